"""Replicas that exchange a share of their gradients beside replicas that exchange all of them."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from benchmarks import claims
from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series, two
from benchmarks.evidence.runs import outcome

REPLICAS = 4
MODEL = ("model.width=0.35", "model.depth=0.3", "precision.weights=float32", "batch.global=64")
DIGITS = ("run.epochs=12", "schedule.warmup_epochs=2")
GLYPHS = (
    "data.source=glyphs", "data.train_images=2560", "data.validation_images=600", "data.glyph_difficulty=0.6",
    "data.crop_area=[0.6,1]", "model.classes=20", "model.image_size=32", "run.epochs=8", "schedule.warmup_epochs=1",
    "log.every_steps=40",
)  # fmt: skip
SETTINGS = {
    "digits, LARS": DIGITS,
    "glyphs, LARS": GLYPHS,
    "digits, SGD": (*DIGITS, "optimizer.name=sgd", "schedule.peak=0.01"),
}
DENSITIES = (0.01, 0.001)
GRADIENT = "exchange.compress=gradient"
SPARSE = {
    "top-k": ("exchange.method=topk", GRADIENT),
    "gTop-k, published": ("exchange.method=gtopk", GRADIENT, "exchange.conserve=false"),
    "gTop-k, conserving": ("exchange.method=gtopk", GRADIENT),
}
DENSE = ("dense", 1.0)
# (name, density) -> overrides
METHODS: Dict[Tuple[str, float], Tuple[str, ...]] = {
    DENSE: (),
    **{(name, density): SPARSE[name] for density, name in itertools.product(DENSITIES, SPARSE)},
}


class QuickstartExperiment(Experiment):
    """Runs of the quickstart recipe with a narrow model; top-1 is a share, and curves are the figure."""

    base = "configs/quickstart.yaml"
    columns = (("top1", "final top-1 (%)", 1, 100), ("train_loss", "final training loss", 3, 1))

    def rows_of(self, series: Sequence[Series]) -> List[dict]:
        """Labels, seeds; mean and standard deviation of the final top-1 and of the last training loss."""
        ends = [[outcome(run) for run in each.runs] for each in series]
        return [
            {
                **each.labels,
                "seeds": len(found),
                **two("top1", [end.top1 for end in found], 6),
                **two("train_loss", [end.train_loss for end in found], 6),
            }
            for each, found in zip(series, ends)
        ]


class ExchangeConvergence(QuickstartExperiment):
    """The same images and batch for all methods."""

    name = "exchange_convergence"
    question = "Sparse exchange: what it learns"
    takes, quick_takes = "two hours, less for cached runs", "3 minutes"
    about = f"""An EfficientNet-B0 G16 of width 0.35 and depth 0.3 (0.48 M parameters), {REPLICAS} replicas in \
{REPLICAS} processes with 16 images each, so a batch of 64. Digits: the quickstart recipe with 12 epochs, 264 steps. \
Glyphs: 20 classes at difficulty 0.6, 2,560 images for training and 600 for validation, 8 epochs, 320 steps. LARS as \
in the quickstart, SGD with momentum 0.9 and peak 0.01; float32. Three seeds, mean ± standard deviation."""
    published = (
        "Runs with density 0.001 are ten to a hundred times as long, start with warm-up, and still lose with large "
        "batches: VGG-16 falls from 74.1 to 71.7 % at batch 8192 (deep gradient compression, its authors' table)."
    )

    def series(self) -> List[Series]:
        return [
            self._series(setting, method)
            for setting in SETTINGS
            for method in METHODS
            if self._is_wanted(setting, method)
        ]

    @staticmethod
    def _is_wanted(setting: str, method: Tuple[str, float]) -> bool:
        """With SGD only the methods that show whether LARS is the reason for a finding."""
        name, density = method
        return "SGD" not in setting or method == DENSE or (density == min(DENSITIES) and name in SPARSE)

    def _series(self, setting: str, method: Tuple[str, float]) -> Series:
        name, density = method
        exchange = () if method == DENSE else (*METHODS[method], f"exchange.density={density}")
        overrides = (*MODEL, "batch.micro=16", *SETTINGS[setting], *exchange)
        labels = {"setting": setting, "exchange": name, "density": density}
        return Series(labels, overrides, replicas=REPLICAS, base=self.base)

    def quick(self) -> List[Series]:
        dense, sparse = self.series()[:2]
        return [each.shortened("run.epochs=1", "schedule.warmup_epochs=0.2", seeds=2) for each in (dense, sparse)]

    def claims(self) -> List[dict]:
        """By how much the conserving rule's final training loss is above the published rule's.

        Runs of one seed start with the same weights and see the same images: they are compared with each other.
        """
        found = []
        for setting, density in itertools.product(SETTINGS, DENSITIES):
            if not self._is_wanted(setting, ("gTop-k, conserving", density)):
                continue
            conserving, published = (
                [outcome(run).train_loss for run in self._series(setting, (f"gTop-k, {rule}", density)).runs]
                for rule in ("conserving", "published")
            )
            more = [ours - theirs for ours, theirs in zip(conserving, published)]
            error = statistics.stdev(more) / len(more) ** 0.5
            name = f"loss_of_conserving_{setting.replace(', ', '_').lower()}_{density:g}"
            found.append(claims.claim(name, [statistics.mean(more) / error], "standard errors", "<= 3"))
        return found

    def more(self, rows: Sequence[dict]) -> str:
        return f"""Excess of the final training loss of gTop-k with conservation over that of the published rule: \
mean over the seeds of the differences between runs of one seed, in standard errors of that mean. If there is no \
difference, one in twenty exceeds 3 with three seeds.

{claims.claims_table(self.claims(), "{:.1f}")}"""

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        panels: Dict[str, dict] = {setting: {} for setting in SETTINGS}
        for series in self.series():
            setting, name, density = series.labels.values()
            panels[setting]["dense" if name == "dense" else f"{name}, {density:g}"] = series.runs
        page.draw_curves(panels, path)

    def verdict(self, rows: Sequence[dict]) -> str:
        at = {(row["setting"], row["exchange"], row["density"]): row for row in rows}
        lost, more = [], []
        for setting in SETTINGS:
            dense = at[(setting, *DENSE)]["top1_mean"]
            points = [100 * (dense - at[setting, name, min(DENSITIES)]["top1_mean"]) for name in SPARSE]
            lost.append(f"{min(points):.1f} to {max(points):.1f} ({setting})")
            for density in DENSITIES:
                if self._is_wanted(setting, ("gTop-k, conserving", density)):
                    ours, theirs = (at[setting, f"gTop-k, {rule}", density] for rule in ("conserving", "published"))
                    more.append(
                        f"{ours['train_loss_mean'] - theirs['train_loss_mean']:+.3f} ({setting} at {density:g})"
                    )
        return (
            f"At density {min(DENSITIES):g}, points of top-1 lost against the dense exchange: {', '.join(lost)}. "
            f"Training loss of gTop-k with conservation minus that of the published rule: {', '.join(more)}."
        )

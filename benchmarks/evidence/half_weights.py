"""Float16 weights and no others: does stochastic rounding keep what rounding to nearest loses?"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import List, Sequence

from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series, losses, two

KEPT, STOCHASTIC, NEAREST = "float32", "float16 stochastic", "float16 nearest"
WEIGHTS = {
    KEPT: ("precision.weights=float32",),
    STOCHASTIC: ("precision.weights=float16", "precision.rounding=stochastic"),
    NEAREST: ("precision.weights=float16", "precision.rounding=nearest"),
}
PAIRED = 4.3  # standard errors; of three differences, chance exceeds this once in 20 times
PEAKS = (0.03125, 0.125, 0.5, 2.0)
LENGTH = (
    "data.glyph_difficulty=0.3", "data.train_images=20480", "run.epochs=2", "schedule.warmup_epochs=0.3",
    "batch.global=64", "batch.micro=64", "evaluation.every_epochs=2",
)  # fmt: skip


class HalfWeights(Experiment):
    """Three kinds of persistent weights over the peak rate."""

    name = "half_weights"
    question = "Float16 weights: stochastic rounding beside float32 and beside rounding to nearest, over the rate"
    about = """LARS as in the recipe, 640 updates of 64 images of difficulty 0.3: rounding tells where updates are \
small and many. "Weights" is what persists, weights and momentum; arithmetic is float32 in all rows, so that rounding \
is all that differs. "Behind float32": by how much the validation loss of a run is above that of the run with float32 \
weights and the same seed, so the same images in the same order and the same first weights."""
    published = (
        "Graphcore trains B4 G16 to 82.54 ± 0.13 % with float16 weights and stochastic rounding; with rounding to "
        "nearest, updates below half the spacing of two float16 numbers are lost (Micikevicius et al., 1710.03740, who "
        "keep float32 master weights for that reason)."
    )

    def series(self) -> List[Series]:
        return [
            Series({"peak": peak, "weights": kind}, (*LENGTH, *WEIGHTS[kind], f"schedule.peak={peak:g}"))
            for peak, kind in itertools.product(PEAKS, WEIGHTS)
        ]

    def rows(self) -> List[dict]:
        """With the validation loss above that of float32 weights, seed by seed."""
        found = super().rows()
        every = {(each.labels["peak"], each.labels["weights"]): each for each in self.series()}
        for row, ((peak, _), series) in zip(found, every.items()):
            behind = [loss - other for loss, other in zip(losses(series), losses(every[peak, KEPT]))]
            row.update(two("behind", behind))
        return found

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        panels = {
            title: {
                kind: [(row["peak"], row[f"{key}_mean"], row[f"{key}_sd"]) for row in rows if row["weights"] == kind]
                for kind in WEIGHTS
            }
            for title, key in (("validation top-1 (%)", "top1"), ("validation loss behind float32", "behind"))
        }
        page.draw(panels, path, x="peak learning rate", y="mean ± standard deviation over seeds", log_x=True)

    def verdict(self, rows: Sequence[dict]) -> str:
        at = {(row["peak"], row["weights"]): row for row in rows}
        stochastic, nearest = ([peak for peak in PEAKS if _clear(at[peak, kind])] for kind in (STOCHASTIC, NEAREST))
        lost = {peak: at[peak, KEPT]["top1_mean"] - at[peak, NEAREST]["top1_mean"] for peak in nearest or PEAKS}
        worst = max(lost, key=lambda peak: lost[peak])
        return (
            f"{'Reproduced' if nearest and not stochastic else 'Not fully reproduced'}: with stochastic rounding the "
            f"validation loss {'differs from' if stochastic else 'cannot be told from'} that of float32 weights "
            f"{_peaks(stochastic) or 'at any rate'}, with rounding to nearest it "
            f"{'is clearly higher ' + _peaks(nearest) if nearest else 'is nowhere clearly higher either'}; rounding to "
            f"nearest costs up to {lost[worst]:.1f} of {at[worst, KEPT]['top1_mean']:.1f} % top-1 there (at {worst:g})."
        )


def _clear(row: dict) -> bool:
    """Whether the difference from the runs with float32 weights is more than chance explains."""
    error = row["behind_sd"] / row["seeds"] ** 0.5
    return abs(row["behind_mean"]) > PAIRED * error


def _peaks(values: Sequence[float]) -> str:
    return f"at {', '.join(f'{value:g}' for value in values)}" if values else ""

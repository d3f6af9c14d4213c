"""At the largest batch: what each part of the LARS recipe is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Iterable, List, Sequence, Tuple

from benchmarks.evidence.experiment import Experiment, Series, changed, standard_errors
from benchmarks.evidence.ladder import BATCHES, CLEAR, LARS, Ladder
from benchmarks.evidence.runs import Run

BATCH = BATCHES[-1]
BASE = "as it is"
# part -> what it is set to -> overrides; what the recipe itself has stands in RECIPE.
PARTS: Dict[str, Dict[str, Tuple[str, ...]]] = {
    "warm-up": {"none": ("schedule.warmup_epochs=0",), "5 epochs": ("schedule.warmup_epochs=5",)},
    "decay": {"power 1": ("schedule.power=1",)},
    "trust coefficient": {"0.0005": ("optimizer.trust_coefficient=0.0005",)},
    "weight decay": {"1e-3": ("optimizer.weight_decay=1e-3",)},
    "skipped": {"none": ("optimizer.skip=[]",), "at the full rate": ("optimizer.skip_lr_scale=1",)},
    "label smoothing": {"none": ("data.label_smoothing=0",)},
    "average": {"of steps 0.9, of epochs 0.5": ("average.step_decay=0.9", "average.epoch_decay=0.5")},
}  # fmt: skip
RECIPE = {
    "warm-up": "1.5 epochs", "decay": "power 2", "trust coefficient": "0.001", "weight decay": "2.5e-6",
    "skipped": "biases and norms, at 0.1", "label smoothing": "0.1", "average": "none",
}  # fmt: skip
_SELDOM = "evaluation.every_epochs=5"  # no curves are drawn of these
_SETTINGS = ", ".join(f"{part}: {value}" for part, value in RECIPE.items())


class Ablations(Experiment):
    """One part is changed at a time, the peak rate is the ladder's."""

    name = "ablations"
    question = f"LARS at a batch of {BATCH}: what is each part of the recipe worth?"
    about = f"""The last rung of the [ladder](ladder.md): LARS in its gradient form at a batch of {BATCH}, at the peak \
rate that was found there, which is kept; so what changes with a part is what it does without tuning the rest anew. \
The recipe has {_SETTINGS}. "Skipped" are parameters without trust ratio and weight decay, which have a share of the \
learning rate. Averages change nothing of the training: their row has the accuracy of both beside that of the \
weights."""
    published = (
        "The pod recipe warms up over 70 of 350 epochs, decays with power 2, skips biases and norms, and averages over "
        "epochs with 0.97 (Graphcore's configuration); linear warm-up is what made batches of 8,192 possible at all "
        "(Goyal et al., 1706.02677)."
    )

    def __init__(self) -> None:
        self._ladder = Ladder()

    def trials(self) -> Iterable[Run]:
        return self._ladder.climbs()[LARS, BATCH].runs()

    def series(self) -> List[Series]:
        base = self._ladder.tuned(LARS, BATCH)
        if base is None:
            return []
        found = [Series({"part": BASE, "setting": ""}, base.overrides)]
        for part, settings in PARTS.items():
            for setting, overrides in settings.items():
                own = changed(base.overrides, (*overrides, _SELDOM))
                found.append(Series({"part": part, "setting": setting}, own))
        return found

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 0.33 * len(rows) + 1.2), layout="constrained")
        axis = figure.subplots()
        names = [f"{row['part']}: {row['setting']}" if row["setting"] else row["part"] for row in rows]
        for place, row in enumerate(rows):
            axis.errorbar(row["top1_mean"], place, xerr=row["top1_sd"], fmt="o", color="C0", capsize=3)
            for average in self._averages(row).values():
                axis.plot(average, place, "D", color="C1")
        axis.axvspan(*(rows[0]["top1_mean"] + side * rows[0]["top1_sd"] for side in (-1, 1)), color="C0", alpha=0.15)
        axis.set(xlabel="validation top-1 (%); diamonds: averages of weights")
        axis.set_yticks(range(len(rows)), names)
        axis.invert_yaxis()
        axis.grid(alpha=0.3)
        figure.savefig(path, dpi=110)

    def verdict(self, rows: Sequence[dict]) -> str:
        base, better, worse, alike = rows[0], [], [], []
        for row in rows[1:]:
            if row["part"] == "average":
                continue
            distance = standard_errors(row, base)
            text = f"{row['part']} {row['setting']} ({row['top1_mean'] - base['top1_mean']:+.1f})"
            (better if distance > CLEAR else worse if distance < -CLEAR else alike).append(text)
        averages = ", ".join(
            f"{name} {average - row['top1_mean']:+.1f}" for row in rows for name, average in self._averages(row).items()
        )
        return (
            f"Of the changes, in points against {base['top1_mean']:.1f} %, clearly worse: "
            f"{', '.join(worse) or 'none'}; "
            f"clearly better: {', '.join(better) or 'none'}; within the spread: {', '.join(alike) or 'none'}; "
            f"averages against their weights: {averages}."
        )

    @staticmethod
    def _averages(row: dict) -> Dict[str, float]:
        """Top-1 of the averages of weights that a row has."""
        found = {kind: row.get(f"{kind}_average_top1") for kind in ("step", "epoch")}
        return {f"of {kind}s": top1 for kind, top1 in found.items() if top1 is not None}

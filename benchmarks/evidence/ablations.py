"""At the largest batch: what each part of the LARS recipe is worth."""

from pathlib import Path
from typing import Dict, Iterable, List, Sequence, Tuple

from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series, changed
from benchmarks.evidence.ladder import BATCHES, LARS, Ladder
from benchmarks.evidence.runs import Run

BATCH = BATCHES[-1]
# part -> what it is set to -> overrides; the page has what the recipe itself sets.
PARTS: Dict[str, Dict[str, Tuple[str, ...]]] = {
    "warm-up": {"none": ("schedule.warmup_epochs=0",), "5 epochs": ("schedule.warmup_epochs=5",)},
    "decay": {"power 1": ("schedule.power=1",)},
    "trust coefficient": {"0.0005": ("optimizer.trust_coefficient=0.0005",)},
    "weight decay": {"1e-3": ("optimizer.weight_decay=1e-3",)},
    "skipped": {"none": ("optimizer.skip=[]",), "at the full rate": ("optimizer.skip_lr_scale=1",)},
    "label smoothing": {"none": ("data.label_smoothing=0",)},
    "average": {"of steps 0.9, of epochs 0.5": ("average.step_decay=0.9", "average.epoch_decay=0.5")},
}  # fmt: skip
TOP1 = {"weights": "top1_mean", "average of steps": "step_average_top1", "average of epochs": "epoch_average_top1"}
_SELDOM = "evaluation.every_epochs=5"  # no curves are drawn of these


class Ablations(Experiment):
    """The last rung of the ladder with one part of the recipe changed at a time, at the peak rate of the ladder."""

    name = "ablations"
    question = f"LARS at a batch of {BATCH}: what is each part of the recipe worth?"

    def __init__(self) -> None:
        self._ladder = Ladder()

    def trials(self) -> Iterable[Run]:
        return self._ladder.climbs()[LARS, BATCH].runs()

    def series(self) -> List[Series]:
        base = self._ladder.tuned(LARS, BATCH)
        if base is None:
            return []
        return [
            Series({"part": "as it is", "setting": ""}, base.overrides),
            *(
                Series({"part": part, "setting": setting}, changed(base.overrides, (*overrides, _SELDOM)))
                for part, settings in PARTS.items()
                for setting, overrides in settings.items()
            ),
        ]

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        sides = {name: [row.get(key) or 0 for row in rows] for name, key in TOP1.items()}
        names = [f"{row['part']} {row['setting'] or ''}" for row in rows]
        page.bars(names, sides, path, "validation top-1 (%), mean over seeds")

    def pairs(self, rows: Sequence[dict]) -> Dict[str, Tuple[dict, dict]]:
        return {f"{row['part']} {row['setting']}": (row, rows[0]) for row in rows[1:] if row["part"] != "average"}

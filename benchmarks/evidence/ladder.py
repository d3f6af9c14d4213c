"""The batch ladder: which optimizer holds its accuracy from a batch of 768 to 6144?"""

import itertools
import math
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from benchmarks.evidence import page
from benchmarks.evidence.experiment import Climb, Experiment, Series, search_table
from benchmarks.evidence.runs import Run, curve
from recipe.batch import steps_per_epoch

CLASSES = 50  # of configs/evidence.yaml
BATCHES = (768, 1536, 3072, 6144)
SMALLEST, LARGEST = BATCHES[0], BATCHES[-1]
LINEAR, RMSPROP, SGD, LARS, LARS_MOMENTUM = "RMSprop, linear", "RMSprop", "SGD", "LARS gradient", "LARS momentum"
K = 1.75  # of docs/results/lars_forms.md: by how much the gradient form steps farther
TARGET = 50.0  # percent of the validation images, of which it is told after how many updates they are right
_EVALUATED = ("evaluation.every_epochs=0.5",)


# Optimizer -> its overrides, and the peak rates that the search begins with, by batch.
RULES: Dict[str, Tuple[Tuple[str, ...], Mapping[int, float]]] = {
    RMSPROP: (("optimizer.name=rmsprop", "optimizer.weight_decay=2.5e-6"), {SMALLEST: 0.016, LARGEST: 0.008}),
    SGD: (("optimizer.name=sgd", "optimizer.weight_decay=2.5e-6"), {SMALLEST: 0.1, LARGEST: 0.1}),
    LARS: (("optimizer.trust=gradient", "optimizer.momentum=0.885"), {SMALLEST: 4.0, LARGEST: 8.0}),
}
_MOMENTUM_FORM = ("optimizer.trust=momentum", "optimizer.momentum=0.885", f"optimizer.trust_coefficient={0.001 * K:g}")


class Ladder(Experiment):
    """The recipe with each optimizer at each batch. Peak rates are searched at the two ends."""

    name = "ladder"
    question = "From a batch of 768 to 6144 at equal epochs: which optimizer holds its accuracy?"

    def climbs(self) -> Dict[Tuple[str, int], Climb]:
        """The searches for peak rates, by optimizer and batch: at the two ends, with the first seed."""
        return {
            (name, batch): Climb(guess, overrides(name, batch), math.log(CLASSES))
            for name, (_, guesses) in RULES.items()
            for batch, guess in guesses.items()
        }

    def trials(self) -> Iterable[Run]:
        return [run for climb in self.climbs().values() for run in climb.runs()]

    def peak(self, optimizer: str, batch: int) -> Optional[float]:
        """The best peak rate at the ends; between them, on the straight line of logarithms. None until it is known."""
        climbs = self.climbs()
        low, high = (climbs[optimizer, end].best() for end in (SMALLEST, LARGEST))
        if batch in (SMALLEST, LARGEST):
            return low if batch == SMALLEST else high
        if low is None or high is None:
            return None
        share = math.log(batch / SMALLEST) / math.log(LARGEST / SMALLEST)
        return float(f"{low ** (1 - share) * high**share:.3g}")

    def tuned(self, optimizer: str, batch: int) -> Optional[Series]:
        """With the best peak. "Linear" has RMSprop's at the smallest batch, in proportion to the batch; the momentum
        form of LARS that of the gradient form, which is what its coefficient is for."""
        if optimizer == LINEAR:
            best = self.peak(RMSPROP, SMALLEST)
            peak = None if best is None else float(f"{best * batch / SMALLEST:.6g}")
        else:
            peak = self.peak(LARS if optimizer == LARS_MOMENTUM else optimizer, batch)
        if peak is None:
            return None
        labels = {"optimizer": optimizer, "batch": batch, "peak": peak}
        return Series(labels, (*overrides(optimizer, batch), f"schedule.peak={peak:g}"))

    def series(self) -> List[Series]:
        found = [self.tuned(*at) for at in itertools.product((LINEAR, *RULES, LARS_MOMENTUM), BATCHES)]
        return [each for each in found if each is not None]

    def rows(self) -> List[dict]:
        """With the updates after which half of the seeds had reached the target."""
        rows = super().rows()
        for row, series in zip(rows, self.series()):
            found = sorted(_updates_to_target(run) for run in series.runs)
            middle = found[len(found) // 2]
            row["updates_to_target"] = None if middle == float("inf") else int(middle)
        return rows

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        titles = {"validation top-1 (%)": "top1", "validation loss": "loss"}
        panels = {title: page.lines(rows, "optimizer", "batch", key) for title, key in titles.items()}
        page.draw(panels, path, x="global batch", y="mean ± standard deviation over seeds")

    def more(self, rows: Sequence[dict]) -> str:
        head = "The search: validation loss of the first seed at each peak rate that was tried."
        return f"{head}\n\n{search_table(self.climbs())}"

    def pairs(self, rows: Sequence[dict]) -> Dict[str, Tuple[dict, dict]]:
        at = {(row["optimizer"], row["batch"]): row for row in rows}
        every = (LINEAR, *RULES, LARS_MOMENTUM)
        return {
            **{f"{name} at {LARGEST} against {SMALLEST}": (at[name, LARGEST], at[name, SMALLEST]) for name in every},
            **{f"{LARS} against {name} at {LARGEST}": (at[LARS, LARGEST], at[name, LARGEST]) for name in every[:3]},
        }


def overrides(optimizer: str, batch: int) -> Tuple[str, ...]:
    """Those without the peak rate. RMSprop's average spans as many images at every batch, as published."""
    rule = RMSPROP if optimizer == LINEAR else optimizer
    own = _MOMENTUM_FORM if rule == LARS_MOMENTUM else RULES[rule][0]
    span = (f"optimizer.alpha={1 - batch / 2**14:g}",) if rule == RMSPROP else ()
    return (*_EVALUATED, *own, *span, f"batch.global={batch}")


def _updates_to_target(run: Run) -> float:
    for epoch, top1 in zip(*curve(run, "eval", "top1")):
        if 100 * top1 >= TARGET:
            recipe = run.recipe()
            return round(epoch * steps_per_epoch(recipe.data.train_images, recipe.batch.global_))
    return float("inf")

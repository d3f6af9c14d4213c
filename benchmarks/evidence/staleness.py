"""Cost of gradients that are applied some steps late, with momentum and without."""

import itertools
from pathlib import Path
from typing import List, Sequence

import numpy as np

from benchmarks import claims
from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series

DELAYS = (0, 1, 4, 16)
MODEL = ("model.width=0.35", "model.depth=0.3", "precision.weights=float32", "batch.global=64")
DIGITS = ("run.epochs=12", "schedule.warmup_epochs=2")
GLYPHS = (
    "data.source=glyphs", "data.train_images=2560", "data.validation_images=600", "data.glyph_difficulty=0.6",
    "data.crop_area=[0.6,1]", "model.classes=20", "model.image_size=32", "run.epochs=8", "schedule.warmup_epochs=1",
    "log.every_steps=40",
)  # fmt: skip
MOMENTA = (0.0, 0.5, 0.9)  # of the theory
WITH, WITHOUT = "digits, LARS, momentum 0.9", "digits, LARS, no momentum"
# Without momentum the peak is raised by the factor by which momentum lengthens a step: 1 / (1 - 0.9) for SGD; about 2
# for LARS, which scales each gradient before momentum sums it up (docs/results/lars_forms.md).
SETTINGS = {
    WITH: DIGITS,
    WITHOUT: (*DIGITS, "optimizer.momentum=0", "schedule.peak=4"),
    "digits, SGD, momentum 0.9": (*DIGITS, "optimizer.name=sgd", "schedule.peak=0.01"),
    "glyphs, LARS, momentum 0.9": GLYPHS,
}


class Staleness(Experiment):
    """In one process: the delay does not depend on the number of replicas."""

    name = "staleness"
    question = "Late gradients: what they cost, and what momentum makes of it"
    takes, quick_takes = "an hour, less for cached runs", "2 minutes"
    base = "configs/quickstart.yaml"
    columns = (("top1", "final top-1 (%)", 1), ("train_loss", "final training loss", 3))

    def series(self) -> List[Series]:
        return [
            Series(
                {"setting": setting, "delay": delay},
                (*MODEL, *overrides, "batch.micro=64", f"exchange.delay={delay}"),
                base=self.base,
            )
            for (setting, overrides), delay in itertools.product(SETTINGS.items(), DELAYS)
        ]

    def quick(self) -> List[Series]:
        none, *_, longest = self.series()[: len(DELAYS)]
        return [each.shortened("run.epochs=1", "schedule.warmup_epochs=0.2", seeds=2) for each in (none, longest)]

    def more(self, rows: Sequence[dict]) -> str:
        theory = [(delay, *(f"{largest_stable_rate(each, delay):.3g}" for each in MOMENTA)) for delay in DELAYS]
        return f"""Linear theory: the largest learning rate times curvature at which a weight in a quadratic bowl does \
not diverge, from the roots of its recurrence (`largest_stable_rate`, tested against closed forms and the recurrence).

{claims.markdown(["delay", *(f"momentum {momentum:g}" for momentum in MOMENTA)], theory)}"""

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        panels = {"": page.lines(rows, "setting", "delay")}
        page.draw(panels, path, x="updates by which gradients are late", y="final top-1 (%)", log_x=False)

    def verdict(self, rows: Sequence[dict]) -> str:
        top1 = {(row["setting"], row["delay"]): row["top1_mean"] for row in rows}
        lost = [
            f"{delay} late {top1[WITHOUT, 0] - top1[WITHOUT, delay]:.1f} and {top1[WITH, 0] - top1[WITH, delay]:.1f}"
            for delay in DELAYS[1:]
        ]
        return f"Points of top-1 lost on the digits by LARS, without momentum and with 0.9: {', '.join(lost)}."


def largest_stable_rate(momentum: float, delay: int) -> float:
    """Learning rate times curvature up to which w' = w + momentum (w - w_before) - rate w_late does not grow.

    The roots of z**(delay+1) - (1 + momentum) z**delay + momentum z**(delay-1) + rate must lie in the unit circle, for
    delay 0 those of this times z.
    """
    low, high = 0.0, 2.0 * (1.0 + momentum)  # the limit without delay
    while high - low > 1e-9:
        middle, coefficients = (low + high) / 2, np.zeros(delay + 3)
        coefficients[:3] = 1.0, -1.0 - momentum, momentum
        coefficients[delay + 1] += middle
        stable = np.abs(np.roots(coefficients)).max() <= 1 + 1e-9
        low, high = (middle, high) if stable else (low, middle)
    return low

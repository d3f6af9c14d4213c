"""Cost of gradients that are applied some steps late, with momentum and without."""

import itertools
from pathlib import Path
from typing import List, Sequence

import numpy as np

from benchmarks import claims
from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series

DELAYS = (0, 1, 4, 16)
MODEL = (
    "model.width=0.35",
    "model.depth=0.3",
    "precision.weights=float32",
    "batch.global=64",
)
DIGITS = ("run.epochs=12", "schedule.warmup_epochs=2")
GLYPHS = (
    "data.source=glyphs",
    "data.train_images=2560",
    "data.validation_images=600",
    "data.glyph_difficulty=0.6",
    "data.crop_area=[0.6,1]",
    "model.classes=20",
    "model.image_size=32",
    "run.epochs=8",
    "schedule.warmup_epochs=1",
    "log.every_steps=40",
)
MOMENTA = (0.0, 0.5, 0.9)  # of the theory
WITH = "digits, LARS, momentum 0.9"
WITHOUT = "digits, LARS, no momentum"
# Without momentum the peak is raised by the factor by which momentum lengthens a step:
# 1 / (1 - 0.9) for SGD; about 2 for LARS, which scales each gradient before momentum sums it up
# (docs/results/lars_forms.md).
SETTINGS = {
    WITH: DIGITS,
    WITHOUT: (*DIGITS, "optimizer.momentum=0", "schedule.peak=4"),
    "digits, SGD, momentum 0.9": (*DIGITS, "optimizer.name=sgd", "schedule.peak=0.01"),
    "glyphs, LARS, momentum 0.9": GLYPHS,
}
_PRECISION = 1e-9  # of the largest stable rate, and of the length of a root


class Staleness(Experiment):
    """In one process: the delay does not depend on the number of replicas."""

    name = "staleness"
    question = "Late gradients: what they cost, and what momentum makes of it"
    takes = "an hour, less for cached runs"
    quick_takes = "2 minutes"
    base = "configs/quickstart.yaml"
    columns = (
        ("top1", "final top-1 (%)", 1),
        ("train_loss", "final training loss", 3),
    )

    def series(self) -> List[Series]:
        """Return a series for each delay in each setting."""
        return [
            self._series(setting, delay) for setting, delay in itertools.product(SETTINGS, DELAYS)
        ]

    def _series(self, setting: str, delay: int) -> Series:
        """Return the runs with a delay, in steps."""
        overrides = (*MODEL, *SETTINGS[setting], "batch.micro=64", f"exchange.delay={delay}")
        return Series({"setting": setting, "delay": delay}, overrides, base=self.base)

    def quick(self) -> List[Series]:
        """Return an epoch of the first setting, without a delay and with the longest."""
        short = ("run.epochs=1", "schedule.warmup_epochs=0.2")
        of_first_setting = self.series()[: len(DELAYS)]
        ends = (of_first_setting[0], of_first_setting[-1])
        return [series.shortened(*short, seeds=2) for series in ends]

    def more(self, rows: Sequence[dict]) -> str:
        """Return the page's part about the theory.

        Args:
            rows: of the table, which are not needed.
        """
        head = ["delay", *(f"momentum {momentum:g}" for momentum in MOMENTA)]
        lines = []
        for delay in DELAYS:
            rates = [largest_stable_rate(momentum, delay) for momentum in MOMENTA]
            lines.append([delay, *(f"{rate:.3g}" for rate in rates)])
        return f"""Linear theory: the largest learning rate times curvature at which a weight in a quadratic bowl does \
not diverge, from the roots of its recurrence (`largest_stable_rate`, tested against closed forms and the recurrence).

{claims.markdown(head, lines)}"""

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        """Draw top-1 over the delay.

        Args:
            rows: of the table.
            path: of the figure.
        """
        panels = {"": page.lines(rows, "setting", "delay")}
        page.draw(
            panels,
            path,
            x="updates by which gradients are late",
            y="final top-1 (%)",
            log_x=False,
        )

    def verdict(self, rows: Sequence[dict]) -> str:
        """Return what each delay costs, with momentum and without.

        Args:
            rows: of the table.
        """
        top1 = {(row["setting"], row["delay"]): row["top1_mean"] for row in rows}
        losses = []
        for delay in DELAYS[1:]:
            without = top1[WITHOUT, 0] - top1[WITHOUT, delay]
            with_momentum = top1[WITH, 0] - top1[WITH, delay]
            losses.append(f"{delay} late {without:.1f} and {with_momentum:.1f}")
        lost = ", ".join(losses)
        return f"Points of top-1 lost on the digits by LARS, without momentum and with 0.9: {lost}."


def largest_stable_rate(momentum: float, delay: int) -> float:
    """Return the largest rate at which a weight in a quadratic bowl does not diverge.

    The weight goes from w to w + momentum (w - w_before) - rate w_late. It does not grow if the
    roots of z**(delay+1) - (1 + momentum) z**delay + momentum z**(delay-1) + rate lie in the unit
    circle, for delay 0 those of this times z.

    Args:
        momentum: of the update.
        delay: steps by which gradients are late.

    Returns:
        Learning rate times curvature.
    """
    low = 0.0
    high = 2.0 * (1.0 + momentum)  # the limit without delay
    while high - low > _PRECISION:
        middle = (low + high) / 2
        if _is_stable(middle, momentum, delay):
            low = middle
        else:
            high = middle
    return low


def _is_stable(rate: float, momentum: float, delay: int) -> bool:
    """Return whether no root of the recurrence lies outside the unit circle."""
    # From the highest power on; all are times z, so that delay 0 has no power below zero.
    coefficients = np.zeros(delay + 3)
    coefficients[:3] = (1.0, -1.0 - momentum, momentum)
    coefficients[delay + 1] += rate
    longest = np.abs(np.roots(coefficients)).max()
    return bool(longest <= 1 + _PRECISION)

"""Learning rates as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

from typing import Callable

from recipe.batch import Lengths, peak_learning_rate
from recipe.config import Recipe


def polynomial(step: int, *, peak: float, warmup: int, total: int, power: float = 2.0, final: float = 0.0) -> float:
    """Learning rate at `step`: linear warm-up from 0 to `peak`, then polynomial decay to `final`.

    The decay runs over `total - warmup` steps, so the rate is continuous at the end of warm-up.

    Args:
        step: optimizer updates done so far, 0 <= step.
        peak, final: learning rates (not per image).
        warmup, total: lengths in steps, 0 <= warmup < total.

    Source: You, Gitman and Ginsburg, 1708.03888, section 5; the G16 recipe warms up for 70 of 350 epochs, power 2.
    """
    if step < warmup:
        return peak * step / warmup
    remaining = max(0.0, 1.0 - (step - warmup) / (total - warmup))
    return final + (peak - final) * remaining**power


def create(recipe: Recipe, lengths: Lengths) -> Callable[[int], float]:
    """The recipe's learning rate as a function of the step."""
    peak = peak_learning_rate(recipe)

    def rate(step: int) -> float:
        return polynomial(
            step,
            peak=peak,
            warmup=lengths.warmup,
            total=lengths.total,
            power=recipe.schedule.power,
            final=peak * recipe.schedule.final_ratio,
        )

    return rate

"""Learning rates as pure functions of the step: nothing to save, nothing to restore.

`step` counts the optimizer updates done so far, from 0; rates are those of the step, not per image. All begin with
a linear warm-up from 0 to `peak` over `warmup` steps.
"""

from __future__ import annotations

import math
from functools import partial
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


def cosine(step: int, *, peak: float, warmup: int, total: int, final: float = 0.0) -> float:
    """Learning rate at `step`: linear warm-up from 0 to `peak`, then half a period of a cosine down to `final`.

    Like polynomial decay it runs over `total - warmup` steps, and stays at `final` after them.

    Args:
        peak, final: learning rates.
        warmup, total: lengths in steps, 0 <= warmup < total.

    Source: Loshchilov and Hutter, 1608.03983, equation 5, without restarts.
    """
    if step < warmup:
        return peak * step / warmup
    done = min(1.0, (step - warmup) / (total - warmup))
    return final + (peak - final) * (1.0 + math.cos(math.pi * done)) / 2


def exponential(step: int, *, peak: float, warmup: int, decay_rate: float, decay_steps: float) -> float:
    """Learning rate at `step`: linear warm-up from 0 to `peak`, then peak * decay_rate^floor(step / decay_steps).

    The drops are counted from the start of the run. Where the warm-up is longer than `decay_steps` some have
    happened when it ends, and the rate falls from just below `peak` by that many at once.

    Args:
        peak: learning rate.
        warmup: length in steps, 0 <= warmup.
        decay_rate: factor, 0 < decay_rate < 1.
        decay_steps: steps between two drops, not always whole: 0 < decay_steps.

    Source: Tan and Le, 1905.11946, section 5.2 (0.97 every 2.4 epochs), and the training code they published, which
    warms up for 5 epochs: the first rate after those is 0.97^2 of the peak.
    """
    if step < warmup:
        return peak * step / warmup
    # 2.2 epochs of 5 steps are 11.000000000000002 in floating point: the drop is due at step 11.
    return peak * decay_rate ** math.floor(step / decay_steps + 1e-9)


def constant(step: int, *, peak: float, warmup: int) -> float:
    """Learning rate at `step`: linear warm-up from 0 to `peak` over `warmup` >= 0 steps, then `peak`."""
    return peak * step / warmup if step < warmup else peak


def create(recipe: Recipe, lengths: Lengths) -> Callable[[int], float]:
    """The recipe's learning rate as a function of the step."""
    schedule, peak = recipe.schedule, peak_learning_rate(recipe)
    if schedule.name == "exponential":
        decay_steps = schedule.decay_epochs * lengths.steps_per_epoch
        return partial(
            exponential, peak=peak, warmup=lengths.warmup, decay_rate=schedule.decay_rate, decay_steps=decay_steps
        )
    if schedule.name == "constant":
        return partial(constant, peak=peak, warmup=lengths.warmup)
    decay = {"peak": peak, "warmup": lengths.warmup, "total": lengths.total, "final": peak * schedule.final_ratio}
    if schedule.name == "cosine":
        return partial(cosine, **decay)
    return partial(polynomial, **decay, power=schedule.power)

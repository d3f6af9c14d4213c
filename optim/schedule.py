"""Learning rates as pure functions of the step: nothing to save, nothing to restore.

`step` counts the optimizer updates done so far, from 0; rates are those of the step, not per image. All begin with
a linear warm-up from 0 to `peak` over `lengths.warmup` steps. What comes after it is registered for the class of the
section: a function of section, peak and lengths that returns the rate as a function of the step.
"""

from __future__ import annotations

import math
from typing import Callable

from recipe.batch import Lengths, peak_learning_rate
from recipe.config import Recipe
from recipe.kinds import Registry
from recipe.optimization import Constant, Cosine, Exponential, Polynomial, Schedule

Rate = Callable[[int], float]
SCHEDULES: Registry[Callable[..., Rate]] = Registry("a schedule")


def create(recipe: Recipe, lengths: Lengths) -> Rate:
    """The recipe's learning rate as a function of the step."""
    return curve(recipe.schedule, peak_learning_rate(recipe), lengths)


def curve(section: Schedule, peak: float, lengths: Lengths) -> Rate:
    """A linear warm-up from 0 to `peak`, then what the section says."""
    after = SCHEDULES.of(section)(section, peak, lengths)
    return lambda step: peak * step / lengths.warmup if step < lengths.warmup else after(step)


@SCHEDULES.implements(Polynomial)
def polynomial(section: Polynomial, peak: float, lengths: Lengths) -> Rate:
    """Polynomial decay to peak * final_ratio over the steps after the warm-up, so continuous at its end.

    Source: You, Gitman and Ginsburg, 1708.03888, section 5; the G16 recipe warms up for 70 of 350 epochs, power 2.
    """
    return _decay(section.final_ratio, peak, lengths, lambda done: (1.0 - done) ** section.power)


@SCHEDULES.implements(Cosine)
def cosine(section: Cosine, peak: float, lengths: Lengths) -> Rate:
    """Half a period of a cosine down to peak * final_ratio over the steps after the warm-up.

    Source: Loshchilov and Hutter, 1608.03983, equation 5, without restarts.
    """
    return _decay(section.final_ratio, peak, lengths, lambda done: (1.0 + math.cos(math.pi * done)) / 2)


@SCHEDULES.implements(Exponential)
def exponential(section: Exponential, peak: float, lengths: Lengths) -> Rate:
    """peak * decay_rate^floor(step / decay_steps): the drops are counted from the start of the run.

    Source: Tan and Le, 1905.11946, section 5.2 (0.97 every 2.4 epochs), and the training code they published, which
    warms up for 5 epochs: the first rate after those is 0.97^2 of the peak.
    """
    decay_steps = section.decay_epochs * lengths.steps_per_epoch
    # 2.2 epochs of 5 steps are 11.000000000000002 in floating point: the drop is due at step 11.
    return lambda step: peak * section.decay_rate ** math.floor(step / decay_steps + 1e-9)


@SCHEDULES.implements(Constant)
def constant(section: Constant, peak: float, lengths: Lengths) -> Rate:
    """The peak until the end."""
    return lambda step: peak


def _decay(final_ratio: float, peak: float, lengths: Lengths, left: Callable[[float], float]) -> Rate:
    """From peak to peak * final_ratio. Args: left: share of the way that is left when a share of the decay is done."""
    final, warmup = peak * final_ratio, lengths.warmup
    steps = lengths.total - warmup
    return lambda step: final + (peak - final) * left(min(1.0, (step - warmup) / steps))

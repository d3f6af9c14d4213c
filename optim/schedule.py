"""Learning rates as pure functions of the step: nothing to save, nothing to restore.

`step` is the number of steps done so far, from 0; rates are those of an update of one step, not per
image. All begin with a linear warm-up from 0 to `peak` over `lengths.warmup` steps. The rest is
registered for the class of the section: a function of section, peak and lengths that returns the
rate as a function of the step.
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
    """Return the learning rate of a `recipe` as a function of the step, for these `lengths`."""
    return curve(recipe.schedule, peak_learning_rate(recipe), lengths)


def curve(section: Schedule, peak: float, lengths: Lengths) -> Rate:
    """Return a linear warm-up from 0 to `peak`, then the rate of the section's schedule.

    Args:
        section: of the recipe.
        peak: the rate after the warm-up.
        lengths: of the run.
    """
    after = SCHEDULES.of(section)(section, peak, lengths)

    def rate(step: int) -> float:
        """Return the rate of a `step`."""
        # Step 0 has rate 0. Without a warm-up no step is below its length: none is divided by 0.
        if step < lengths.warmup:
            return peak * step / lengths.warmup
        return after(step)

    return rate


@SCHEDULES.implements(Polynomial)
def polynomial(section: Polynomial, peak: float, lengths: Lengths) -> Rate:
    """Return polynomial decay to peak * final_ratio over the steps after the warm-up.

    It is continuous at the warm-up's end.

    Args:
        section, peak, lengths: see `curve`.

    Source: You, Gitman and Ginsburg, 1708.03888, section 5; the G16 recipe warms up for 70 of 350
    epochs, power 2.
    """
    return _decay(section.final_ratio, peak, lengths, lambda done: (1.0 - done) ** section.power)


@SCHEDULES.implements(Cosine)
def cosine(section: Cosine, peak: float, lengths: Lengths) -> Rate:
    """Return half a period of a cosine down to peak * final_ratio after the warm-up.

    Args:
        section, peak, lengths: see `curve`.

    Source: Loshchilov and Hutter, 1608.03983, equation 5, without restarts.
    """
    return _decay(
        section.final_ratio,
        peak,
        lengths,
        left=lambda done: (1.0 + math.cos(math.pi * done)) / 2,
    )


@SCHEDULES.implements(Exponential)
def exponential(section: Exponential, peak: float, lengths: Lengths) -> Rate:
    """Return peak * decay_rate^floor(step / decay_steps), with steps from the start of the run.

    Args:
        section, peak, lengths: see `curve`.

    Source: Tan and Le, 1905.11946, section 5.2 (0.97 every 2.4 epochs), and the training code they
    published, which warms up for 5 epochs: the first rate after those is 0.97^2 of the peak.
    """
    decay_steps = section.decay_epochs * lengths.steps_per_epoch

    def rate(step: int) -> float:
        """Return the rate of a `step`."""
        # 2.2 epochs of 5 steps are 11.000000000000002 in floating point, but the drop is due at 11.
        drops = math.floor(step / decay_steps + 1e-9)
        return peak * section.decay_rate**drops

    return rate


@SCHEDULES.implements(Constant)
def constant(section: Constant, peak: float, lengths: Lengths) -> Rate:
    """Return the peak until the end.

    Args:
        section, peak, lengths: see `curve`.
    """
    return lambda step: peak


def _decay(
    final_ratio: float,
    peak: float,
    lengths: Lengths,
    left: Callable[[float], float],
) -> Rate:
    """Return a rate that goes from peak to peak * final_ratio after the warm-up.

    Args:
        final_ratio, peak, lengths: see `polynomial`.
        left: share of the way that is left when a share of the decay is done.
    """
    final = peak * final_ratio
    # Above 0: recipe/batch.py refuses a warm-up as long as the run.
    steps = lengths.total - lengths.warmup

    def rate(step: int) -> float:
        """Return the rate of a `step`."""
        # A run that goes on beyond its length keeps the final rate.
        done = min(1.0, (step - lengths.warmup) / steps)
        return final + (peak - final) * left(done)

    return rate

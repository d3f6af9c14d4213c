"""Equal tuning: the same number of peak rates for every optimizer at every batch, by a rule written
beforehand.
"""

import math
import statistics
from typing import List, Optional, Sequence

from benchmarks.evidence.experiment import Search
from benchmarks.evidence.runs import outcome

_FACTOR = 3.0  # between the first rates


class FourRates(Search):
    """A search that tries a third of a guess, the guess and three times it, then one rate beside
    the best of these.

    The fourth is by the root of three towards the better neighbour of the best, or by three beyond
    the end if the best is the first or the last. A run that diverges counts as guessing.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        seeds: Sequence[int],
        *,
        guess: float,
        classes: int,
    ):
        """
        Args:
            overrides: of all runs, without the peak rate.
            seeds: with which each rate is tried.
            guess: the peak rate in the middle of the first three.
            classes: of the task, from which the loss of guessing follows.
        """
        super().__init__(overrides, seeds)
        self._guess = guess
        self._guessing = math.log(classes)

    def rates(self) -> List[float]:
        """Return the first three rates, and the fourth once their losses are known."""
        # Multiplied, not divided: rates are parts of the names of runs that are kept.
        lower = 1 / _FACTOR
        low = rounded(self._guess * lower)
        middle = rounded(self._guess)
        high = rounded(self._guess * _FACTOR)
        first = [low, middle, high]
        losses = [loss for loss in map(self.loss, first) if loss is not None]
        if len(losses) < len(first):
            return first
        loss_low, loss_middle, loss_high = losses
        # Of equal losses that of the lower rate counts as the better one.
        if loss_low <= min(loss_middle, loss_high):
            fourth = low * lower
        elif loss_middle <= loss_high:
            fourth = middle * (_FACTOR**-0.5 if loss_low < loss_high else _FACTOR**0.5)
        else:
            fourth = high * _FACTOR
        return [*first, rounded(fourth)]

    def loss(self, rate: float) -> Optional[float]:
        """Return the validation loss with a peak `rate`, the mean over the seeds.

        It is None until all of these runs are done.
        """
        outcomes = [outcome(run) for run in self.tried(rate)]
        finished = [result for result in outcomes if result is not None]
        if len(finished) < len(outcomes):
            return None
        return statistics.mean(min(result.loss, self._guessing) for result in finished)


def rounded(rate: float) -> float:
    """Return a `rate` with three digits, so that a run's name is short and the same everywhere."""
    return float(f"{rate:.3g}")

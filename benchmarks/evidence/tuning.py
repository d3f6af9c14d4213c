"""Equal tuning: the same number of peak rates for every optimizer at every batch, by a rule written beforehand."""

import math
import statistics
from typing import List, Optional, Sequence

from benchmarks.evidence.experiment import Search
from benchmarks.evidence.runs import outcome

_FACTOR = 3.0  # between the first rates


class FourRates(Search):
    """A search that tries a third of a guess, the guess and three times it, then one rate beside the best of these.

    The fourth is by the root of three towards the better neighbour of the best, or by three beyond the end if the best
    is the first or the last. A run that diverges counts as guessing.
    """

    def __init__(self, overrides: Sequence[str], seeds: Sequence[int], *, guess: float, classes: int):
        """
        Args:
            overrides: of all runs, without the peak rate.
            guess: the peak rate in the middle of the first three.
            classes: of the task, from which the loss of guessing follows.
        """
        super().__init__(overrides, seeds)
        self._guess = guess
        self._guessing = math.log(classes)

    def rates(self) -> List[float]:
        first = [rounded(self._guess * factor) for factor in (1 / _FACTOR, 1, _FACTOR)]
        losses = [self.loss(rate) for rate in first]
        if None in losses:
            return first
        best = min(range(3), key=losses.__getitem__)
        inside = _FACTOR**-0.5 if losses[0] < losses[2] else _FACTOR**0.5
        factors = (1 / _FACTOR, inside, _FACTOR)
        return [*first, rounded(first[best] * factors[best])]

    def loss(self, rate: float) -> Optional[float]:
        found = [outcome(run) for run in self.tried(rate)]
        if None in found:
            return None
        return statistics.mean(min(each.loss, self._guessing) for each in found)


def rounded(rate: float) -> float:
    """Return a rate with three digits, so that a run's name is short and the same everywhere."""
    return float(f"{rate:.3g}")

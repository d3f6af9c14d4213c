"""Updates of a run whose batch grows: `batch.schedule`.

A run counts in steps of `batch.global` images. An update takes one step or, with a larger batch, several, so rates,
epochs, the order of images and random draws depend on the images seen, not on the number of updates. An update ends at
the latest where an epoch, a part of the schedule or the run ends.

With the schedule `noise` the batch is doubled at the end of an epoch if the noise scale, less a standard error, is at
least twice the batch, up to `batch.largest` (McCandless et al., 1812.06162, section 2.2). It never shrinks.
"""

from __future__ import annotations

from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

from recipe.config import Recipe

_STANDARD_ERRORS = 2.0  # of a noise scale within which zero must not lie


def is_known(noise: float, error: float) -> bool:
    """Return whether a noise scale is told from zero: it is more than two of its standard errors."""
    return noise > _STANDARD_ERRORS * error


class Update(NamedTuple):
    """step: its first step, from 0. steps: how many it takes. number: of updates before it."""

    step: int
    steps: int
    number: int

    @property
    def end(self) -> int:
        """Steps done after it."""
        return self.step + self.steps

    def reaches(self, every: int) -> bool:
        """Whether a multiple of `every` steps is done with it, and was not before."""
        return self.end // every > self.step // every


class Course:
    """The updates of a run of `total` steps.

    growth: (step, steps of an update from there on) for each growth by the schedule `noise`; to be saved with the run.
    """

    def __init__(self, recipe: Recipe, steps_per_epoch: int, total: int, growth: Sequence[Sequence[int]] = ()):
        self._per_epoch, self._total = steps_per_epoch, total
        self._size, self._largest = recipe.batch.global_, recipe.batch.largest
        schedule = recipe.batch.schedule if isinstance(recipe.batch.schedule, list) else [(0, self._size)]
        # (first step, steps of an update), the first at 0
        self._changes: List[Tuple[int, int]] = [
            *((-(-int(images) // self._size), int(batch) // self._size) for images, batch in schedule),
            *((step, steps) for step, steps in growth),
        ]

    @property
    def growth(self) -> List[Tuple[int, int]]:
        """See the class; empty without the schedule `noise`."""
        return [] if self._largest is None else self._changes[1:]

    def may_grow(self, done: int) -> bool:
        """Whether the batch may be made larger after `done` steps."""
        at_end_of_epoch = done % self._per_epoch == 0 and done < self._total
        doubled = 2 * self._size * self._changes[-1][1]
        return self._largest is not None and at_end_of_epoch and doubled <= self._largest

    def grow(self, done: int, noise: float, error: float) -> Optional[int]:
        """Double the batch from step `done` on if the noise scale, in images, less its standard error allows it; return
        the new batch, or None."""
        steps = 2 * self._changes[-1][1]
        if noise - error < steps * self._size:
            return None
        self._changes.append((done, steps))
        return steps * self._size

    def _steps_at(self, step: int) -> int:
        """Steps of an update that begins at `step`."""
        whole = [steps for first, steps in self._changes if first <= step][-1]
        ends = [first for first, _ in self._changes if first > step]
        return min(whole, min([*ends, (step // self._per_epoch + 1) * self._per_epoch, self._total]) - step)

    def updates(self, start: int = 0) -> Iterator[Update]:
        """The updates from step `start` on, where one begins."""
        step = number = 0
        while step < self._total:
            steps = self._steps_at(step)
            if step >= start:
                yield Update(step, steps, number)
            step, number = step + steps, number + 1

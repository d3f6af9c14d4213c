"""Updates of a run whose batch grows: `batch.schedule`.

A run counts in steps of `batch.global` images. An update takes one step or, if the schedule has a larger batch,
several. Rates, warm-ups, epochs, the order of images and random draws are therefore functions of the images seen, not
of the number of updates. An update ends at the latest where an epoch ends, where the schedule changes, and where the
run ends.

With the schedule `noise` the batch follows the noise scale of the run, the batch at which saving updates costs as much
as it gains (McCandless et al., 1812.06162, section 2.2). It is doubled at the end of an epoch if the noise scale less a
standard error is at least twice the batch, and the result is at most `batch.largest`. It is never made smaller, and
doubles once an epoch at most, as the noise scale is an average over the last updates.
"""

from __future__ import annotations

from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

from recipe.config import Recipe


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

    growth: (step, steps of an update from there on) for each time that the schedule `noise` has made the batch larger,
        in order. To be saved with the run, which resumes with it.
    """

    def __init__(self, recipe: Recipe, steps_per_epoch: int, total: int, growth: Sequence[Sequence[int]] = ()):
        self._per_epoch, self._total = steps_per_epoch, total
        self._size, self._largest = recipe.batch.global_, recipe.batch.largest
        schedule = recipe.batch.schedule
        # (first step, steps of an update), the first at 0
        self._changes: List[Tuple[int, int]] = [
            (-(-int(images) // self._size), int(batch) // self._size)
            for images, batch in (schedule if isinstance(schedule, list) else [(0, self._size)])
        ]
        self._changes += [(step, steps) for step, steps in growth]

    @property
    def growth(self) -> List[Tuple[int, int]]:
        """See the class; empty without the schedule `noise`."""
        return [] if self._largest is None else self._changes[1:]

    def may_grow(self, done: int) -> bool:
        """Whether the batch may be made larger after `done` steps."""
        if self._largest is None or done % self._per_epoch or done >= self._total:
            return False
        return 2 * self._batch <= self._largest

    def grow(self, done: int, noise: float, error: float) -> Optional[int]:
        """Double the batch from step `done` on if the noise scale allows it.

        Args: noise, error: the noise scale and its standard error, in images.
        Returns: the new batch, or None.
        """
        if noise - error < 2 * self._batch:
            return None
        self._changes.append((done, 2 * self._changes[-1][1]))
        return self._batch

    @property
    def _batch(self) -> int:
        """Images of an update, as the schedule `noise` has it now."""
        return self._size * self._changes[-1][1]

    def steps_at(self, step: int) -> int:
        """Steps of an update that begins at `step`."""
        whole = [steps for first, steps in self._changes if first <= step][-1]
        ends = [first for first, _ in self._changes if first > step]
        ends += [(step // self._per_epoch + 1) * self._per_epoch, self._total]
        return min(whole, min(ends) - step)

    def updates(self, start: int = 0) -> Iterator[Update]:
        """The updates from step `start` on, where one begins."""
        if self._largest is None and len(self._changes) == 1 and self._changes[0][1] == 1:
            yield from (Update(step, 1, step) for step in range(start, self._total))
            return
        step = number = 0
        while step < self._total:
            steps = self.steps_at(step)
            if step >= start:
                yield Update(step, steps, number)
            step, number = step + steps, number + 1

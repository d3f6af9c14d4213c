"""Updates of a run whose batch grows: `batch.schedule`.

A run counts in steps of `batch.global` images. An update takes one step or, if the schedule has a larger batch,
several. Rates, warm-ups, epochs, the order of images and random draws are therefore functions of the images seen, not
of the number of updates. An update ends at the latest where an epoch ends, where the schedule changes, and where the
run ends.
"""

from __future__ import annotations

from typing import Iterator, List, NamedTuple, Tuple

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
    """The updates of a run of `total` steps."""

    def __init__(self, recipe: Recipe, steps_per_epoch: int, total: int):
        self._per_epoch, self._total = steps_per_epoch, total
        size = recipe.batch.global_
        # (first step, steps of an update), the first at 0
        self._changes: List[Tuple[int, int]] = [
            (-(-int(images) // size), int(batch) // size) for images, batch in recipe.batch.schedule or [(0, size)]
        ]

    def steps_at(self, step: int) -> int:
        """Steps of an update that begins at `step`."""
        whole = [steps for first, steps in self._changes if first <= step][-1]
        ends = [first for first, _ in self._changes if first > step]
        ends += [(step // self._per_epoch + 1) * self._per_epoch, self._total]
        return min(whole, min(ends) - step)

    def updates(self, start: int = 0) -> Iterator[Update]:
        """The updates from step `start` on, where one begins."""
        if len(self._changes) == 1 and self._changes[0][1] == 1:
            yield from (Update(step, 1, step) for step in range(start, self._total))
            return
        step = number = 0
        while step < self._total:
            steps = self.steps_at(step)
            if step >= start:
                yield Update(step, steps, number)
            step, number = step + steps, number + 1

"""Updates of a run whose batch grows: `batch.schedule`.

A run counts in steps of `batch.global` images. An update takes one step or, with a larger batch,
several, so rates, epochs, the order of images and the draws for images and layers depend on the
images seen, not on the number of updates; stochastic rounding, and what an optimizer counts, follow
the index of the update. An update ends at the latest where an epoch, a part of the schedule or the
run ends. Its length follows from its first step alone, so that a run goes on from any step: where a
session accepts other images (`data.changed_images`), epochs end elsewhere than before.

With the schedule `noise` the batch is doubled at the end of an epoch if the noise scale, less a
standard error, is at least twice the batch, up to `batch.largest` (McCandless et al., 1812.06162,
section 2.2). It never shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, List, Optional, Sequence, Tuple

from recipe.config import Recipe

_STANDARD_ERRORS = 2.0  # of a noise scale within which zero must not lie


def is_known(noise: float, error: float) -> bool:
    """Return whether a noise scale can be told from zero: it is more than two standard errors.

    Args:
        noise: noise scale, in images.
        error: its standard error, in images.
    """
    return noise > _STANDARD_ERRORS * error


@dataclass(frozen=True)
class Update:
    """An optimizer update. step: its first step, from 0. steps: how many it takes. index: updates
    before it.
    """

    step: int
    steps: int
    index: int

    @property
    def end(self) -> int:
        """Steps of the run that are done after it."""
        return self.step + self.steps

    def reaches(self, every: int) -> bool:
        """Return whether a multiple of `every` steps is done with it, and was not before."""
        return self.end // every > self.step // every


class Course:
    """The updates of a run."""

    def __init__(
        self, recipe: Recipe, steps_per_epoch: int, total: int, growth: Sequence[Sequence[int]] = ()
    ):
        """
        Args:
            recipe: of the run, of which the section `batch` counts.
            steps_per_epoch: steps of `batch.global` images.
            total: steps of the run.
            growth: see the property; of the session before.
        """
        self._per_epoch = steps_per_epoch
        self._total = total
        self._size = recipe.batch.global_
        self._largest = recipe.batch.largest
        # (first step, steps of an update from there on); the first change is at step 0.
        self._changes: List[Tuple[int, int]] = []
        if isinstance(recipe.batch.schedule, list):
            for images, batch in recipe.batch.schedule:
                first = -(-int(images) // self._size)  # rounded up
                self._changes.append((first, int(batch) // self._size))
        else:
            self._changes.append((0, 1))
        # Growth by `noise` cannot be computed again from the recipe: a resumed run brings it along.
        for step, steps in growth:
            self._changes.append((step, steps))

    @property
    def growth(self) -> List[Tuple[int, int]]:
        """(step, steps of an update from there on) for each growth by the schedule `noise`; to be
        saved with the run.

        Empty without that schedule.
        """
        return [] if self._largest is None else self._changes[1:]

    def may_grow(self, done: int) -> bool:
        """Return whether the batch may be made larger after `done` steps."""
        # Only at the end of an epoch, so that a run waits for its device no more often than that.
        if self._largest is None:
            return False
        is_end_of_epoch = done % self._per_epoch == 0 and done < self._total
        _, steps = self._changes[-1]
        return is_end_of_epoch and 2 * steps * self._size <= self._largest

    def grow(self, done: int, noise: float, error: float) -> Optional[int]:
        """Double the batch if the noise scale allows it.

        Args:
            done: steps of the run so far.
            noise: noise scale, in images.
            error: its standard error, in images.

        Returns:
            The new batch in images, or None.
        """
        steps = 2 * self._changes[-1][1]
        # Less the error: a batch that has grown by mistake never shrinks again.
        if noise - error < steps * self._size:
            return None
        self._changes.append((done, steps))
        return steps * self._size

    def _steps_at(self, step: int) -> int:
        """Return the steps of an update that begins at `step`."""
        whole = [steps for first, steps in self._changes if first <= step][-1]
        # It ends at the latest where an epoch, a part of the schedule or the run ends.
        end_of_epoch = (step // self._per_epoch + 1) * self._per_epoch
        changes = [first for first, _ in self._changes if first > step]
        end = min([*changes, end_of_epoch, self._total])
        return min(whole, end - step)

    def done(self, steps: int) -> List[Update]:
        """Return the updates of the first so many steps, as if all were made by this course.

        Where the steps end within an update, the last is what they have of it.
        """
        return list(self._between(0, min(steps, self._total), index=0))

    def updates(self, start: int = 0, made: Optional[int] = None) -> Iterator[Update]:
        """Return the updates from step `start` on, with which the first of them begins.

        Args:
            start: steps of the run so far.
            made: updates that these took; None where all were made by this course.
        """
        # The index of an update depends on the sizes of all before it.
        if made is None:
            made = len(self.done(start))
        return self._between(start, self._total, index=made)

    def _between(self, step: int, end: int, index: int) -> Iterator[Update]:
        """Yield the updates from a step on, the first of which has an index, until `end`."""
        while step < end:
            steps = min(self._steps_at(step), end - step)
            yield Update(step, steps, index)
            step += steps
            index += 1

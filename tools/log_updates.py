"""Updates between the lines of a log: fewer than steps where the batch has a schedule."""

from __future__ import annotations

import bisect
from typing import List, NamedTuple, Optional, Sequence

from recipe.config import Recipe
from recipe.course import Course


class LogLine(NamedTuple):
    """A log line, as far as it tells of updates; NaN for what it lacks.

    step: steps done.
    epoch: done.
    updates: since the line before it; older logs have none.
    batch: images of the last of them, where the batch has a schedule.
    """

    step: float
    epoch: float
    updates: float
    batch: float


def between(lines: Sequence[LogLine], recipe: Recipe) -> List[float]:
    """Return the updates that each line tells of.

    In older logs they follow from a schedule in the recipe. Of those whose batch followed the noise
    scale they are estimated, as if all updates were as large as the last one before the line.

    Args:
        lines: of the log.
        recipe: of the run.
    """
    ends: Optional[List[int]] = None
    # Only where they are needed: there are as many as updates in the run.
    if isinstance(recipe.batch.schedule, list) and not all(line.updates > 0 for line in lines):
        ends = _ends(lines, recipe)
    counts: List[float] = []
    before = 0.0
    for line in lines:
        if line.updates > 0:
            updates = line.updates
        elif ends is not None:
            updates = bisect.bisect_right(ends, line.step) - bisect.bisect_right(ends, before)
        else:
            size = recipe.batch.global_
            batch = line.batch if line.batch > 0 else size
            updates = (line.step - before) * size / batch
        counts.append(updates)
        before = line.step
    return counts


def _ends(lines: Sequence[LogLine], recipe: Recipe) -> Optional[List[int]]:
    """Return the steps that are done after each update; None where no line tells of an epoch."""
    # The last line comes behind a whole update, so that the course may end there.
    total = int(lines[-1].step)
    for line in reversed(lines):
        if line.epoch > 0 and line.step > 0:
            course = Course(recipe, max(1, round(line.step / line.epoch)), total)
            return [update.end for update in course.updates()]
    return None

"""Where the time of each session of a run went: computing, waiting for images, and the rest."""

from __future__ import annotations

import bisect
from typing import List, NamedTuple, Sequence

from tools.reporting.metrics import Metrics
from tools.reporting.run import resumed_at
from training.monitor import duration

COLUMNS = ("session", "steps", "time", "computing", "waiting for images", "evaluation, checkpoints")


class SessionTime(NamedTuple):
    """Seconds of one session by what they went to. first, last: updates done before and after it."""

    first: int
    last: int
    computing: float
    waiting: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.computing + self.waiting + self.rest


def session_times(metrics: Metrics, starts: Sequence[dict], global_batch: int) -> List[SessionTime]:
    """Where the time of each session went, as far as the log shows it; the sessions whose work was kept.

    A log line has the images a second and the share of waiting since the line before it (or the session's start), and
    the seconds of the whole run. What the two do not account for went to evaluation and checkpoints. Those between
    the last log line of a session and its end count to the next session. Loading torch and the model is in neither.

    Args:
        starts: see `run.starts_in`.
        global_batch: images of an update.
    """
    bounds = [0, *resumed_at(starts)]
    parts = [[0.0, 0.0, 0.0] for _ in bounds]
    last, counted, session = 0, 0.0, 0
    columns = (metrics.train[name] for name in ("step", "images_per_second", "data_wait", "seconds"))
    for step, pace, wait, seconds in zip(*columns):
        session = max(0, bisect.bisect_left(bounds, step) - 1)
        updates = step - max(last, bounds[session])
        last = step
        if not (pace > 0 and seconds >= counted):
            continue  # not finite, or a file that was put together by hand
        total, counted = seconds - counted, seconds
        training = min(total, updates * global_batch / pace)
        waiting = training * wait if 0 <= wait <= 1 else 0.0
        parts[session] = [sum(pair) for pair in zip(parts[session], (training - waiting, waiting, total - training))]
    if metrics.end and isinstance(metrics.end.get("seconds"), (int, float)):
        parts[session][2] += max(0.0, metrics.end["seconds"] - counted)
    ends = [*bounds[1:], max(metrics.step, bounds[-1])]
    return [SessionTime(first, end, *part) for first, end, part in zip(bounds, ends, parts) if sum(part) > 0]


def as_rows(sessions: Sequence[SessionTime]) -> List[List[str]]:
    """The sessions as rows of a table of COLUMNS."""
    return [
        [
            str(number),
            f"{part.first:,} to {part.last:,}",
            duration(part.seconds),
            *(f"{duration(each)} ({each / part.seconds:.0%})" for each in (part.computing, part.waiting, part.rest)),
        ]
        for number, part in enumerate(sessions, start=1)
    ]

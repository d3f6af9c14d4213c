"""The sessions of a run (one, and one more for each time that it was resumed), and where their time went."""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from tools.reporting.metrics import Metrics
from training import run_folder
from training.metrics import MOST_STEPS


class Start(NamedTuple):
    """One start of the program on a run folder; environment: as environment.json has it."""

    environment: dict

    @property
    def step(self) -> Optional[int]:
        """Updates that were done before; None where nothing was trained: finished already, or refused."""
        return self._count("step", least=0)

    @property
    def replicas(self) -> Optional[int]:
        """That trained together; None as for `step`."""
        return self._count("replicas", least=1)

    def _count(self, name: str, least: int) -> Optional[int]:
        value = self.environment.get(name)
        return value if type(value) is int and least <= value < MOST_STEPS else None


class SessionTime(NamedTuple):
    """Seconds of one session: computing, waiting for images, and the rest: evaluation, checkpoints.

    first, last: updates done before and after it.
    """

    first: int
    last: int
    computing: float
    waiting: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.computing + self.waiting + self.rest


def starts(folder: Path) -> List[Start]:
    """All starts that environment.json has, the first one first."""
    return [Start(each) for each in run_folder.starts(folder)]


def resumed_at(begun: Sequence[Start]) -> List[int]:
    """The steps at which a later session went on from an earlier one, ascending."""
    return sorted({start.step for start in begun if start.step})


def session_times(metrics: Metrics, begun: Sequence[Start], global_batch: int) -> List[SessionTime]:
    """Where the time of each session went, as far as the log tells; the sessions whose work was kept.

    A log line tells the images a second and the share of waiting since the one before it (or the session's start), and
    the seconds of the whole run. What the two do not account for went to evaluation and checkpoints. Those between
    the last log line of a session and its end count to the next session. Loading torch and the model is in neither.

    Args:
        global_batch: images of an update.
    """
    bounds = [0, *resumed_at(begun)]
    parts = [[0.0, 0.0, 0.0] for _ in bounds]
    last, counted, session = 0, 0.0, 0
    train = metrics.train
    for step, pace, wait, seconds in zip(
        *(train[name] for name in ("step", "images_per_second", "data_wait", "seconds"))
    ):
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

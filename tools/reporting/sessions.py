"""The sessions of a run (one, and one more for each time that it was resumed), and where their time went."""

from __future__ import annotations

import bisect
import datetime
import json
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence

from tools.reporting.metrics import Metrics


class Start(NamedTuple):
    """One start of the program on a run folder.

    environment: as environment.json has it. step: updates that were done before; None where it is not known, or
    where nothing was trained (the run was finished already, or its recipe was refused).
    """

    environment: dict
    step: Optional[int]


class Spent(NamedTuple):
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
    """All starts that environment.json has, the first one first; the step where TensorBoard's files tell it."""
    try:
        found = json.loads((folder / "environment.json").read_text(encoding="utf-8"))["starts"]
        environments = [each for each in found if isinstance(each, dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    times = [_seconds(each.get("started")) for each in environments]
    steps: Dict[int, int] = {}
    if all(time is not None for time in times):
        for begun, step in _begun(folder / "tensorboard"):
            # A start is noted to the second, before the training opens its file.
            steps[max(0, bisect.bisect_right(times, begun) - 1)] = step
    return [Start(each, steps.get(number)) for number, each in enumerate(environments)]


def _begun(folder: Path) -> List[tuple]:
    """(seconds since 1970, updates done before) of each session that opened a file for TensorBoard, in order.

    The writer says there from which step on it overwrites what an earlier session wrote.
    """
    files = sorted(folder.glob("events.out.tfevents.*")) if folder.is_dir() else []
    if not files:
        return []
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    except ImportError:
        return []
    found = []
    for file in files:
        # The session's own event is the second or third.
        for _, event in zip(range(4), LegacyEventFileLoader(str(file)).Load()):
            if event.HasField("session_log"):
                found.append((event.wall_time, max(0, event.step - 1)))
                break
    return sorted(found)


def _seconds(started: object) -> Optional[float]:
    try:
        return datetime.datetime.fromisoformat(str(started)).timestamp()
    except ValueError:
        return None


def resumed_at(begun: Sequence[Start]) -> List[int]:
    """The steps at which a later session went on from an earlier one, ascending."""
    return sorted({start.step for start in begun if start.step})


def spent(metrics: Metrics, begun: Sequence[Start], global_batch: int) -> List[Spent]:
    """Where the time of each session went, as far as the log tells; the sessions whose work was kept.

    A log line tells the images a second and the share of waiting since the one before it (or the session's start), and
    the seconds of the whole run. What the two do not account for went to evaluation and checkpoints. Those between
    the last log line of a session and its end count to the next session. Loading torch and the model is in neither.

    Args:
        global_batch: images of an update.
    """
    bounds = [0, *resumed_at(begun)]
    parts = [[0.0, 0.0, 0.0] for _ in bounds]
    last, told, session = 0, 0.0, 0
    train = metrics.train
    for step, pace, wait, seconds in zip(
        *(train[name] for name in ("step", "images_per_second", "data_wait", "seconds"))
    ):
        session = max(0, bisect.bisect_left(bounds, step) - 1)
        updates = step - max(last, bounds[session])
        last = step
        if not (pace > 0 and seconds >= told):
            continue  # not finite, or a file that was put together by hand
        total, told = seconds - told, seconds
        training = min(total, updates * global_batch / pace)
        waiting = training * wait if 0 <= wait <= 1 else 0.0
        parts[session] = [sum(pair) for pair in zip(parts[session], (training - waiting, waiting, total - training))]
    if metrics.end and isinstance(metrics.end.get("seconds"), (int, float)):
        parts[session][2] += max(0.0, metrics.end["seconds"] - told)
    ends = [*bounds[1:], max(metrics.step, bounds[-1])]
    return [Spent(first, end, *part) for first, end, part in zip(bounds, ends, parts) if sum(part) > 0]

"""metrics.jsonl: the events of a run, one JSON object a line. Loads no torch.

An event has `event` (train, eval, checkpoint or end) and `step` (steps done).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO, Dict, Iterator, List, NamedTuple, Optional, cast

from common.errors import UserError
from common.files import check_same, writing
from common.json_io import json_text, parse_json

NAME = "metrics.jsonl"
# Fields that differ between two runs of the same recipe; all others repeat bit for bit.
TIMING_FIELDS = (
    "images_per_second",
    "mfu",
    "seconds",
    "data_wait",
    "input_bound",
    "workers_needed",
)
TOP = 5  # classes: a label among so many of the likeliest is a hit of `top5`
MOST_STEPS = 10**12
_LARGEST = 3.5e38  # of float32: no run computes with more
# What readers compute with; other values of an event are only shown.
_NUMBERS = (
    "epoch",
    "loss",
    "top1",
    "top5",
    "best_top1",
    "lr",
    "batch",
    "updates",
    "seconds",
    "images",
    "images_per_second",
    "data_wait",
    "validation_set",
)


class Line(NamedTuple):
    """A line of the file.

    number: counted from 1.
    event: None where the line is damaged.
    """

    number: int
    event: Optional[dict]


def lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a metrics file except a last one that is cut off.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be read.
    """
    # As bytes, line by line: files of long runs are large, and damaged ones are no UTF-8.
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            event = _event_in(line)
            if event is not None or line.endswith(b"\n"):
                yield Line(number, event)


def read_events(folder: Path) -> Dict[str, List[dict]]:
    """Return the events of a run by kind.

    Args:
        folder: of the run.

    Raises:
        UserError: the file is missing or cannot be read, or a line is damaged.
    """
    path = folder / NAME
    # A damaged line is an error here: a report without it would be another run's.
    events: Dict[str, List[dict]] = {}
    try:
        for line in lines(path):
            if line.event is None:
                raise UserError(f"{path}:{line.number}: not a line of metrics; remove it")
            events.setdefault(line.event["event"], []).append(line.event)
    except (FileNotFoundError, NotADirectoryError):
        remedy = "name a run folder, e.g. runs/quickstart"
        raise UserError(f"{path}: no such file; {remedy}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make it a readable file") from None
    return events


def last_events(path: Path) -> Dict[str, dict]:
    """Return the last event of each kind.

    Args:
        path: of a metrics file, which may be damaged or missing.
    """
    try:
        return {line.event["event"]: line.event for line in lines(path) if line.event}
    except OSError:
        return {}


def is_number(value: object) -> bool:
    """Return whether a `value` of an event is a finite number, or null in its place."""
    if value is None:
        return True
    # Not a bool, which is an int to isinstance.
    return type(value) in (int, float) and -_LARGEST <= cast(float, value) <= _LARGEST


def length_until(path: Path, step: int) -> int:
    """Return the bytes of a file's events until a step is done, without the run's end.

    Args:
        path: of the file; 0 is returned if there is none.
        step: steps done.
    """
    # A damaged line ends what is kept: nobody knows what stood there.
    length = 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as stream:
        for line in stream:
            event = _event_in(line)
            if event is None or event["step"] > step or event["event"] == "end":
                break
            length += len(line)
    return length


def _event_in(line: bytes) -> Optional[dict]:
    """Return the event in a line, None where it is damaged."""
    try:
        event = parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    step = event.get("step")
    if type(step) is not int or not 0 <= step < MOST_STEPS:  # a bool is no number here
        return None
    return event if all(is_number(event.get(name)) for name in _NUMBERS) else None


class Metrics:
    """The file as a run writes it: appended, cut back to the checkpoint when the run resumes."""

    def __init__(self, path: Path, keep_bytes: int):
        """
        Args:
            path: of the file, which is made if there is none.
            keep_bytes: what is behind them is cut off.
        """
        self._path = path
        self._stream: IO[bytes] = open(path, "ab")  # noqa: SIM115
        self._stream.truncate(min(keep_bytes, os.path.getsize(path)))

    def check(self) -> None:
        """Raise OSError where the path no longer leads to the file that was opened."""
        check_same(self._path, self._stream.fileno())

    def write(self, event: dict) -> None:
        """Append an `event`; numbers that JSON does not know become null."""
        # Checked each time: events of a folder that was replaced would land in a file without a name.
        self.check()
        with writing(self._path):
            self._stream.write((json_text(event) + "\n").encode())
            self._stream.flush()

    def position(self) -> int:
        """Return the file's length in bytes, all of it safely on the disk."""
        self.check()
        with writing(self._path):
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return os.fstat(self._stream.fileno()).st_size

    def close(self) -> None:
        with writing(self._path):  # what a failed write has left is tried again
            self._stream.close()

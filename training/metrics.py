"""metrics.jsonl: the events of a run, one JSON object a line. Loads no torch.

An event has `event` (train, eval, checkpoint or end) and `step` (updates done).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO, Dict, Iterator, List, NamedTuple, Optional

from common.errors import UserError
from common.files import check_same, writing
from common.json_io import json_text, parse_json

NAME = "metrics.jsonl"
# Fields that differ between two runs of the same recipe; all others repeat bit for bit.
TIMING_FIELDS = ("images_per_second", "mfu", "seconds", "data_wait", "input_bound", "workers_needed")
TOP = 5  # classes: a label among so many of the likeliest is a hit of `top5`
MOST_STEPS = 10**12
_LARGEST = 3.5e38  # of float32: no run computes with more
# What readers compute with; other values of an event are only shown.
_NUMBERS = ("epoch", "loss", "top1", "top5", "best_top1", "lr", "seconds", "images", "images_per_second", "data_wait")


class Line(NamedTuple):
    """A line of the file, numbered from 1, and its event, None where it is damaged."""

    number: int
    event: Optional[dict]


def lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a metrics file except a last one that is cut off. Raises OSError: it cannot be read."""
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            event = _event_in(line)
            if event is not None or line.endswith(b"\n"):
                yield Line(number, event)


def read_events(folder: Path) -> Dict[str, List[dict]]:
    """Return the events of a run by kind. Raises UserError where the file is missing, or a line is damaged."""
    path = folder / NAME
    found: Dict[str, List[dict]] = {}
    try:
        for line in lines(path):
            if line.event is None:
                raise UserError(f"{path}:{line.number}: not a line of metrics; remove it")
            found.setdefault(line.event["event"], []).append(line.event)
    except OSError:
        raise UserError(f"{path}: no such file; name a run folder, e.g. runs/quickstart") from None
    return found


def last_events(path: Path) -> Dict[str, dict]:
    """Return the last event of each kind in a file, which may be damaged or missing."""
    try:
        return {line.event["event"]: line.event for line in lines(path) if line.event}
    except OSError:
        return {}


def _event_in(line: bytes) -> Optional[dict]:
    try:
        event = parse_json(line)
    except ValueError:
        return None
    whole = isinstance(event, dict) and isinstance(event.get("event"), str) and type(event.get("step")) is int
    whole = whole and 0 <= event["step"] < MOST_STEPS and all(is_number(event.get(name)) for name in _NUMBERS)
    return event if whole else None


def is_number(value: object) -> bool:
    """Whether a value of an event is a finite number, or null in the place of another one."""
    return value is None or (type(value) in (int, float) and -_LARGEST <= value <= _LARGEST)


def length_until(path: Path, step: int) -> int:
    """Bytes of a file's events until a step is done, without the run's end; 0 if there is no such file."""
    length = 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as stream:
        for line in stream:
            event = _event_in(line)
            if event is None or event["step"] > step or event["event"] == "end":
                break
            length += len(line)
    return length


class Metrics:
    """The file as a run writes it: appended, and cut back to the checkpoint when the run resumes."""

    def __init__(self, path: Path, keep_bytes: int):
        self._path = path
        self._stream: IO[bytes] = open(path, "ab")  # noqa: SIM115
        self._stream.truncate(min(keep_bytes, os.path.getsize(path)))

    def check(self) -> None:
        """Raises OSError where the path no longer leads to the file that was opened."""
        check_same(self._path, self._stream.fileno())

    def write(self, event: dict) -> None:
        """Append an event; numbers that JSON does not know become null."""
        self.check()
        with writing(self._path):
            self._stream.write((json_text(event) + "\n").encode())
            self._stream.flush()

    def position(self) -> int:
        """The file's length in bytes, all of it safely on the disk."""
        self.check()
        with writing(self._path):
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return os.fstat(self._stream.fileno()).st_size

    def close(self) -> None:
        with writing(self._path):  # what a failed write has left is tried again
            self._stream.close()

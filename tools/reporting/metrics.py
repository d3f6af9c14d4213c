"""The events of a run in columns: a hundred thousand log lines of two hundred layers each fit into memory so."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

from training.metrics import is_number, lines

_MISSING = float("nan")


class Events:
    """Events of one kind; a column for each number in them, those of inner objects as `trust/stem.conv_stem.weight`.

    What an event does not have, or has as null (it was not finite), is NaN.
    """

    def __init__(self) -> None:
        self.columns: Dict[str, array] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> array:
        """float64 [events]; NaN throughout where no event has it."""
        return self.columns.get(name) or array("d", [_MISSING]) * self._length

    def has(self, name: str) -> bool:
        """Whether any event has a number of that name."""
        return any(value == value for value in self.columns.get(name, ()))

    def add(self, event: dict) -> None:
        """One more event."""
        for key, value in event.items():
            if isinstance(value, dict):
                for name, inner in value.items():
                    self._put(f"{key}/{name}", inner)
            else:
                self._put(key, value)
        self._length += 1
        for column in self.columns.values():
            if len(column) < self._length:
                column.append(_MISSING)

    def _put(self, name: str, value: object) -> None:
        if value is None or (isinstance(value, float) and not is_number(value)):
            value = _MISSING  # the column keeps its place among the others
        elif not is_number(value):
            return
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = array("d", [_MISSING]) * self._length
        if len(column) == self._length:  # else a file that was put together by hand has the name twice
            column.append(value)


class Metrics(NamedTuple):
    """Content of metrics.jsonl.

    step: the last one that it tells of. end: the event of a finished run. odd: numbers of the lines that are no events,
    without a last one that was being written.
    """

    train: Events
    evaluation: Events
    step: int
    end: Optional[dict]
    odd: List[int]


def read(path: Path) -> Metrics:
    """The events in a file that may still be written; of a file that is missing, none. Raises OSError."""
    train, evaluation, end, step = Events(), Events(), None, 0
    odd: List[int] = []
    if not path.exists():
        return Metrics(train, evaluation, step, end, odd)
    for number, event in lines(path):
        if event is None:
            odd.append(number)
            continue
        step = max(step, event["step"])
        if event["event"] == "train":
            train.add(event)
        elif event["event"] == "eval":
            evaluation.add(event)
        end = event if event["event"] == "end" else None
    return Metrics(train, evaluation, step, end, odd)

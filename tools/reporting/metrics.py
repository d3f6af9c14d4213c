"""The events of a run in columns, so that a hundred thousand log lines of two hundred layers fit into memory."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

from training.metrics import is_number, lines

_MISSING = float("nan")


class Events:
    """Events of one kind; a column for each number in them, those of inner objects as `trust/stem.conv_stem.weight`.

    NaN stands for what an event does not have, or has as null (it was not finite).
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
        """Append an event."""
        values = dict(event)
        for key, inner in event.items():
            if type(inner) is dict:
                values.update((f"{key}/{name}", value) for name, value in inner.items())
        for name, value in values.items():
            if not is_number(value) and type(value) is not float:
                continue
            if name not in self.columns:
                self.columns[name] = array("d", [_MISSING]) * self._length
            self.columns[name].append(value if is_number(value) and value is not None else _MISSING)
        self._length += 1
        for column in self.columns.values():
            if len(column) < self._length:
                column.append(_MISSING)


class Metrics(NamedTuple):
    """Content of metrics.jsonl.

    step: the newest. end: the event of a finished run. odd: numbers of the lines that are no events, except a last one
    that was being written.
    """

    train: Events
    evaluation: Events
    step: int
    end: Optional[dict]
    odd: List[int]


def read(path: Path) -> Metrics:
    """The events in a file that may still be written; none if it is missing. Raises OSError."""
    kinds = {"train": Events(), "eval": Events()}
    end, step, odd = None, 0, []
    for number, event in lines(path) if path.exists() else ():
        if event is None:
            odd.append(number)
            continue
        step = max(step, event["step"])
        if event["event"] in kinds:
            kinds[event["event"]].add(event)
        end = event if event["event"] == "end" else None
    return Metrics(kinds["train"], kinds["eval"], step, end, odd)

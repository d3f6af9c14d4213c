"""The trials of a sweep in the order of what they reached: as rows, as a CSV file, as a table for a terminal."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from recipe.files import write_text
from tools.sweeping.candidates import as_text
from tools.sweeping.definition import Definition
from tools.sweeping.trials import COMPLETE, STATES, Record

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN = 20  # rows of the table; all are in the file


def ranked(records: Sequence[Record], definition: Definition) -> List[Record]:
    """Complete trials from the best to the worst, of equals the earlier first; then the others by state and number."""
    sign = 1 if definition.direction == "minimize" else -1
    return sorted(
        records,
        key=lambda each: (STATES.index(each.state), 0.0 if each.value is None else sign * each.value, each.number),
    )


def best(records: Sequence[Record], definition: Definition) -> Optional[Record]:
    """The complete trial with the best value, if there is any."""
    return next((each for each in ranked(records, definition) if each.state == COMPLETE), None)


def counts(records: Sequence[Record]) -> Dict[str, int]:
    """How many trials there are in each state."""
    return {state: sum(each.state == state for each in records) for state in STATES}


def rows(records: Sequence[Record], definition: Definition) -> List[Dict[str, Any]]:
    """A row for each trial in the order of `ranked`; `rank` is None where there is no value to rank by."""
    return [
        {
            "rank": place if each.state == COMPLETE else None,
            "trial": each.number,
            "state": each.state,
            "value": each.value,
            "parameters": each.parameters,
            "epochs": each.epochs,
            "seconds": each.seconds,
            "reason": each.reason,
        }
        for place, each in enumerate(ranked(records, definition), start=1)
    ]


def write(path: Path, records: Sequence[Record], definition: Definition) -> None:
    """The rows as CSV, a column for each parameter; the value's column is named after the metric."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["rank", "trial", "state", definition.metric, *definition.space, "epochs", "seconds", "reason"])
    for row in rows(records, definition):
        parameters = [_cell(row["parameters"][name]) for name in definition.space]
        start = [row[name] for name in ("rank", "trial", "state", "value")]
        writer.writerow([*start, *parameters, row["epochs"], row["seconds"], row["reason"]])
    write_text(path, stream.getvalue())


def table(records: Sequence[Record], definition: Definition) -> Table:
    """The best rows for a terminal."""
    from rich.table import Table
    from rich.text import Text

    shown = rows(records, definition)[:_SHOWN]
    names = _short(list(definition.space))
    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "trial", definition.metric, *(names[key] for key in definition.space), "epochs", "seconds"):
        found.add_column(Text(name), justify="right", overflow="fold")
    found.add_column("state", overflow="fold")
    for row in shown:
        numbers = (row["rank"], row["trial"], _number(row["value"], ".5g"))
        ends = (_number(row["epochs"], ".4g"), _number(row["seconds"], ".1f"))
        parameters = (_cell(row["parameters"][key]) for key in definition.space)
        cells = ["" if each is None else str(each) for each in (*numbers, *parameters, *ends)]
        found.add_row(*(Text(cell) for cell in cells), Text(row["state"]))
    return found


def _short(names: Sequence[str]) -> Dict[str, str]:
    """Keys without their sections, where that says which."""
    last = [name.rpartition(".")[2] for name in names]
    return {name: short if last.count(short) == 1 else name for name, short in zip(names, last)}


def _number(value: Optional[float], form: str) -> Optional[str]:
    return None if value is None else format(value, form)


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else as_text(value)

"""Progress of a sweep: lines for people, and the files that show its state."""

from __future__ import annotations

import csv
import io
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from recipe import loading, schema
from recipe.files import write_text
from tools.sweeping import picture
from tools.sweeping.candidates import Candidates, as_text
from tools.sweeping.definition import Definition
from tools.sweeping.folder import SweepFolder
from tools.sweeping.trials import COMPLETE, STATES, Record

if TYPE_CHECKING:
    from rich.table import Table

    from tools.sweeping.study import Study

_SHOWN = 20  # rows of the table; all are in the file
_PICTURE_SECONDS = 30.0  # between two pictures: drawing one takes a second


class Report:
    """Lines for people; leaderboard.csv, best.yaml, importance.png."""

    def __init__(self, candidates: Candidates, study: Study, folder: SweepFolder):
        self._candidates, self._study, self._folder = candidates, study, folder
        self._definition = candidates.sweep.definition
        self._drawn = time.monotonic()
        self._best: Optional[Dict[str, Any]] = None  # that best.yaml has

    def changed(self, line: str, record: Optional[Record]) -> None:
        """Args: line: for people, if there is anything to say. record: the trial that has ended, if one has."""
        if line:
            print(line, flush=True)
        self._write()
        if record is not None and time.monotonic() - self._drawn > _PICTURE_SECONDS:
            self._draw()

    def conclude(self) -> Dict[str, Any]:
        """Writes all files, prints the table, and returns everything as data."""
        from rich.console import Console

        rows = self._write()
        importances, folder = self._draw(), self._folder
        Console(width=None if sys.stdout.isatty() else 120).print(table(rows, self._definition))
        files = {"study": folder.study, "leaderboard": folder.leaderboard, "picture": folder.picture}
        if self._best is not None:
            files["best"] = folder.best
        return {
            "sweep": self._candidates.sweep.name,
            "folder": str(folder.path),
            **{name: getattr(self._definition, name) for name in ("metric", "direction", "sampler", "seed")},
            "counts": {state: sum(row["state"] == state for row in rows) for state in STATES},
            "best": self._best,
            "leaderboard": rows,
            "importances": importances,
            "files": {name: str(path) for name, path in files.items()},
        }

    def _write(self) -> List[Dict[str, Any]]:
        rows = ranked(self._study.records(), self._definition)
        write_csv(self._folder.leaderboard, rows, self._definition)
        if rows and rows[0]["rank"] == 1 and rows[0] != self._best:
            self._best = rows[0]
            write_text(self._folder.best, _best_recipe(self._folder, self._candidates, rows[0]))
        return rows

    def _draw(self) -> Optional[Dict[str, float]]:
        importances = self._study.importances()
        picture.draw(self._folder.picture, self._candidates.sweep, self._study.records(), importances)
        self._drawn = time.monotonic()
        return importances


def _best_recipe(folder: SweepFolder, candidates: Candidates, best: Dict[str, Any]) -> str:
    """The best trial as a recipe that extends the sweep's, by its path from the folder."""
    sweep, definition = candidates.sweep, candidates.sweep.definition
    # Without links: `..` of a linked folder is elsewhere.
    schema_path, recipe_path = (
        os.path.relpath(os.path.realpath(path), os.path.realpath(folder.path)) for path in (schema.PATH, sweep.recipe)
    )
    head = (
        f"yaml-language-server: $schema={schema_path}",
        f"The best trial of the sweep {sweep.name} ({sweep.path}): {folder.trial(best['trial'])}",
        f"  python train.py --config {shlex.quote(str(folder.best))}",
        f"Measured: {definition.metric} {best['value']:.6g} after {best['epochs']:.4g} epochs",
        "Of many trials the best is in part the luckiest: train it with another run.seed before you rely on it.",
    )
    lines = [f"# {' '.join(line.splitlines())}" for line in head]  # names of files may hold line breaks
    lines += ["", f"extends: {as_text(recipe_path)}"]
    overrides = [f"run.name={as_text(f'{sweep.word}-best')}", *candidates.overrides(best["parameters"])]
    base, recipe = (loading.load(sweep.recipe, given) for given in ((), overrides))
    for section, values in recipe.model_dump(mode="json", by_alias=True).items():
        same_kind = type(getattr(base, section)) is type(getattr(recipe, section))
        before = getattr(base, section).model_dump(mode="json", by_alias=True) if same_kind else {}
        swept = [key for key in values if f"{section}.{key}" in definition.space]
        changed = [key for key in values if key in swept or key not in before or before[key] != values[key]]
        lines += ["", f"{section}:"] if changed else []
        for key in changed:
            lines.append(f"  {key}: {as_text(values[key])}{'   # found by the sweep' if key in swept else ''}")
    return "\n".join(lines) + "\n"


def ranked(records: Sequence[Record], definition: Definition) -> List[Dict[str, Any]]:
    """A row for each trial: complete ones from the best to the worst, of equals the earlier first; then the others.

    `rank` is None for trials that are not complete; those are in the order of their states and numbers.
    """
    sign = 1 if definition.direction == "minimize" else -1
    order = sorted(records, key=lambda each: (STATES.index(each.state), sign * (each.value or 0.0), each.trial))
    return [
        {"rank": place if each.state == COMPLETE else None, **each._asdict()}
        for place, each in enumerate(order, start=1)
    ]


def write_csv(path: Path, rows: Sequence[Dict[str, Any]], definition: Definition) -> None:
    """The rows as CSV, with a column for each parameter; the column of the value is named after the metric."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["rank", "trial", "state", definition.metric, *definition.space, "epochs", "seconds", "reason"])
    for row in rows:
        cells = [row[name] for name in ("rank", "trial", "state", "value")]
        cells += [_cell(row["parameters"][key]) for key in definition.space]
        writer.writerow(cells + [row[name] for name in ("epochs", "seconds", "reason")])
    write_text(path, stream.getvalue())


def table(rows: Sequence[Dict[str, Any]], definition: Definition) -> Table:
    """The first rows for a terminal."""
    from rich.table import Table
    from rich.text import Text

    last = [key.rpartition(".")[2] for key in definition.space]
    names = [name if last.count(name) == 1 else key for key, name in zip(definition.space, last)]
    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "trial", definition.metric, *names, "epochs", "seconds"):
        found.add_column(Text(name), justify="right", overflow="fold")
    found.add_column("state", overflow="fold")
    for row in rows[:_SHOWN]:
        numbers = [
            "" if row[name] is None else format(row[name], form)
            for name, form in (("rank", "d"), ("trial", "d"), ("value", ".5g"), ("epochs", ".4g"), ("seconds", ".1f"))
        ]
        parameters = [_cell(row["parameters"][key]) for key in definition.space]
        found.add_row(*map(Text, [*numbers[:3], *parameters, *numbers[3:], row["state"]]))
    return found


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else as_text(value)

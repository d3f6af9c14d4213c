"""Progress of a sweep: lines for people, and the files that show its state."""

from __future__ import annotations

import csv
import io
import os
import shlex
import time
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Container,
    Dict,
    List,
    Optional,
    Sequence,
    Tuple,
    Type,
)

from common.files import write_text
from common.text import printable
from recipe import loading
from recipe.config import Recipe
from recipe.section import Section
from tools import packages
from tools.planning import text
from tools.sweeping.candidates import Candidates, as_text
from tools.sweeping.definition import Definition, SweepFile
from tools.sweeping.folder import SweepFolder
from tools.sweeping.picture import draw_picture
from tools.sweeping.trials import COMPLETE, STATES, Record

if TYPE_CHECKING:
    from tools.sweeping.study import Study

_SHOWN = 20  # rows of the table; all are in the file
_PICTURE_SECONDS = 30.0  # between two pictures: drawing one takes a second


class Report:
    """Lines for people; leaderboard.csv, best.yaml, importance.png."""

    def __init__(self, candidates: Candidates, study: Study, folder: SweepFolder):
        self._candidates = candidates
        self._study = study
        self._folder = folder
        self._definition = candidates.sweep.definition
        self._drawn = time.monotonic()
        self._best: Optional[Dict[str, Any]] = None  # the row that best.yaml has

    def changed(self, line: str, record: Optional[Record]) -> None:
        """Print a line and write the files.

        Args:
            line: for people, if there is anything to say.
            record: the trial that has ended, if one has.
        """
        if line:
            print(line, flush=True)
        self._write()
        # At the end it is drawn in any case.
        if record is not None and time.monotonic() - self._drawn > _PICTURE_SECONDS:
            self._draw()

    def conclude(self) -> Dict[str, Any]:
        """Write all files, print the table, and return everything as data."""
        rows = self._write()
        importances = self._draw()
        print(table(rows, self._definition))
        folder = self._folder
        files = {
            "study": str(folder.study),
            "leaderboard": str(folder.leaderboard),
        }
        without_picture = packages.lacking("matplotlib")
        if without_picture:
            print(f"no picture of the sweep: {without_picture}")
        else:
            files["picture"] = str(folder.picture)
        # There is no best recipe until a trial is complete.
        if self._best is not None:
            files["best"] = str(folder.best)
        counts = dict.fromkeys(STATES, 0)
        for row in rows:
            counts[row["state"]] += 1
        return {
            "sweep": self._candidates.sweep.name,
            "folder": str(folder.path),
            "metric": self._definition.metric,
            "direction": self._definition.direction,
            "sampler": self._definition.sampler,
            "seed": self._definition.seed,
            "counts": counts,
            "best": self._best,
            "leaderboard": rows,
            "importances": importances,
            "files": files,
        }

    def _write(self) -> List[Dict[str, Any]]:
        """Write the leaderboard, and the best recipe if another trial is the best; return rows."""
        rows = ranked(self._study.records(), self._definition)
        write_csv(self._folder.leaderboard, rows, self._definition)
        # Only complete trials have a rank, so there may be rows without a best one.
        first = rows[0] if rows else None
        if first is not None and first["rank"] == 1 and first != self._best:
            self._best = first
            recipe = _best_recipe(self._folder, self._candidates, first)
            write_text(self._folder.best, recipe)
        return rows

    def _draw(self) -> Optional[Dict[str, float]]:
        """Draw the picture if that can be done; return the importances of the parameters."""
        importances = self._study.importances()
        sweep = self._candidates.sweep
        if not packages.lacking("matplotlib"):
            draw_picture(self._folder.picture, sweep, self._study.records(), importances)
        self._drawn = time.monotonic()
        return importances


def _best_recipe(folder: SweepFolder, candidates: Candidates, best: Dict[str, Any]) -> str:
    """Return the best trial as a recipe that extends the sweep's, by its path from the folder."""
    sweep = candidates.sweep
    # Without links: `..` of a linked folder is elsewhere.
    path = os.path.relpath(os.path.realpath(sweep.recipe), os.path.realpath(folder.path))
    name = f"run.name={as_text(f'{sweep.word}-best')}"
    overrides = [name, *candidates.overrides(best["parameters"])]
    base = loading.load(sweep.recipe)
    recipe = loading.load(sweep.recipe, overrides)
    lines = [
        *_head_of_best(folder, sweep, best),
        "",
        f"extends: {as_text(path)}",
        *_changed_lines(base, recipe, sweep.definition.space),
    ]
    return "\n".join(lines) + "\n"


def _head_of_best(folder: SweepFolder, sweep: SweepFile, best: Dict[str, Any]) -> List[str]:
    """Return the comment at the head of the best trial's recipe."""
    metric = sweep.definition.metric
    head = (
        f"The best trial of the sweep {sweep.name} ({sweep.path}): {folder.trial(best['trial'])}",
        f"  python train.py --config {shlex.quote(str(folder.best))}",
        f"Measured: {metric} {best['value']:.6g} after {best['epochs']:.4g} epochs",
        "Of many trials the best is in part the luckiest: train it with another run.seed before you rely on it.",
    )
    # Names of files may hold line breaks, which would end a comment.
    return [f"# {' '.join(line.splitlines())}" for line in head]


def _changed_lines(base: Recipe, recipe: Recipe, swept: Container[str]) -> List[str]:
    """Return the lines of a recipe file for the keys that differ from `base`, or are `swept`."""
    lines = []
    for section, values in recipe.model_dump(mode="json", by_alias=True).items():
        before = _values(getattr(base, section), type(getattr(recipe, section)))
        changed = []
        for key, value in values.items():
            # A key of the space is written though the recipe has the same value: another kind of
            # section may replace it.
            is_swept = f"{section}.{key}" in swept
            if is_swept or key not in before or before[key] != value:
                changed.append(f"  {key}: {as_text(value)}")
        if changed:
            lines += ["", f"{section}:", *changed]
    return lines


def _values(section: Section, kind: Type[Section]) -> Dict[str, Any]:
    """Return the values of a section; none if it is of another kind, whose keys are others."""
    if type(section) is not kind:
        return {}
    return section.model_dump(mode="json", by_alias=True)


def ranked(records: Sequence[Record], definition: Definition) -> List[Dict[str, Any]]:
    """Return a row for each trial.

    Complete ones come first, from the best to the worst, with a rank; then the others by state.

    Args:
        records: of all trials.
        definition: of the sweep.
    """

    def order(record: Record) -> Tuple[int, float, int]:
        """Return the key by which a `record` is sorted."""
        value = definition.sign * (record.value or 0.0)
        # Of equally good trials the earliest comes first.
        return STATES.index(record.state), value, record.trial

    rows = []
    for number, record in enumerate(sorted(records, key=order), start=1):
        # Complete trials come first, so that their numbers are ranks.
        rank = number if record.state == COMPLETE else None
        rows.append({"rank": rank, **record._asdict()})
    return rows


def write_csv(path: Path, rows: Sequence[Dict[str, Any]], definition: Definition) -> None:
    """Write the rows as CSV, with a column for each parameter.

    The column of the value is named after the metric.

    Args:
        path: of the file.
        rows: of all trials.
        definition: of the sweep.
    """
    # Written as a whole: people and programs read it while the sweep runs.
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    first = ("rank", "trial", "state")
    last = ("epochs", "seconds", "reason")
    writer.writerow([*first, definition.metric, *definition.space, *last])
    for row in rows:
        cells = [row[name] for name in (*first, "value")]
        cells += [_cell(row["parameters"][key]) for key in definition.space]
        cells += [row[name] for name in last]
        writer.writerow(cells)
    write_text(path, stream.getvalue())


def table(rows: Sequence[Dict[str, Any]], definition: Definition) -> str:
    """Return the first rows for a terminal.

    Args:
        rows: of all trials.
        definition: of the sweep.
    """
    # Whole keys would make lines too long for a terminal.
    names = _short_names(list(definition.space))
    head = ["rank", "trial", definition.metric, *names, "epochs", "seconds", "state"]
    lines = [head]
    for row in rows[:_SHOWN]:
        lines.append(_table_row(row, definition))
    # The state, in the last column, is a word, and aligned as one.
    last = len(head) - 1
    return "\n".join(text.table(lines, "", left=(last,)))


def _table_row(row: Dict[str, Any], definition: Definition) -> List[str]:
    """Return the cells of a trial in the table."""
    # A choice may be any text: line breaks and control characters would spoil the table.
    parameters = [printable(_cell(row["parameters"][key])) for key in definition.space]
    return [
        _formatted(row["rank"], "d"),
        _formatted(row["trial"], "d"),
        _formatted(row["value"], ".5g"),
        *parameters,
        _formatted(row["epochs"], ".4g"),
        _formatted(row["seconds"], ".1f"),
        row["state"],
    ]


def _short_names(keys: Sequence[str]) -> List[str]:
    """Return the last part of each key, the whole key where another has the same last part."""
    last = [key.rpartition(".")[2] for key in keys]
    names = []
    for key, name in zip(keys, last):
        is_unique = last.count(name) == 1
        names.append(name if is_unique else key)
    return names


def _formatted(value: Optional[float], form: str) -> str:
    """Return a number in a format; nothing for none."""
    return "" if value is None else format(value, form)


def _cell(value: Any) -> str:
    """Return a parameter as text."""
    return value if isinstance(value, str) else as_text(value)

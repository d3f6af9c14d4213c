"""Progress of a sweep: lines for people, and the files that show its state."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import shlex
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from common.files import replacing, write_text
from common.text import count, printable
from recipe import loading
from tools.output import few_ticks
from tools.planning import text
from tools.sweeping.candidates import Candidates, as_text
from tools.sweeping.definition import Axis, Definition, SweepFile
from tools.sweeping.folder import SweepFolder
from tools.sweeping.trials import COMPLETE, PRUNED, STATES, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tools.sweeping.study import Study

_SHOWN = 20  # rows of the table; all are in the file
_PICTURE_SECONDS = 30.0  # between two pictures: drawing one takes a second
_COLUMNS = 3
_SIDE = 3.4  # of a panel, inches
_LETTERS = 26  # of all labels that fit below a panel side by side
_BLUE, _ORANGE, _GREY = "#0072b2", "#f0a30a", "#9a9a9a"  # by Okabe and Ito, distinct for colour-blind readers
_BEST = {"marker": "*", "markersize": 15, "color": "#d55e00", "markeredgecolor": "white", "linestyle": "none"}


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
        rows = self._write()
        importances, folder = self._draw(), self._folder
        print(table(rows, self._definition))
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
        draw_picture(self._folder.picture, self._candidates.sweep, self._study.records(), importances)
        self._drawn = time.monotonic()
        return importances


def _best_recipe(folder: SweepFolder, candidates: Candidates, best: Dict[str, Any]) -> str:
    """The best trial as a recipe that extends the sweep's, by its path from the folder."""
    sweep, definition = candidates.sweep, candidates.sweep.definition
    # Without links: `..` of a linked folder is elsewhere.
    recipe_path = os.path.relpath(os.path.realpath(sweep.recipe), os.path.realpath(folder.path))
    head = (
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
        # A key of the space is written though the recipe has the same value: another kind of section may replace it.
        kept = [key for key in before if before[key] == values.get(key) and f"{section}.{key}" not in definition.space]
        changed = [key for key in values if key not in kept]
        lines += ["", f"{section}:", *(f"  {key}: {as_text(values[key])}" for key in changed)] if changed else []
    return "\n".join(lines) + "\n"


def ranked(records: Sequence[Record], definition: Definition) -> List[Dict[str, Any]]:
    """A row for each trial: complete ones from the best to the worst, with a rank; then the others by state."""
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


def table(rows: Sequence[Dict[str, Any]], definition: Definition) -> str:
    """The first rows for a terminal."""
    last = [key.rpartition(".")[2] for key in definition.space]
    names = [name if last.count(name) == 1 else key for key, name in zip(definition.space, last)]
    found = [("rank", "trial", definition.metric, *names, "epochs", "seconds", "state")]
    for row in rows[:_SHOWN]:
        numbers = [
            "" if row[name] is None else format(row[name], form)
            for name, form in (("rank", "d"), ("trial", "d"), ("value", ".5g"), ("epochs", ".4g"), ("seconds", ".1f"))
        ]
        parameters = [printable(_cell(row["parameters"][key])) for key in definition.space]
        found.append((*numbers[:3], *parameters, *numbers[3:], row["state"]))
    return "\n".join(text.table(found, "", left=(len(found[0]) - 1,)))


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else as_text(value)


def draw_picture(
    path: Path, sweep: SweepFile, records: Sequence[Record], importances: Optional[Dict[str, float]]
) -> None:
    """History, importances, and the value over each parameter. Args: importances: None: too few trials."""
    from matplotlib.figure import Figure

    metric, space = sweep.definition.metric, sweep.definition.space
    complete, pruned = ([each for each in records if each.state == state] for state in (COMPLETE, PRUNED))
    rows = ranked(complete, sweep.definition)
    best = next((each for each in complete if each.trial == rows[0]["trial"]), None) if rows else None
    lines = math.ceil((2 + len(space)) / _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * _SIDE * 1.15, lines * _SIDE), layout="constrained")
    figure.suptitle(_plain(f"{sweep.name}: {metric} of {count(len(complete), 'complete trial')}"))
    history, importance, *panels = figure.subplots(lines, _COLUMNS, squeeze=False).flat
    _draw_history(history, sweep.definition, complete, pruned, best)
    importance.set(title="importance (PED-ANOVA)", xlim=(0, 1))
    if importances is None:
        importance.text(0.5, 0.5, "too few different values\nto say what mattered", ha="center", va="center")
        importance.set_yticks([])
    for name, share in sorted((importances or {}).items(), key=lambda pair: pair[1]):
        importance.barh(_plain(name), share, color=_BLUE)
    for (key, axis), panel in zip(space.items(), panels):
        _draw_parameter(panel, key, axis, complete, best)
        panel.set(title=_plain(key), ylabel=metric)
    for panel in panels[len(space) :]:
        panel.set_axis_off()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def _draw_history(
    panel: Axes, definition: Definition, complete: Sequence[Record], pruned: Sequence[Record], best: Optional[Record]
) -> None:
    """The value of each trial, and the best so far."""
    better = min if definition.direction == "minimize" else max
    numbers = [each.trial for each in complete]
    values = [each.value for each in complete]
    panel.plot(numbers, values, "o", color=_BLUE, label="trial")
    panel.step(numbers, list(itertools.accumulate(values, better)), where="post", color=_ORANGE, label="best so far")
    if pruned:
        panel.plot([each.trial for each in pruned], [each.value for each in pruned], "x", color=_GREY, label="pruned")
    if best is not None:
        panel.plot([best.trial], [best.value], label=f"best: trial {best.trial}", **_BEST)
    panel.set(title="history", xlabel="trial", ylabel=definition.metric)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend(fontsize=8)


def _draw_parameter(panel: Axes, key: str, axis: Axis, complete: Sequence[Record], best: Optional[Record]) -> None:
    """The value of each trial over one parameter."""
    values = [each.value for each in complete]
    if axis.choices is None:
        labels: List[str] = []
        places = [each.parameters[key] for each in complete]
        panel.set_xscale("log" if axis.log else "linear")
        panel.axvspan(axis.low, axis.high, alpha=0)  # the whole range, also where nothing was drawn
    else:
        labels = [as_text(choice) for choice in axis.choices]
        places = [labels.index(as_text(each.parameters[key])) for each in complete]
    panel.plot(places, values, "o", color=_BLUE)
    if best is not None:
        panel.plot([places[complete.index(best)]], [best.value], **_BEST)
    if axis.choices is None:
        few_ticks(panel.xaxis)
    else:
        long = sum(map(len, labels)) > _LETTERS
        shown = [_plain(textwrap.shorten(label, _LETTERS, placeholder="...")) for label in labels]
        panel.set_xticks(range(len(labels)), shown, rotation=30 if long else 0, ha="right" if long else "center")
        panel.set_xlim(-0.5, len(labels) - 0.5)
    panel.grid(alpha=0.3)


def _plain(text: str) -> str:
    """Text that matplotlib does not read as mathematics."""
    return text.replace("$", r"\$")

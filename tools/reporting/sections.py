"""The content of a report, as report.html shows it: of one run, or of several compared."""

from __future__ import annotations

import math
import os
import shlex
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from common.credentials import masked
from common.text import count, duration
from recipe import loading
from recipe.batch import peak_learning_rate
from recipe.config import Recipe
from recipe.section import as_yaml
from tools import formats
from tools.reporting import curves
from tools.reporting.curves import run_style
from tools.reporting.run import (
    AVERAGES,
    Run,
    division,
    headline,
    state,
)
from tools.reporting.session_times import SessionTime, session_times
from training.monitor import pace

_DIFFERS_ALWAYS = ("run.name", "run.output")  # in any two runs
_OF_A_START = ("started", "command", "step")  # keys of environment.json that every start has anew
_TIMES = ("session", "steps", "time", "computing", "waiting for images", "evaluation, checkpoints")
_MOST_LINES = 5  # of metrics.jsonl that are named


def share(value: Optional[float]) -> str:
    """Return a share as text: a `value` of 0.9972 as `99.72 %`, an unknown one as nothing."""
    if value is None or math.isnan(value):
        return ""
    return formats.percent(value, 2)


class _Column(NamedTuple):
    """One figure of `headline`.

    title: in the page.
    key: of the figure.
    form: makes text of it.
    """

    title: str
    key: str
    form: Callable[[Any], str]


_FIGURES = (
    _Column("top-1, validation", "top1", share),
    _Column("top-5", "top5", share),
    _Column("best top-1", "best_top1", share),
    *[_Column(f"top-1, {name.replace('_', ' ')}", name, share) for name in AVERAGES],
    _Column("duration", "seconds", duration),
    _Column("throughput", "images_per_second", pace),
    _Column("epochs", "epoch", "{:.4g}".format),
    _Column("steps", "step", "{:,}".format),
    _Column("global batch", "global_batch", "{:,}".format),
)


# Of several runs; the page of a single one has the others among its facts.
_COMPARED = (
    _Column("state", "state", str),
    *_FIGURES,
    _Column("device", "device", str),
    _Column("revision", "revision", str),
)


def of_run(run: Run) -> dict:
    """Return the page of one `run`, without its images."""
    figures = headline(run)
    drawn = curves.draw([run], [run.name])
    title = run.name
    if figures["top1"] is not None:
        title += f": top-1 {share(figures['top1'])}"
    return {
        "title": title,
        "heading": run.recipe.run.name if run.recipe else run.name,
        "state": state(run),
        "cards": _cards(figures),
        "facts": _facts(run, figures),
        "faults": _faults(run),
        "curves": drawn,
        "layers": drawn.layers,
        "time": _time(run),
        "recipe": {
            "reason": run.complaint,
            "settings": settings(run.recipe) if run.recipe else [],
            "text": loading.dump(run.recipe) if run.recipe else "",
        },
        "environment": {
            "machine": _machine(run.starts[-1]) if run.starts else [],
            "starts": _starts(run.starts),
        },
    }


def _cards(figures: Mapping[str, Any]) -> List[Tuple[str, str]]:
    """Return title and text of the figures that a run has so far."""
    cards = []
    for column in _FIGURES:
        value = figures.get(column.key)
        if value is not None:
            cards.append((column.title, column.form(value)))
    return cards


def _facts(run: Run, figures: Mapping[str, Any]) -> List[Tuple[str, object]]:
    """Return the lines below the cards, each with its name. figures: of the run."""
    return [
        ("Folder", run.folder),
        ("Batch", division(run) or "not known without the recipe"),
        ("Device", figures["device"] or "unknown"),
        ("Started", _when(figures["started"])),
        ("Revision", figures["revision"] or "unknown"),
    ]


def _faults(run: Run) -> List[str]:
    """Return the faults of the run folder, a sentence each."""
    faults = []
    if not run.recipe:
        faults.append(f"The recipe cannot be read: {run.complaint}")
    odd = run.metrics.odd
    # A line that a killed process has not finished is none of them: see `Metrics`.
    if odd:
        lines = ", ".join(map(str, odd[:_MOST_LINES]))
        if len(odd) > _MOST_LINES:
            lines += " ..."
        faults.append(f"Lines of metrics.jsonl that are no events were passed over: {lines}.")
    return faults


def _time(run: Run) -> dict:
    """Return the section that shows where the time went."""
    if run.recipe is None:
        return {"rows": [], "note": "Where the time went is not known without the recipe."}
    times = session_times(run.metrics, run.starts, run.recipe.batch.global_)
    rows = []
    for number, session in enumerate(times, start=1):
        rows.append((str(number), *_time_cells(session)))
    # The loop itself noted whether images were too slow.
    end = run.metrics.end or {}
    note = "" if rows else "Nothing is logged yet."
    if end.get("input_bound"):
        workers = end.get("workers_needed")
        note = f"Input-bound: data.workers={workers} would keep up, given a core for each."
    return {
        "names": _TIMES,
        "rows": rows,
        "sessions": count(len(rows), "session"),
        "note": note,
    }


def _time_cells(session: SessionTime) -> List[str]:
    """Return the steps of a session, its time, and the parts of that: see `_TIMES`."""
    cells = [f"{session.first:,} to {session.last:,}", duration(session.total)]
    for seconds in (session.computing, session.waiting, session.rest):
        # Sessions without any time have no row.
        share_of_time = seconds / session.total
        cells.append(f"{duration(seconds)} ({share_of_time:.0%})")
    return cells


def _starts(starts: Sequence[dict]) -> List[Tuple[str, str, str, str]]:
    """Return when, from where and how each start began, and what differs from the one before."""
    rows = []
    # The first start is compared with itself: nothing has changed.
    before = [*starts[:1], *starts]
    for start, earlier in zip(starts, before):
        changed = []
        for name, value in _machine(start):
            if earlier.get(name) != start[name]:
                changed.append(f"{name}: {value}")
        when = _when(start.get("started"))
        step = f"{start['step']:,}" if "step" in start else ""
        rows.append((when, step, _command(start), "; ".join(changed)))
    return rows


def _command(start: dict) -> str:
    """Return the command line of a start."""
    command = start.get("command")
    if isinstance(command, list):
        text = shlex.join(map(str, command))
    else:
        text = _one_line(command)
    # Older runs stored credentials of their command lines as they were.
    return masked(text)


def _machine(start: dict) -> List[Tuple[str, str]]:
    """Return what a start says about its machine and programs, in one line each."""
    facts = []
    for name, value in start.items():
        if name not in _OF_A_START:
            facts.append((name, _one_line(value)))
    return facts


def _one_line(value: object) -> str:
    """Return a value of environment.json in one line."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not known" if value is None else str(value)


def _when(time: object) -> str:
    """Return `2026-11-22T04:34:01+00:00` as `2026-11-22 04:34:01 UTC`."""
    return str(time or "unknown").replace("T", " ").replace("+00:00", " UTC")


def names_of(runs: Sequence[Run]) -> List[str]:
    """Return the names of `runs`: their folders, below the deepest one that all share."""
    folders = [run.folder.resolve() for run in runs]
    shared = os.path.commonpath([folder.parent for folder in folders])
    return [os.path.relpath(folder, shared) for folder in folders]


def of_comparison(runs: Sequence[Run], names: Sequence[str]) -> dict:
    """Return the page of several runs.

    Args:
        runs: to be compared.
        names: of the runs, on the page.
    """
    columns, cells = _figures_of(runs)
    drawn = curves.draw(runs, names)
    title = f"{len(runs)} runs compared"
    rows = []
    faults = []
    for order, (name, run) in enumerate(zip(names, runs)):
        # The style of a run in the curves, as a key to them.
        rows.append((name, run_style(order), cells[order]))
        faults += [f"{name}: {fault}" for fault in _faults(run)]
    page: Dict[str, object] = {
        "title": title,
        "heading": title,
        "columns": ["run", *columns],
        "runs": rows,
        "faults": faults,
        "curves": drawn,
        "layers": drawn.layers,
    }
    compared = _compared_recipes(runs, names)
    if compared is not None:
        page["differences"] = compared
    return page


def _compared_recipes(runs: Sequence[Run], names: Sequence[str]) -> Optional[Dict[str, object]]:
    """Return the section on the differences of recipes; None where none can be read."""
    recipes = []
    readable = []
    batches = []
    for run, name in zip(runs, names):
        if run.recipe is None:
            continue
        recipes.append(run.recipe)
        readable.append(name)
        batches.append((name, division(run) or "cannot be divided"))
    if not recipes:
        return None
    return {
        "batches": batches,
        "names": ["key", *readable],
        "rows": [(key, *values) for key, values in differences(recipes)],
    }


def _figures_of(runs: Sequence[Run]) -> Tuple[List[str], List[List[str]]]:
    """Return the titles of the figures that any run has, and each run's figures as text."""
    figures = [headline(run) for run in runs]
    columns = []
    for column in _COMPARED:
        # A column that no run has would be empty.
        if any(values.get(column.key) is not None for values in figures):
            columns.append(column)
    cells = []
    for values in figures:
        row = []
        for column in columns:
            value = values.get(column.key)
            row.append("" if value is None else column.form(value))
        cells.append(row)
    titles = [column.title for column in columns]
    return titles, cells


def settings(recipe: Recipe) -> List[Tuple[str, str, str, str]]:
    """List the keys of a `recipe` that differ from the defaults of their section's name.

    Returns:
        (key, value, default, description) of each.
    """
    rows = []
    for name, section in recipe:
        # Sections with a name have other keys, and defaults, for each name.
        defaults = section.defaults()
        fields = type(section).fields()
        for key, value in section.changes().items():
            # Docstrings of keys have several lines.
            description = " ".join((fields[key].description or "").split())
            default = as_yaml(defaults[key])
            rows.append((f"{name}.{key}", as_yaml(value), default, description))
    return rows


def _all_keys(sections: Sequence[Mapping[str, Any]]) -> List[str]:
    """Return the keys that any of these sections has, each once, in their order."""
    keys: Dict[str, None] = {}
    # Recipes may have sections of other kinds, which have other keys.
    for section in sections:
        keys.update(dict.fromkeys(section))
    return list(keys)


def differences(recipes: Sequence[Recipe]) -> List[Tuple[str, List[str]]]:
    """List the keys that differ among `recipes`, but for a run's name and folder; and the peak.

    Returns:
        (key, value in each recipe as text) of each.
    """
    rows = []
    dumped = [recipe.model_dump(mode="json", by_alias=True) for recipe in recipes]
    for section in Recipe.model_fields:
        sections = [recipe[section] for recipe in dumped]
        for key in _all_keys(sections):
            name = f"{section}.{key}"
            values = [as_yaml(keys.get(key)) for keys in sections]
            if len(set(values)) > 1 and name not in _DIFFERS_ALWAYS:
                rows.append((name, values))
    # With the same schedule.peak, it may follow from batches that differ.
    peaks = [f"{peak_learning_rate(recipe):.6g}" for recipe in recipes]
    if len(set(peaks)) > 1 and all(key != "schedule.peak" for key, _ in rows):
        rows.append(("peak learning rate, as it follows", peaks))
    return rows

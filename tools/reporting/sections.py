"""What a report shows, as report.html takes it: of one run, or of several with one colour per run in all figures."""

from __future__ import annotations

import os
import shlex
from typing import List, Optional, Sequence, Tuple

from common.credentials import masked
from common.text import count
from recipe import loading
from recipe.batch import peak_learning_rate
from recipe.config import Recipe
from recipe.section import as_yaml
from tools import formats
from tools.reporting import curves
from tools.reporting.curves import run_style
from tools.reporting.run import AVERAGES, Run, division, headline, session_times, state
from training.monitor import duration, pace

_OF_THE_PLACE = ("run.name", "run.output")  # differ in any two runs
_OF_A_START = ("started", "command", "step")  # keys of environment.json that every start has anew
_TIMES = ("session", "steps", "time", "computing", "waiting for images", "evaluation, checkpoints")


def share(value: Optional[float]) -> str:
    """0.9972 as `99.72 %`; empty if unknown."""
    return "" if value is None or value != value else formats.percent(value, 2)


# Of `headline`: the title of a figure, its key, its format.
_FIGURES = (
    ("top-1, validation", "top1", share),
    ("top-5", "top5", share),
    ("best top-1", "best_top1", share),
    *((f"top-1, {name.replace('_', ' ')}", name, share) for name in AVERAGES),
    ("duration", "seconds", duration),
    ("throughput", "images_per_second", pace),
    ("epochs", "epoch", "{:.4g}".format),
    ("steps", "step", "{:,}".format),
    ("global batch", "global_batch", "{:,}".format),
)


def of_run(run: Run) -> dict:
    """The page of one run, without its images."""
    figures = headline(run)
    drawn = curves.draw([run], [run.name])
    return {
        "title": f"{run.name}: top-1 {share(figures['top1'])}" if figures["top1"] is not None else run.name,
        "heading": run.recipe.run.name if run.recipe else run.name,
        "state": state(run),
        "cards": [(title, form(figures[key])) for title, key, form in _FIGURES if figures.get(key) is not None],
        "facts": [
            ("Folder", run.folder),
            ("Batch", division(run) or "not known without the recipe"),
            ("Device", figures["device"] or "unknown"),
            ("Started", _when(figures["started"])),
            ("Revision", figures["revision"] or "unknown"),
        ],
        "faults": _faults(run),
        "curves": drawn,
        "layers": drawn.layers,
        "time": _time(run),
        "recipe": {
            "reason": run.complaint,
            "settings": settings(run.recipe) if run.recipe else [],
            "text": loading.dump(run.recipe) if run.recipe else "",
        },
        "environment": {"machine": _machine(run.starts[-1]) if run.starts else [], "starts": _starts(run)},
    }


def _faults(run: Run) -> List[str]:
    """Faults of the run folder, a sentence each."""
    found = [] if run.recipe else [f"The recipe cannot be read: {run.complaint}"]
    odd = run.metrics.odd
    if odd:
        lines = ", ".join(map(str, odd[:5])) + (" ..." if len(odd) > 5 else "")
        found.append(f"Lines of metrics.jsonl that are no events were passed over: {lines}.")
    return found


def _time(run: Run) -> dict:
    if run.recipe is None:
        return {"rows": [], "note": "Where the time went is not known without the recipe."}
    rows = []
    for number, part in enumerate(session_times(run.metrics, run.starts, run.recipe.batch.global_), start=1):
        spent = (part.computing, part.waiting, part.rest)
        shares = (f"{duration(each)} ({each / sum(spent):.0%})" for each in spent)
        rows.append((str(number), f"{part.first:,} to {part.last:,}", duration(sum(spent)), *shares))
    end = run.metrics.end or {}
    note = "" if rows else "Nothing is logged yet."
    if end.get("input_bound"):
        note = f"Input-bound: data.workers={end.get('workers_needed')} would keep up, given a core for each."
    return {"names": _TIMES, "rows": rows, "sessions": count(len(rows), "session"), "note": note}


def _starts(run: Run) -> List[tuple]:
    """When, from where and how each start of the program began, and what had changed since the one before."""
    rows = []
    for start, earlier in zip(run.starts, [*run.starts[:1], *run.starts]):
        changed = [f"{name}: {value}" for name, value in _machine(start) if earlier.get(name) != start[name]]
        command = start.get("command")
        text = shlex.join(map(str, command)) if isinstance(command, list) else _listed(command)
        step = f"{start['step']:,}" if "step" in start else ""
        rows.append((_when(start.get("started")), step, masked(text), "; ".join(changed)))  # older runs masked nothing
    return rows


def _machine(start: dict) -> List[Tuple[str, str]]:
    return [(name, _listed(value)) for name, value in start.items() if name not in _OF_A_START]


def _listed(value: object) -> str:
    """A value of environment.json in one line."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not known" if value is None else str(value)


def _when(time: object) -> str:
    """`2026-11-22T04:34:01+00:00` as `2026-11-22 04:34:01 UTC`."""
    return str(time or "unknown").replace("T", " ").replace("+00:00", " UTC")


def names_of(runs: Sequence[Run]) -> List[str]:
    """The folders' names, with those of the folders above them that the runs do not share."""
    folders = [run.folder.resolve() for run in runs]
    shared = os.path.commonpath([folder.parent for folder in folders])
    return [os.path.relpath(folder, shared) for folder in folders]


def of_comparison(runs: Sequence[Run], names: Sequence[str]) -> dict:
    """The page of several runs, which are called `names`."""
    figures = [headline(run) for run in runs]
    wanted = (("state", "state", str), *_FIGURES, ("device", "device", str), ("revision", "revision", str))
    columns = [column for column in wanted if any(each.get(column[1]) is not None for each in figures)]
    cells = [["" if each.get(key) is None else form(each[key]) for _, key, form in columns] for each in figures]
    readable = [(run, name) for run, name in zip(runs, names) if run.recipe]
    rows = differences([run.recipe for run, _ in readable])
    drawn = curves.draw(runs, names)
    title = f"{len(runs)} runs compared"
    page = {
        "title": title,
        "heading": title,
        "columns": ["run", *(title for title, _, _ in columns)],
        "runs": [(name, run_style(order), cells[order]) for order, name in enumerate(names)],
        "faults": [f"{name}: {text}" for name, run in zip(names, runs) for text in _faults(run)],
        "curves": drawn,
        "layers": drawn.layers,
    }
    if readable:
        page["differences"] = {
            "batches": [(name, division(run) or "cannot be divided") for run, name in readable],
            "names": ["key", *(name for _, name in readable)],
            "rows": [(key, *values) for key, values in rows],
        }
    return page


def settings(recipe: Recipe) -> List[Tuple[str, str, str, str]]:
    """(key, value, default, description) of the keys that differ from the defaults of the names that are given."""
    found = []
    for section, part in recipe:
        defaults, fields = part.defaults(), type(part).fields()
        for key, value in part.changes().items():
            described = " ".join((fields[key].description or "").split())
            found.append((f"{section}.{key}", as_yaml(value), as_yaml(defaults[key]), described))
    return found


def differences(recipes: Sequence[Recipe]) -> List[Tuple[str, List[str]]]:
    """(key, value in each recipe, as text) of the keys that differ, but for a run's name and place; and the peak."""
    rows = []
    dumped = [recipe.model_dump(mode="json", by_alias=True) for recipe in recipes]
    for section in Recipe.model_fields:
        for key in dict.fromkeys(key for each in dumped for key in each[section]):
            values = [as_yaml(each[section].get(key)) for each in dumped]
            if len(set(values)) > 1 and f"{section}.{key}" not in _OF_THE_PLACE:
                rows.append((f"{section}.{key}", values))
    peaks = [f"{peak_learning_rate(recipe):.6g}" for recipe in recipes]
    if len(set(peaks)) > 1 and all(key != "schedule.peak" for key, _ in rows):
        rows.append(("peak learning rate, as it follows", peaks))
    return rows

"""The sections of a report that compares runs: one colour per run in all figures."""

from __future__ import annotations

from typing import List, Sequence, Tuple

from tools.reporting import curves, layers, recipes, timing
from tools.reporting.drawing import LineStyle, run_style
from tools.reporting.markup import Html, note, share, table, tag, when
from tools.reporting.page import Section
from tools.reporting.run import AVERAGES, Run, division, headline
from tools.reporting.sections import before, grid, oddities
from training.monitor import duration

_STROKES = {"dash": "8 5", "dot": "2 3", "dashdot": "8 3 2 3", "longdash": "13 5", "longdashdot": "13 3 2 3"}


def names_of(runs: Sequence[Run]) -> List[str]:
    """The folders' names, with as many of the folders above them as tell the runs apart."""
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(len(part) for part in parts)):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.folder) for run in runs]


def head(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """The runs beside each other, with the line that each is drawn as."""
    figures = [headline(run) for run in runs]
    averages = [name for name in AVERAGES if any(name in each for each in figures)]
    heads = ["run", "state", "top-1", "top-5", "best top-1", *(f"top-1, {name.replace('_', ' ')}" for name in averages)]
    heads += ["epochs", "steps", "global batch", "duration", "img/s"]
    rows = []
    for order, (name, each) in enumerate(zip(names, figures)):
        scores = [share(each.get(key)) for key in ("top1", "top5", "best_top1", *averages)]
        rest = (
            None if each["epoch"] is None else f"{each['epoch']:.4g}",
            f"{each['step']:,}",
            None if each["global_batch"] is None else f"{each['global_batch']:,}",
            None if each["seconds"] is None else duration(each["seconds"]),
            None if each["images_per_second"] is None else f"{each['images_per_second']:.3g}",
        )
        cells = ["" if cell is None else cell for cell in (*scores, *rest)]
        rows.append((tag("span", _swatch(run_style(order)), name, class_="run"), each["state"], *cells))
    shown = table(heads, rows, caption="The runs", numbers=range(2, len(heads)))
    remarks = [note(f"{name}: {text}") for name, run in zip(names, runs) for text in oddities(run)]
    return tag("header", tag("h1", f"{len(runs)} runs compared"), shown, *remarks)


def sections(runs: Sequence[Run], names: Sequence[str]) -> Tuple[List[Section], str]:
    """The sections, and the unit of the time axis."""
    drawn = curves.draw(runs, names)
    ratios = layers.draw(runs, names, drawn.unit[1])
    together = drawn._replace(figures=[*drawn.figures, *ratios])
    found = [
        Section("curves", "Curves", [*before(together), *grid(together)], together.figures),
        _recipes(runs, names),
        _time(runs, names),
        _environments(runs, names),
    ]
    return found, drawn.unit[0]


def _recipes(runs: Sequence[Run], names: Sequence[str]) -> Section:
    """The keys in which the recipes differ, and how each divides its batch."""
    readable = [(run, name) for run, name in zip(runs, names) if run.recipe]
    batches = [(name, division(run) or "cannot be divided") for run, name in readable]
    content: List[object] = [table(("run", "global batch"), batches, caption="Batches")] if batches else []
    rows = recipes.differences([run.recipe for run, _ in readable]) if len(readable) > 1 else []
    if rows:
        lines = [(tag("code", key), *(tag("code", value) for value in values)) for key, values in rows]
        content.append(table(("key", *(name for _, name in readable)), lines, caption="Keys that differ"))
    elif len(readable) > 1:
        content.append(note("The recipes are equal."))
    if len(readable) < len(runs):
        content.append(note(f"{len(runs) - len(readable)} of the recipes cannot be read and are left out."))
    return Section("recipes", "What differs in the recipes", content)


def _time(runs: Sequence[Run], names: Sequence[str]) -> Section:
    rows, missing = [], []
    for run, name in zip(runs, names):
        parts, reason = timing.of_run(run)
        if parts:
            rows.append((name, timing.together(parts)))
        else:
            missing.append(note(f"{name}: {reason}"))
    if not rows:
        return Section("time", "Time", missing)
    figure = timing.draw(rows)
    return Section("time", "Time", [timing.place(figure), timing.as_table(rows, "run"), *missing], [figure])


def _environments(runs: Sequence[Run], names: Sequence[str]) -> Section:
    """Where and when each ran."""
    heads = ("run", "started", "device", "revision", "torch", "starts", "folder")
    rows = []
    for run, name in zip(runs, names):
        each, newest = headline(run), run.starts[-1].environment if run.starts else {}
        revision, folder = tag("code", each["revision"] or "unknown"), tag("code", each["folder"])
        device, torch = each["device"] or "unknown", newest.get("torch", "unknown")
        rows.append((name, when(each["started"]), device, revision, torch, each["starts"], folder))
    return Section("environment", "Environment", [table(heads, rows, caption="Environments", numbers=(5,))])


def _swatch(style: LineStyle) -> Html:
    """The line that a run is drawn as."""
    dashes = _STROKES.get(style.dash)
    line = tag("line", x1=0, y1=6, x2=36, y2=6, stroke=style.colour, stroke_width=3, stroke_dasharray=dashes)
    return tag("svg", line, class_="swatch", viewBox="0 0 36 12", aria_hidden="true")

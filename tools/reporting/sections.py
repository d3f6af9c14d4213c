"""The sections of a report: of one run, and of a comparison with one colour per run in all figures."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from recipe import loading
from recipe.credentials import masked
from tools import formats
from tools.reporting import curves, layers, recipes, timing
from tools.reporting.curves import Curves
from tools.reporting.drawing import run_style
from tools.reporting.page import Figure, Html, Section, facts, folded, grid, note, table, tag
from tools.reporting.run import AVERAGES, Run, division, headline, state
from training.monitor import duration, pace

_MOST_ROWS = 400  # of evaluations
_MOST_SESSIONS = 20  # that are shown unfolded
_OF_A_START = ("started", "command", "step")  # keys of environment.json that every start has anew
_STROKES = {"dash": "8 5", "dot": "2 3", "dashdot": "8 3 2 3", "longdash": "13 5", "longdashdot": "13 3 2 3"}


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


def head(run: Run) -> Html:
    """Name, state, the figures that a run is judged by, and where and when it ran."""
    figures, now = headline(run), state(run)
    cards = [
        tag("div", tag("dl", tag("dt", title), tag("dd", form(figures[key]))))
        for title, key, form in _FIGURES
        if figures.get(key) is not None
    ]
    place = [
        ("Folder", tag("code", str(run.folder))),
        ("Batch", division(run) or "not known without the recipe"),
        ("Device", figures["device"] or "unknown"),
        ("Started", _when(figures["started"])),
        ("Last written", _when(figures["last_written"])),
        ("Revision", tag("code", figures["revision"] or "unknown")),
    ]
    return tag(
        "header",
        tag("h1", run.recipe.run.name if run.recipe else run.name),
        tag("p", tag("span", now.kind, class_="state"), " ", now.text),
        tag("div", *cards, class_="cards"),
        facts(place),
        *map(note, [*_faults(run), *curves.gaps(run)]),
    )


def _faults(run: Run) -> List[str]:
    """Faults of the run folder, a sentence each."""
    found = [] if run.recipe else [f"The recipe cannot be read: {run.complaint}"]
    odd = run.metrics.odd
    if odd:
        lines = ", ".join(map(str, odd[:5])) + (" ..." if len(odd) > 5 else "")
        found.append(f"Lines of metrics.jsonl that are no events were passed over: {lines}.")
    return found


def title(run: Run) -> str:
    """Title of the browser's tab."""
    top1 = share(headline(run)["top1"])
    return f"{run.name}: top-1 {top1}" if top1 else run.name


def curve_sections(run: Run) -> Tuple[List[Section], str]:
    """The curves, and the layers where their trust ratios are logged; the unit of the time axis."""
    drawn = curves.draw([run], [run.name])
    ratios = layers.draw([run], [run.name], drawn.unit[1])
    sections = [Section("curves", "Curves", [*_curves(drawn), _scores(run)], drawn.figures)]
    if ratios:
        sections.append(Section("layers", "Layers", [grid(ratios)], ratios))
    elif drawn.figures:
        reason = "the update was not made by LARS, or log.trust_ratios is off"
        sections[0].content.append(note(f"No trust ratios of layers: none in metrics.jsonl ({reason})."))
    return sections, drawn.unit[0]


def _curves(drawn: Curves) -> List[Html]:
    """The choice of the abscissa, what to know about the lines, the figures, and what is left out of them."""
    left_out = [note(f"Not drawn: {'; '.join(drawn.left_out)}.")] if drawn.left_out else []
    if not drawn.figures:
        return left_out
    choices = []
    for value, name in (("epoch", "epochs"), ("step", "steps"), ("time", f"time ({drawn.unit[0]})")):
        button = tag("input", type="radio", name="over", value=value, checked="" if value == "epoch" else None)
        choices.append(tag("label", button, f" {name}"))
    hint = "Drag over a figure to zoom, double-click to return; click on a name to hide its line."
    remarks = []
    if any(figure.marks for figure in drawn.figures):
        remarks.append("A dotted vertical line: there a later session of the run went on.")
    if drawn.thinned:
        remarks.append("Long lines are thinned out: of each stretch the lowest and the highest value are drawn.")
    return [
        tag("noscript", note("The figures are drawn by the page's own script, which is switched off.")),
        tag("fieldset", tag("legend", "Drawn over"), *choices),
        tag("p", hint, class_="note hint"),
        *([note(" ".join(remarks))] if remarks else []),
        grid(drawn.figures),
        *left_out,
    ]


def _scores(run: Run) -> Html:
    """All evaluations as a table, folded away."""
    events = run.metrics.evaluation
    if not len(events):
        return note("No evaluation yet.")
    columns = {"top-1": "top1", "top-5": "top5", "loss": "loss"}
    for name in AVERAGES:
        if events.has(f"{name}/top1"):
            columns[f"top-1, {name.replace('_', ' ')}"] = f"{name}/top1"
    rows = []
    for place in range(max(0, len(events) - _MOST_ROWS), len(events)):
        values = {name: events[column][place] for name, column in columns.items()}
        cells = [f"{value:.4f}" if name == "loss" else share(value) for name, value in values.items()]
        rows.append([f"{events['epoch'][place]:.4g}", f"{events['step'][place]:.0f}", *cells])
    names = ["epoch", "step", *columns]
    which = "All" if len(rows) == len(events) else f"The last {len(rows):,}"
    shown = table(names, rows, caption="Evaluations", numbers=range(len(names)))
    return folded(f"{which} evaluations as a table", shown)


def time_section(run: Run) -> Section:
    """Where the time went, by session."""
    parts, reason = timing.of_run(run)
    if not parts:
        return Section("time", "Time", [note(reason)])
    rows = [(f"session {order + 1}", part) for order, part in enumerate(parts)]
    many = len(rows) > _MOST_SESSIONS
    figure = timing.draw([("all sessions", timing.together(parts))] if many else rows)
    shown = timing.as_table(rows)
    content: List[object] = [grid([figure]), folded(f"{len(rows)} sessions", shown) if many else shown]
    if run.metrics.end and run.metrics.end.get("input_bound"):
        needed = run.metrics.end.get("workers_needed")
        content.append(note(f"Input-bound: data.workers={needed} would keep up, given a core for each."))
    return Section("time", "Time", content, [figure])


def recipe_section(run: Run) -> Section:
    """Settings that differ from the defaults, and the whole recipe."""
    if run.recipe is None:
        return Section("recipe", "Recipe", [note(f"Cannot be read: {run.complaint}")])
    rows = [(*(tag("code", each) for each in setting[:3]), setting[3]) for setting in recipes.settings(run.recipe)]
    content = [
        note("Settings that differ from the defaults of its model, optimizer and schedule."),
        table(("key", "value", "default", "what it is"), rows, caption="Keys that are not at their defaults"),
        folded("The whole resolved recipe", tag("pre", loading.dump(run.recipe))),
    ]
    return Section("recipe", "Recipe", content)


def environment_section(run: Run) -> Section:
    """Versions and machine of the newest start, and the changes from each start to the next."""
    if not run.starts:
        return Section("environment", "Environment", [note("Unknown: no environment.json that can be read.")])
    rows = []
    for start, earlier in zip(run.starts, [run.starts[0], *run.starts]):
        changed = [f"{name}: {value}" for name, value in _machine(start) if earlier.get(name) != start[name]]
        command = start.get("command")
        text = " ".join(map(str, command)) if isinstance(command, list) else _listed(command)
        shown = tag("code", masked(text))  # older runs have what they were given
        step = f"{start['step']:,}" if "step" in start else ""
        rows.append((_when(start.get("started")), step, shown, "; ".join(changed)))
    heads = ("started", "from step", "command", "changes")
    starts = table(heads, rows, caption="Starts of the program", numbers=(1,))
    starts = starts if len(rows) <= _MOST_SESSIONS else folded(f"{len(rows)}", starts)
    return Section("environment", "Environment", [facts(_machine(run.starts[-1])), tag("h3", "Starts"), starts])


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
    """The folders' names, with as many of the folders above them as make the runs differ."""
    parts = [run.folder.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts))):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(run.folder) for run in runs]


def head_of_comparison(runs: Sequence[Run], names: Sequence[str]) -> Html:
    """The runs beside each other, with the line that each is drawn as."""
    figures = [headline(run) for run in runs]
    columns = [column for column in _FIGURES if any(each.get(column[1]) is not None for each in figures)]
    rows = []
    for order, (name, each) in enumerate(zip(names, figures)):
        style = run_style(order)
        line = tag(
            "line",
            x1=0,
            y1=6,
            x2=36,
            y2=6,
            stroke=style.colour,
            stroke_width=3,
            stroke_dasharray=_STROKES.get(style.dash),
        )
        swatch = tag("svg", line, class_="swatch", viewBox="0 0 36 12", aria_hidden="true")
        cells = ["" if each.get(key) is None else form(each[key]) for _, key, form in columns]
        rows.append((tag("span", swatch, name, class_="run"), each["state"], *cells))
    heads = ["run", "state", *(title for title, _, _ in columns)]
    shown = table(heads, rows, caption="The runs", numbers=range(2, len(heads)))
    remarks = [note(f"{name}: {text}") for name, run in zip(names, runs) for text in _faults(run)]
    return tag("header", tag("h1", f"{len(runs)} runs compared"), shown, *remarks)


def comparison(runs: Sequence[Run], names: Sequence[str]) -> Tuple[List[Section], str]:
    """The sections, and the unit of the time axis."""
    drawn = curves.draw(runs, names)
    figures: List[Figure] = [*drawn.figures, *layers.draw(runs, names, drawn.unit[1])]
    found = [
        Section("curves", "Curves", _curves(drawn._replace(figures=figures)), figures),
        Section("recipes", "What differs in the recipes", _differences(runs, names)),
        _times(runs, names),
        _environments(runs, names),
    ]
    return found, drawn.unit[0]


def _differences(runs: Sequence[Run], names: Sequence[str]) -> List[object]:
    """The keys in which the recipes differ, and how each divides its batch."""
    readable = [(run, name) for run, name in zip(runs, names) if run.recipe]
    content: List[object] = []
    if readable:
        batches = [(name, division(run) or "cannot be divided") for run, name in readable]
        content.append(table(("run", "global batch"), batches, caption="Batches"))
    rows = recipes.differences([run.recipe for run, _ in readable])
    if rows:
        lines = [(tag("code", key), *(tag("code", value) for value in values)) for key, values in rows]
        content.append(table(("key", *(name for _, name in readable)), lines, caption="Keys that differ"))
    elif len(readable) > 1:
        content.append(note("The recipes are equal."))
    if len(readable) < len(runs):
        content.append(note(f"{len(runs) - len(readable)} of the recipes cannot be read and are left out."))
    return content


def _times(runs: Sequence[Run], names: Sequence[str]) -> Section:
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
    return Section("time", "Time", [grid([figure]), timing.as_table(rows, "run"), *missing], [figure])


def _environments(runs: Sequence[Run], names: Sequence[str]) -> Section:
    """Where and when each ran."""
    rows = []
    for run, name in zip(runs, names):
        each, newest = headline(run), run.starts[-1] if run.starts else {}
        revision, folder = tag("code", each["revision"] or "unknown"), tag("code", each["folder"])
        device, torch = each["device"] or "unknown", newest.get("torch", "unknown")
        rows.append((name, _when(each["started"]), device, revision, torch, each["starts"], folder))
    heads = ("run", "started", "device", "revision", "torch", "starts", "folder")
    return Section("environment", "Environment", [table(heads, rows, caption="Environments", numbers=(5,))])

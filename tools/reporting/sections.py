"""The sections of the report of one run."""

from __future__ import annotations

from typing import List, Sequence, Tuple

from recipe import loading
from recipe.credentials import masked
from tools.reporting import curves, layers, recipes, timing
from tools.reporting.curves import Curves
from tools.reporting.drawing import Figure
from tools.reporting.markup import Html, facts, listed, more, note, share, table, tag, when
from tools.reporting.page import Section, plot
from tools.reporting.run import AVERAGES, Run, division, headline, state
from training.monitor import duration, pace

_MOST_ROWS = 400  # of evaluations
_MOST_SESSIONS = 20  # that are shown at once
_OF_A_START = ("started", "command", "step")


def head(run: Run) -> Html:
    """Name, state, the figures that a run is judged by, and what it was."""
    figures, now = headline(run), state(run)
    title = run.recipe.run.name if run.recipe else run.name
    cards = [
        ("top-1, validation", share(figures["top1"])),
        ("top-5", share(figures["top5"])),
        ("best top-1", share(figures["best_top1"])),
        *((f"top-1, {name.replace('_', ' ')}", share(figures[name])) for name in AVERAGES if name in figures),
        ("duration", None if figures["seconds"] is None else duration(figures["seconds"])),
        ("throughput", None if figures["images_per_second"] is None else pace(figures["images_per_second"])),
        ("epochs", None if figures["epoch"] is None else f"{figures['epoch']:.4g}"),
        ("steps", f"{figures['step']:,}"),
    ]
    known = [
        ("Folder", tag("code", str(run.folder))),
        ("Batch", division(run) or "not known without the recipe"),
        ("Device", figures["device"] or "unknown"),
        ("Started", when(figures["started"])),
        ("Last written", when(figures["last_written"])),
        ("Revision", tag("code", figures["revision"]) if figures["revision"] else "unknown"),
    ]
    remarks = [*oddities(run), *curves.gaps(run)]
    return tag(
        "header",
        tag("h1", title),
        tag("p", tag("span", now.kind, class_="state"), " ", now.text),
        tag("div", *(_card(name, value) for name, value in cards if value is not None), class_="cards"),
        facts(known),
        *(note(remark) for remark in remarks),
    )


def _card(name: str, value: str) -> Html:
    return tag("div", tag("dl", tag("dt", name), tag("dd", value)))


def oddities(run: Run) -> List[str]:
    """Faults of the run folder, a sentence each."""
    found = []
    if run.recipe is None:
        found.append(f"The recipe cannot be read: {run.complaint}")
    if run.metrics.odd:
        lines = ", ".join(str(number) for number in run.metrics.odd[:5]) + (" ..." if len(run.metrics.odd) > 5 else "")
        found.append(f"Lines of metrics.jsonl that are no events were passed over: {lines}.")
    return found


def title(run: Run) -> str:
    """Title of the browser's tab."""
    top1 = share(headline(run)["top1"])
    return f"{run.name}: top-1 {top1}" if top1 else run.name


def curve_sections(run: Run) -> Tuple[List[Section], str]:
    """The curves, and the layers where the run tells their trust ratios; the unit of the time axis."""
    drawn = curves.draw([run], [run.name])
    ratios = layers.draw([run], [run.name], drawn.unit[1])
    sections = [Section("curves", "Curves", [*before(drawn), *grid(drawn), *_scores(run)], drawn.figures)]
    if ratios:
        sections.append(Section("layers", "Layers", [_places(ratios)], ratios))
    elif drawn.figures:
        reason = "the update was not made by LARS, or log.trust_ratios is off"
        sections[0].content.append(note(f"No trust ratios of layers: none in metrics.jsonl ({reason})."))
    return sections, drawn.unit[0]


def before(drawn: Curves) -> List[Html]:
    """The choice of the abscissa, and what to know about the lines."""
    if not drawn.figures:
        return []
    choices = []
    for value, name in (("epoch", "epochs"), ("step", "steps"), ("time", f"time ({drawn.unit[0]})")):
        button = tag("input", type="radio", name="over", value=value, checked="" if value == "epoch" else None)
        choices.append(tag("label", button, f" {name}"))
    found = [
        tag("noscript", note("The figures are drawn by the page's own script, which is switched off.")),
        tag("fieldset", tag("legend", "Drawn over"), *choices),
        tag(
            "p",
            "Drag over a figure to zoom, double-click to return; click on a name to hide its line.",
            class_="note hint",
        ),
    ]
    remarks = []
    if any(figure.marks for figure in drawn.figures):
        remarks.append("A dotted vertical line: there a later session of the run went on.")
    if drawn.thinned:
        remarks.append("Long lines are thinned out: of each stretch the lowest and the highest value are drawn.")
    found += [note(" ".join(remarks))] if remarks else []
    return found


def grid(drawn: Curves) -> List[Html]:
    """The figures, and what is left out of them."""
    found = []
    if drawn.figures:
        found.append(_places(drawn.figures))
    if drawn.left_out:
        found.append(note(f"Not drawn: {'; '.join(drawn.left_out)}."))
    return found


def _scores(run: Run) -> List[Html]:
    """All evaluations as a table, folded away."""
    events = run.metrics.evaluation
    if not len(events):
        return [note("No evaluation yet.")]
    columns = [("top-1", "top1"), ("top-5", "top5"), ("loss", "loss")]
    for name in AVERAGES:
        if events.has(f"{name}/top1"):
            columns.append((f"top-1, {name.replace('_', ' ')}", f"{name}/top1"))
    rows = []
    for place in range(max(0, len(events) - _MOST_ROWS), len(events)):
        values = [events[column][place] for _, column in columns]
        cells = [f"{value:.4f}" if name == "loss" else share(value) for (name, _), value in zip(columns, values)]
        rows.append([f"{events['epoch'][place]:.4g}", f"{events['step'][place]:.0f}", *cells])
    names = ["epoch", "step", *(name for name, _ in columns)]
    shown = table(names, rows, caption="Evaluations", numbers=range(len(names)))
    which = "All" if len(rows) == len(events) else f"The last {len(rows):,}"
    return [more(f"{which} evaluations as a table", shown)]


def _places(figures: Sequence[Figure]) -> Html:
    return tag("div", *(plot(figure) for figure in figures), class_="figures")


def time_section(run: Run) -> Section:
    """Where the time went, by session."""
    parts, reason = timing.of_run(run)
    if not parts:
        return Section("time", "Time", [note(reason)])
    rows = [(f"session {order + 1}", part) for order, part in enumerate(parts)]
    long = len(rows) > _MOST_SESSIONS
    figure = timing.draw([("all sessions", timing.together(parts))] if long else rows)
    shown = timing.as_table(rows)
    content: List[object] = [timing.place(figure), more(f"{len(rows)} sessions", shown) if long else shown]
    if run.metrics.end and run.metrics.end.get("input_bound"):
        needed = run.metrics.end.get("workers_needed")
        content.append(note(f"Input-bound: data.workers={needed} would keep up, given a core for each."))
    return Section("time", "Time", content, [figure])


def recipe_section(run: Run) -> Section:
    """Settings that differ from the defaults, and the whole recipe."""
    if run.recipe is None:
        return Section("recipe", "Recipe", [note(f"Cannot be read: {run.complaint}")])
    rows = [
        (tag("code", setting.key), tag("code", setting.value), tag("code", setting.default), setting.description)
        for setting in recipes.settings(run.recipe)
    ]
    return Section(
        "recipe",
        "Recipe",
        [
            note("Settings that differ from the defaults of its model, optimizer and schedule."),
            table(("key", "value", "default", "what it is"), rows, caption="Keys that are not at their defaults"),
            more("The whole resolved recipe", tag("pre", loading.dump(run.recipe))),
        ],
    )


def environment_section(run: Run) -> Section:
    """Versions and machine of the newest start, and the changes from each start to the next."""
    if not run.starts:
        return Section("environment", "Environment", [note("Unknown: no environment.json that can be read.")])
    environments = [start.environment for start in run.starts]
    known = [(name, listed(value)) for name, value in environments[-1].items() if name not in _OF_A_START]
    rows = []
    for start, earlier in zip(run.starts, [environments[0], *environments]):
        here = start.environment
        changed = [
            f"{name}: {listed(value)}"
            for name, value in here.items()
            if name not in _OF_A_START and earlier.get(name) != value
        ]
        step = "" if start.step is None else f"{start.step:,}"
        rows.append((when(here.get("started")), step, tag("code", _line(here.get("command"))), "; ".join(changed)))
    heads = ("started", "from step", "command", "changes")
    starts = table(heads, rows, caption="Starts of the program", numbers=(1,))
    content = [
        facts(known),
        tag("h3", "Starts"),
        starts if len(rows) <= _MOST_SESSIONS else more(f"{len(rows)}", starts),
    ]
    return Section("environment", "Environment", content)


def _line(command: object) -> str:
    text = " ".join(str(word) for word in command) if isinstance(command, list) else listed(command)
    return masked(text)  # older runs have what they were given

"""Where the time of a run went: computing, waiting for images, and the rest."""

from __future__ import annotations

from typing import List, Sequence, Tuple

from tools.reporting.drawing import COLOURS, Figure, unit_of
from tools.reporting.markup import Html, label, number, table, tag
from tools.reporting.page import plot
from tools.reporting.run import Run
from tools.reporting.sessions import SessionTime, session_times
from training.monitor import duration

# A pattern beside the colour: the parts can be told apart without it.
_PARTS = (
    ("computing", "computing", COLOURS[0], ""),
    ("waiting", "waiting for images", COLOURS[4], "/"),
    ("rest", "evaluation, checkpoints", COLOURS[2], "x"),
)


def of_run(run: Run) -> Tuple[List[SessionTime], str]:
    """The time of each session; if it is unknown, none and the reason."""
    if run.recipe is None:
        return [], "Where the time went is not known without the recipe."
    parts = session_times(run.metrics, run.starts, run.recipe.batch.global_)
    return parts, "" if parts else "Nothing is logged yet."


def together(parts: Sequence[SessionTime]) -> SessionTime:
    """The sum over the sessions of a run."""
    sums = [sum(getattr(part, name) for part in parts) for name, *_ in _PARTS]
    return SessionTime(parts[0].first, parts[-1].last, *sums)


def draw(rows: Sequence[Tuple[str, SessionTime]]) -> Figure:
    """A bar per row, the first at the top."""
    unit, length = unit_of(max(part.seconds for _, part in rows))
    names = [label(name) for name, _ in rows]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "y": names,
            "x": [number(getattr(part, key) / length) for _, part in rows],
            "marker": {
                "color": colour,
                "pattern": {"shape": pattern, "bgcolor": colour, "fgcolor": "#fff", "solidity": 0.2},
            },
            "hovertemplate": f"%{{y}}, {title}: %{{x:.3~g}} {unit}<extra></extra>",
        }
        for key, title, colour, pattern in _PARTS
    ]
    layout = {
        "barmode": "stack",
        "height": 110 + 30 * len(rows),
        "bargap": 0.35,
        "xaxis": {"title": {"text": unit}},
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True, "showgrid": False},
        "legend": {"traceorder": "normal"},
        "hovermode": "closest",
    }
    summary = " ".join(
        f"{name}: " + ", ".join(f"{title} {getattr(part, key) / part.seconds:.0%}" for key, title, *_ in _PARTS) + "."
        for name, part in rows
    )
    caption = (
        "From the log lines: the time that their images took, the share of it that a device waited, and what is "
        "left until the next line. The program's start and work that was lost and repeated are not included."
    )
    return Figure("time", "Where the time went", caption, summary, data, layout, wide=True)


def place(figure: Figure) -> Html:
    """Where the bars come."""
    return tag("div", plot(figure), class_="figures")


def as_table(rows: Sequence[Tuple[str, SessionTime]], called: str = "session") -> Html:
    """The same in figures."""
    cells = []
    for name, part in rows:
        shares = [f"{duration(getattr(part, key))} ({getattr(part, key) / part.seconds:.0%})" for key, *_ in _PARTS]
        cells.append((name, f"{part.first:,} to {part.last:,}", duration(part.seconds), *shares))
    names = (called, "steps", "time", *(title for _, title, *_ in _PARTS))
    return table(names, cells, caption="Where the time went", numbers=range(1, len(names)))

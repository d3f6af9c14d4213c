"""Where the time of each session of a run went: computing, waiting for images, and the rest."""

from __future__ import annotations

import bisect
from typing import List, NamedTuple, Sequence, Tuple

from tools.reporting.drawing import COLOURS, label, number, unit_of
from tools.reporting.metrics import Metrics
from tools.reporting.page import Figure, Html, table
from tools.reporting.run import Run, resumed_at
from training.monitor import duration

# A pattern beside the colour: the parts can be told apart without it.
_PARTS = (
    ("computing", "computing", COLOURS[0], ""),
    ("waiting", "waiting for images", COLOURS[4], "/"),
    ("rest", "evaluation, checkpoints", COLOURS[2], "x"),
)


class SessionTime(NamedTuple):
    """Seconds of one session by what they went to. first, last: updates done before and after it."""

    first: int
    last: int
    computing: float
    waiting: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.computing + self.waiting + self.rest


def session_times(metrics: Metrics, starts: Sequence[dict], global_batch: int) -> List[SessionTime]:
    """Where the time of each session went, as far as the log shows it; the sessions whose work was kept.

    A log line has the images a second and the share of waiting since the line before it (or the session's start), and
    the seconds of the whole run. What the two do not account for went to evaluation and checkpoints. Those between
    the last log line of a session and its end count to the next session. Loading torch and the model is in neither.

    Args:
        starts: see `run.starts_in`.
        global_batch: images of an update.
    """
    bounds = [0, *resumed_at(starts)]
    parts = [[0.0, 0.0, 0.0] for _ in bounds]
    last, counted, session = 0, 0.0, 0
    columns = (metrics.train[name] for name in ("step", "images_per_second", "data_wait", "seconds"))
    for step, pace, wait, seconds in zip(*columns):
        session = max(0, bisect.bisect_left(bounds, step) - 1)
        updates = step - max(last, bounds[session])
        last = step
        if not (pace > 0 and seconds >= counted):
            continue  # not finite, or a file that was put together by hand
        total, counted = seconds - counted, seconds
        training = min(total, updates * global_batch / pace)
        waiting = training * wait if 0 <= wait <= 1 else 0.0
        parts[session] = [sum(pair) for pair in zip(parts[session], (training - waiting, waiting, total - training))]
    if metrics.end and isinstance(metrics.end.get("seconds"), (int, float)):
        parts[session][2] += max(0.0, metrics.end["seconds"] - counted)
    ends = [*bounds[1:], max(metrics.step, bounds[-1])]
    return [SessionTime(first, end, *part) for first, end, part in zip(bounds, ends, parts) if sum(part) > 0]


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
    data = []
    for key, title, colour, shape in _PARTS:
        pattern = {"shape": shape, "bgcolor": colour, "fgcolor": "#fff", "solidity": 0.2}
        bar = {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "y": [label(name) for name, _ in rows],
            "x": [number(getattr(part, key) / length) for _, part in rows],
            "marker": {"color": colour, "pattern": pattern},
            "hovertemplate": f"%{{y}}, {title}: %{{x:.3~g}} {unit}<extra></extra>",
        }
        data.append(bar)
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


def as_table(rows: Sequence[Tuple[str, SessionTime]], called: str = "session") -> Html:
    """The same figures as a table. Args: called: what a row is."""
    cells = []
    for name, part in rows:
        shares = [f"{duration(getattr(part, key))} ({getattr(part, key) / part.seconds:.0%})" for key, *_ in _PARTS]
        cells.append((name, f"{part.first:,} to {part.last:,}", duration(part.seconds), *shares))
    names = (called, "steps", "time", *(title for _, title, *_ in _PARTS))
    return table(names, cells, caption="Where the time went", numbers=range(1, len(names)))

"""Timelines of traced steps: which rank computed which micro batch when.

They are written for Chrome's trace viewer, and as a picture.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Container, Dict, List, NamedTuple, Sequence, Tuple

from common.errors import first_line
from common.files import replacing, write_text
from common.json_io import json_text
from engines.timeline import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's blue and orange, which all eyes tell apart, and greys that also differ in print.
_COLOURS = {
    "forward": "#0072b2",
    "backward": "#f0a30a",
    "load": "#d0d0d0",
    "exchange": "#9a9a9a",
    "update": "#4d4d4d",
}
_COMPUTING = ("forward", "backward")
_MOST_ROWS = 8
_MOST_BOXES = 300  # side by side
_WIDTH = 14.0  # of the picture, inches
_POINTS = 72  # per inch
_FONT = 6.0  # points, of the numbers of micro batches

_Row = Tuple[int, int]  # replica, rank


class _Window(NamedTuple):
    """The time that a picture shows.

    start, end: seconds on the clock of the spans.
    points: of the picture, per second.
    """

    start: float
    end: float
    points: float


def ideal(micro_batches: int, stages: int, virtual: int = 1) -> float:
    """Return the efficiency of a pipeline that waits only while it fills and empties.

    M V / (M V + K - 1) for M micro batches on K ranks that compute V stages each in turn, all of
    them even, for GPipe's schedule and 1F1B alike.

    Source: Huang et al., 1811.06965, section 2.3; interleaved: Narayanan et al., 2104.04473,
    section 2.2.

    Args:
        micro_batches: of a replica's step (M).
        stages: ranks of a replica (K).
        virtual: stages of a rank (V).
    """
    work = micro_batches * virtual
    return work / (work + stages - 1)


def efficiency(spans: Sequence[Span]) -> float:
    """Return the share of one step's time that replica 0's ranks computed.

    The time is that from the first forward to the last backward pass: exchange and update do not
    count, so that `ideal` is the bound.

    Args:
        spans: of one step.
    """
    # One replica stands for all: their schedules are the same.
    computing = [span for span in spans if span.replica == 0 and span.kind in _COMPUTING]
    ranks = {span.rank for span in computing}
    busy = math.fsum(span.end - span.start for span in computing)
    length = max(span.end for span in computing) - min(span.start for span in computing)
    return busy / (len(ranks) * length)


def _micro_batches(spans: Sequence[Span]) -> int:
    """Return how many micro batches replica 0 computed in one step, or in an update of several."""
    forward = [span for span in spans if span.replica == 0 and span.kind == "forward"]
    return len({span.micro_batch for span in forward})


def write(
    folder: Path,
    spans: Sequence[Span],
    stages: int,
    virtual: int = 1,
) -> str:
    """Write trace.json and, where matplotlib is installed, timeline.png.

    trace.json holds all spans, a process per replica and a thread per rank. timeline.png shows the
    first step, a row per rank; of replica 0 alone where the rows of all would be too many.

    Args:
        folder: of the two files; it is made.
        spans: of all ranks, in one or more steps.
        stages: see `ideal`.
        virtual: see `ideal`.

    Returns:
        The line to print, with the mean efficiency of the steps.
    """
    by_step: Dict[int, List[Span]] = {}
    for span in spans:
        by_step.setdefault(span.step, []).append(span)
    efficiencies = {step: efficiency(by_step[step]) for step in by_step}
    first = min(by_step)
    last = max(by_step)
    micro_batches = _micro_batches(by_step[first])
    work = micro_batches * virtual
    best = ideal(micro_batches, stages, virtual)
    bound = f"ideal {work} / ({work} + {stages - 1}) = {best:.2f}"
    # The files.
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "trace.json", json_text(_trace(spans)))
    title = f"step {first}: pipeline efficiency {efficiencies[first]:.2f}, {bound}"
    picture = ", timeline.png"
    try:
        _draw(by_step[first], title, folder / "timeline.png")
    except ImportError as error:  # no reason to end a training
        picture = f" (no picture: {first_line(error)}; pip install matplotlib)"
    # The line.
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    mean = statistics.mean(efficiencies.values())
    summary = f"pipeline efficiency {mean:.2f} of 1, {bound}"
    return f"timeline of {steps}: {folder / 'trace.json'}{picture}; {summary}"


def _trace(spans: Sequence[Span]) -> dict:
    """Return the content of a trace, in microseconds from the first span on.

    Source: "Trace Event Format", Google 2016: complete events and metadata events.
    """
    start = min(span.start for span in spans)
    events = []
    for (replica, rank), stages in _rows(spans).items():
        events.append(_name_event("process_name", f"replica {replica}", replica, rank))
        events.append(_name_event("thread_name", f"{stages} (rank {rank})", replica, rank))
    for span in sorted(spans, key=lambda span: span.start):
        # Spans of an exchange or an update are of no micro batch.
        index = "" if span.micro_batch < 0 else f" {span.micro_batch}"
        event = {
            "ph": "X",
            "name": span.kind + index,
            "cat": span.kind,
            "pid": span.replica,
            "tid": span.rank,
            "ts": (span.start - start) * 1e6,
            "dur": (span.end - span.start) * 1e6,
            "args": {
                "step": span.step,
                "stage": span.stage,
                "micro_batch": span.micro_batch,
            },
        }
        events.append(event)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name_event(kind: str, name: str, replica: int, rank: int) -> dict:
    """Return the event that names a process or thread of a trace."""
    return {"ph": "M", "pid": replica, "tid": rank, "name": kind, "args": {"name": name}}


def _rows(spans: Sequence[Span]) -> Dict[_Row, str]:
    """Return (replica, rank) -> `stage 1` or `stages 1, 3`, by replica and first stage."""
    # From the spans themselves: who computes what follows from the schedule, not from the rank.
    stages: Dict[_Row, set] = {}
    for span in spans:
        if span.kind in _COMPUTING:
            stages.setdefault((span.replica, span.rank), set()).add(span.stage)
    rows = {}
    for row in sorted(stages, key=lambda row: (row[0], min(stages[row]), row[1])):
        noun = "stages" if len(stages[row]) > 1 else "stage"
        rows[row] = f"{noun} {', '.join(map(str, sorted(stages[row])))}"
    return rows


def _draw(spans: Sequence[Span], title: str, output: Path) -> None:
    """Draw one step: a row per rank, a box per micro batch.

    Only the beginning of a step of very many micro batches is shown.
    """
    from matplotlib.figure import Figure

    # Replicas are alike: one shows the schedule.
    rows = _rows(spans)
    if len(rows) > _MOST_ROWS:
        rows = {row: stages for row, stages in rows.items() if row[0] == 0}
    window = _window(spans)
    figure = Figure(figsize=(_WIDTH, 1.3 + 0.52 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for height, row in enumerate(rows):
        of_rank = [span for span in spans if (span.replica, span.rank) == row]
        _draw_row(axes, height, of_rank, window)
    labels = [f"replica {replica}, {stages}" for (replica, _), stages in rows.items()]
    milliseconds = (window.end - window.start) * 1e3
    # From the larger bound to the smaller one: the first stage is on top.
    axes.set(xlim=(0, milliseconds), xlabel="milliseconds", ylim=(len(rows) - 0.45, -0.55))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.set_yticks(range(len(rows)), labels)
    axes.set_title(title, fontsize=11, loc="left")
    _draw_legend(axes, {span.kind for span in spans})
    with replacing(output) as temporary:
        # The name of the temporary file does not say what it is.
        figure.savefig(temporary, dpi=140, format="png")


def _window(spans: Sequence[Span]) -> _Window:
    """Return the time that the picture of a step shows."""
    # Hundreds of boxes would be thinner than a line: the schedule repeats itself before that.
    start = min(span.start for span in spans)
    end = max(span.end for span in spans)
    box = statistics.median(span.end - span.start for span in spans if span.kind in _COMPUTING)
    end = min(end, start + box * _MOST_BOXES)
    points = _WIDTH * _POINTS * 0.92 / (end - start)  # labels take the rest of the width
    return _Window(start, end, points)


def _draw_row(axes: Axes, height: int, spans: Sequence[Span], window: _Window) -> None:
    """Draw the spans of one rank, with the numbers of micro batches where there is room."""
    shown = [span for span in spans if span.start < window.end]
    # Drawn last, over images that are loaded meanwhile.
    shown.sort(key=lambda span: span.kind in _COMPUTING)
    for span in shown:
        start = (span.start - window.start) * 1e3  # milliseconds
        length = span.end - span.start  # seconds
        # White edges part the boxes; they are thin where boxes are narrow, or would cover them.
        axes.barh(
            height,
            length * 1e3,
            0.86,
            start,
            color=_COLOURS[span.kind],
            edgecolor="white",
            linewidth=min(0.8, length * window.points / 8),
        )
        if span.kind in _COMPUTING:
            _draw_index(axes, height, span, window)


def _draw_index(axes: Axes, height: int, span: Span, window: _Window) -> None:
    """Write the index of a micro batch into its box, where there is room."""
    text = str(span.micro_batch)
    # A digit is about 0.64 times as wide as the font is high.
    width = (0.64 * len(text) + 0.1) * _FONT  # points, with a margin
    length = span.end - span.start  # seconds
    if width > length * window.points:
        return
    start = (span.start - window.start) * 1e3  # milliseconds
    axes.text(
        start + length * 500,
        height,
        text,
        color="white" if span.kind == "forward" else "black",
        ha="center",
        va="center_baseline",
        fontsize=_FONT,
        clip_on=True,
    )


def _draw_legend(axes: Axes, kinds: Container[str]) -> None:
    """Draw the legend of these kinds of spans, above the picture."""
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=_COLOURS[kind], label=kind) for kind in _COLOURS if kind in kinds]
    waiting = Patch(facecolor="white", edgecolor="#9a9a9a", linewidth=0.6, label="waiting")
    handles.append(waiting)
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0.2,
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
    )

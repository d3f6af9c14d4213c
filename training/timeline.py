"""Timelines of traced steps: who computed which micro batch when, for Chrome's trace viewer and as a picture."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from engines.timeline import Span

# Okabe and Ito's blue and orange, which all eyes tell apart, and greys that also differ in print.
_COLOURS = {"forward": "#0072b2", "backward": "#f0a30a", "load": "#d0d0d0", "exchange": "#9a9a9a", "update": "#4d4d4d"}
_COMPUTING = ("forward", "backward")
_MOST_ROWS = 8
_WIDTH = 14.0  # of the picture, inches
_POINTS = _WIDTH * 72 * 0.92  # of all rows: their labels take the rest
_HEIGHT = 0.86  # of a box, where rows are 1 apart
# Points of a middle box: where it is narrower than the first, a part of the step is shown, with the second.
_SMALL, _LARGE = 4.0, 14.0
_FONT = 6.0  # points, of the numbers of micro batches


def ideal(micro_batches: int, stages: int, virtual: int = 1) -> float:
    """Efficiency of a pipeline of even stages without any waiting but that of filling and emptying it.

    M V / (M V + K - 1) for M micro batches of a replica's step on K ranks (`stages`) that compute V stages (`virtual`)
    in turn, for GPipe's schedule and 1F1B alike.

    Source: Huang et al., 1811.06965, section 2.3; interleaved: Narayanan et al., 2104.04473, section 2.2.
    """
    work = micro_batches * virtual
    return work / (work + stages - 1)


def efficiency(spans: Sequence[Span]) -> float:
    """Share of one step's time, from its first forward to its last backward pass, that replica 0's ranks computed.

    Exchange, update and the time after the last backward pass do not count, so that `ideal` is the bound.
    """
    computing = [span for span in spans if span.replica == 0 and span.kind in _COMPUTING]
    steps = {span.step for span in computing}
    assert len(steps) == 1, f"spans of one step, not of {sorted(steps)}"
    busy = math.fsum(span.end - span.start for span in computing)
    length = max(span.end for span in computing) - min(span.start for span in computing)
    return busy / (len({span.rank for span in computing}) * length)


def write(folder: Path, spans: Sequence[Span], *, micro_batches: int, stages: int, virtual: int = 1) -> str:
    """Writes trace.json and timeline.png; returns the line to print, with the mean efficiency of the steps.

    trace.json holds all spans in Chrome's Trace Event format, a process per replica and a thread per rank: open it
    with https://ui.perfetto.dev or chrome://tracing. timeline.png shows the first of the steps, a row per rank; of
    replica 0 alone where the rows of all would be too many.

    Args:
        spans: of all ranks, of one or more steps.
        micro_batches, stages, virtual: see `ideal`.
    """
    by_step: Dict[int, List[Span]] = {}
    for span in spans:
        by_step.setdefault(span.step, []).append(span)
    steps = sorted(by_step)
    ranks = sum(replica == 0 for replica, _ in _rows(spans))
    assert ranks == stages, f"spans of {ranks} ranks of replica 0, not of {stages}"
    work = micro_batches * virtual
    bound = f"ideal {work} / ({work} + {stages - 1}) = {ideal(micro_batches, stages, virtual):.2f}"
    found = [efficiency(by_step[step]) for step in steps]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trace.json").write_text(json.dumps(_trace(spans)))
    title = f"step {steps[0]}: pipeline efficiency {found[0]:.2f}, {bound}"
    _draw(by_step[steps[0]], title, folder / "timeline.png")
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return (
        f"timeline of {which}: {folder / 'trace.json'}, timeline.png; "
        f"pipeline efficiency {math.fsum(found) / len(found):.2f} of 1, {bound}"
    )


def _trace(spans: Sequence[Span]) -> dict:
    """Source: "Trace Event Format", Google 2016: complete events and metadata events; times are microseconds."""
    zero = min(span.start for span in spans)
    events = []
    for replica in sorted({span.replica for span in spans}):
        events.append({"ph": "M", "name": "process_name", "pid": replica, "args": {"name": f"replica {replica}"}})
    for (replica, rank), stages in _rows(spans).items():
        thread = {"ph": "M", "pid": replica, "tid": rank}
        events.append({**thread, "name": "thread_name", "args": {"name": f"{_numbered(stages)} (rank {rank})"}})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": rank}})
    for span in sorted(spans, key=lambda span: span.start):
        number = "" if span.micro_batch < 0 else f" {span.micro_batch}"
        event = {"ph": "X", "name": span.kind + number, "cat": span.kind, "pid": span.replica, "tid": span.rank}
        event.update(ts=(span.start - zero) * 1e6, dur=(span.end - span.start) * 1e6)
        event["args"] = {"step": span.step, "stage": span.stage, "micro_batch": span.micro_batch}
        events.append(event)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _rows(spans: Sequence[Span]) -> Dict[Tuple[int, int], List[int]]:
    """(replica, rank) -> the stages that it computes, in the order of the replicas and their first stages."""
    stages: Dict[Tuple[int, int], set] = {}
    for span in spans:
        if span.kind in _COMPUTING:
            stages.setdefault((span.replica, span.rank), set()).add(span.stage)
    return {row: sorted(stages[row]) for row in sorted(stages, key=lambda row: (row[0], min(stages[row]), row[1]))}


def _numbered(stages: List[int]) -> str:
    """`stage 1`; `stages 1, 3`."""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _draw(spans: Sequence[Span], title: str, output: Path) -> None:
    """One step: a row per rank, a box per micro batch with its number where there is room for it.

    Of a step of very many micro batches the beginning and the end are shown, where a pipeline fills and empties.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = _rows(spans)
    if len(rows) > _MOST_ROWS:
        rows = {row: stages for row, stages in rows.items() if row[0] == 0}
    replicas = sorted({replica for replica, _ in rows})
    places = [number + 0.35 * replicas.index(replica) for number, (replica, _) in enumerate(rows)]
    labels = [f"replica {row[0]}, {_numbered(stages)}" for row, stages in rows.items()]
    if len(replicas) == 1:
        labels = [_numbered(stages) for stages in rows.values()]
    zero, end = min(span.start for span in spans), max(span.end for span in spans)
    windows = _windows(spans, zero, end)
    if len(windows) > 1:
        title += ", its beginning and end"
    figure = Figure(figsize=(_WIDTH, 1.3 + 0.52 * (places[-1] + 1)), layout="constrained")
    axes = figure.subplots(1, len(windows), sharey=True, squeeze=False)[0]
    for axis, (left, right) in zip(axes, windows):
        points = _POINTS / len(windows) / (right - left)
        seen = [span for span in spans if span.end > left and span.start < right]
        axis.set(xlim=((left - zero) * 1e3, (right - zero) * 1e3), xlabel="milliseconds")
        for place, (row, stages) in zip(places, rows.items()):
            own = [span for span in seen if (span.replica, span.rank) == row]
            # What computes lies over what does not: images may be loaded meanwhile.
            own.sort(key=lambda span: span.kind in _COMPUTING)
            _draw_row(axis, own, place, stages, points, zero)
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "left", "right"]].set_visible(False)
    axes[0].set_yticks(places, labels)
    axes[0].set_ylim(places[-1] + 0.55, -0.55)
    axes[0].set_title(title, fontsize=11, loc="left")
    kinds = [kind for kind in _COLOURS if any(span.kind == kind for span in spans)]
    handles = [Patch(facecolor=_COLOURS[kind], label=kind) for kind in kinds]
    handles.append(Patch(facecolor="white", edgecolor="#9a9a9a", linewidth=0.6, label="waiting"))
    at = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axes[-1].legend(handles=handles, **at, ncols=len(handles), frameon=False, fontsize=9, handlelength=1.2)
    figure.savefig(output, dpi=140)


def _windows(spans: Sequence[Span], zero: float, end: float) -> List[Tuple[float, float]]:
    """The parts of a step to show, (from, to) in seconds: all, or where computing begins and where it ends."""
    computing = [span for span in spans if span.kind in _COMPUTING]
    box = statistics.median(span.end - span.start for span in computing)
    length = box * _POINTS / 2 / _LARGE
    first = max(zero, min(span.start for span in computing) - length / 5)
    last = min(end, max(span.end for span in computing) + length / 5)
    if box * _POINTS / (end - zero) >= _SMALL or last - first < 2 * length:
        return [(zero, end)]
    return [(first, first + length), (last - length, last)]


def _draw_row(axis, spans: List[Span], place: float, stages: List[int], points: float, zero: float):
    """One rank's boxes; the later ones of its `stages` are lighter. Args: points: per second; see `_draw`."""
    from matplotlib.colors import to_rgb

    lighter = [stages.index(span.stage) if span.kind in _COMPUTING else 0 for span in spans]
    shades = [0.65 * number / len(stages) for number in lighter]
    axis.broken_barh(
        [((span.start - zero) * 1e3, (span.end - span.start) * 1e3) for span in spans],
        (place - _HEIGHT / 2, _HEIGHT),
        facecolors=[[c + (1 - c) * shade for c in to_rgb(_COLOURS[span.kind])] for span, shade in zip(spans, shades)],
        edgecolors="white",
        linewidths=[min(0.8, (span.end - span.start) * points / 8) for span in spans],
    )
    for span, shade in zip(spans, shades):
        width = (0.64 * len(str(span.micro_batch)) + 0.1) * _FONT  # points, with a margin
        if span.kind in _COMPUTING and width <= (span.end - span.start) * points:
            ink = "white" if span.kind == "forward" and shade < 0.3 else "black"
            style = {"ha": "center", "va": "center_baseline", "fontsize": _FONT, "color": ink, "clip_on": True}
            axis.text(((span.start + span.end) / 2 - zero) * 1e3, place, str(span.micro_batch), **style)

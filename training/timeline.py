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
_MOST_BOXES = 300  # side by side
_WIDTH = 14.0  # of the picture, inches
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


def write(folder: Path, spans: Sequence[Span], micro_batches: int, stages: int, virtual: int = 1) -> str:
    """Write trace.json and timeline.png; return the line to print, with the mean efficiency of the steps.

    trace.json holds all spans in Chrome's Trace Event format, a process per replica and a thread per rank: open it
    with https://ui.perfetto.dev or chrome://tracing. timeline.png shows the first step, a row per rank; of replica 0
    alone where the rows of all would be too many.

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
    efficient = f"pipeline efficiency {statistics.mean(found):.2f} of 1, {bound}"
    return f"timeline of {which}: {folder / 'trace.json'}, timeline.png; {efficient}"


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

    Of a step of very many micro batches only the beginning is shown.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = _rows(spans)
    if len(rows) > _MOST_ROWS:
        rows = {row: stages for row, stages in rows.items() if row[0] == 0}
    zero, end = min(span.start for span in spans), max(span.end for span in spans)
    box = statistics.median(span.end - span.start for span in spans if span.kind in _COMPUTING)
    end = min(end, zero + box * _MOST_BOXES)
    points = _WIDTH * 72 * 0.92 / (end - zero)  # per second; labels take the rest
    figure = Figure(figsize=(_WIDTH, 1.3 + 0.52 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        own = [span for span in spans if (span.replica, span.rank) == row and span.start < end]
        own.sort(key=lambda span: span.kind in _COMPUTING)  # drawn last, over images that are loaded meanwhile
        axes.broken_barh(
            [((span.start - zero) * 1e3, (span.end - span.start) * 1e3) for span in own],
            (place - 0.43, 0.86),
            facecolors=[_COLOURS[span.kind] for span in own],
            edgecolors="white",
            linewidths=[min(0.8, (span.end - span.start) * points / 8) for span in own],
        )
        for span in own:
            width = (0.64 * len(str(span.micro_batch)) + 0.1) * _FONT  # points, with a margin
            if span.kind in _COMPUTING and width <= (span.end - span.start) * points:
                ink = "white" if span.kind == "forward" else "black"
                style = {"ha": "center", "va": "center_baseline", "fontsize": _FONT, "color": ink, "clip_on": True}
                axes.text(((span.start + span.end) / 2 - zero) * 1e3, place, str(span.micro_batch), **style)
    axes.set(xlim=(0, (end - zero) * 1e3), xlabel="milliseconds", ylim=(len(rows) - 0.45, -0.55))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    labels = [f"replica {replica}, {_numbered(stages)}" for (replica, _), stages in rows.items()]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_title(title, fontsize=11, loc="left")
    kinds = [kind for kind in _COLOURS if any(span.kind == kind for span in spans)]
    handles = [Patch(facecolor=_COLOURS[kind], label=kind) for kind in kinds]
    handles.append(Patch(facecolor="white", edgecolor="#9a9a9a", linewidth=0.6, label="waiting"))
    at = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axes.legend(handles=handles, **at, ncols=len(handles), frameon=False, fontsize=9, handlelength=1.2)
    figure.savefig(output, dpi=140)

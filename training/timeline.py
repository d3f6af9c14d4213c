"""Timelines of traced steps: who computed which micro batch when, for Chrome's trace viewer and as a picture."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from common.json_io import json_text
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
    Exchange, update and the time after the last backward pass do not count, so that `ideal` is the bound."""
    computing = [span for span in spans if span.replica == 0 and span.kind in _COMPUTING]
    busy = math.fsum(span.end - span.start for span in computing)
    length = max(span.end for span in computing) - min(span.start for span in computing)
    return busy / (len({span.rank for span in computing}) * length)


def write(folder: Path, spans: Sequence[Span], micro_batches: int, stages: int, virtual: int = 1) -> str:
    """Write trace.json and timeline.png; return the line to print, with the mean efficiency of the steps.

    trace.json holds all spans, a process per replica and a thread per rank. timeline.png shows the first step, a row
    per rank; of replica 0 alone where the rows of all would be too many.

    Args: spans: of all ranks, of one or more steps. micro_batches, stages, virtual: see `ideal`.
    """
    by_step: Dict[int, List[Span]] = {}
    for span in spans:
        by_step.setdefault(span.step, []).append(span)
    first, last = min(by_step), max(by_step)
    work = micro_batches * virtual
    bound = f"ideal {work} / ({work} + {stages - 1}) = {ideal(micro_batches, stages, virtual):.2f}"
    found = {step: efficiency(by_step[step]) for step in by_step}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trace.json").write_text(json_text(_trace(spans)))
    title = f"step {first}: pipeline efficiency {found[first]:.2f}, {bound}"
    _draw(by_step[first], title, folder / "timeline.png")
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    efficient = f"pipeline efficiency {statistics.mean(found.values()):.2f} of 1, {bound}"
    return f"timeline of {which}: {folder / 'trace.json'}, timeline.png; {efficient}"


def _trace(spans: Sequence[Span]) -> dict:
    """Source: "Trace Event Format", Google 2016: complete events and metadata events; times are microseconds."""
    zero = min(span.start for span in spans)
    events = []
    for (replica, rank), stages in _rows(spans).items():
        for kind, name in (("process", f"replica {replica}"), ("thread", f"{stages} (rank {rank})")):
            events.append({"ph": "M", "pid": replica, "tid": rank, "name": f"{kind}_name", "args": {"name": name}})
    for span in sorted(spans, key=lambda span: span.start):
        number = "" if span.micro_batch < 0 else f" {span.micro_batch}"
        event = {"ph": "X", "name": span.kind + number, "cat": span.kind, "pid": span.replica, "tid": span.rank}
        event.update(ts=(span.start - zero) * 1e6, dur=(span.end - span.start) * 1e6)
        event["args"] = {"step": span.step, "stage": span.stage, "micro_batch": span.micro_batch}
        events.append(event)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _rows(spans: Sequence[Span]) -> Dict[Tuple[int, int], str]:
    """(replica, rank) -> `stage 1` or `stages 1, 3`, in the order of the replicas and their first stages."""
    found: Dict[Tuple[int, int], set] = {}
    for span in spans:
        if span.kind in _COMPUTING:
            found.setdefault((span.replica, span.rank), set()).add(span.stage)
    rows = sorted(found, key=lambda row: (row[0], min(found[row]), row[1]))
    return {row: f"stage{'s' * (len(found[row]) > 1)} {', '.join(map(str, sorted(found[row])))}" for row in rows}


def _draw(spans: Sequence[Span], title: str, output: Path) -> None:
    """One step: a row per rank, a box per micro batch with its number where there is room for it.
    Of a step of very many micro batches only the beginning is shown."""
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
        for span in own:
            start, length = (span.start - zero) * 1e3, span.end - span.start
            style = {"edgecolor": "white", "linewidth": min(0.8, length * points / 8)}
            axes.barh(place, length * 1e3, 0.86, start, color=_COLOURS[span.kind], **style)
            width = (0.64 * len(str(span.micro_batch)) + 0.1) * _FONT  # points, with a margin
            if span.kind in _COMPUTING and width <= length * points:
                style = {"ha": "center", "va": "center_baseline", "fontsize": _FONT, "clip_on": True}
                ink = "white" if span.kind == "forward" else "black"
                axes.text(start + length * 500, place, str(span.micro_batch), color=ink, **style)
    axes.set(xlim=(0, (end - zero) * 1e3), xlabel="milliseconds", ylim=(len(rows) - 0.45, -0.55))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.set_yticks(range(len(rows)), [f"replica {replica}, {stages}" for (replica, _), stages in rows.items()])
    axes.set_title(title, fontsize=11, loc="left")
    kinds = [kind for kind in _COLOURS if any(span.kind == kind for span in spans)]
    handles = [Patch(facecolor=_COLOURS[kind], label=kind) for kind in kinds]
    handles.append(Patch(facecolor="white", edgecolor="#9a9a9a", linewidth=0.6, label="waiting"))
    at = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    axes.legend(handles=handles, **at, ncols=len(handles), frameon=False, fontsize=9, handlelength=1.2)
    figure.savefig(output, dpi=140)

"""LARS's trust ratios, of which every weight has one: their median and range, and each as a row of colours."""

from __future__ import annotations

import math
import statistics
from typing import List, Optional, Sequence

from tools.reporting.curves import session_marks
from tools.reporting.drawing import COLOURS, Clock, LineStyle, abscissae, axes, in_words, label, run_style, trace
from tools.reporting.page import Figure
from tools.reporting.run import Run

_PREFIX = "trust/"
_COLUMNS = 240
_POINTS = 600
_MOST_TICKS = 30
_RANGE = (
    ("largest", max, LineStyle(COLOURS[1], "dash")),
    ("median", statistics.median, LineStyle(COLOURS[0], width=2.2)),
    ("smallest", min, LineStyle(COLOURS[2], "dot")),
)


def draw(runs: Sequence[Run], names: Sequence[str], unit: float) -> List[Figure]:
    """Figures of the runs that log trust ratios; none where none does. Args: unit: of the time axis, in seconds."""
    data, summary = [], []
    for order, run in enumerate(runs):
        train, layers, drawn = run.metrics.train, _layers(run), _drawn(run, _POINTS)
        if not layers:
            continue
        ratios = [[train[layer][place] for layer in layers if math.isfinite(train[layer][place])] for place in drawn]
        x, epochs = abscissae(train, drawn, Clock(train, unit)), [train["epoch"][place] for place in drawn]
        median = (names[order], statistics.median, run_style(order)._replace(width=1.8, symbol=None))
        more = {} if len(runs) == 1 else {"legendgroup": str(order)}
        for name, pick, style in (median,) if more else _RANGE:
            values = [pick(row) if row else math.nan for row in ratios]
            data.append(trace(name, style, x, values, **more))
            summary.append(in_words(name, values, epochs))
    if not data:
        return []
    layout, words = axes("trust ratio", data, log=True), " ".join(summary)
    if len(runs) > 1:
        return [Figure("trust", "Trust ratios", "Median over the weights that LARS scales.", words, data, layout)]
    caption = f"Of {len(layers)} weights: the factor by which LARS scales the learning rate of each."
    layout["hovermode"] = "x unified"
    clock = Clock(runs[0].metrics.train, unit)
    marks = session_marks(runs[0], clock)
    return [
        Figure("trust", "Trust ratios", caption, words, data, layout, marks, wide=True),
        *_heat_map(runs[0], layers, clock),
    ]


def _layers(run: Run) -> List[str]:
    """Columns of the trust ratios, in the order of the model."""
    return [name for name in run.metrics.train.columns if name.startswith(_PREFIX)]


def _drawn(run: Run, most: int) -> List[int]:
    """Evenly spread log lines, as not all of their many numbers can be drawn."""
    count = len(run.metrics.train)
    if count <= most:
        return list(range(count))
    return sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})


def _heat_map(run: Run, layers: Sequence[str], clock: Clock) -> List[Figure]:
    """A row per weight, the model's first at the top; none where there are not two log lines to lay side by side."""
    drawn = _drawn(run, _COLUMNS)
    powers = [[_power(run.metrics.train[layer][place]) for place in drawn] for layer in layers]
    found = [power for row in powers for power in row if power is not None]
    if len(drawn) < 2 or not found:
        return []
    names = [layer[len(_PREFIX) :].removesuffix(".weight") for layer in layers]
    ticks = range(math.floor(min(found)), math.ceil(max(found)) + 1)
    bar = {"tickvals": list(ticks), "ticktext": [f"{10.0**tick:g}" for tick in ticks]}
    data = {
        "type": "heatmap",
        "x": abscissae(run.metrics.train, drawn, clock),
        "y": [label(name) for name in names],
        "z": powers,
        "hovertemplate": "%{y}<br>at %{x}: 10<sup>%{z:.2f}</sup><extra></extra>",
        "colorscale": "Cividis",
        "colorbar": {**bar, "thickness": 12, "outlinewidth": 0},
    }
    stages = _stages(names)
    vertical = {
        "type": "category",
        "autorange": "reversed",
        "tickvals": [label(first) for first, _ in stages],
        "ticktext": [label(stage) for _, stage in stages],
        "automargin": True,
        "showgrid": False,
    }
    layout = {"yaxis": vertical, "height": max(260, min(1000, 90 + 6 * len(layers))), "showlegend": False}
    caption = "A row per weight in the order of the model; the ticks are the first weights of their stages."
    summary = f"{len(layers)} weights, trust ratios from {10 ** min(found):.3g} to {10 ** max(found):.3g}."
    return [Figure("layers", "Trust ratio of each weight", caption, summary, [data], layout, wide=True)]


def _stages(names: Sequence[str]) -> List[tuple]:
    """(first weight, stage) where another stage begins, without those whose labels would overlap."""
    found: List[tuple] = []
    last = 0
    for row, name in enumerate(names):
        parts = name.split(".")
        stage = ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]
        if not found or (found[-1][1] != stage and row - last >= len(names) / _MOST_TICKS):
            found.append((name, stage))
            last = row
    return found


def _power(ratio: float) -> Optional[float]:
    return round(math.log10(ratio), 3) if ratio > 0 and math.isfinite(ratio) else None

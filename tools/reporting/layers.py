"""LARS's trust ratios, of which every weight has one: each as a row of colours, and all by their median and range."""

from __future__ import annotations

import math
import statistics
from typing import List, Optional, Sequence

from tools.reporting.curves import session_marks
from tools.reporting.drawing import COLOURS, Clock, Figure, LineStyle, abscissae, axes, in_words, run_style, trace
from tools.reporting.markup import label
from tools.reporting.run import Run, places

_PREFIX = "trust/"
_COLUMNS = 240
_POINTS = 600
_MOST_TICKS = 30


def draw(runs: Sequence[Run], names: Sequence[str], unit: float) -> List[Figure]:
    """Figures of the runs that tell trust ratios; none where none does. Args: unit: seconds of a unit of time."""
    telling = [(order, run) for order, run in enumerate(runs) if _layers(run)]
    if not telling:
        return []
    if len(runs) > 1:
        return [_medians(telling, names, unit)]
    return [_range(runs[0], unit), *_heat_map(runs[0], unit)]


def _layers(run: Run) -> List[str]:
    """Columns of the trust ratios, in the order of the model."""
    return [name for name in run.metrics.train.columns if name.startswith(_PREFIX)]


def _drawn(run: Run, most: int) -> List[int]:
    """Evenly spread log lines: of so many numbers each, not all can be drawn."""
    count = len(run.metrics.train)
    return (
        sorted({round(place * (count - 1) / (most - 1)) for place in range(most)})
        if count > most
        else list(range(count))
    )


def _finite(run: Run, place: int, layers: Sequence[str]) -> List[float]:
    """The ratios of a log line that are finite."""
    ratios = (run.metrics.train[layer][place] for layer in layers)
    return [ratio for ratio in ratios if math.isfinite(ratio)]


def _range(run: Run, unit: float) -> Figure:
    drawn, layers = _drawn(run, _POINTS), _layers(run)
    rows = [_finite(run, place, layers) for place in drawn]
    clock, epochs = Clock(*places(run)), [run.metrics.train["epoch"][place] for place in drawn]
    x = abscissae(run.metrics.train, drawn, clock, unit)
    data, summary = [], []
    for name, pick, style in (
        ("largest", max, LineStyle(COLOURS[1], "dash")),
        ("median", statistics.median, LineStyle(COLOURS[0], width=2.2)),
        ("smallest", min, LineStyle(COLOURS[2], "dot")),
    ):
        values = [pick(row) if row else math.nan for row in rows]
        data.append(trace(name, style, x, values))
        summary.append(in_words(name, values, epochs))
    layout = {**axes("trust ratio", data, log=True), "hovermode": "x unified"}
    caption = f"Of {len(layers)} weights: the factor by which LARS scales the learning rate of each."
    marks = session_marks(run, clock, unit)
    return Figure("trust", "Trust ratios", caption, " ".join(summary), data, layout, marks, wide=True)


def _medians(telling: Sequence[tuple], names: Sequence[str], unit: float) -> Figure:
    data, summary = [], []
    for order, run in telling:
        drawn, layers = _drawn(run, _POINTS), _layers(run)
        rows = [_finite(run, place, layers) for place in drawn]
        values = [statistics.median(row) if row else math.nan for row in rows]
        x = abscissae(run.metrics.train, drawn, Clock(*places(run)), unit)
        style = run_style(order)._replace(width=1.8, symbol=None)
        data.append(trace(names[order], style, x, values, legendgroup=str(order)))
        summary.append(in_words(names[order], values, [run.metrics.train["epoch"][place] for place in drawn]))
    layout = axes("trust ratio", data, log=True)
    return Figure("trust", "Trust ratios", "Median over the weights that LARS scales.", " ".join(summary), data, layout)


def _heat_map(run: Run, unit: float) -> List[Figure]:
    """A row per weight, the model's first at the top; none where there are not two log lines to lay side by side."""
    drawn, layers = _drawn(run, _COLUMNS), _layers(run)
    columns = [run.metrics.train[layer] for layer in layers]
    powers = [[_power(column[place]) for place in drawn] for column in columns]
    found = [power for row in powers for power in row if power is not None]
    if len(drawn) < 2 or not found:
        return []
    names = [_short(layer) for layer in layers]
    ticks = range(math.floor(min(found)), math.ceil(max(found)) + 1)
    bar = {
        "tickvals": list(ticks),
        "ticktext": [f"{10.0**tick:g}" for tick in ticks],
        "thickness": 12,
        "outlinewidth": 0,
    }
    data = {
        "type": "heatmap",
        "x": abscissae(run.metrics.train, drawn, Clock(*places(run)), unit),
        "y": [label(name) for name in names],
        "z": powers,
        "hovertemplate": "%{y}<br>at %{x}: 10<sup>%{z:.2f}</sup><extra></extra>",
        "colorscale": "Cividis",
        "colorbar": bar,
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
    return [
        Figure(
            "layers",
            "Trust ratio of each weight",
            "A row per weight in the order of the model; the ticks are the first weights of their stages.",
            f"{len(layers)} weights, trust ratios from {10 ** min(found):.3g} to {10 ** max(found):.3g}.",
            [data],
            {"yaxis": vertical, "height": max(260, min(1000, 90 + 6 * len(layers))), "showlegend": False},
            wide=True,
        )
    ]


def _short(layer: str) -> str:
    """`trust/blocks.0.0.conv_dw.weight` as `blocks.0.0.conv_dw`."""
    name = layer[len(_PREFIX) :]
    return name[: -len(".weight")] if name.endswith(".weight") else name


def _stages(names: Sequence[str]) -> List[tuple]:
    """(first weight, stage) where another stage begins, without those that would overlap."""
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

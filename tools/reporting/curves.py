"""Figures over epochs, steps and time: of one run, or of several in the same figures."""

from __future__ import annotations

import math
import re
import statistics
from typing import List, NamedTuple, Optional, Sequence, Tuple

from tools.reporting import drawing
from tools.reporting.drawing import COLOURS, Clock, LineStyle, number
from tools.reporting.metrics import Events
from tools.reporting.page import Figure
from tools.reporting.run import Run, resumed_at, steps_per_epoch

_POINTS = 6000  # of all lines of a figure together
_MOST_MARKS = 30
_RATIOS = 600  # log lines whose trust ratios are drawn
_COLUMNS = 240  # of those with a row of colours for each weight
_PREFIX = "trust/"


class Series(NamedTuple):
    """One quantity. column: of the training events, or of evaluations. role: its name within its figure."""

    column: str
    role: str
    evaluated: bool = False

    def events_of(self, run: Run) -> Events:
        return run.metrics.evaluation if self.evaluated else run.metrics.train


class Plan(NamedTuple):
    """One figure of the curves."""

    key: str
    title: str
    axis: str
    caption: str
    series: Tuple[Series, ...]
    log: bool = False
    share: bool = False
    dull: bool = False  # left out where nothing ever changes in it


class Curves(NamedTuple):
    """left_out: what is not drawn, and why. unit: (name, seconds) of the time axis. thinned: whether lines are."""

    figures: List[Figure]
    left_out: List[str]
    unit: tuple
    thinned: bool


def _scores(name: str) -> Tuple[Series, ...]:
    return (
        Series(name, "training"),
        Series(name, "validation", True),
        Series(f"step_average/{name}", "average over updates", True),
        Series(f"epoch_average/{name}", "average over epochs", True),
    )


def _plan(column: str, title: str, axis: str, caption: str, **more: bool) -> Plan:
    """A figure of one quantity of the log."""
    return Plan(column.partition("/")[0], title, axis, caption, (Series(column, title.lower()),), **more)


_LOSS = (
    "Training: the objective, label smoothing and mixing included, averaged over the updates since the line before. "
    "Validation: every image once."
)
_TOP1 = "Training images are augmented, and mixed where the recipe says so: their accuracy can be below validation's."
_NOISE = "Batches far below it learn as much from each image, batches far above it as much from each update."
_MFU = "Floating-point operations of the model, over what this machine reached in a large matrix product."
_NORMS = ("weight", "gradient", "update")
_PLANS = (
    Plan("loss", "Loss", "cross entropy, nats", _LOSS, _scores("loss"), log=True),
    Plan("top1", "Top-1 accuracy", "share of images", _TOP1, _scores("top1"), share=True),
    _plan("lr", "Learning rate", "learning rate", "At the last update before a line."),
    _plan("noise_scale/images", "Gradient noise scale", "images", _NOISE, log=True),
    _plan("loss_scale", "Loss scale", "factor", "Multiplies the loss before the backward pass.", log=True, dull=True),
    _plan("skipped_steps", "Skipped updates", "updates", "So far, because their gradient was not finite.", dull=True),
    _plan("unreadable_images", "Unreadable images", "images", "Left out so far.", dull=True),
    _plan("images_per_second", "Images a second", "images / s", "Training only, without evaluation and checkpoints."),
    _plan("mfu", "Model FLOPs utilisation", "share of the reachable", _MFU, share=True),
    _plan("data_wait", "Waiting for images", "share of the time", "A device waited for images.", share=True),
)
_LINES_OF_NORMS = tuple(Series(f"{name}_norm", name) for name in _NORMS)
_ALL_NORMS = (Plan("norms", "Norms", "Euclidean norm", "Over all parameters.", _LINES_OF_NORMS, log=True),)
_EACH_NORM = tuple(
    _plan(f"{name}_norm", f"Norm of the {name}", "Euclidean norm", "Over all parameters.", log=True) for name in _NORMS
)
_ROLES = {
    "training": LineStyle(COLOURS[0], width=1.5),
    "validation": LineStyle(COLOURS[1], width=2.2, symbol="circle"),
    "average over updates": LineStyle(COLOURS[2], "dash", 2, "square"),
    "average over epochs": LineStyle(COLOURS[3], "dot", 2, "diamond"),
    "gradient": LineStyle(COLOURS[1], "dash"),
    "update": LineStyle(COLOURS[2], "dot", 2),
}

_RANGE = (
    ("largest", max, LineStyle(COLOURS[1], "dash")),
    ("median", statistics.median, LineStyle(COLOURS[0], width=2.2)),
    ("smallest", min, LineStyle(COLOURS[2], "dot")),
)


def draw(runs: Sequence[Run], names: Sequence[str]) -> Curves:
    """Draws one run with a colour for each quantity, or several with a colour for each run."""
    unit = drawing.unit_of(
        max((time for run in runs for time in run.metrics.train["seconds"] if time == time), default=0.0)
    )
    clocks = [Clock(run.metrics.train, unit[1]) for run in runs]
    figures: List[Figure] = []
    left_out: List[str] = []
    for plan in (*_PLANS[:3], *(_ALL_NORMS if len(runs) == 1 else _EACH_NORM), *_PLANS[3:]):
        found = [
            (order, series, series.events_of(run)[series.column])
            for order, run in enumerate(runs)
            for series in plan.series
            if series.events_of(run).has(series.column)
        ]
        seen = {value for _, _, column in found for value in column if value == value} if plan.dull else ()
        if not found:
            left_out.append(f"{plan.title.lower()} (not in metrics.jsonl)")
        elif len(seen) == 1:
            left_out.append(f"{plan.title.lower()} ({seen.pop():g} throughout)")
        else:
            figures.append(_figure(plan, found, runs, names, clocks))
    most = max((len(run.metrics.train) for run in runs), default=0)
    return Curves(figures, left_out, unit, most > _POINTS // max(1, len(runs)))


def _figure(
    plan: Plan, found: Sequence[tuple], runs: Sequence[Run], names: Sequence[str], clocks: Sequence[Clock]
) -> Figure:
    """Args: found: (number of the run, series, its values) of each line."""
    data = []
    alone = len(runs) == 1
    # Validation stands for the run in the legend: training is pale.
    named = dict(sorted((pair[:2] for pair in found), key=lambda pair: pair[1].role == "validation"))
    for order, series, values in found:
        if alone:
            style, name, more = _ROLES.get(series.role, LineStyle(COLOURS[0])), series.role, {}
        else:
            style, name = _in_comparison(order, series.role), names[order]
            more = {"legendgroup": str(order), "showlegend": series is named[order]}
        places = drawing.thinned(values, max(100, _POINTS // len(found)))
        x = drawing.abscissae(series.events_of(runs[order]), places, clocks[order])
        data.append(drawing.trace(name, style, x, [values[place] for place in places], **more))
    layout = drawing.axes(plan.axis, data, log=plan.log, share=plan.share)
    if alone:
        layout["hovermode"] = "x unified"
    return Figure(plan.key, plan.title, plan.caption, data, layout, session_marks(runs[0], clocks[0]) if alone else [])


def _in_comparison(order: int, role: str) -> LineStyle:
    """Validation as the run is drawn everywhere; what is beside it in the same figure thinner."""
    style = drawing.run_style(order)
    if role == "training":
        return style._replace(width=1.2, opacity=0.55, symbol=None)
    if role.startswith("average"):
        return style._replace(width=1.2, symbol=f"{style.symbol}-open")
    return style if role == "validation" else style._replace(width=1.8, symbol=None)


def session_marks(run: Run, clock: Clock) -> List[dict]:
    """Where later sessions went on, for vertical lines; none where there would be too many to read."""
    steps, per_epoch = resumed_at(run.starts), steps_per_epoch(run)
    if len(steps) > _MOST_MARKS or not per_epoch:
        return []
    return [{"epoch": number(step / per_epoch), "step": step, "time": clock.at(step)} for step in steps]


def trust_ratios(runs: Sequence[Run], names: Sequence[str], unit: float) -> List[Figure]:
    """Figures of LARS's trust ratios, of which every weight has one; none where no run logs them.

    The median and the range, and each weight as a row of colours. Args: unit: of the time axis, in seconds.
    """
    data = []
    for order, run in enumerate(runs):
        train, layers, drawn = run.metrics.train, _layers(run), _drawn(run, _RATIOS)
        if not layers:
            continue
        ratios = [[train[layer][place] for layer in layers if math.isfinite(train[layer][place])] for place in drawn]
        x = drawing.abscissae(train, drawn, Clock(train, unit))
        median = (names[order], statistics.median, drawing.run_style(order)._replace(width=1.8, symbol=None))
        for name, pick, style in _RANGE if len(runs) == 1 else (median,):
            data.append(drawing.trace(name, style, x, [pick(row) if row else math.nan for row in ratios]))
    if not data:
        return []
    layout = drawing.axes("trust ratio", data, log=True)
    if len(runs) > 1:
        return [Figure("trust", "Trust ratios", "Median over the weights that LARS scales.", data, layout)]
    layout["hovermode"] = "x unified"
    caption = f"Of {len(layers)} weights: the factor by which LARS scales the learning rate of each."
    clock = Clock(runs[0].metrics.train, unit)
    marks = session_marks(runs[0], clock)
    return [
        Figure("trust", "Trust ratios", caption, data, layout, marks, wide=True),
        *_heat_map(runs[0], layers, clock),
    ]


def _layers(run: Run) -> List[str]:
    """Columns of the trust ratios, in the order of the model."""
    return [name for name in run.metrics.train.columns if name.startswith(_PREFIX)]


def _drawn(run: Run, most: int) -> List[int]:
    """Evenly spread log lines, as not all of their many numbers can be drawn."""
    count = len(run.metrics.train)
    return list(range(0, count, max(1, -(-count // most))))


def _heat_map(run: Run, layers: Sequence[str], clock: Clock) -> List[Figure]:
    """A row per weight, the model's first at the top; none where there are not two log lines to lay side by side."""
    drawn = _drawn(run, _COLUMNS)
    powers = [[_power(run.metrics.train[layer][place]) for place in drawn] for layer in layers]
    if len(drawn) < 2 or all(power is None for row in powers for power in row):
        return []
    names = [layer[len(_PREFIX) :].removesuffix(".weight") for layer in layers]
    stages, last = {}, -3
    for row, name in enumerate(names):
        stage = re.match(r"(blocks\.)?[^.]*", name)[0]
        if stage not in stages and row - last >= min(3, len(names) / 10):  # closer labels would overlap
            stages[stage], last = drawing.label(name), row
    data = {
        "type": "heatmap",
        "x": drawing.abscissae(run.metrics.train, drawn, clock),
        "y": list(map(drawing.label, names)),
        "z": powers,
        "hovertemplate": "%{y}<br>at %{x}: 10<sup>%{z:.2f}</sup><extra></extra>",
        "colorscale": "Cividis",
        "colorbar": {"thickness": 12, "outlinewidth": 0, "tickprefix": "10<sup>", "ticksuffix": "</sup>"},
    }
    vertical = {"type": "category", "autorange": "reversed", "automargin": True, "showgrid": False}
    # The names of all weights would leave no room for the rows on a phone.
    vertical.update(tickvals=list(stages.values()), ticktext=list(map(drawing.label, stages)))
    layout = {"yaxis": vertical, "height": max(260, min(1000, 90 + 6 * len(layers))), "showlegend": False}
    caption = "A row per weight in the order of the model; the ticks name the model's stages."
    return [Figure("layers", "Trust ratio of each weight", caption, [data], layout, wide=True)]


def _power(ratio: float) -> Optional[float]:
    return round(math.log10(ratio), 3) if ratio > 0 and math.isfinite(ratio) else None

"""Figures over epochs, steps and time: of one run, or of several in the same figures."""

from __future__ import annotations

import bisect
import html
import math
import statistics
from typing import List, NamedTuple, Optional, Sequence, Tuple

from recipe.course import is_known
from tools.reporting.page import Figure
from tools.reporting.run import Events, Run, resumed_at, steps_per_epoch

_POINTS = 6000  # of all lines of a figure together
_MOST_MARKS = 30
_RATIOS = 600  # log lines whose trust ratios are drawn
_COLUMNS = 240  # of those with a row of colours for each weight
_PREFIX = "trust/"

# Okabe and Ito's colours, which all eyes tell apart, in an order in which neighbours differ most. Their yellow and
# their black are left out: one is lost on white paper, the other on a dark screen.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
_MOST_SYMBOLS = 80  # on a line: more would hide it
_SYMBOL = 6  # pixels
_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


class LineStyle(NamedTuple):
    """How a line is drawn; dash and symbol repeat the information of the colour."""

    colour: str
    dash: str = "solid"
    width: float = 1.5
    symbol: Optional[str] = None
    opacity: float = 1


def run_style(order: int) -> LineStyle:
    """The style of a run in a comparison, by its number: colour, dash and symbol; no two alike among thirty-six."""
    turn, place = divmod(order, len(COLOURS))
    return LineStyle(COLOURS[place], _DASHES[(place + turn) % len(_DASHES)], 2.2, _SYMBOLS[place])


class Series(NamedTuple):
    """One quantity. column: of the training events, or of evaluations. role: its name within its figure. error: the
    column of its standard error, if it has one."""

    column: str
    role: str
    evaluated: bool = False
    error: str = ""

    def events_of(self, run: Run) -> Events:
        return run.metrics.evaluation if self.evaluated else run.metrics.train

    def values_of(self, run: Run) -> Sequence[float]:
        """The values of all events; NaN where there is none, or where it is not told from zero."""
        events = self.events_of(run)
        values = events[self.column]
        if not self.error:
            return values
        return [value if is_known(value, error) else math.nan for value, error in zip(values, events[self.error])]


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
    """left_out: what is not drawn, and why. unit: of the time axis. thinned: whether lines are."""

    figures: List[Figure]
    layers: List[Figure]
    left_out: List[str]
    unit: str
    thinned: bool


def _scores(name: str) -> Tuple[Series, ...]:
    return (
        Series(name, "training"),
        Series(name, "validation", True),
        Series(f"step_average/{name}", "average over updates", True),
        Series(f"epoch_average/{name}", "average over epochs", True),
    )


def _plan(column: str, title: str, axis: str, caption: str, error: str = "", **more: bool) -> Plan:
    """A figure of one quantity of the log."""
    series = Series(column, title.lower(), error=error)
    return Plan(column.partition("/")[0], title, axis, caption, (series,), **more)


_LOSS = (
    "Training: the objective with label smoothing and mixing, averaged over the updates since the previous log line. "
    "Validation: the mean over all validation images."
)
_TOP1 = "Training images are augmented, and mixed if the recipe asks for it: their accuracy can be lower."
_NOISE = (
    "Far smaller batches learn as much from each image, far larger ones as much from each update. "
    "Left out where zero is within two standard errors."
)
_MFU = "Floating-point operations a second, as a share of what this machine reaches in a large matrix product."
_PLANS = (
    Plan("loss", "Loss", "cross entropy, nats", _LOSS, _scores("loss"), log=True),
    Plan("top1", "Top-1 accuracy", "share of images", _TOP1, _scores("top1"), share=True),
    _plan("lr", "Learning rate", "learning rate", "The rate of the last update before each log line."),
    _plan("weight_norm", "Norm of the weights", "Euclidean norm", "Taken over all parameters together.", log=True),
    _plan("gradient_norm", "Norm of the gradient", "Euclidean norm", "Taken over all parameters together.", log=True),
    _plan("update_norm", "Norm of the update", "Euclidean norm", "Taken over all parameters together.", log=True),
    _plan("noise_scale/images", "Gradient noise scale", "images", _NOISE, "noise_scale/error", log=True),
    _plan(
        "loss_scale",
        "Loss scale",
        "factor",
        "A factor of the loss in the backward pass.",
        log=True,
        dull=True,
    ),
    _plan(
        "skipped_steps",
        "Skipped updates",
        "updates",
        "So far, for gradients that are not finite.",
        dull=True,
    ),
    _plan("unreadable_images", "Unreadable images", "images", "Left out of training so far.", dull=True),
    _plan("images_per_second", "Images a second", "images / s", "Training only, without evaluation and checkpoints."),
    _plan("mfu", "Model FLOPs utilisation", "share of the reachable", _MFU, share=True),
    _plan(
        "data_wait",
        "Waiting for images",
        "share of the time",
        "Time in which a device had to wait.",
        share=True,
    ),
)
_ROLES = {
    "training": LineStyle(COLOURS[0], width=1.5),
    "validation": LineStyle(COLOURS[1], width=2.2, symbol="circle"),
    "average over updates": LineStyle(COLOURS[2], "dash", 2, "square"),
    "average over epochs": LineStyle(COLOURS[3], "dot", 2, "diamond"),
}

_RANGE = (
    ("largest", max, LineStyle(COLOURS[1], "dash")),
    ("median", statistics.median, LineStyle(COLOURS[0], width=2.2)),
    ("smallest", min, LineStyle(COLOURS[2], "dot")),
)


def draw(runs: Sequence[Run], names: Sequence[str]) -> Curves:
    """Draws one run with a colour for each quantity, or several with a colour for each run."""
    longest = max((time for run in runs for time in run.metrics.train["seconds"] if time == time), default=0.0)
    unit = unit_of(longest)
    figures: List[Figure] = []
    left_out: List[str] = []
    for plan in _PLANS:
        found = [
            (order, series, series.values_of(run))
            for order, run in enumerate(runs)
            for series in plan.series
            if series.events_of(run).has(series.column)
        ]
        seen = {value for _, _, column in found for value in column if value == value}
        if not found:
            left_out.append(f"{plan.title.lower()} (not in metrics.jsonl)")
        elif not seen:
            left_out.append(f"{plan.title.lower()} (not told from zero)")
        elif len(seen) == 1 and plan.dull:
            left_out.append(f"{plan.title.lower()} ({seen.pop():g} throughout)")
        else:
            figures.append(_figure(plan, found, runs, names, unit[1]))
    most = max(len(run.metrics.train) for run in runs)
    return Curves(figures, _trust_ratios(runs, names, unit[1]), left_out, unit[0], most > _POINTS // len(runs))


def _figure(plan: Plan, found: Sequence[tuple], runs: Sequence[Run], names: Sequence[str], unit: float) -> Figure:
    """Args: found: (number of the run, series, its values) of each line."""
    data = []
    # Validation stands for the run in the legend: training is pale.
    named = dict(sorted((pair[:2] for pair in found), key=lambda pair: pair[1].role == "validation"))
    for order, series, values in found:
        style, name, more = _ROLES.get(series.role, LineStyle(COLOURS[0])), series.role, {}
        if len(runs) > 1:
            style, name = _in_comparison(order, series.role), names[order]
            more = {"legendgroup": str(order), "showlegend": series is named[order]}
        places = thinned(values, max(100, _POINTS // len(found)))
        x = abscissae(series.events_of(runs[order]), places, unit)
        data.append(_trace(name, style, x, [values[place] for place in places], **more))
    layout = _axes(plan.axis, data, log=plan.log, share=plan.share)
    return _with_sessions(Figure(plan.key, plan.title, plan.caption, data, layout), runs, unit)


def _in_comparison(order: int, role: str) -> LineStyle:
    """Validation as the run is drawn everywhere; what is beside it in the same figure thinner."""
    style = run_style(order)
    if role == "training":
        return style._replace(width=1.2, opacity=0.55, symbol=None)
    if role.startswith("average"):
        return style._replace(width=1.2, symbol=f"{style.symbol}-open")
    return style if role == "validation" else style._replace(width=1.8, symbol=None)


def _with_sessions(figure: Figure, runs: Sequence[Run], unit: float) -> Figure:
    """`figure`; of one run with vertical lines where later sessions went on, unless there are too many to read."""
    if len(runs) > 1:
        return figure
    figure.layout["hovermode"] = "x unified"
    steps, per_epoch, train = resumed_at(runs[0].starts), steps_per_epoch(runs[0]), runs[0].metrics.train
    if len(steps) > _MOST_MARKS or not per_epoch:
        return figure
    times = [train["seconds"][max(0, bisect.bisect_right(train["step"], step) - 1)] for step in steps if len(train)]
    places = zip(steps, times)
    marks = [{"epoch": number(step / per_epoch), "step": step, "time": number(time / unit)} for step, time in places]
    return figure._replace(marks=marks)


def _trust_ratios(runs: Sequence[Run], names: Sequence[str], unit: float) -> List[Figure]:
    """Figures of LARS's trust ratios: range and median, and each weight as a row of colours; none if none is logged."""
    data = []
    for order, run in enumerate(runs):
        train, layers, drawn = run.metrics.train, _layers(run), _drawn(run, _RATIOS)
        if not layers:
            continue
        ratios = [[train[layer][place] for layer in layers if math.isfinite(train[layer][place])] for place in drawn]
        x = abscissae(train, drawn, unit)
        median = (names[order], statistics.median, run_style(order)._replace(width=1.8, symbol=None))
        for name, pick, style in _RANGE if len(runs) == 1 else (median,):
            data.append(_trace(name, style, x, [pick(row) if row else math.nan for row in ratios]))
    if not data:
        return []
    caption = "LARS multiplies each weight's learning rate by its trust ratio. Several runs: the median."
    layout = _axes("trust ratio", data, log=True)
    figure = Figure("trust", "Trust ratios", caption, data, layout, wide=len(runs) == 1)
    return [_with_sessions(figure, runs, unit), *(_heat_map(runs[0], unit) if len(runs) == 1 else ())]


def _layers(run: Run) -> List[str]:
    """Columns of the trust ratios, in the order of the model."""
    return [name for name in run.metrics.train.columns if name.startswith(_PREFIX)]


def _drawn(run: Run, most: int) -> List[int]:
    """Evenly spread log lines, as not all of their many numbers can be drawn."""
    count = len(run.metrics.train)
    return list(range(0, count, max(1, -(-count // most))))


def _heat_map(run: Run, unit: float) -> List[Figure]:
    """A row per weight, the model's first at the top; none where there are not two log lines to lay side by side."""
    layers, drawn = _layers(run), _drawn(run, _COLUMNS)
    powers = [[_power(run.metrics.train[layer][place]) for place in drawn] for layer in layers]
    if len(drawn) < 2 or all(power is None for row in powers for power in row):
        return []
    data = {
        "type": "heatmap",
        "x": abscissae(run.metrics.train, drawn, unit),
        "y": [_label(layer[len(_PREFIX) :].removesuffix(".weight")) for layer in layers],
        "z": powers,
        "hovertemplate": "%{y}<br>at %{x}: 10<sup>%{z:.2f}</sup><extra></extra>",
        "colorscale": "Cividis",
        "colorbar": {"thickness": 12, "outlinewidth": 0, "tickprefix": "10<sup>", "ticksuffix": "</sup>"},
    }
    # The names of all weights would leave no room for the rows on a phone.
    vertical = {"type": "category", "autorange": "reversed", "showticklabels": False, "showgrid": False}
    layout = {"yaxis": vertical, "height": max(260, min(1000, 90 + 6 * len(layers))), "showlegend": False}
    caption = "One row for each weight, in the order of the model. Point at a row to see its name."
    return [Figure("layers", "Trust ratio of each weight", caption, [data], layout, wide=True)]


def _power(ratio: float) -> Optional[float]:
    return round(math.log10(ratio), 3) if ratio > 0 and math.isfinite(ratio) else None


def unit_of(seconds: float) -> tuple:
    """(name, seconds) of the unit in which a run of so many seconds is shown."""
    return next((unit for unit in _UNITS if seconds >= 2 * unit[1]), _UNITS[-1])


def number(value: float) -> Optional[float]:
    """With the five digits that a figure can show; None for what JSON cannot represent."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _label(text: str) -> str:
    """Text for a figure: plotly reads a few tags of HTML, and entities, in all that it draws."""
    return html.escape(text, quote=False)


def thinned(values: Sequence[float], most: int) -> List[int]:
    """Numbers of the values to draw, ascending: at most `most` of them (4 at least), or all. The first and the last; of
    each stretch the smallest and the largest, so that no spike is lost, and one that is not finite."""
    if len(values) <= most:
        return list(range(len(values)))
    stretches = max(1, (most - 2) // 3)
    drawn = {0, len(values) - 1}
    for stretch in range(stretches):
        places = range(len(values) * stretch // stretches, len(values) * (stretch + 1) // stretches)
        finite = [place for place in places if math.isfinite(values[place])]
        if finite:
            drawn |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(places):
            drawn.add(next(place for place in places if not math.isfinite(values[place])))
    return sorted(drawn)


def abscissae(events: Events, places: Sequence[int], unit: float) -> dict:
    """Epochs, steps and times of some events. Args: unit: of time, in seconds."""
    epochs, steps, seconds = (events[name] for name in ("epoch", "step", "seconds"))
    return {
        "epoch": [number(epochs[place]) for place in places],
        "step": [int(steps[place]) for place in places],
        "time": [number(seconds[place] / unit) for place in places],
    }


def _trace(name: str, style: LineStyle, x: dict, y: Sequence[float], **more: object) -> dict:
    """A line as plotly has it, apart from `x`; gaps where values are not finite. Args: more: of plotly's keys."""
    lonely = _lonely(y)
    marked = bool(style.symbol) and len(y) <= _MOST_SYMBOLS
    size: object = _SYMBOL
    if any(lonely) and not marked:
        size = [_SYMBOL if alone else 0 for alone in lonely]
    return {
        "type": "scatter",
        "mode": "lines+markers" if marked or any(lonely) else "lines",
        "name": _label(name),
        "x": x,
        "y": [number(value) for value in y],
        "line": {"color": style.colour, "dash": style.dash, "width": style.width},
        "marker": {"symbol": style.symbol or "circle", "size": size, "color": style.colour},
        "opacity": style.opacity,
        **more,
    }


def _lonely(y: Sequence[float]) -> List[bool]:
    """Whether each value has no finite neighbour: of such a value a line shows nothing."""
    finite = [False, *map(math.isfinite, y), False]
    return [own and not before and not after for before, own, after in zip(finite, finite[1:], finite[2:])]


def _axes(title: str, data: Sequence[dict], *, log: bool = False, share: bool = False) -> dict:
    """The layout of lines whose abscissae can be switched. Args: log: logarithmic. share: values are shares."""
    vertical = {"title": {"text": title, "standoff": 8}, "automargin": True, "zeroline": False}
    vertical.update(type="log" if log else "linear", tickformat="~%" if share else "~g" if log else "")
    return {"yaxis": vertical, "hovermode": "closest", "showlegend": len(data) > 1}

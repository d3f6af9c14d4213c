"""Figures over epochs, steps and time: of one run, or of several in the same figures."""

from __future__ import annotations

import bisect
import html
import math
import statistics
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from recipe.course import is_known
from tools.reporting.page import Figure
from tools.reporting.run import Events, Run, resumed_at, steps_per_epoch

_POINTS = 6000  # of all lines of a figure together
_LEAST_POINTS = 100  # of a line
_MOST_MARKS = 30
_RATIOS = 600  # log lines whose trust ratios are drawn
_COLUMNS = 240  # of those with a row of colours for each weight
_PREFIX = "trust/"

# Okabe and Ito's colours, which all eyes tell apart, in an order in which neighbours differ most.
# Their yellow and their black are left out: one is lost on white paper, the other on a dark screen.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
_MOST_SYMBOLS = 80  # on a line: more would hide it
_SYMBOL = 6  # pixels


class LineStyle(NamedTuple):
    """How a line is drawn; dash and symbol repeat the information of the colour.

    dash, symbol: by plotly's names; without a symbol its points are not marked.
    width: pixels.
    opacity: from 0 to 1.
    """

    colour: str
    dash: str = "solid"
    width: float = 1.5
    symbol: Optional[str] = None
    opacity: float = 1


def run_style(order: int) -> LineStyle:
    """Return the style of a run in a comparison; no two are alike among thirty-six.

    Args:
        order: number of the run, from 0.
    """
    # After each round of colours the dashes move on by one, so that no pair comes twice.
    turn, index = divmod(order, len(COLOURS))
    return LineStyle(
        colour=COLOURS[index],
        dash=_DASHES[(index + turn) % len(_DASHES)],
        width=2.2,
        symbol=_SYMBOLS[index],
    )


class Unit(NamedTuple):
    """A unit of time."""

    name: str
    seconds: float


_UNITS = (
    Unit("days", 86400.0),
    Unit("hours", 3600.0),
    Unit("minutes", 60.0),
    Unit("seconds", 1.0),
)


class Series(NamedTuple):
    """One quantity.

    column: of the training events, or of evaluations.
    role: its name within its figure.
    evaluated: whether it is of evaluations.
    error: the column of its standard error, if it has one.
    """

    column: str
    role: str
    evaluated: bool = False
    error: str = ""

    def events_of(self, run: Run) -> Events:
        """Return the events of a `run` that have this quantity."""
        return run.metrics.evaluation if self.evaluated else run.metrics.train

    def values_of(self, run: Run) -> Sequence[float]:
        """Return the values of all events of a `run`; NaN where there is none.

        A value that is not told from zero by its standard error is none.
        """
        events = self.events_of(run)
        values = events[self.column]
        if not self.error:
            return values
        known = []
        for value, error in zip(values, events[self.error]):
            known.append(value if is_known(value, error) else math.nan)
        return known


class Plan(NamedTuple):
    """One figure of the curves.

    key: its name in the page.
    title: above it.
    axis: label of the values.
    caption: below it.
    series: the quantities that it may show.
    log: the axis is logarithmic.
    share: values are shares, drawn as percentages.
    dull: it is left out where nothing ever changes in it.
    """

    key: str
    title: str
    axis: str
    caption: str
    series: Tuple[Series, ...]
    log: bool = False
    share: bool = False
    dull: bool = False


class Curves(NamedTuple):
    """All figures of a page.

    layers: those of single weights.
    left_out: what is not drawn, and why.
    unit: of the time axis.
    thinned: whether lines are.
    """

    figures: List[Figure]
    layers: List[Figure]
    left_out: List[str]
    unit: str
    thinned: bool


class _Comparison(NamedTuple):
    """The runs whose curves are drawn, one or several.

    names: of the runs, in legends.
    unit: of the time axis, in seconds.
    """

    runs: Sequence[Run]
    names: Sequence[str]
    unit: float


class _Line(NamedTuple):
    """One line of a figure.

    order: number of the run.
    values: of all events.
    """

    order: int
    series: Series
    values: Sequence[float]


def _scores(name: str) -> Tuple[Series, ...]:
    """Return the quantities that training, evaluation and averages of weights have alike."""
    return (
        Series(name, "training"),
        Series(name, "validation", evaluated=True),
        Series(f"step_average/{name}", "average over updates", evaluated=True),
        Series(f"epoch_average/{name}", "average over epochs", evaluated=True),
    )


def _plan(
    column: str,
    title: str,
    axis: str,
    caption: str,
    error: str = "",
    **options: bool,
) -> Plan:
    """Return a figure of one quantity of the log.

    Args:
        column: of the training events.
        title, axis, caption: see `Plan`.
        error: the column of its standard error, if it has one.
        options: log, share and dull of a Plan.
    """
    series = Series(column, title.lower(), error=error)
    return Plan(
        key=column.partition("/")[0],
        title=title,
        axis=axis,
        caption=caption,
        series=(series,),
        **options,
    )


_LOSS = (
    "Training: the objective with label smoothing and mixing, averaged over the updates since the "
    "previous log line. Validation: the mean over all validation images."
)
_TOP1 = "Training images are augmented, and mixed if the recipe asks for it: their accuracy can be lower."
_NORM = "Taken over all parameters together."
_NOISE = (
    "Far smaller batches learn as much from each image, far larger ones as much from each update. "
    "Left out where zero is within two standard errors."
)
_PACE = "Training only, without evaluation and checkpoints."
_MFU = "Floating-point operations a second, as a share of what this machine reaches in a large matrix product."
_PLANS = (
    Plan("loss", "Loss", "cross entropy, nats", _LOSS, _scores("loss"), log=True),
    Plan("top1", "Top-1 accuracy", "share of images", _TOP1, _scores("top1"), share=True),
    _plan(
        "lr",
        "Learning rate",
        "learning rate",
        "The rate of the last update before each log line.",
    ),
    _plan("weight_norm", "Norm of the weights", "Euclidean norm", _NORM, log=True),
    _plan("gradient_norm", "Norm of the gradient", "Euclidean norm", _NORM, log=True),
    _plan("update_norm", "Norm of the update", "Euclidean norm", _NORM, log=True),
    _plan(
        "noise_scale/images",
        "Gradient noise scale",
        "images",
        _NOISE,
        error="noise_scale/error",
        log=True,
    ),
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
    _plan(
        "unreadable_images",
        "Unreadable images",
        "images",
        "Left out of training so far.",
        dull=True,
    ),
    _plan("images_per_second", "Images a second", "images / s", _PACE),
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
    "training": LineStyle(COLOURS[0]),
    "validation": LineStyle(COLOURS[1], width=2.2, symbol="circle"),
    "average over updates": LineStyle(COLOURS[2], "dash", 2, "square"),
    "average over epochs": LineStyle(COLOURS[3], "dot", 2, "diamond"),
}


class _Pick(NamedTuple):
    """A statistic of the trust ratios of a log line, and the line that it is drawn as.

    name: in the legend.
    statistic: makes a number of all ratios of a log line.
    """

    name: str
    statistic: Callable[[Sequence[float]], float]
    style: LineStyle


_RANGE = (
    _Pick("largest", max, LineStyle(COLOURS[1], "dash")),
    _Pick("median", statistics.median, LineStyle(COLOURS[0], width=2.2)),
    _Pick("smallest", min, LineStyle(COLOURS[2], "dot")),
)


def draw(runs: Sequence[Run], names: Sequence[str]) -> Curves:
    """Draw one run with a colour for each quantity, or several with a colour for each run.

    Args:
        runs: one or several.
        names: of the runs, in legends.
    """
    # All runs share one axis of time, in the unit of the longest.
    unit = unit_of(max(map(_seconds, runs)))
    comparison = _Comparison(runs, names, unit.seconds)
    figures: List[Figure] = []
    left_out: List[str] = []
    is_thinned = False
    for plan in _PLANS:
        drawn = _lines(plan, runs)
        reason = _reason_to_leave_out(plan, drawn)
        if reason:
            left_out.append(f"{plan.title.lower()} ({reason})")
        else:
            figures.append(_figure(plan, drawn, comparison))
            most = _most_points(drawn)
            is_thinned |= any(len(line.values) > most for line in drawn)
    return Curves(
        figures=figures,
        layers=_trust_ratios(comparison),
        left_out=left_out,
        unit=unit.name,
        thinned=is_thinned,
    )


def _seconds(run: Run) -> float:
    """Return the seconds of training that a run has logged."""
    known = [time for time in run.metrics.train["seconds"] if not math.isnan(time)]
    return max(known, default=0.0)


def _lines(plan: Plan, runs: Sequence[Run]) -> List[_Line]:
    """Return the lines of a figure: the quantities that each run has logged."""
    drawn = []
    for order, run in enumerate(runs):
        for series in plan.series:
            if series.events_of(run).has(series.column):
                drawn.append(_Line(order, series, series.values_of(run)))
    return drawn


def _reason_to_leave_out(plan: Plan, drawn: Sequence[_Line]) -> str:
    """Return why a figure would show nothing; nothing if it would show something."""
    if not drawn:
        return "not in metrics.jsonl"
    # Over all lines: a constant that differs between runs is worth a figure.
    seen: Set[float] = set()
    for line in drawn:
        seen.update(value for value in line.values if not math.isnan(value))
    if not seen:
        return "not told from zero"
    if len(seen) == 1 and plan.dull:
        return f"{seen.pop():g} throughout"
    return ""


def _most_points(drawn: Sequence[_Line]) -> int:
    """Return the points of each line of a figure, its share of those that a figure may have."""
    return max(_LEAST_POINTS, _POINTS // len(drawn))


def _figure(plan: Plan, drawn: Sequence[_Line], comparison: _Comparison) -> Figure:
    """Draw the lines of a figure."""
    # In a legend of several runs, validation stands for the run: training is pale.
    legend: Dict[int, Series] = {}
    for line in sorted(drawn, key=lambda line: line.series.role == "validation"):
        legend[line.order] = line.series
    most = _most_points(drawn)
    data = []
    for line in drawn:
        trace = _trace_of(line, comparison, most)
        # One entry of the legend switches all lines of a run.
        if len(comparison.runs) > 1:
            trace["legendgroup"] = str(line.order)
            trace["showlegend"] = line.series is legend[line.order]
        data.append(trace)
    layout = _axes(plan.axis, data, log=plan.log, share=plan.share)
    figure = Figure(plan.key, plan.title, plan.caption, data, layout)
    return _with_sessions(figure, comparison)


def _trace_of(line: _Line, comparison: _Comparison, most: int) -> dict:
    """Return a line as plotly has it, of `most` points at most."""
    role = line.series.role
    events = line.series.events_of(comparison.runs[line.order])
    shown = thinned(line.values, most)
    x = abscissae(events, shown, comparison.unit)
    y = [line.values[index] for index in shown]
    # A single run has a colour for each quantity, several have one for each run.
    if len(comparison.runs) == 1:
        return _trace(role, _ROLES.get(role, LineStyle(COLOURS[0])), x, y)
    return _trace(comparison.names[line.order], _in_comparison(line.order, role), x, y)


def _in_comparison(order: int, role: str) -> LineStyle:
    """Return the run's style for validation, a thinner one for what is beside it in a figure."""
    style = run_style(order)
    if role == "validation":
        return style
    if role == "training":
        return style._replace(width=1.2, opacity=0.55, symbol=None)
    if role.startswith("average"):
        return style._replace(width=1.2, symbol=f"{style.symbol}-open")
    return style._replace(width=1.8, symbol=None)


def _with_sessions(figure: Figure, comparison: _Comparison) -> Figure:
    """Return the figure of one run with vertical lines where later sessions went on.

    Without them where they would be too many to read, and with several runs.
    """
    if len(comparison.runs) > 1:
        return figure
    run = comparison.runs[0]
    figure.layout["hovermode"] = "x unified"
    train = run.metrics.train
    steps = resumed_at(run.starts)
    # Too many to read, or no place to draw them at.
    if len(steps) > _MOST_MARKS or not steps_per_epoch(run) or not len(train):
        return figure
    marks = []
    for step in steps:
        # The newest log line up to that step has the time at which the session went on.
        newest = max(0, bisect.bisect_right(train["step"], step) - 1)
        seconds = train["seconds"][newest]
        # A session may have gone on with other images, in epochs of another length.
        per_epoch = steps_per_epoch(run, done=step)
        assert per_epoch is not None
        mark = {
            "epoch": number(step / per_epoch),
            "step": step,
            "time": number(seconds / comparison.unit),
        }
        marks.append(mark)
    return figure._replace(marks=marks)


def _trust_ratios(comparison: _Comparison) -> List[Figure]:
    """Return the figures of LARS's trust ratios; none if none is logged.

    They are range and median, and of a single run each weight as a row of colours.
    """
    single = len(comparison.runs) == 1
    data = []
    for order, run in enumerate(comparison.runs):
        # Ranges of several runs would hide each other.
        picks: Sequence[_Pick] = _RANGE
        if not single:
            style = run_style(order)._replace(width=1.8, symbol=None)
            picks = (_Pick(comparison.names[order], statistics.median, style),)
        data += _ratio_traces(run.metrics.train, picks, comparison.unit)
    if not data:
        return []
    figure = Figure(
        key="trust",
        title="Trust ratios",
        caption="LARS multiplies each weight's learning rate by its trust ratio. Several runs: the median.",
        data=data,
        layout=_axes("trust ratio", data, log=True),
        wide=single,
    )
    figures = [_with_sessions(figure, comparison)]
    if single:
        figures += _heat_map(comparison.runs[0].metrics.train, comparison.unit)
    return figures


def _ratio_traces(train: Events, picks: Sequence[_Pick], unit: float) -> List[dict]:
    """Return statistics of the trust ratios of a run as plotly has lines; none if none is logged.

    Args:
        train: log lines of the run.
        picks: the statistics.
        unit: of the time axis, in seconds.
    """
    layers = _layers(train)
    if not layers:
        return []
    drawn = _evenly_spread(len(train), _RATIOS)
    ratios = []
    for index in drawn:
        values = [train[layer][index] for layer in layers]
        # Ratios that are not finite would spoil the statistics of the line.
        ratios.append([value for value in values if math.isfinite(value)])
    x = abscissae(train, drawn, unit)
    traces = []
    for pick in picks:
        # A gap where a line has none that is finite.
        y = [pick.statistic(values) if values else math.nan for values in ratios]
        traces.append(_trace(pick.name, pick.style, x, y))
    return traces


def _layers(train: Events) -> List[str]:
    """Return the columns of the trust ratios, in the order of the model."""
    return [name for name in train.columns if name.startswith(_PREFIX)]


def _evenly_spread(count: int, most: int) -> List[int]:
    """Return evenly spread log lines, as not all of their many numbers can be drawn."""
    return list(range(0, count, max(1, -(-count // most))))


def _heat_map(train: Events, unit: float) -> List[Figure]:
    """Return a figure with a row for each weight, the model's first at the top.

    None where there are not two log lines to lay side by side.
    """
    layers = _layers(train)
    drawn = _evenly_spread(len(train), _COLUMNS)
    # Powers of ten, so that small and large ratios have as many colours.
    powers = []
    for layer in layers:
        powers.append([_power(train[layer][index]) for index in drawn])
    if len(drawn) < 2 or all(power is None for row in powers for power in row):
        return []
    names = [layer[len(_PREFIX) :].removesuffix(".weight") for layer in layers]
    data = {
        "type": "heatmap",
        "x": abscissae(train, drawn, unit),
        "y": list(map(_escaped, names)),
        "z": powers,
        "hovertemplate": "%{y}<br>at %{x}: 10<sup>%{z:.2f}</sup><extra></extra>",
        "colorscale": "Cividis",
        "colorbar": {
            "thickness": 12,
            "outlinewidth": 0,
            "tickprefix": "10<sup>",
            "ticksuffix": "</sup>",
        },
    }
    # The names of all weights would leave no room for the rows on a phone.
    vertical = {
        "type": "category",
        "autorange": "reversed",
        "showticklabels": False,
        "showgrid": False,
    }
    layout = {
        "yaxis": vertical,
        "height": max(260, min(1000, 90 + 6 * len(layers))),
        "showlegend": False,
    }
    figure = Figure(
        key="layers",
        title="Trust ratio of each weight",
        caption="One row for each weight, in the order of the model. Point at a row to see its name.",
        data=[data],
        layout=layout,
        wide=True,
    )
    return [figure]


def _power(ratio: float) -> Optional[float]:
    """Return the power of ten that a ratio is; None where it is none."""
    if ratio > 0 and math.isfinite(ratio):
        return round(math.log10(ratio), 3)
    return None


def unit_of(seconds: float) -> Unit:
    """Return the unit in which a run of so many `seconds` is shown."""
    # Two of a unit at least: less than that is read more easily in the next smaller one.
    return next((unit for unit in _UNITS if seconds >= 2 * unit.seconds), _UNITS[-1])


def number(value: float) -> Optional[float]:
    """Round a `value` to the five digits that a figure can show.

    Returns:
        The rounded value; None for what JSON cannot represent.
    """
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _escaped(text: str) -> str:
    """Return text for a figure: plotly reads a few tags of HTML, and entities, in all it draws."""
    return html.escape(text, quote=False)


def thinned(values: Sequence[float], most: int) -> List[int]:
    """Choose the values that are drawn of a long line.

    The first and the last are; of each stretch between them the smallest and the largest, so that
    no spike is lost, and one that is not finite.

    Args:
        values: of the line.
        most: how many are drawn, 4 at least.

    Returns:
        The indices of the chosen values, ascending.
    """
    if len(values) <= most:
        return list(range(len(values)))
    # Each stretch gives three points at most, beside the two ends.
    stretches = max(1, (most - 2) // 3)
    drawn = {0, len(values) - 1}
    for stretch in range(stretches):
        start = len(values) * stretch // stretches
        end = len(values) * (stretch + 1) // stretches
        drawn.update(_extremes(values, range(start, end)))
    return sorted(drawn)


def _extremes(values: Sequence[float], stretch: range) -> List[int]:
    """Return where a stretch has its smallest and largest value, and one that is not finite."""
    finite = []
    odd = []
    for index in stretch:
        if math.isfinite(values[index]):
            finite.append(index)
        else:
            odd.append(index)
    chosen = odd[:1]
    if finite:
        chosen.append(min(finite, key=values.__getitem__))
        chosen.append(max(finite, key=values.__getitem__))
    return chosen


def abscissae(events: Events, indices: Sequence[int], unit: float) -> dict:
    """Return epochs, steps and times of some events.

    Args:
        events: of one kind.
        indices: of the events that are drawn.
        unit: of time, in seconds.
    """
    # The reader of the page switches between the three.
    epochs = events["epoch"]
    steps = events["step"]
    seconds = events["seconds"]
    return {
        "epoch": [number(epochs[index]) for index in indices],
        "step": [int(steps[index]) for index in indices],
        "time": [number(seconds[index] / unit) for index in indices],
    }


def _trace(name: str, style: LineStyle, x: dict, y: Sequence[float]) -> dict:
    """Return a line as plotly has it, apart from `x`; gaps where values are not finite.

    Args:
        name: in the legend.
        style: of the line.
        x: see `abscissae`.
        y: its values.
    """
    # A line shows nothing of a value that has no finite neighbour, so it gets a symbol.
    alone = _alone(y)
    marked = bool(style.symbol) and len(y) <= _MOST_SYMBOLS
    size: object = _SYMBOL
    if any(alone) and not marked:
        size = [_SYMBOL if is_alone else 0 for is_alone in alone]
    return {
        "type": "scatter",
        "mode": "lines+markers" if marked or any(alone) else "lines",
        "name": _escaped(name),
        "x": x,
        "y": [number(value) for value in y],
        "line": {"color": style.colour, "dash": style.dash, "width": style.width},
        "marker": {"symbol": style.symbol or "circle", "size": size, "color": style.colour},
        "opacity": style.opacity,
    }


def _alone(y: Sequence[float]) -> List[bool]:
    """Return for each value whether it is finite and neither of its neighbours is."""
    # The ends have one neighbour: beyond them there is nothing finite.
    finite = [False, *map(math.isfinite, y), False]
    alone = []
    for before, value, after in zip(finite, finite[1:], finite[2:]):
        alone.append(value and not before and not after)
    return alone


def _axes(title: str, data: Sequence[dict], *, log: bool = False, share: bool = False) -> dict:
    """Return the layout of lines whose abscissae can be switched.

    Args:
        title: of the axis of values.
        data: the lines as plotly has them.
        log, share: see `Plan`.
    """
    # d3's formats, in which `~` leaves out trailing zeros.
    if share:
        ticks = "~%"
    else:
        ticks = "~g" if log else ""
    vertical = {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "zeroline": False,
        "type": "log" if log else "linear",
        "tickformat": ticks,
    }
    return {"yaxis": vertical, "hovermode": "closest", "showlegend": len(data) > 1}

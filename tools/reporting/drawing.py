"""Figures as data: lines thinned to what a screen can show, each over epochs, steps and time; the style of the axes.

What a figure shows is in curves.py, layers.py and others; report.js draws it.
"""

from __future__ import annotations

import bisect
import math
from typing import List, NamedTuple, Optional, Sequence

from tools.reporting.markup import label, number
from tools.reporting.metrics import Events

# Okabe and Ito's colours, which all eyes tell apart, in an order in which neighbours differ most. Their yellow and
# their black are left out: one is lost on white paper, the other on a dark screen.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
_MOST_SYMBOLS = 80  # on a line: more would hide it
_UNITS = (("seconds", 1.0), ("minutes", 60.0), ("hours", 3600.0), ("days", 86400.0))


class LineStyle(NamedTuple):
    """How a line is drawn; dash and symbol repeat the information of the colour."""

    colour: str
    dash: str = "solid"
    width: float = 1.5
    symbol: Optional[str] = None
    faint: bool = False


class Figure(NamedTuple):
    """One figure of the page.

    key: its id. caption: what it shows. summary: the same figures in words, for who cannot see it. data, layout: as
    plotly has them, but that `x` may be {"epoch": [...], "step": [...], "time": [...]}. marks: the places of
    vertical lines, each such an object of numbers.
    """

    key: str
    title: str
    caption: str
    summary: str
    data: List[dict]
    layout: dict
    marks: Sequence[dict] = ()
    wide: bool = False

    def as_data(self) -> dict:
        """Input of report.js."""
        return {"key": self.key, "data": self.data, "layout": self.layout, "marks": list(self.marks)}


def run_style(order: int) -> LineStyle:
    """The style of a run in a comparison, by its number: colour, dash and symbol; no two alike among thirty-six."""
    turn, place = divmod(order, len(COLOURS))
    return LineStyle(COLOURS[place], DASHES[(place + turn) % len(DASHES)], 2.2, _SYMBOLS[place])


class Clock:
    """From a step of a run to its place in time."""

    def __init__(self, steps: Sequence[float], seconds: Sequence[float]):
        """Args: of the log lines, ascending."""
        self._steps, self._seconds = steps, seconds

    def at(self, step: float) -> Optional[float]:
        """Seconds of the run at the newest log line up to `step`; None before the first one."""
        place = bisect.bisect_right(self._steps, step) - 1
        return self._seconds[place] if place >= 0 else None


def thinned(values: Sequence[float], most: int) -> List[int]:
    """Numbers of the values to draw, ascending: at most `most` of them (4 at least), or all.

    Of each stretch the smallest and the largest, so that no spike is lost, and one that is not finite; besides these
    the first and the last of all.
    """
    if len(values) <= most:
        return list(range(len(values)))
    stretches = max(1, (most - 2) // 3)
    kept = {0, len(values) - 1}
    for stretch in range(stretches):
        places = range(len(values) * stretch // stretches, len(values) * (stretch + 1) // stretches)
        finite = [place for place in places if math.isfinite(values[place])]
        if finite:
            kept.add(min(finite, key=values.__getitem__))
            kept.add(max(finite, key=values.__getitem__))
        if len(finite) < len(places):
            kept.add(next(place for place in places if not math.isfinite(values[place])))
    return sorted(kept)


def line(
    events: Events,
    values: Sequence[float],
    clock: Clock,
    style: LineStyle,
    name: str,
    unit: float,
    most: int,
    **more: object,
) -> dict:
    """A line over epochs, steps and time; gaps where values are not finite.

    Args:
        values: one for each of `events`.
        unit: seconds of a unit of the time axis.
        most: points.
        more: of plotly's, such as `legendgroup`.
    """
    places = thinned(values, most)
    return trace(name, style, abscissae(events, places, clock, unit), [values[place] for place in places], **more)


def trace(name: str, style: LineStyle, x: dict, y: Sequence[float], **more: object) -> dict:
    """A line as plotly has it, but for `x`; a point where it would be none."""
    whole = {
        "type": "scatter",
        "mode": "lines",
        "name": label(name),
        "x": x,
        "y": [number(value) for value in y],
        "line": {"color": style.colour, "dash": style.dash, "width": style.width},
        "opacity": 0.55 if style.faint else 1,
        **more,
    }
    if len(y) == 1 or (style.symbol and len(y) <= _MOST_SYMBOLS):
        mode = "markers" if len(y) == 1 else "lines+markers"
        whole.update(mode=mode, marker={"symbol": style.symbol or "circle", "size": 6, "color": style.colour})
    return whole


def abscissae(events: Events, places: Sequence[int], clock: Clock, unit: float) -> dict:
    """Epochs, steps and time of some events. Args: unit: seconds of a unit of time."""
    steps, epochs = events["step"], events["epoch"]
    times = [clock.at(steps[place]) for place in places]
    return {
        "epoch": [number(epochs[place]) for place in places],
        "step": [int(steps[place]) for place in places],
        "time": [None if time is None else number(time / unit) for time in times],
    }


def unit_of(seconds: float) -> tuple:
    """(name, seconds) of the unit in which a run of so many seconds is shown."""
    return next((unit for unit in reversed(_UNITS) if seconds >= 2 * unit[1]), _UNITS[0])


def axes(title: str, data: Sequence[dict], *, log: bool = False, share: bool = False) -> dict:
    """The layout of lines whose abscissae can be switched. Args: log: logarithmic. share: values are shares."""
    vertical = {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "zeroline": False,
        "type": "log" if log else "linear",
    }
    if share:
        vertical["tickformat"] = "~%"
    elif log:
        vertical["tickformat"] = "~g"  # else the digits between powers of ten stand alone: 2, 5, 10
        found = [value for trace in data for value in trace["y"] if value is not None and value > 0]
        decades = math.log10(max(found)) - math.log10(min(found)) if found else 0
        if decades > 2.2:
            vertical["nticks"] = min(7, math.ceil(decades) + 1)  # whole powers of ten
        elif decades > 0.62:
            vertical["nticks"] = int(decades / 0.31)  # 1, 2 and 5 of each decade; plotly itself would take all digits
    return {"yaxis": vertical, "hovermode": "closest", "showlegend": len(data) > 1}


def in_words(name: str, values: Sequence[float], epochs: Sequence[float], share: bool = False) -> str:
    """`NAME: 2.26 at first, 0.828 at last, between 0.81 (epoch 34) and 2.26 (epoch 1).`"""
    finite = [(value, epoch) for value, epoch in zip(values, epochs) if math.isfinite(value)]
    if not finite:
        return f"{name}: none finite."

    def form(value: float) -> str:
        return f"{value:.2%}" if share else f"{value:.4g}"

    (low, early), (high, late) = min(finite), max(finite)
    return (
        f"{name}: {form(finite[0][0])} at first, {form(finite[-1][0])} at last, "
        f"between {form(low)} (epoch {early:.4g}) and {form(high)} (epoch {late:.4g})."
    )

"""Lines as plotly's data: thinned to what a screen can show, over epochs, steps and time; the style of the axes.

What a figure shows is in curves.py and layers.py; report.js draws it.
"""

from __future__ import annotations

import bisect
import html
import math
from typing import List, NamedTuple, Optional, Sequence

from tools.reporting.metrics import Events

# Okabe and Ito's colours, which all eyes tell apart, in an order in which neighbours differ most. Their yellow and
# their black are left out: one is lost on white paper, the other on a dark screen.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
_MOST_SYMBOLS = 80  # on a line: more would hide it
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


class Clock:
    """Maps a step of a run to time, in units of `unit` seconds."""

    def __init__(self, train: Events, unit: float = 1.0):
        lines = [(step, time) for step, time in zip(train["step"], train["seconds"]) if time == time]
        self._steps = [step for step, _ in lines]
        self._times = [number(seconds / unit) for _, seconds in lines]

    def at(self, step: float) -> Optional[float]:
        """The time of the newest log line up to `step`; None before the first one."""
        place = bisect.bisect_right(self._steps, step) - 1
        return self._times[place] if place >= 0 else None


def unit_of(seconds: float) -> tuple:
    """(name, seconds) of the unit in which a run of so many seconds is shown."""
    return next((unit for unit in _UNITS if seconds >= 2 * unit[1]), _UNITS[-1])


def number(value: float) -> Optional[float]:
    """With the five digits that a figure can show; None for what JSON cannot represent."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def label(text: str) -> str:
    """Text for a figure: plotly reads a few tags of HTML, and entities, in all that it draws."""
    return html.escape(text, quote=False)


def thinned(values: Sequence[float], most: int) -> List[int]:
    """Numbers of the values to draw, ascending: at most `most` of them (4 at least), or all.

    The first and the last; of each stretch the smallest and the largest, so that no spike is lost, and one that is not
    finite.
    """
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


def abscissae(events: Events, places: Sequence[int], clock: Clock) -> dict:
    """Epochs, steps and times of some events."""
    steps = [events["step"][place] for place in places]
    return {
        "epoch": [number(events["epoch"][place]) for place in places],
        "step": [int(step) for step in steps],
        "time": [clock.at(step) for step in steps],
    }


def trace(name: str, style: LineStyle, x: dict, y: Sequence[float], **more: object) -> dict:
    """A line as plotly has it, apart from `x`; gaps where values are not finite. Args: more: of plotly's keys."""
    mode = "markers" if len(y) == 1 else "lines+markers" if style.symbol and len(y) <= _MOST_SYMBOLS else "lines"
    return {
        "type": "scatter",
        "mode": mode,
        "name": label(name),
        "x": x,
        "y": [number(value) for value in y],
        "line": {"color": style.colour, "dash": style.dash, "width": style.width},
        "marker": {"symbol": style.symbol or "circle", "size": 6, "color": style.colour},
        "opacity": style.opacity,
        **more,
    }


def axes(title: str, data: Sequence[dict], *, log: bool = False, share: bool = False) -> dict:
    """The layout of lines whose abscissae can be switched. Args: log: logarithmic. share: values are shares."""
    vertical = {"title": {"text": title, "standoff": 8}, "automargin": True, "zeroline": False}
    vertical.update(type="log" if log else "linear", tickformat="~%" if share else "")
    found = [value for trace in data for value in trace["y"] if value is not None and value > 0]
    if log and found:
        vertical["tickformat"] = "~g"  # else the digits between powers of ten stand alone: 2, 5, 10
        decades = math.log10(max(found) / min(found))
        if decades > 0.62:
            vertical["dtick"] = math.ceil(decades / 7) if decades > 2.2 else "D2"  # powers of ten, or 1, 2 and 5
    return {"yaxis": vertical, "hovermode": "closest", "showlegend": len(data) > 1}

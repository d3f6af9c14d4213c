"""A sweep as a picture: its history, what mattered, and the metric over each parameter."""

from __future__ import annotations

import itertools
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Dict, List, NamedTuple, Optional, Sequence, Tuple

from common.text import count
from tools.output import few_ticks, save
from tools.sweeping.candidates import as_text
from tools.sweeping.definition import Axis, Definition, SweepFile, Value
from tools.sweeping.trials import COMPLETE, PRUNED, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_SIDE = 3.4  # of a panel, inches
_LETTERS = 26  # of all labels that fit below a panel side by side
# By Okabe and Ito, distinct for colour-blind readers.
_BLUE = "#0072b2"
_ORANGE = "#f0a30a"
_GREY = "#9a9a9a"
_VERMILION = "#d55e00"


class _Trials(NamedTuple):
    """The trials that are drawn.

    complete, pruned: those that ended so, by number.
    values: of the metric, of the complete ones.
    best: place of the best one among these; None: none is complete.
    """

    complete: List[Record]
    values: List[float]
    pruned: List[Record]
    best: Optional[int]


def draw_picture(
    path: Path,
    sweep: SweepFile,
    records: Sequence[Record],
    importances: Optional[Dict[str, float]],
) -> None:
    """Draw a sweep.

    Args:
        path: of the picture, a PNG.
        sweep: that is drawn.
        records: of its trials.
        importances: of the parameters; None: too few trials.
    """
    from matplotlib.figure import Figure

    space = sweep.definition.space
    metric = sweep.definition.metric
    trials = _select(sweep.definition, records)
    rows = math.ceil((2 + len(space)) / _COLUMNS)
    # Wider than high, as labels of the y axis take room.
    size = (_COLUMNS * _SIDE * 1.15, rows * _SIDE)
    figure = Figure(figsize=size, layout="constrained")
    complete = count(len(trials.complete), "complete trial")
    figure.suptitle(_plain(f"{sweep.name}: {metric} of {complete}"))
    # History and importances, then a panel for each parameter; the last row may have gaps.
    history, importance, *panels = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    _draw_history(history, sweep.definition, trials)
    _draw_importances(importance, importances)
    for (key, axis), panel in zip(space.items(), panels):
        _draw_parameter(panel, key, axis, trials)
        panel.set(title=_plain(key), ylabel=metric)
    for panel in panels[len(space) :]:
        panel.set_axis_off()
    save(figure, path)


def _select(definition: Definition, records: Sequence[Record]) -> _Trials:
    """Return the trials that are drawn."""
    complete = [record for record in records if record.state == COMPLETE]
    pruned = [record for record in records if record.state == PRUNED]
    values = _values(complete)

    def order(place: int) -> Tuple[float, int]:
        """Return the key by which the complete trial at a `place` is compared."""
        return definition.sign * values[place], complete[place].trial

    # Of equally good trials the earliest is the best, as on the leaderboard.
    best = min(range(len(complete)), key=order, default=None)
    return _Trials(complete, values, pruned, best)


def _values(records: Sequence[Record]) -> List[float]:
    """Return the metric of trials; NaN, which is not drawn, where there was no evaluation."""
    return [math.nan if record.value is None else record.value for record in records]


def _draw_history(panel: Axes, definition: Definition, trials: _Trials) -> None:
    """Draw the value of each trial, and the best so far."""
    numbers = [record.trial for record in trials.complete]
    if definition.direction == "minimize":
        bests = list(itertools.accumulate(trials.values, min))
    else:
        bests = list(itertools.accumulate(trials.values, max))
    panel.plot(numbers, trials.values, "o", color=_BLUE, label="trial")
    panel.step(numbers, bests, where="post", color=_ORANGE, label="best so far")
    # Only where there are some: an empty line would be in the legend.
    if trials.pruned:
        pruned = [record.trial for record in trials.pruned]
        panel.plot(pruned, _values(trials.pruned), "x", color=_GREY, label="pruned")
    if trials.best is not None:
        number = numbers[trials.best]
        _draw_star(panel, number, trials.values[trials.best], label=f"best: trial {number}")
    panel.set(title="history", xlabel="trial", ylabel=definition.metric)
    # There is no trial 2.5.
    panel.locator_params(axis="x", integer=True)
    panel.legend(fontsize=8)


def _draw_star(panel: Axes, place: float, value: float, label: Optional[str] = None) -> None:
    """Draw the best trial.

    Args:
        panel: to draw on.
        place: of the trial on the x axis.
        value: of the metric.
        label: in the legend, which it is left out of without one.
    """
    panel.plot(
        [place],
        [value],
        label=label,
        marker="*",
        markersize=15,
        color=_VERMILION,
        markeredgecolor="white",
        linestyle="none",
    )


def _draw_importances(panel: Axes, importances: Optional[Dict[str, float]]) -> None:
    """Draw a bar for each parameter, the most important one at the top."""
    panel.set(title="importance (PED-ANOVA)", xlim=(0, 1))
    if importances is None:
        text = "too few different values\nto say what mattered"
        panel.text(0.5, 0.5, text, ha="center", va="center")
        panel.set_yticks([])
        return
    for name, share in sorted(importances.items(), key=lambda pair: pair[1]):
        panel.barh(_plain(name), share, color=_BLUE)


def _draw_parameter(panel: Axes, key: str, axis: Axis, trials: _Trials) -> None:
    """Draw the value of each trial over one parameter.

    Args:
        panel: to draw on.
        key: the parameter.
        axis: its values.
        trials: to be drawn.
    """
    drawn = [record.parameters[key] for record in trials.complete]
    places: List[float]
    if axis.choices is None:
        places = [_number(value) for value in drawn]
        low, high = axis.bounds
        panel.set_xscale("log" if axis.log else "linear")
        panel.axvspan(low, high, alpha=0)  # the whole range, also where nothing was drawn
        _draw_points(panel, places, trials)
        # Ticks depend on the limits, which the points have set by now.
        few_ticks(panel.xaxis)
    else:
        # By their text: a choice may be a list, or true beside 1.
        labels = [as_text(choice) for choice in axis.choices]
        places = [labels.index(as_text(value)) for value in drawn]
        _draw_points(panel, places, trials)
        _label_choices(panel, labels)
    panel.grid(alpha=0.3)


def _number(value: Value) -> float:
    """Return a value that was drawn from a range."""
    assert isinstance(value, (int, float))
    return value


def _draw_points(panel: Axes, places: Sequence[float], trials: _Trials) -> None:
    """Draw the complete trials at their places, and a star at the best one."""
    panel.plot(places, trials.values, "o", color=_BLUE)
    if trials.best is not None:
        _draw_star(panel, places[trials.best], trials.values[trials.best])


def _label_choices(panel: Axes, labels: Sequence[str]) -> None:
    """Label the choices of a parameter; turn labels that are too long for a panel."""
    shown = []
    for label in labels:
        short = textwrap.shorten(label, _LETTERS, placeholder="...")
        shown.append(_plain(short))
    places = range(len(labels))
    if sum(map(len, labels)) > _LETTERS:
        panel.set_xticks(places, shown, rotation=30, ha="right")
    else:
        panel.set_xticks(places, shown, rotation=0, ha="center")
    # All choices, also those that no trial has had.
    panel.set_xlim(-0.5, len(labels) - 0.5)


def _plain(text: str) -> str:
    """Return text that matplotlib does not read as mathematics."""
    return text.replace("$", r"\$")

"""Results of a sweep as one picture: history, importances, and the value over each parameter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from recipe.files import replacing
from tools.sweeping.candidates import as_text
from tools.sweeping.definition import Axis, Definition
from tools.sweeping.leaderboard import best
from tools.sweeping.trials import COMPLETE, PRUNED, Record

_COLUMNS = 3
_SIDE = 3.4  # of a panel, inches
_MARGIN = 0.05  # at either end of a range
_TICKS = 4  # parts of a range
_BLUE, _ORANGE, _GREY = "#0072b2", "#f0a30a", "#9a9a9a"  # Okabe and Ito's, which all eyes tell apart


def draw(
    path: Path, name: str, records: Sequence[Record], definition: Definition, importances: Optional[Dict[str, float]]
) -> None:
    """Writes the picture.

    Args:
        name: of the sweep.
        importances: by parameter; None: too few trials to say.
    """
    from matplotlib.figure import Figure

    complete = [each for each in records if each.state == COMPLETE]
    lines = math.ceil((2 + len(definition.space)) / _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * _SIDE * 1.15, lines * _SIDE), layout="constrained")
    axes = figure.subplots(lines, _COLUMNS, squeeze=False).flat
    figure.suptitle(f"{name}: {definition.metric} of {len(complete)} complete trials".replace("$", r"\$"))
    _history(next(axes), records, definition)
    _shares(next(axes), definition, importances)
    winner = best(records, definition)
    for key, axis in definition.space.items():
        _parameter(next(axes), key, axis, complete, winner, definition.metric)
    for empty in axes:
        empty.set_axis_off()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def _history(panel: Any, records: Sequence[Record], definition: Definition) -> None:
    complete = [each for each in records if each.state == COMPLETE]
    panel.plot([each.number for each in complete], [each.value for each in complete], "o", color=_BLUE, label="trial")
    better = min if definition.direction == "minimize" else max
    values = [each.value for each in complete]
    so_far = [better(values[: count + 1]) for count in range(len(values))]
    panel.step([each.number for each in complete], so_far, where="post", color=_ORANGE, label="best so far")
    pruned = [each.number for each in records if each.state == PRUNED]
    for number in pruned:
        panel.axvline(number, color=_GREY, lw=0.8, ls=":", label="pruned" if number == pruned[0] else None)
    panel.set(title="history", xlabel="trial", ylabel=definition.metric)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def _shares(panel: Any, definition: Definition, importances: Optional[Dict[str, float]]) -> None:
    panel.set(title="importance (PED-ANOVA)", xlim=(0, 1))
    if importances is None:
        panel.text(0.5, 0.5, "too few different values\nto say what mattered", ha="center", va="center")
        panel.set_yticks([])
        return
    names = sorted(importances, key=importances.__getitem__)
    panel.barh(names, [importances[name] for name in names], color=_BLUE)
    panel.tick_params(axis="y", labelsize=8)


def _parameter(panel: Any, key: str, axis: Axis, complete: List[Record], winner: Optional[Record], metric: str) -> None:
    panel.set(title=key, ylabel=metric)
    panel.grid(alpha=0.3)
    if axis.choices is not None:
        labels = [as_text(choice) for choice in axis.choices]
        panel.set_xticks(range(len(labels)), [label.replace("$", r"\$") for label in labels])
        panel.set_xlim(-0.5, len(labels) - 0.5)

        def place(record: Record) -> float:
            return labels.index(as_text(record.parameters[key]))
    else:
        _range(panel, axis)

        def place(record: Record) -> float:
            return float(record.parameters[key])

    panel.plot([place(each) for each in complete], [each.value for each in complete], "o", color=_BLUE, alpha=0.7)
    if winner is not None:
        panel.plot([place(winner)], [winner.value], "o", color=_ORANGE, ms=9)


def _range(panel: Any, axis: Axis) -> None:
    """All of what could be drawn, so that what was left out is seen."""
    low, high = axis.low, axis.high
    if axis.log:
        panel.set_xscale("log")
        margin = (high / low) ** _MARGIN
        panel.set_xlim(low / margin, high * margin)
        # The ends and what lies between them in equal ratios: powers of ten alone say little of a narrow range.
        ticks = [low * (high / low) ** (part / _TICKS) for part in range(_TICKS + 1)]
        panel.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
        panel.set_xticks([], minor=True)
    else:
        panel.set_xlim(low - _MARGIN * (high - low), high + _MARGIN * (high - low))
        panel.locator_params(axis="x", nbins=_TICKS + 1)

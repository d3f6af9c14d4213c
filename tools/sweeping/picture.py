"""Results of a sweep as one picture: history, importances, and the value over each parameter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from recipe.files import replacing
from tools.sweeping.candidates import as_text
from tools.sweeping.definition import Axis, SweepFile
from tools.sweeping.trials import COMPLETE, PRUNED, Record

_COLUMNS = 3
_SIDE = 3.4  # of a panel, inches
_TICKS = 4  # intervals on a logarithmic axis
_BLUE, _ORANGE, _GREY = "#0072b2", "#f0a30a", "#9a9a9a"  # by Okabe and Ito, distinct for colour-blind readers


def draw(
    path: Path,
    sweep: SweepFile,
    records: Sequence[Record],
    importances: Optional[Dict[str, float]],  # by parameter; None: too few trials
) -> None:
    from matplotlib.figure import Figure

    definition = sweep.definition
    complete = [each for each in records if each.state == COMPLETE]
    better = min if definition.direction == "minimize" else max
    best = better(complete, key=lambda each: each.value, default=None)
    lines = math.ceil((2 + len(definition.space)) / _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * _SIDE * 1.15, lines * _SIDE), layout="constrained")
    axes = figure.subplots(lines, _COLUMNS, squeeze=False).flat
    figure.suptitle(f"{sweep.name}: {definition.metric} of {len(complete)} complete trials".replace("$", r"\$"))
    _history(next(axes), complete, [each for each in records if each.state == PRUNED], definition.metric, better)
    _importances(next(axes), importances)
    for key, axis in definition.space.items():
        panel = next(axes)
        panel.set(title=key, ylabel=definition.metric)
        _values_over(panel, key, axis, complete, best)
    for empty in axes:
        empty.set_axis_off()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def _history(panel: Any, complete: List[Record], pruned: List[Record], metric: str, better: Callable) -> None:
    numbers, values = [each.trial for each in complete], [each.value for each in complete]
    panel.plot(numbers, values, "o", color=_BLUE, label="trial")
    so_far = [better(values[: count + 1]) for count in range(len(values))]
    panel.step(numbers, so_far, where="post", color=_ORANGE, label="best so far")
    if pruned:
        panel.plot([each.trial for each in pruned], [each.value for each in pruned], "x", color=_GREY, label="pruned")
    panel.set(title="history", xlabel="trial", ylabel=metric)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def _importances(panel: Any, importances: Optional[Dict[str, float]]) -> None:
    panel.set(title="importance (PED-ANOVA)", xlim=(0, 1))
    if importances is None:
        panel.text(0.5, 0.5, "too few different values\nto say what mattered", ha="center", va="center")
        panel.set_yticks([])
        return
    names = sorted(importances, key=importances.__getitem__)
    panel.barh(names, [importances[name] for name in names], color=_BLUE)
    panel.tick_params(axis="y", labelsize=8)


def _values_over(panel: Any, key: str, axis: Axis, complete: List[Record], best: Optional[Record]) -> None:
    """Values over a parameter; the axis shows the whole range, also where nothing was drawn."""
    labels = [as_text(choice) for choice in axis.choices or ()]

    def place(record: Record) -> float:
        value = record.parameters[key]
        return labels.index(as_text(value)) if labels else float(value)

    if labels:
        panel.set_xticks(range(len(labels)), [label.replace("$", r"\$") for label in labels])
        panel.set_xlim(-0.5, len(labels) - 0.5)
    else:
        panel.set_xscale("log" if axis.log else "linear")
        panel.axvspan(axis.low, axis.high, alpha=0)
    if axis.log:
        # Powers of ten alone show little of a narrow range.
        ticks = [axis.low * (axis.high / axis.low) ** (part / _TICKS) for part in range(_TICKS + 1)]
        panel.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
        panel.set_xticks([], minor=True)
    panel.grid(alpha=0.3)
    panel.plot([place(each) for each in complete], [each.value for each in complete], "o", color=_BLUE, alpha=0.7)
    if best is not None:
        panel.plot([place(best)], [best.value], "o", color=_ORANGE, ms=9)

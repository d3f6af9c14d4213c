"""Results of a sweep as one picture: history, importances, and the value over each parameter."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, Dict, Optional, Sequence

from recipe.files import replacing
from tools.sweeping.candidates import as_text
from tools.sweeping.definition import Axis, SweepFile
from tools.sweeping.trials import COMPLETE, PRUNED, Record

_COLUMNS = 3
_SIDE = 3.4  # of a panel, inches
_BLUE, _ORANGE, _GREY = "#0072b2", "#f0a30a", "#9a9a9a"  # by Okabe and Ito, distinct for colour-blind readers


def draw(
    path: Path,
    sweep: SweepFile,
    records: Sequence[Record],
    importances: Optional[Dict[str, float]],  # by parameter; None: too few trials
) -> None:
    from matplotlib.figure import Figure

    metric, space = sweep.definition.metric, sweep.definition.space
    complete, pruned = ([each for each in records if each.state == state] for state in (COMPLETE, PRUNED))
    better = min if sweep.definition.direction == "minimize" else max
    lines = math.ceil((2 + len(space)) / _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * _SIDE * 1.15, lines * _SIDE), layout="constrained")
    figure.suptitle(f"{sweep.name}: {metric} of {len(complete)} complete trials".replace("$", r"\$"))
    history, importance, *panels = figure.subplots(lines, _COLUMNS, squeeze=False).flat
    numbers, values = [each.trial for each in complete], [each.value for each in complete]
    history.plot(numbers, values, "o", color=_BLUE, label="trial")
    best_so_far = list(itertools.accumulate(values, better))
    history.step(numbers, best_so_far, where="post", color=_ORANGE, label="best so far")
    history.plot([each.trial for each in pruned], [each.value for each in pruned], "x", color=_GREY, label="pruned")
    history.set(title="history", xlabel="trial", ylabel=metric)
    history.xaxis.get_major_locator().set_params(integer=True)
    history.legend(fontsize=8)
    importance.set(title="importance (PED-ANOVA)", xlim=(0, 1))
    if importances is None:
        importance.text(0.5, 0.5, "too few different values\nto say what mattered", ha="center", va="center")
    for name, share in sorted((importances or {}).items(), key=lambda pair: pair[1]):
        importance.barh(name, share, color=_BLUE)
    best = better(complete, key=lambda each: each.value, default=None)
    for (key, axis), panel in zip(space.items(), panels):
        panel.set(title=key, ylabel=metric)
        _values_over(panel, key, axis, complete, color=_BLUE, alpha=0.7)
        _values_over(panel, key, axis, [best] if best else [], color=_ORANGE, markersize=9)
    for panel in panels[len(space) :]:
        panel.set_axis_off()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def _values_over(panel: Any, key: str, axis: Axis, records: Sequence[Record], **style: Any) -> None:
    """Values over a parameter; the axis shows the whole range, also where nothing was drawn."""
    labels = [as_text(choice) for choice in axis.choices or ()]
    places = [each.parameters[key] for each in records]
    if labels:
        places = [labels.index(as_text(value)) for value in places]
        panel.set_xticks(range(len(labels)), [label.replace("$", r"\$") for label in labels])
        panel.set_xlim(-0.5, len(labels) - 0.5)
    else:
        panel.set_xscale("log" if axis.log else "linear")
        panel.axvspan(axis.low, axis.high, alpha=0)
    panel.grid(alpha=0.3)
    panel.plot(places, [each.value for each in records], "o", **style)

"""A step as a picture: its parts, now and after the next doubling of replicas, and how long each rank computes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Dict

from recipe.division import count
from tools.diagnosis.examination import Findings
from tools.diagnosis.rendering import PARTS
from tools.planning.picture import COLOURS

_MOST_RANKS = 64
_COLOURS = {**COLOURS, "rest": "#4d4d4d"}


def draw(found: Findings, config: str, output: Path) -> None:
    """Write a PNG. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    steps, ranks = figure.subplots(2, 1, height_ratios=(2, 1.4))
    bars = {f"{count(found.batch.replicas, 'replica')},\nmeasured": found.parts}
    if found.doubling is not None:
        row = found.doubling
        images = f"\nbatch {row.global_batch}" if row.grown else ""
        bars[f"{count(row.replicas, 'replica')},\npredicted{images}"] = row.parts
    for place, parts in enumerate(bars.values()):
        _stack(steps, place, parts)
    steps.set_yticks(range(len(bars)), list(bars))
    steps.invert_yaxis()
    steps.set_xlabel("milliseconds of a step")
    shown = [name for name in PARTS if any(parts.get(name, 0.0) > 0 for parts in bars.values())]
    handles = [steps.barh(0, 0, color=_COLOURS[name], label=PARTS[name][0]) for name in shown]
    steps.legend(handles=handles, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)
    steps.set_title(f"{config}: {found.images_per_second:,.0f} images/s", loc="left", parse_math=False)
    rows = found.ranks[:_MOST_RANKS]
    numbers, means = [row.rank for row in rows], [1e3 * row.mean for row in rows]
    deviations = [1e3 * row.deviation for row in rows]
    ranks.bar(numbers, means, yerr=deviations, color=_COLOURS["compute"], width=0.6, capsize=3)
    ranks.set_xticks(numbers if len(numbers) <= 16 else numbers[:: len(numbers) // 8])
    ranks.set(xlabel="rank", ylabel="ms", xlim=(min(numbers) - 1, max(numbers) + 1))
    micro_batches = count(found.times.shape.accumulation, "micro batch", "micro batches")
    title = f"forward and backward passes of {micro_batches}, mean and deviation over steps"
    ranks.set_title(title, loc="left", fontsize=10)
    figure.suptitle(textwrap.fill(found.advice.text, 120), fontsize=9, x=0.01, ha="left", parse_math=False)
    figure.savefig(output, dpi=110)


def _stack(axis, place: int, parts: Dict[str, float]) -> None:
    """One bar, with the share of each part in it that is wide enough."""
    left, total = 0.0, sum(max(0.0, seconds) for seconds in parts.values())
    for name in PARTS:
        seconds = max(0.0, parts.get(name, 0.0))
        axis.barh(place, 1e3 * seconds, left=1e3 * left, color=_COLOURS[name], height=0.6)
        if seconds > 0.04 * total:
            colour = "w" if name in ("compute", "exchange", "update", "rest") else "k"
            text = f"{100 * seconds / sum(parts.values()):.0f} %"
            axis.text(1e3 * (left + seconds / 2), place, text, ha="center", va="center", color=colour)
        left += seconds

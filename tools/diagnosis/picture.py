"""A step as a picture: its parts, now and after the next doubling of replicas, and how long each rank computes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Dict, NamedTuple

from recipe.division import count
from tools.diagnosis.examination import Findings
from tools.planning.picture import COLOURS

_MOST_RANKS = 64


class Look(NamedTuple):
    """A part of a step in a terminal and in a picture. style: colours of a terminal, which letters replace in black and
    white."""

    letter: str
    words: str
    style: str
    colour: str


# In the order of `splitting.PARTS`.
LOOKS = {
    "compute": Look("C", "computing, forward and backward", "white on blue", COLOURS["compute"]),
    "input": Look("I", "waiting for images", "black on yellow", COLOURS["input"]),
    "imbalance": Look("M", "imbalance of the stages", "black on cyan", COLOURS["imbalance"]),
    "bubble": Look("B", "pipeline filling and emptying", "black on white", COLOURS["bubble"]),
    "exchange": Look("X", "exchange that is not hidden", "white on red", COLOURS["exchange"]),
    "straggling": Look("S", "waiting for slower ranks", "white on magenta", COLOURS["straggling"]),
    "update": Look("U", "update", "black on green", COLOURS["update"]),
    "rest": Look("r", "rest, in no part", "white on black", "#4d4d4d"),
}


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
    shown = [name for name in LOOKS if any(parts.get(name, 0.0) > 0 for parts in bars.values())]
    handles = [steps.barh(0, 0, color=LOOKS[name].colour, label=LOOKS[name].words) for name in shown]
    steps.legend(handles=handles, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)
    title = f"{config}: {found.images_per_second:,.0f} images/s"
    steps.set_title(title, loc="left", parse_math=False)
    _draw_ranks(ranks, found)
    figure.suptitle(textwrap.fill(found.advice.text, 120), fontsize=9, x=0.01, ha="left", parse_math=False)
    figure.savefig(output, dpi=110)


def _stack(axis, place: int, parts: Dict[str, float]) -> None:
    """One bar, with the share of each part in it that is wide enough."""
    left, total = 0.0, sum(max(0.0, seconds) for seconds in parts.values())
    for name, look in LOOKS.items():
        seconds = max(0.0, parts.get(name, 0.0))
        axis.barh(place, 1e3 * seconds, left=1e3 * left, color=look.colour, height=0.6)
        if seconds > 0.04 * total:
            colour = "w" if name in ("compute", "exchange", "update", "rest") else "k"
            text = f"{100 * seconds / sum(parts.values()):.0f} %"
            axis.text(1e3 * (left + seconds / 2), place, text, ha="center", va="center", color=colour)
        left += seconds


def _draw_ranks(axis, found: Findings) -> None:
    rows = found.ranks[:_MOST_RANKS]
    numbers, means = [row.rank for row in rows], [1e3 * row.mean for row in rows]
    deviations = [1e3 * row.deviation for row in rows]
    axis.bar(numbers, means, yerr=deviations, color=LOOKS["compute"].colour, width=0.6, capsize=3)
    axis.set_xticks(numbers if len(numbers) <= 16 else numbers[:: len(numbers) // 8])
    micro_batches = count(found.times.shape.accumulation, "micro batch", "micro batches")
    title = f"forward and backward passes of {micro_batches}, mean and deviation over steps"
    axis.set(xlabel="rank", ylabel="ms", xlim=(min(numbers) - 1, max(numbers) + 1))
    axis.set_title(title, loc="left", fontsize=10)

"""A step as a picture: its parts, now and after the next doubling of replicas, and how long each rank computes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

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
    """Writes a PNG. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    steps, ranks = figure.subplots(2, 1, height_ratios=(2, 1.4))
    bars = _bars(found)
    for place, (_, parts) in enumerate(bars):
        _stack(steps, place, parts)
    steps.set_yticks(range(len(bars)), [label for label, _ in bars])
    steps.invert_yaxis()
    steps.set_xlabel("milliseconds of a step")
    shown = [name for name in LOOKS if any(parts.get(name, 0.0) > 0 for _, parts in bars)]
    handles = [steps.barh(0, 0, color=LOOKS[name].colour, label=LOOKS[name].words) for name in shown]
    steps.legend(handles=handles, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.22), frameon=False)
    steps.set_title(f"{config.replace('$', chr(92) + '$')}: {found.images_per_second:,.0f} images/s", loc="left")
    _draw_ranks(ranks, found)
    advice = textwrap.fill(found.advice.text.replace("$", r"\$"), 120)
    figure.suptitle(advice, fontsize=9, x=0.01, ha="left")
    figure.savefig(output, dpi=110)


def _bars(found: Findings) -> List[Tuple[str, Dict[str, float]]]:
    bars = [(f"{count(found.batch.replicas, 'replica')},\nmeasured", found.parts)]
    if found.doubling is not None:
        row = found.doubling
        images = f"\nbatch {row.global_batch}" if row.grown else ""
        bars.append((f"{count(row.replicas, 'replica')},\npredicted{images}", row.parts))
    return bars


def _stack(axis, place: int, parts: Dict[str, float]) -> None:
    """One bar, with the share of each part in it that is wide enough."""
    left, total = 0.0, sum(max(0.0, seconds) for seconds in parts.values())
    for name, look in LOOKS.items():
        seconds = max(0.0, parts.get(name, 0.0))
        axis.barh(place, 1e3 * seconds, left=1e3 * left, color=look.colour, height=0.6)
        if seconds > 0.04 * total:
            dark = name in ("compute", "exchange", "update", "rest")
            text = f"{100 * seconds / sum(parts.values()):.0f} %"
            axis.text(1e3 * (left + seconds / 2), place, text, ha="center", va="center", color="w" if dark else "k")
        left += seconds


def _draw_ranks(axis, found: Findings) -> None:
    rows = found.ranks[:_MOST_RANKS]
    numbers = [row.rank for row in rows]
    deviations = [1e3 * row.deviation for row in rows]
    axis.bar(
        numbers, [1e3 * row.mean for row in rows], yerr=deviations, color=LOOKS["compute"].colour, width=0.6, capsize=3
    )
    axis.set_xticks(numbers if len(numbers) <= 16 else numbers[:: len(numbers) // 8])
    axis.set_xlim(min(numbers) - 1, max(numbers) + 1)
    micro_batches = found.times.shape.accumulation
    axis.set(xlabel="rank", ylabel="ms")
    title = f"forward and backward passes of {count(micro_batches, 'micro batch', 'micro batches')}"
    axis.set_title(f"{title}, mean and deviation over steps", loc="left", fontsize=10)

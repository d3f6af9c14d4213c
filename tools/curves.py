"""Draws the curves of one or more runs: python -m tools.curves RUN_FOLDER... --output FILE.png"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

from pathlib import Path
from typing import List, Optional

from recipe.errors import DONE
from recipe.files import writing
from tools import output as outputs
from training.command import Parser, one_line
from training.metrics import read_events

_PANELS = (("loss", "log"), ("top-1 accuracy", "linear"), ("learning rate", "linear"), ("norms", "log"))


def draw(folders: List[Path], output: Path) -> None:
    """Loss, accuracy, learning rate and norms over epochs, a colour per run; training thin, evaluation bold."""
    figure = outputs.figure(output, (11, 6.5))
    axes = dict(zip(("loss", "top1", "lr", "norms"), figure.subplots(2, 2).flat))
    for number, folder in enumerate(folders):
        events, colour = read_events(folder), f"C{number}"
        train, evaluation = events.get("train", []), events.get("eval", [])
        for key in ("loss", "top1", "lr"):
            _line(axes[key], train, key, color=colour, lw=1, alpha=0.6, label=None if number else "training")
        for key in ("loss", "top1"):
            label = folder.name if len(folders) > 1 else "validation"
            _line(axes[key], evaluation, key, color=colour, lw=2, label=label)
        for name, style in (("weight", "-"), ("gradient", "--"), ("update", ":")):
            _line(axes["norms"], train, f"{name}_norm", color=colour, ls=style, label=None if number else name)
    for axis, (title, scale) in zip(axes.values(), _PANELS):
        axis.set(title=title, xlabel="epoch", yscale=scale)
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    with writing(output):
        figure.savefig(output, dpi=110)


def _line(axis, events: List[dict], key: str, **style) -> None:
    found = [(event.get("epoch"), event.get(key)) for event in events]
    points = [point for point in found if all(type(each) in (int, float) for each in point)]
    # Of a single value a line shows nothing.
    marker = "o" if len(points) == 1 else None
    axis.plot([epoch for epoch, _ in points], [value for _, value in points], marker=marker, **style)


@one_line()
def main(arguments: Optional[List[str]] = None) -> int:
    """Runs the command; returns its exit code."""
    parser = Parser(prog="python -m tools.curves", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), metavar="FILE.png")
    options = parser.parse_args(arguments)
    draw(options.folders, options.output)
    print(options.output)
    return DONE

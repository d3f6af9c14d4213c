"""Draws the curves of one or more runs: python -m tools.curves RUN_FOLDER... --output FILE.png"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from common.command import run

    run(__file__)

from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional

from common.command import Parser, one_line
from common.errors import DONE
from tools import output as outputs
from training.metrics import read_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Key, title and scale of each panel.
_PANELS = (
    ("loss", "loss", "log"),
    ("top1", "top-1 accuracy", "linear"),
    ("lr", "learning rate", "linear"),
    ("norms", "norms", "log"),
)
_NORM_STYLES = (("weight", "-"), ("gradient", "--"), ("update", ":"))


def draw(folders: List[Path], output: Path) -> None:
    """Draw loss, accuracy, learning rate and norms over epochs, a colour per run.

    Training is drawn thin, evaluation bold.

    Args:
        folders: of the runs.
        output: the picture.

    Raises:
        UserError: a run cannot be read, or the name is that of no kind of picture.
    """
    figure = outputs.figure(output, (11, 6.5))
    keys = [key for key, _, _ in _PANELS]
    panels = dict(zip(keys, figure.subplots(2, 2).flat))
    for number, folder in enumerate(folders):
        name = folder.name if len(folders) > 1 else "validation"
        _draw_run(panels, folder, number, name)
    for key, title, scale in _PANELS:
        panel = panels[key]
        panel.set(title=title, xlabel="epoch", yscale=scale)
        panel.grid(alpha=0.3)
        # matplotlib warns about a legend without entries.
        handles, _ = panel.get_legend_handles_labels()
        if handles:
            panel.legend(fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    outputs.save(figure, output)


def _draw_run(panels: Dict[str, Axes], folder: Path, number: int, name: str) -> None:
    """Draw run `number`; its evaluation has the `name` in the legend."""
    events = read_events(folder)
    train = events.get("train", [])
    evaluation = events.get("eval", [])
    colour = f"C{number}"
    # Styles mean the same in all runs: the first one explains them.
    is_first = number == 0
    # Evaluations have no learning rate, and no norms.
    for key in ("loss", "top1", "lr"):
        label = "training" if is_first else None
        _draw_line(panels[key], train, key, color=colour, lw=1, alpha=0.6, label=label)
    for key in ("loss", "top1"):
        _draw_line(panels[key], evaluation, key, color=colour, lw=2, label=name)
    for norm, style in _NORM_STYLES:
        label = norm if is_first else None
        _draw_line(panels["norms"], train, f"{norm}_norm", color=colour, ls=style, label=label)


def _draw_line(panel: Axes, events: List[dict], key: str, **style: Any) -> None:
    """Draw a value of events over their epochs, without events that lack one of them."""
    epochs = []
    values = []
    for event in events:
        epoch = _number(event.get("epoch"))
        value = _number(event.get(key))
        if epoch is not None and value is not None:
            epochs.append(epoch)
            values.append(value)
    # A line through a single value is invisible.
    marker = "o" if len(values) == 1 else None
    panel.plot(epochs, values, marker=marker, **style)


def _number(value: object) -> Optional[float]:
    """Return an entry of an event if it is a number, which true and false are not."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    return None


@one_line()
def main(arguments: Optional[List[str]] = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None: those of the process.

    Returns:
        The exit code.
    """
    parser = Parser(prog="python -m tools.curves", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--output", type=Path, default=Path("curves.png"), metavar="FILE.png")
    options = parser.parse_args(arguments)
    draw(options.folders, options.output)
    print(options.output)
    return DONE

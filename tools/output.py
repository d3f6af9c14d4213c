"""Pictures that commands write; whether they can is checked before the work that they show."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Sequence, Tuple

from common.errors import ConfigError
from common.files import check_file, replacing
from tools import packages

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_DOTS = 110  # of an inch
_TICKS = 5  # labels of an axis of a small panel: more overlap
# Multiples of a power of ten that a logarithmic axis labels, from the densest set to the sparsest.
_MULTIPLES = ((1, 2, 5), (1, 3), (1,))


def check_picture(path: Path, made: Optional[Path] = None) -> None:
    """Check that a picture can be written, without making it.

    Args:
        path: of the picture, named by `--picture`.
        made: folder that the command makes before it draws, if any.

    Raises:
        ConfigError: it cannot, the name is that of no kind of picture, or matplotlib is not
            installed.
        OSError: the disk is full, which blames no input.
    """
    option = "--picture"
    figure(path, (1, 1))
    will_be_there = made is not None and path.parent.resolve() == made.resolve()
    if not will_be_there and not path.parent.exists():
        fault = f"{path}: there is no folder {path.parent}"
        raise ConfigError(f"{fault}; make it, or name another file by {option}")
    check_file(path, option)


def figure(path: Path, size: Tuple[float, float]) -> Figure:
    """Return an empty figure that is to be saved as a picture.

    Args:
        path: of the picture.
        size: width and height in inches.

    Raises:
        ConfigError: the name is that of no kind of picture, or matplotlib is not installed.
    """
    packages.check(str(path), "matplotlib")
    # Imported late: it takes half a second, in commands that may draw nothing.
    from matplotlib.figure import Figure

    empty = Figure(figsize=size, layout="constrained")
    if path.suffix.lstrip(".") not in empty.canvas.get_supported_filetypes():
        raise ConfigError(f"{path}: no kind of picture; name it like {path.stem}.png")
    return empty


def save(picture: Figure, path: Path) -> None:
    """Save a picture, whole or not at all: people look at the old one while it is drawn anew.

    Args:
        picture: an own `figure`.
        path: of its file.

    Raises:
        OSError: as the disk does.
    """
    with replacing(path) as temporary:
        # The name of the temporary file does not say what it is.
        picture.savefig(temporary, dpi=_DOTS, format=path.suffix.lstrip("."))


def few_ticks(axis: Axis) -> None:
    """Give an axis at most five labels, which do not overlap.

    matplotlib labels every minor tick of a logarithmic axis that spans less than a decade.

    Args:
        axis: whose scale and limits are set.
    """
    from matplotlib import ticker

    if axis.get_scale() != "log":
        axis.set_major_locator(ticker.MaxNLocator(_TICKS))
        return
    labels = _round_numbers(*sorted(axis.get_view_interval()))
    if len(labels) > 1:
        every = -(-len(labels) // _TICKS)
        axis.set_major_locator(ticker.FixedLocator(labels[::every]))
    else:
        # Within less than an octave there may be no such number.
        axis.set_major_locator(ticker.MaxNLocator(_TICKS))
    # matplotlib's own formatters write powers of ten, and label minor ticks between these.
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _round_numbers(low: float, high: float) -> List[float]:
    """Return the densest multiples of powers of ten that are few enough, else the sparsest."""
    for multiples in _MULTIPLES:
        numbers = _multiples_within(multiples, low, high)
        if len(numbers) <= _TICKS:
            break
    return numbers


def _multiples_within(multiples: Sequence[int], low: float, high: float) -> List[float]:
    """Return these multiples of all powers of ten from `low` to `high`, ascending."""
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    numbers = []
    for power in range(first, last + 1):
        numbers += [multiple * 10.0**power for multiple in multiples]
    return [number for number in numbers if low <= number <= high]

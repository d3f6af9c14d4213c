"""Files that commands write: pictures, and whether a file can be written, checked before the work that makes it."""

from __future__ import annotations

import errno
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Tuple

from recipe.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_TICKS = 5  # labels of an axis of a small panel: more overlap


def check(path: Path) -> None:
    """Check that a file can be written, without making it or its folders.

    Raises ConfigError if not, and OSError, which blames no input, if the disk is full.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; name a file in it by --output")
        tempfile.TemporaryFile(dir=next(each for each in path.absolute().parents if each.exists())).close()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; name another file by --output") from None


def figure(path: Path, size: Tuple[float, float]) -> Figure:
    """Return an empty figure of `size` inches to be saved as `path`. Raises ConfigError for the name of no picture."""
    from matplotlib.figure import Figure

    empty = Figure(figsize=size, layout="constrained")
    if path.suffix.lstrip(".") not in empty.canvas.get_supported_filetypes():
        raise ConfigError(f"{path}: no kind of picture; name it like {path.stem}.png")
    return empty


def few_ticks(axis: Axis) -> None:
    """Give an axis, whose scale and limits are set, at most five labels, which do not overlap: matplotlib labels every
    minor tick of a logarithmic axis that spans less than a decade."""
    from matplotlib import ticker

    if axis.get_scale() != "log":
        axis.set_major_locator(ticker.MaxNLocator(_TICKS))
        return
    low, high = sorted(axis.get_view_interval())
    for steps in ((1, 2, 5), (1, 3), (1,)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        places = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(places) <= _TICKS:
            break
    every = -(-len(places) // _TICKS)
    # Within less than an octave no such number may lie.
    locator = ticker.FixedLocator(places[::every]) if len(places) > 1 else ticker.MaxNLocator(_TICKS)
    axis.set_major_locator(locator)
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())

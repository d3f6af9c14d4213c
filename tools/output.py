"""Files that commands write: pictures, and whether a file can be written, checked before the work that makes it."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Tuple

from recipe.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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

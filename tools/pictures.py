"""Pictures that commands write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Tuple

from recipe.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(path: Path, size: Tuple[float, float], example: str) -> Figure:
    """Return an empty figure to be saved as `path`.

    Args:
        size: width and height in inches. example: a name that is right.

    Raises:
        UserError: the name is that of no kind of picture.
    """
    from matplotlib.figure import Figure

    empty = Figure(figsize=size, layout="constrained")
    if path.suffix.lstrip(".") not in empty.canvas.get_supported_filetypes():
        raise UserError(f"{path}: no kind of picture; name it like {example}")
    return empty

"""What a target is: something that reads files."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, List, NamedTuple, Tuple, Type

from recipe.errors import UserError


class Target(NamedTuple):
    """Something that reads files.

    seeds: whole files, given a folder to work in. read: of damaged bytes, in that folder. refuses: what it may raise.
    share: of all inputs.
    """

    seeds: Callable[[Path], List[bytes]]
    read: Callable[[bytes, Path], None]
    refuses: Tuple[Type[Exception], ...] = (UserError,)
    share: float = 0.1

"""Whether a file can be written, asked before the work that makes it."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from recipe.errors import ConfigError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDY = "name another file by --output"


def check(path: Path) -> None:
    """Leaves nothing behind: neither a file nor the folders that are still to be made.

    Raises:
        ConfigError: `path` is a folder, or its folder can neither be written nor be made.
        OSError: the disk is full.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; name a file in it by --output")
        folder = next(each for each in path.absolute().parents if each.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in _FULL:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; {_REMEDY}") from None

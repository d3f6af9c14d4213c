"""Whether a file can be written, checked before the work that makes it."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

from recipe.errors import ConfigError


def check(path: Path) -> None:
    """Check that a file can be written, without making it or its folders.

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
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise ConfigError(f"{path}: cannot be written: {error.strerror}; name another file by --output") from None

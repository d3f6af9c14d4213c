"""Files that are there whole or not at all, and folders that are still the same. Loads nothing heavy."""

from __future__ import annotations

import contextlib
import errno
import os
import zipfile
from pathlib import Path
from typing import Iterator, Union


def stored_plainly(archive: zipfile.ZipFile, size: int) -> bool:
    """Whether the members of a zip file of `size` bytes are not compressed: such could swell a thousandfold."""
    entries = archive.infolist()
    plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    return plain and sum(entry.file_size for entry in entries) <= size


def write_text(path: Path, text: str) -> None:
    """Writes a file, in UTF-8, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


def check_same(path: Path, descriptor: int) -> None:
    """Raises OSError unless `path` still leads to what `descriptor` has open.

    What is open keeps its inode's number, so nothing that takes its place can have the same.
    """
    try:
        same = os.path.samestat(os.stat(path), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        same = False
    if not same:
        what = "no longer what this run opened there: it was removed, renamed, replaced or unmounted"
        raise OSError(errno.ESTALE, what, str(path))


@contextlib.contextmanager
def writing(place: Union[str, Path]) -> Iterator[None]:
    """Names `place` in an OSError that names no file: a failed write() does not say where."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(place)
        raise

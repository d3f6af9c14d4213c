"""Files that are there whole or not at all (the one atomic write of the repository), and checks of what is open."""

from __future__ import annotations

import contextlib
import errno
import os
import zipfile
from pathlib import Path
from typing import Iterator, Union


@contextlib.contextmanager
def replacing(path: Path, durable: bool = False, shared: bool = False) -> Iterator[Path]:
    """A path beside `path` to write a file to, which takes the place of `path` once the block ends without an error.

    Args: durable: whether content and name are on the disk then. shared: whether other processes may write this file.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp" if shared else f"{path.name}.tmp")
    try:
        with writing(path):
            yield temporary
            if durable:
                _sync(temporary)
            os.replace(temporary, path)
            if durable:
                _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write(path: Path, content: Union[bytes, memoryview], durable: bool = False) -> None:
    """Write a file whole or not at all; see `replacing`."""
    with replacing(path, durable) as temporary, open(temporary, "wb") as stream:
        stream.write(content)


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, whole or not at all; what UTF-8 has no bytes for is escaped (names of folders)."""
    write(path, text.encode("utf-8", errors="backslashreplace"))


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(place: Union[str, Path]) -> Iterator[None]:
    """Names `place` in an OSError that names no file: a failed write() does not say where."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(place)
        raise


def check_same(path: Path, descriptor: int) -> None:
    """Raises OSError unless `path` still leads to what `descriptor` has open, whose inode nothing else can have."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return
    what = "no longer what this run opened there: it was removed, renamed, replaced or unmounted"
    raise OSError(errno.ESTALE, what, str(path))


def stored_plainly(archive: zipfile.ZipFile, size: int) -> bool:
    """Whether the members of a zip file of `size` bytes are not compressed: such could swell a thousandfold."""
    plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    return plain and sum(entry.file_size for entry in archive.infolist()) <= size

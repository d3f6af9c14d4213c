"""Files that are there whole or not at all (the one atomic write of the repository), bounded reads,
and paths.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import tempfile
import zipfile
from pathlib import Path
from typing import IO, Iterator, Union

from common.errors import DISK_FULL, ConfigError

# A name that starts as an environment variable does in a shell: $HOME, ${SCRATCH}.
_VARIABLE = re.compile(r"(?:^|/)(\$[A-Za-z_]\w*|\$\{\w+\})")


def expanded(path: str) -> str:
    """Return a path with the home folder in the place of a leading `~` or `~user`.

    Raises:
        ValueError: there is no such user, so that the folder would be called `~user`; or the path
            holds a character that no file system has in a name, or an environment variable.
    """
    if "\0" in path:
        raise ValueError("holds the character NUL, which no path can have; remove it")
    # Nobody means a new folder called $HOME. In addresses it is a name: Azure's container $web.
    variable = _VARIABLE.search(path)
    if variable and "://" not in path and not os.path.exists(path):
        name = variable[1].strip("${}")
        raise ValueError(
            f"{variable[1]} is not replaced here; write ${{{name}:-DEFAULT}} in a file, or the path"
        )
    at_home = os.path.expanduser(path)
    if at_home.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(
            f"{user} is no home folder here; correct the path, or write ./{user} for that name"
        )
    return at_home


def user_cache() -> Path:
    """Return the folder of what is kept for this user's later runs on this machine; it may not
    exist yet.
    """
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder, "large-batch-efficientnet")


def open_regular(path: Union[str, bytes, Path]) -> IO[bytes]:
    """Open the file at `path` to be read.

    Raises:
        OSError: it is no regular file, such as a named pipe or a device.
    """
    # Opening a named pipe would otherwise wait until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def read_regular(path: Union[str, bytes, Path], most: int) -> bytes:
    """Read a whole regular file of at most `most` bytes. Raises OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes, above the limit of {most:,}", path)
        return file.read(most)


@contextlib.contextmanager
def replacing(path: Path, durable: bool = False, shared: bool = False) -> Iterator[Path]:
    """Yield a path to write a file to, which takes the place of `path` once the block ends without
    an error.

    Args:
        path: of the file; the other one lies beside it.
        durable: whether content and name are on the disk then.
        shared: whether other processes may write this file.
    """
    # Beside it, as a rename works within one file system only.
    owner = f".{os.getpid()}" if shared else ""
    temporary = path.with_name(f"{path.name}{owner}.tmp")
    try:
        with writing(path):
            yield temporary
            if durable:
                sync(temporary)
            os.replace(temporary, path)
            # The new name is an entry of the folder, which a crash can lose as well.
            if durable:
                sync(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        # Users know the file by its own name.
        if isinstance(error, OSError) and str(error.filename) == str(temporary):
            error.filename = str(path)
        raise


def write(path: Path, content: Union[bytes, memoryview], durable: bool = False) -> None:
    """Write `content` to `path` whole or not at all; see `replacing`."""
    with replacing(path, durable) as temporary, open(temporary, "wb") as stream:
        stream.write(content)


def write_text(path: Path, text: str) -> None:
    """Write `text` to a file in UTF-8, whole or not at all.

    What UTF-8 has no bytes for, in names of folders, is escaped.
    """
    write(path, text.encode("utf-8", errors="backslashreplace"))


def sync(path: Path) -> None:
    """Wait until a file or folder, at `path`, is on the disk."""
    # Also of a folder, which Python cannot open as a file.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(place: Union[str, Path]) -> Iterator[None]:
    """Name `place` in an OSError that names no file: a failed write() does not say where."""
    try:
        yield
    except OSError as error:
        # One without a number is a library's own: with a file its text would be lost.
        if error.filename is None and error.errno is not None:
            error.filename = str(place)
        raise


@contextlib.contextmanager
def checking(place: Path, remedy: str) -> Iterator[None]:
    """Blame the user's choice of `place` for an OSError that comes as the place is tried.

    Args:
        place: of what is to be written.
        remedy: what the user can do.

    Raises:
        ConfigError: it cannot be written.
        OSError: the disk is full, which blames no input.
    """
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise OSError(error.errno, error.strerror, str(place)) from None
        raise ConfigError(f"{place}: cannot be written: {error.strerror}; {remedy}") from None


def check_file(path: Path, option: str = "--output") -> None:
    """Check that a file can be written, without making it or its folders.

    Args:
        path: of the file.
        option: by which it was named.

    Raises:
        ConfigError: it cannot.
        OSError: the disk is full, which blames no input.
    """
    with checking(path, f"name another file by {option}"):
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; name a file in it by {option}")
        # The nearest folder that is there; the others would be made in it.
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        tempfile.TemporaryFile(dir=folder).close()


def check_same(path: Path, descriptor: int) -> None:
    """Raise OSError unless `path` still leads to what `descriptor` has open, whose inode nothing
    else can have.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return
    fault = "no longer what this run opened there: it was removed, renamed, replaced or unmounted"
    raise OSError(errno.ESTALE, fault, str(path))


def stored_plainly(archive: zipfile.ZipFile, size: int) -> bool:
    """Return whether no member of a zip file is compressed: such could swell a thousandfold.

    Args:
        archive: the file.
        size: its bytes.
    """
    entries = archive.infolist()
    is_plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    return is_plain and sum(entry.file_size for entry in entries) <= size

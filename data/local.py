"""Byte ranges of files: the interface of a folder, and folders on this machine."""

import abc
import functools
import os
from typing import List, NamedTuple, Optional, Sequence, Union

from common.errors import DataError
from common.files import read_regular

# Of a folder; a process may have 1,024, and a training process has workers, sockets and logs too.
_OPEN_FILES = 64


class MissingFile(DataError):
    """There is no such file."""


class Range(NamedTuple):
    """Some bytes of a file."""

    name: str
    start: int
    length: int


class Folder(abc.ABC):
    """Files that are read in parts.

    May be shared by threads, copied by a fork and sent to another process.
    """

    place: str  # path or URL
    at_once = 1  # whole files that are worth reading at once; only a server makes readers wait
    most_streams: Optional[int] = None  # files to read from end to end at once; None: any number

    def path(self, name: str) -> str:
        """Return the path or URL of the file `name`, as errors name it."""
        return os.path.join(self.place, name)

    def size(self, name: str) -> Optional[int]:
        """Return the bytes of the file `name`; None where it would take long to find out.

        Raises:
            MissingFile: there is no such file.
            DataError: it cannot be read.
        """
        return None

    @abc.abstractmethod
    def read(self, name: str, most: int) -> bytes:
        """Read a whole file.

        Args:
            name: of the file.
            most: bytes that it may have.

        Raises:
            MissingFile: there is no such file.
            DataError: it cannot be read or is longer.
        """

    @abc.abstractmethod
    def ranges(self, wanted: Sequence[Range]) -> List[Union[bytes, str]]:
        """Read several ranges.

        Args:
            wanted: the ranges, of one file or several.

        Returns:
            Their bytes, in the order of `wanted`; in the place of one that cannot be read, the
            reason.
        """


class LocalFolder(Folder):
    """Files in a folder on this machine."""

    def __init__(self, place: str):
        self.place = place
        # A file that falls out of the cache stays open for whoever still reads it.
        self._opened = functools.lru_cache(_OPEN_FILES)(_File)

    def __reduce__(self) -> tuple:
        # Open files belong to this process; another opens its own.
        return LocalFolder, (self.place,)

    def size(self, name: str) -> int:
        """Return the bytes of the file `name`: see `Folder.size`."""
        try:
            return os.stat(self.path(name)).st_size
        except OSError as error:
            raise _failure(self.path(name), error) from None

    def read(self, name: str, most: int) -> bytes:
        """Read a whole file of at most `most` bytes: see `Folder.read`."""
        try:
            return read_regular(self.path(name), most)
        except OSError as error:
            raise _failure(self.path(name), error) from None

    def ranges(self, wanted: Sequence[Range]) -> List[Union[bytes, str]]:
        """Read the `wanted` ranges: see `Folder.ranges`."""
        return [self._range(requested) for requested in wanted]

    def _range(self, wanted: Range) -> Union[bytes, str]:
        """Return the bytes of a range, or why it cannot be read."""
        try:
            file = self._opened(self.path(wanted.name))
            # At an offset: threads, and processes after a fork, share the position of a file.
            content = os.pread(file.number, wanted.length, wanted.start)
        except OSError as error:
            return error.strerror or type(error).__name__
        if len(content) != wanted.length:
            return "the file ends before the image does"
        return content


class _File:
    """A file that is closed when nobody holds it any more."""

    number = -1  # for __del__, which also runs where opening failed

    def __init__(self, path: str):
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def _failure(path: str, error: OSError) -> DataError:
    """Return the error of a file that cannot be read."""
    kind = MissingFile if isinstance(error, FileNotFoundError) else DataError
    return kind(f"{path}: {error.strerror}")

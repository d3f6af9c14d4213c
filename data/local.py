"""Byte ranges of files: the interface of a folder, and folders on this machine."""

import abc
import functools
import os
from typing import List, NamedTuple, Optional, Sequence, Union

from common.errors import DataError
from common.files import read_regular

_OPEN_FILES = 64  # of a folder; a process may have 1,024, and a training process has workers, sockets and logs too


class MissingFile(DataError):
    """There is no such file."""


class Range(NamedTuple):
    name: str
    start: int
    length: int


class Folder(abc.ABC):
    """Files that are read in parts. May be shared by threads, copied by a fork and sent to another process."""

    place: str  # path or URL

    def path(self, name: str) -> str:
        """Path or URL of a file, as errors name it."""
        return os.path.join(self.place, name)

    def size(self, name: str) -> Optional[int]:
        """Bytes of a file, or None where it would take long to find out. Raises MissingFile, DataError."""
        return None

    @abc.abstractmethod
    def read(self, name: str, most: int) -> bytes:
        """A whole file of at most `most` bytes. Raises MissingFile, DataError: it cannot be read or is longer."""

    @abc.abstractmethod
    def ranges(self, wanted: Sequence[Range]) -> List[Union[bytes, str]]:
        """Several ranges, in the order of `wanted`; in the place of one that cannot be read, the reason."""


class LocalFolder(Folder):
    """Files in a folder on this machine."""

    def __init__(self, place: str):
        self.place = place
        self._opened = functools.lru_cache(_OPEN_FILES)(_File)

    def __reduce__(self) -> tuple:
        return LocalFolder, (self.place,)

    def size(self, name: str) -> int:
        try:
            return os.stat(self.path(name)).st_size
        except OSError as error:
            raise _failure(self.path(name), error) from None

    def read(self, name: str, most: int) -> bytes:
        try:
            return read_regular(self.path(name), most)
        except OSError as error:
            raise _failure(self.path(name), error) from None

    def ranges(self, wanted: Sequence[Range]) -> List[Union[bytes, str]]:
        return [self._range(one) for one in wanted]

    def _range(self, wanted: Range) -> Union[bytes, str]:
        try:
            file = self._opened(self.path(wanted.name))
            # At an offset: threads, and processes after a fork, share the position of a file.
            read = os.pread(file.number, wanted.length, wanted.start)
        except OSError as error:
            return error.strerror or type(error).__name__
        return read if len(read) == wanted.length else "the file ends before the image does"


class _File:
    """A file that is closed when nobody holds it any more."""

    number = -1

    def __init__(self, path: str):
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def _failure(path: str, error: OSError) -> DataError:
    kind = MissingFile if isinstance(error, FileNotFoundError) else DataError
    return kind(f"{path}: {error.strerror}")

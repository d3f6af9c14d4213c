"""Byte ranges of files behind a URL, by fsspec: object stores, web servers, caches before them.

Imported only where a place is a URL. Nothing is ever listed. Whatever a server does, each call
comes to an end.
"""

import os
import threading
import time
from typing import Any, Dict, List, Optional, Sequence, Set, Union

from common import credentials
from common.errors import DataError
from data.local import Folder, MissingFile, Range
from recipe.randomness import bits32, key

_NO_FSSPEC = "data.root is a URL, for which the package fsspec is needed: pip install fsspec"

try:
    import fsspec
    import fsspec.asyn
except ImportError:
    raise DataError(_NO_FSSPEC) from None

_TRIES = 3
_PAUSE = 0.5  # seconds before the second try, about; twice that before the third
_PATIENCE = 8.0  # seconds that a server gets to answer,
_LITTLE_PATIENCE = 0.5  # where it has not for the same file before, and
_RATE = 1e6  # bytes a second that it must give at least
_PIECE = 2**18  # bytes of a whole file that are requested at once
_PATIENCE_WITH_CACHES = 120.0  # seconds: before they answer at all, they may fetch a whole shard
_FINAL = (FileNotFoundError, PermissionError)  # answers that another try would not change
_FORBIDDEN = (401, 403)  # HTTP status


class RemoteFolder(Folder):
    """Files behind a URL.

    A failed request is tried three times, with pauses. If that was in vain for a file, it is tried
    once each time until it answers again, and for less time, so that a shard that is gone costs a
    run seconds, not hours.
    """

    at_once = 32
    # Each requests a long range at a time, and shares the server with the others: `_patience` counts
    # on as many. More would only wait longer for one that hangs.
    most_streams = 2

    def __init__(self, place: str):
        """
        Args:
            place: URL that fsspec knows.

        Raises:
            DataError: it does not, or lacks a package.
        """
        # Errors name `place`, and runs store it; only `_access` and `_query` hold secrets.
        try:
            self.place = credentials.take(place).rstrip("/")
        except ValueError as error:
            raise DataError(str(error)) from None
        self._access, self._query = credentials.restored(self.place)
        self._failing: Set[str] = set()
        self._process: Optional[int] = None
        self._connect()

    def __getstate__(self) -> dict:
        """Leave out the connection, and what this process knows of the server."""
        state = dict(self.__dict__)
        state["_failing"] = set()
        state["_process"] = None
        state["_system"] = None
        return state

    def read(self, name: str, most: int) -> bytes:
        """Read a whole file of at most `most` bytes: see `Folder.read`."""
        # In pieces: nobody knows its length before, and a server that hangs would be waited for as
        # long as the longest file takes.
        path = self.path(name)
        content = bytearray()
        while len(content) <= most:
            # From the last byte on, as servers refuse ranges that begin at the end of a file. One
            # byte more than it may have shows a longer file without reading it.
            start = max(0, len(content) - 1)
            piece = Range(name, start, min(_PIECE, most + 1 - start))
            (answer,) = self._answers([piece], exact=False)
            if isinstance(answer, FileNotFoundError):
                raise MissingFile(f"{path}: {_reason(answer)}")
            if isinstance(answer, Exception):
                raise DataError(f"{path}: {_reason(answer)}")
            content[start:] = answer
            if len(answer) < piece.length:
                return bytes(content)
        fault = f"more than {most:,} bytes came; there is another file in its place"
        raise DataError(f"{path}: {fault}")

    def ranges(self, wanted: Sequence[Range]) -> List[Union[bytes, str]]:
        """Read the `wanted` ranges: see `Folder.ranges`."""
        contents: List[Union[bytes, str]] = []
        for answer in self._answers(wanted, exact=True):
            contents.append(_reason(answer) if isinstance(answer, Exception) else answer)
        return contents

    def _answers(self, wanted: Sequence[Range], exact: bool) -> list:
        """Request ranges, some of them several times.

        Args:
            wanted: the ranges.
            exact: whether fewer bytes than requested are a fault; if not, a piece of a whole file.

        Returns:
            The bytes of each range; for one that failed, the last exception.
        """
        answers: List[Any] = [b""] * len(wanted)
        # Places in `wanted`. Of a range without bytes servers send the whole file, or an error.
        pending = [place for place, requested in enumerate(wanted) if requested.length]
        for attempt in range(1, _TRIES + 1):
            for place, answer in self._attempt(wanted, pending, exact).items():
                answers[place] = answer
            retried = []
            for place in pending:
                if self._is_worth_a_try(wanted[place].name, answers[place]):
                    retried.append(place)
            pending = retried
            if not pending or attempt == _TRIES:
                break
            # Workers that lost the same server do not come back all at once.
            share = bits32(key("pause", os.getpid()), attempt) / 2**32
            pause = _PAUSE * 2 ** (attempt - 1)
            time.sleep(pause * (0.5 + share))
        # A file that has answered once is asked patiently again.
        for place in pending:
            self._failing.add(wanted[place].name)
        for requested, answer in zip(wanted, answers):
            if not isinstance(answer, Exception):
                self._failing.discard(requested.name)
        return answers

    def _is_worth_a_try(self, name: str, answer: Any) -> bool:
        """Return whether a file that gave this answer is requested again at once."""
        if not isinstance(answer, Exception) or isinstance(answer, _FINAL):
            return False
        if isinstance(answer, TimeoutError) and not self._concurrent:
            return False  # a cache goes on fetching; a second fetch would be in its way
        return name not in self._failing

    def _attempt(self, wanted: Sequence[Range], pending: List[int], exact: bool) -> Dict[int, Any]:
        """Request the pending ranges once; return the answer to each, by its place in `wanted`.

        Each file has a thread of its own where that works, so that one that hangs holds up no
        other.
        """
        self._connect()
        groups = self._groups(wanted, pending)
        arrived: Dict[int, Any] = {}

        def request(places: List[int]) -> None:
            """Fetch the ranges of one group, at these `places` in `wanted`."""
            try:
                answers = self._fetch([wanted[place] for place in places], exact)
                arrived.update(zip(places, answers))
            except Exception as error:  # each file system raises its own
                arrived.update(dict.fromkeys(places, error))

        # Daemons: the process may end while one of them still waits.
        threads = []
        for places in groups.values():
            threads.append(threading.Thread(target=request, args=(places,), daemon=True))
        start = time.monotonic()
        for thread in threads:
            thread.start()
        # All began together. What comes after a thread was given up no longer counts.
        answers = {}
        for thread, (name, places) in zip(threads, groups.items()):
            patience = self._patience(name, wanted, exact)
            thread.join(max(0.0, start + patience - time.monotonic()))
            for place in places:
                late = TimeoutError(f"no answer within {patience:.0f} s")
                answers[place] = arrived.get(place, late)
        return answers

    def _groups(self, wanted: Sequence[Range], pending: List[int]) -> Dict[str, List[int]]:
        """Return the pending places by file; all under one name where requests come one by one."""
        groups: Dict[str, List[int]] = {}
        for place in pending:
            name = wanted[place].name if self._concurrent else ""
            groups.setdefault(name, []).append(place)
        return groups

    def _patience(self, name: str, wanted: Sequence[Range], exact: bool) -> float:
        """Return the seconds that the server gets to answer for a file, beside all others."""
        if not self._concurrent:
            return _PATIENCE_WITH_CACHES
        patience = _LITTLE_PATIENCE if name in self._failing else _PATIENCE
        # Ranges of files that are requested together come beside each other. So do the pieces of
        # whole files, each by a thread of its own, and single ranges: those of files that are read
        # from end to end.
        beside = 1
        if not exact:
            beside = self.at_once
        elif len(wanted) == 1:
            beside = self.most_streams
        return patience + beside * sum(requested.length for requested in wanted) / _RATE

    def _fetch(self, wanted: Sequence[Range], exact: bool) -> list:
        """Return the bytes of each range, or the exception in its place."""
        # Errors are returned: one file that is missing must not hide the bytes of the others.
        answers = self._system.cat_ranges(
            [f"{self._root}/{requested.name}{self._query}" for requested in wanted],
            [requested.start for requested in wanted],
            [requested.start + requested.length for requested in wanted],
            on_error="return",
        )
        return [_checked(answer, requested, exact) for answer, requested in zip(answers, wanted)]

    @property
    def _concurrent(self) -> bool:
        """Return whether threads may use it at once.

        Caches claim to be what they stand before; their class does not.
        """
        return isinstance(self._system, fsspec.asyn.AsyncFileSystem)

    def _connect(self) -> None:
        """Connect, once in each process: connections do not survive a fork."""
        if self._process == os.getpid():
            return
        try:
            self._system, root = fsspec.core.url_to_fs(self._access)
        except Exception as error:  # each file system has its own about URLs and credentials
            raise DataError(f"{self.place}: {_reason_for_no_connection(error)}") from None
        # A web server that ignores ranges would send the whole shard for every image.
        if self.place.startswith(("http://", "https://")):
            from data.http import BoundedHttp

            self._system = BoundedHttp(**self._system.storage_options)
        self._root = root.rstrip("/")
        self._process = os.getpid()


def _checked(answer: Any, requested: Range, exact: bool) -> Any:
    """Return an answer, or a ValueError in its place if it has not the requested length.

    It may be shorter unless that is `exact`.
    """
    if isinstance(answer, Exception) or len(answer) == requested.length:
        return answer
    if len(answer) < requested.length and not exact:
        return answer
    if len(answer) > requested.length:
        # How many more there were is not known: the rest was not read.
        excess = f"more than {requested.length:,} bytes came"
        return ValueError(f"{excess}; the server does not know byte ranges")
    return ValueError(f"{len(answer):,} bytes came instead of {requested.length:,}")


def _reason(error: Exception) -> str:
    """Return why a file could not be read, without secrets."""
    if isinstance(error, FileNotFoundError):
        return "no such file"
    # Libraries quote the URL that they were given, with its password.
    reason = credentials.masked(str(error)) or type(error).__name__
    status = getattr(error, "status", None)
    if status in _FORBIDDEN or isinstance(error, PermissionError):
        variable = credentials.ENVIRONMENT
        reason += f"; give the credentials in data.root, {variable} or ~/.netrc"
    return reason


def _reason_for_no_connection(error: Exception) -> str:
    """Return why fsspec does not take a URL."""
    if isinstance(error, ImportError):
        package = getattr(error.__cause__ or error, "name", None)
        if package:
            return f"a package for this kind of URL is missing: pip install {package}"
    return _reason(error)


# fsspec runs requests in a thread, of which a fork has none. Its older versions (2025.3) do not
# notice.
if hasattr(fsspec.asyn, "reset_lock"):
    os.register_at_fork(after_in_child=fsspec.asyn.reset_lock)

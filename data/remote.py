"""Byte ranges of files behind a URL, by fsspec: object stores, web servers, caches in front of them.

Imported only where a place is a URL. Nothing is ever listed. Whatever a server does, each call comes to an end.
"""

import os
import threading
import time
from typing import Any, Dict, List, Optional, Sequence, Set, Union

from common import credentials
from common.errors import DataError
from data.local import Folder, MissingFile, Range
from recipe.randomness import bits32, key

try:
    import fsspec
    import fsspec.asyn
except ImportError:
    raise DataError("data.root is a URL, for which the package fsspec is needed: pip install fsspec") from None

_TRIES = 3
_PAUSE = 0.5  # seconds before the second try, about; twice that before the third
_PATIENCE = 8.0  # seconds that a server gets to answer,
_LITTLE_PATIENCE = 0.5  # where it has not for the same file before, and
_RATE = 1e6  # bytes a second that it must give at least
_PATIENCE_WITH_CACHES = 120.0  # seconds: before they answer at all, they may fetch a whole shard


class RemoteFolder(Folder):
    """Files behind a URL.

    A failed request is tried three times, with pauses. If that was in vain for a file, it is tried once each time until
    it answers again, and for less time, so that a shard that is gone costs a run seconds, not hours.
    """

    def __init__(self, place: str):
        """Args: place: URL that fsspec knows. Raises DataError: it does not, or lacks a package."""
        try:
            self.place = credentials.take(place).rstrip("/")
        except ValueError as error:
            raise DataError(str(error)) from None
        self._access, self._query = credentials.restored(self.place)
        self._failing: Set[str] = set()
        self._process: Optional[int] = None
        self._connect()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_failing": set(), "_process": None, "_system": None}

    def read(self, name: str, most: int) -> bytes:
        (answer,) = self._answers([Range(name, 0, most + 1)], exact=False)
        if isinstance(answer, Exception):
            kind = MissingFile if isinstance(answer, FileNotFoundError) else DataError
            raise kind(f"{self.path(name)}: {_reason(answer)}")
        if len(answer) > most:
            raise DataError(f"{self.path(name)}: more than {most:,} bytes came; there is another file in its place")
        return answer

    def ranges(self, wanted: Sequence[Range]) -> List[Union[bytes, str]]:
        answers = self._answers(wanted, exact=True)
        return [_reason(answer) if isinstance(answer, Exception) else answer for answer in answers]

    def _answers(self, wanted: Sequence[Range], exact: bool) -> list:
        """The bytes of each range, which may be fewer unless `exact`; for one that failed, the last exception."""
        answers: List[Any] = [None] * len(wanted)
        pending = list(range(len(wanted)))
        for tried in range(1, _TRIES + 1):
            self._attempt(wanted, pending, exact, answers)
            pending = [number for number in pending if self._is_worth_a_try(wanted[number].name, answers[number])]
            if not pending or tried == _TRIES:
                break
            # Workers that lost the same server do not come back all at once.
            share = bits32(key("pause", os.getpid()), tried) / 2**32
            time.sleep(_PAUSE * 2 ** (tried - 1) * (0.5 + share))
        self._failing |= {wanted[number].name for number in pending}
        self._failing -= {one.name for one, answer in zip(wanted, answers) if not isinstance(answer, Exception)}
        return answers

    def _is_worth_a_try(self, name: str, answer: Any) -> bool:
        final = (FileNotFoundError, PermissionError)
        if not self._concurrent:  # a cache goes on fetching; a second fetch would be in its way
            final = (*final, TimeoutError)
        return isinstance(answer, Exception) and not isinstance(answer, final) and name not in self._failing

    def _attempt(self, wanted: Sequence[Range], pending: List[int], exact: bool, answers: List[Any]) -> None:
        """Request once: each file in a thread of its own where that works, so that one that hangs holds up no other."""
        self._connect()
        groups: Dict[str, List[int]] = {}
        for number in pending:
            groups.setdefault(wanted[number].name if self._concurrent else "", []).append(number)
        found: Dict[int, Any] = {}

        def run(numbers: List[int]) -> None:
            try:
                found.update(zip(numbers, self._fetched([wanted[number] for number in numbers], exact)))
            except Exception as error:  # each file system raises its own
                found.update(dict.fromkeys(numbers, error))

        # Daemons: the process may end while one of them still waits.
        threads = [threading.Thread(target=run, args=(numbers,), daemon=True) for numbers in groups.values()]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread, (name, numbers) in zip(threads, groups.items()):
            patience = _LITTLE_PATIENCE if name in self._failing else _PATIENCE
            patience += sum(one.length for one in wanted) / _RATE if exact else 0.0
            patience = patience if self._concurrent else _PATIENCE_WITH_CACHES
            thread.join(max(0.0, start + patience - time.monotonic()))
            for number in numbers:
                answers[number] = found.get(number, TimeoutError(f"no answer within {patience:.0f} s"))

    def _fetched(self, wanted: Sequence[Range], exact: bool) -> list:
        """The bytes of each range, or the exception in its place."""
        files = [f"{self._root}/{one.name}{self._query}" for one in wanted]
        ends = [one.start + one.length for one in wanted]
        answers = self._system.cat_ranges(files, [one.start for one in wanted], ends, on_error="return")
        for number, (one, answer) in enumerate(zip(wanted, answers)):
            if isinstance(answer, Exception) or len(answer) == one.length or not exact:
                continue
            reason = f"{len(answer):,} bytes came instead of {one.length:,}"
            if len(answer) > one.length:  # how many more there were is not known: the rest was not read
                reason = f"more than {one.length:,} bytes came; the server does not know byte ranges"
            answers[number] = ValueError(reason)
        return answers

    @property
    def _concurrent(self) -> bool:
        """Whether threads may use it at once. Caches claim to be what they stand before; their class does not."""
        return isinstance(self._system, fsspec.asyn.AsyncFileSystem)

    def _connect(self) -> None:
        """Connect, once in each process: connections do not survive a fork."""
        if self._process == os.getpid():
            return
        try:
            self._system, root = fsspec.core.url_to_fs(self._access)
        except Exception as error:  # each file system has its own complaints about URLs and credentials
            package = getattr(error.__cause__ or error, "name", None) if isinstance(error, ImportError) else None
            missing = f"a package for this kind of URL is missing: pip install {package}"
            raise DataError(f"{self.place}: {missing if package else _reason(error)}") from None
        if self.place.startswith(("http://", "https://")):
            from data.http import BoundedHttp

            self._system = BoundedHttp(**self._system.storage_options)
        self._root, self._process = root.rstrip("/"), os.getpid()


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file"
    reason = credentials.masked(str(error)) or type(error).__name__
    if getattr(error, "status", None) in (401, 403) or isinstance(error, PermissionError):
        reason += f"; give the credentials in data.root, {credentials.ENVIRONMENT} or ~/.netrc"
    return reason


# fsspec runs requests in a thread, of which a fork has none. Its older versions (2025.3) do not notice.
if hasattr(fsspec.asyn, "reset_lock"):
    os.register_at_fork(after_in_child=fsspec.asyn.reset_lock)

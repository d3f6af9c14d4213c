"""Recordings of a session's first updates: log.profile, torch's trace; log.memory, a GPU's memory.

Every rank writes files of its own, with its number in their names, below `profile/` in the run
folder (docs/gpu.md).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, ContextManager, Optional, Type

import torch

from common.files import writing
from engines.base import Engine
from recipe.config import Log
from training.monitor import Monitor

_ENTRIES = 100_000  # of the history of memory: the newest allocations and releases
_VIEWER = "https://pytorch.org/memory_viz"


class MemoryHistory:
    """A context that records what takes memory of a CUDA device, where `log.memory` asks for it.

    It is entered before the engine is built, so that weights have their origin in the snapshot.
    `write` ends it; so does running out of memory within the context, with a snapshot. On other
    devices it does nothing.
    """

    def __init__(
        self,
        log: Log,
        file: Path,
        device: str,
        say: Callable[[str], None],
    ):
        """
        Args:
            log: section of the recipe, which may ask for a snapshot.
            file: of this rank's snapshot.
            device: type of its device.
            say: prints a line, on the main rank.
        """
        self._path = file
        self._say = say
        self._on = log.memory and device == "cuda"
        if log.memory and not self._on:
            reason = f"there are snapshots of CUDA memory only, and this device is {device}"
            say(f"log.memory: left out; {reason}")

    def __enter__(self) -> MemoryHistory:
        if self._on:
            torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        # The history shows what filled the memory; another run may not fail the same way.
        if self._on and isinstance(error, torch.cuda.OutOfMemoryError):
            with contextlib.suppress(OSError):  # what counts is the error that is on its way
                self._dump()
                # Memory may run out on any rank, so this is no line of the main one.
                print(f"log.memory: memory ran out: {self._path}, for {_VIEWER}", flush=True)
        self._end()

    def write(self, updates: int) -> None:
        """Write the snapshot, unless that is done.

        Args:
            updates: of this session, so far.

        Raises:
            OSError: it cannot be written.
        """
        if self._on:
            self._dump()
            self._say(f"memory up to update {updates} of this session: {self._path}, for {_VIEWER}")
            self._end()

    def _dump(self) -> None:
        """Write the snapshot."""
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._path))

    def _end(self) -> None:
        """End the recording of the history, if it is on."""
        if self._on:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._on = False


class Recordings:
    """Records the updates that `log.profile` selects, from a session's second on.

    The first update compiles and warms up. After the last of them, or after the second without a
    profile, it also has the history of memory written.
    """

    def __init__(
        self,
        updates: int,
        file: Path,
        engine: Engine,
        *,
        monitor: Monitor,
        history: MemoryHistory,
    ):
        """
        Args:
            updates: how many are recorded, 0 for no profile.
            file: of this rank's profile.
            engine: whose updates are recorded.
            monitor: prints lines.
            history: of the device's memory.
        """
        self._path = file
        self._engine = engine
        self._monitor = monitor
        self._history = history
        self._profiled = updates
        self._updates = 0  # of this session
        self._profiler: Any = None

    def update(self, step: int) -> ContextManager[Any]:
        """Return a context for the update that begins at `step`."""
        if self._updates == 1 and self._profiled:
            self._start()
        if self._profiler is None:
            return contextlib.nullcontext()
        return torch.profiler.record_function(f"step {step}")

    def after_update(self, last: bool) -> None:
        """Write what is complete; only then this waits for the device.

        Args:
            last: whether no update follows.
        """
        # The first update is not recorded; without a profile the memory's history ends with the second.
        self._updates += 1
        is_complete = self._updates == 1 + max(1, self._profiled)
        if not (is_complete or last):
            return
        if self._profiler is not None:
            self._monitor.check()
            profiler = self._stop()
            with writing(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(str(self._path))
            updates = f"updates 2 to {self._updates} of this session"
            self._monitor.say(f"profile of {updates}: {self._path}")
        self._history.write(self._updates)

    def close(self) -> None:
        """End a profile that is not complete, and throw it away."""
        if self._profiler is not None:
            self._stop()

    def _start(self) -> None:
        """Begin a profile."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._engine.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()
        self._name_spans(True)

    def _stop(self) -> Any:
        """End the profile, and return its profiler."""
        self._name_spans(False)
        profiler = self._profiler
        # Forgotten first: if stopping fails, `close` does not try it again.
        self._profiler = None
        profiler.stop()
        return profiler

    def _name_spans(self, on: bool) -> None:
        """Let the engine tell the profiler what it does, or not."""
        if self._engine.recorder is not None:
            self._engine.recorder.named = on


def profile_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's profile, below the run `folder`."""
    return _file(folder, rank, "json.gz")


def snapshot_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's snapshot of memory, below the run `folder`."""
    return _file(folder, rank, "memory.pickle")


def _file(folder: Path, rank: int, suffix: str) -> Path:
    """Return a rank's file below a run folder."""
    return folder / "profile" / f"rank-{rank:04d}.{suffix}"

"""What torch records of a session's first updates: log.profile, a profiler's trace; log.memory, the memory of a GPU.

Every rank writes files of its own, with its number in their names, below `profile/` in the run folder (docs/gpu.md).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, ContextManager, Optional, Type

import torch

from common.files import writing
from engines.base import Engine
from parallel.topology import Topology
from recipe.batch import output_folder
from recipe.config import Recipe
from training.monitor import Monitor

_ENTRIES = 100_000  # of the history of memory: the newest allocations and releases
_VIEWER = "https://pytorch.org/memory_viz"


class MemoryHistory:
    """A context that records what takes memory of a CUDA device, where `log.memory` asks for it.

    It is entered before the engine is built, so that weights have their origin in the snapshot. `write` ends it; so
    does running out of memory within the context, with a snapshot. On other devices it does nothing.
    """

    def __init__(self, recipe: Recipe, place: Topology, device: str, say: Callable[[str], None]):
        """Args: device: type of the device. say: prints a line, of the main rank."""
        self._path, self._say = _file(recipe, place, "memory.pickle"), say
        self._on = recipe.log.memory and device == "cuda"
        if recipe.log.memory and not self._on:
            say(f"log.memory: left out; there are snapshots of CUDA memory only, and this device is {device}")

    def __enter__(self) -> MemoryHistory:
        if self._on:
            torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None:
        if self._on and isinstance(error, torch.cuda.OutOfMemoryError):
            with contextlib.suppress(OSError):  # what counts is the error that is on its way
                self._dump()
                print(f"log.memory: memory ran out: {self._path}, for {_VIEWER}", flush=True)  # on any rank
        self._end()

    def write(self, updates: int) -> None:
        """Write the snapshot after some updates, unless that is done. Raises OSError."""
        if self._on:
            self._dump()
            self._say(f"memory up to update {updates} of this session: {self._path}, for {_VIEWER}")
            self._end()

    def _dump(self) -> None:
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._path))

    def _end(self) -> None:
        if self._on:
            torch.cuda.memory._record_memory_history(enabled=None)
        self._on = False


class Recordings:
    """Records the updates that `log.profile` selects, from a session's second on, as the first one compiles and warms
    up. After the last of them, or after the second without a profile, it also has the history of memory written."""

    def __init__(self, recipe: Recipe, engine: Engine, monitor: Monitor, history: MemoryHistory):
        self._path, self._engine, self._monitor = _file(recipe, engine.topology, "json.gz"), engine, monitor
        self._history, self._wanted = history, recipe.log.profile
        self._done = 0  # updates of this session
        self._profiler: Any = None

    def update(self, step: int) -> ContextManager[Any]:
        """A context for the update that begins at a step."""
        if self._done == 1 and self._wanted:
            self._start()
        recorded = self._profiler is not None
        return torch.profiler.record_function(f"step {step}") if recorded else contextlib.nullcontext()

    def after_update(self, last: bool) -> None:
        """Write what is complete. Waits for the device only then. Args: last: whether no update follows."""
        self._done += 1
        if self._done == 1 + max(1, self._wanted) or last:
            if self._profiler is not None:
                self._monitor.check()
                profiler = self._stop()
                with writing(self._path):
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    profiler.export_chrome_trace(str(self._path))
                self._monitor.say(f"profile of updates 2 to {self._done} of this session: {self._path}")
            self._history.write(self._done)

    def close(self) -> None:
        """End a profile that is not complete, and throw it away."""
        if self._profiler is not None:
            self._stop()

    def _start(self) -> None:
        kinds = torch.profiler.ProfilerActivity
        cuda = self._engine.device.type == "cuda"
        self._profiler = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA] if cuda else [kinds.CPU])
        self._profiler.start()
        self._name_spans(True)

    def _stop(self) -> Any:
        self._name_spans(False)
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        return profiler

    def _name_spans(self, on: bool) -> None:
        if self._engine.recorder is not None:
            self._engine.recorder.named = on


def _file(recipe: Recipe, place: Topology, suffix: str) -> Path:
    return Path(output_folder(recipe), "profile", f"rank-{place.rank:04d}.{suffix}")

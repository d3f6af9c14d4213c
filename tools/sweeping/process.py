"""Processes of a sweep: those that train its trials, which never outlive it, and the signals that ask it to stop."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import List, Optional, Tuple

from parallel.parent_death import bound_to_parent
from recipe import credentials
from recipe.config import Recipe
from training.stopping import StopSignals

_TAIL = 64 * 1024  # bytes of a log in which its last line is looked for
_LINE = 300  # characters of it that are reported
_SAME_SECONDS = 0.5  # timeout(1) and some terminals deliver one signal twice


class Trial:
    """A trial that is begun: its process, once there is one, and the part of its metrics that was seen.

    reported: evaluations that the study knows. pruned: whether it was told to end. starts: of processes.
    """

    def __init__(self, number: int, recipe: Recipe, command: List[str], log: Path):
        """
        Args:
            command: arguments of Python: the program and its own.
            log: the process's output is appended to it.
        """
        self.number, self.recipe = number, recipe
        self.process: Optional[subprocess.Popen] = None
        self.starts, self.reported, self.pruned = 0, 0, False
        self._command, self._log, self._log_start = [sys.executable, "-u", *command], log, 0
        self._seen: Optional[Tuple[int, int]] = None

    def start(self, threads: int) -> None:
        """Starts a process. Args: threads: of OpenMP, unless the environment sets them."""
        with open(self._log, "ab") as stream:
            stream.write(f"$ {shlex.join(self._command)}\n".encode("utf-8", "surrogateescape"))
            self._log_start = stream.tell()
            stream.flush()
            self.process = subprocess.Popen(
                bound_to_parent(self._command),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads), **os.environ, **credentials.environment()},
                start_new_session=True,  # a terminal's Ctrl-C is for the sweep alone
            )
        self.starts += 1

    def poll(self) -> Optional[int]:
        """The exit code; negative: the signal that ended it; None: it runs, or was not started."""
        return None if self.process is None else self.process.poll()

    def ask_to_end(self) -> None:
        """Lets it finish its step, save and end."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once, with all that it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def last_line(self) -> str:
        """The last line of its output, or nothing."""
        with open(self._log, "rb") as stream:
            stream.seek(max(self._log_start, os.fstat(stream.fileno()).st_size - _TAIL))
            lines = stream.read().decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last if len(last) <= _LINE else last[:_LINE] + " ..."

    def new_metrics(self, metrics: Path) -> bool:
        """Whether metrics.jsonl has changed since the last call."""
        try:
            status = metrics.stat()
        except FileNotFoundError:
            return False
        before, self._seen = self._seen, (status.st_size, status.st_mtime_ns)
        return self._seen != before


def threads_each(workers: int) -> int:
    """OpenMP threads of each of so many trials: together they have as many as this process may use cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // workers)


class StopRequest(StopSignals):
    """Within it, SIGTERM, SIGINT and SIGUSR1 are noted: the first lets trials save and end, the second ends them.

    asked: to stop. hurry: a second time. name: of the first signal. SIGUSR1 never hurries: SLURM may send it to a sweep
    and its trials alike, as it does to runs.
    """

    def __init__(self) -> None:
        super().__init__(self._note)
        self.asked = self.hurry = False
        self.name = ""
        self._since = 0.0

    def __enter__(self) -> StopRequest:
        super().__enter__()
        return self

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        if not self.asked:
            self.asked, self.name, self._since = True, signal.Signals(number).name, time.monotonic()
        elif number != signal.SIGUSR1 and time.monotonic() - self._since > _SAME_SECONDS:
            self.hurry = True

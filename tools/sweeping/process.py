"""One trial's training process: started, asked to save and end, and never outliving the sweep."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Optional, Sequence

from parallel.parent_death import bound_to_parent
from recipe import credentials

_TAIL = 64 * 1024  # bytes of a log in which its last line is looked for
_LINE = 300  # characters of it that are told


class TrialProcess:
    """A Python program that trains, from its creation on."""

    def __init__(self, arguments: Sequence[str], log: Path, threads: int):
        """
        Args:
            arguments: of Python: the program and its own.
            log: what the process says is added to it.
            threads: of OpenMP, unless the environment says how many.
        """
        command = [sys.executable, "-u", *arguments]
        self._log = log
        with open(log, "ab") as stream:
            stream.write(f"$ {shlex.join(command)}\n".encode("utf-8", "surrogateescape"))
            self._since = stream.tell()
            stream.flush()
            self._process = subprocess.Popen(
                bound_to_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": str(threads), **os.environ, **credentials.environment()},
                start_new_session=True,  # a terminal's Ctrl-C is for the sweep alone
            )

    def poll(self) -> Optional[int]:
        """The exit code; negative: the signal that ended it; None: it runs."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """The step is finished, saved, and the process ends."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once, with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_line(self) -> str:
        """The last thing that it said, or nothing."""
        with open(self._log, "rb") as stream:
            stream.seek(max(self._since, os.fstat(stream.fileno()).st_size - _TAIL))
            lines = stream.read().decode("utf-8", "replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return said if len(said) <= _LINE else said[:_LINE] + " ..."


def threads_each(workers: int) -> int:
    """Of a trial beside others, so that together they have as many as this process may use cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // workers)

"""A process that trains for a command which trains several runs, and the signals that stop both."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import List, Optional

from common import credentials
from parallel import launchers
from parallel.parent_death import bound_to_parent
from training.stopping import StopSignals

_MAX_LINE = 300  # characters of a log's last line that are reported
_SAME_SECONDS = 0.5  # timeout(1) and some terminals deliver one signal twice


@dataclass(eq=False)
class TrainingProcess:
    """A command line that trains, and its process while there is one.

    command: begins with the full path of a program.
    log: the process's output is appended to it.
    starts: how many processes have been started.

    Linux ends the process when the thread that started it ends, not only with the whole program.
    """

    command: List[str]
    log: Path
    starts: int = 0
    _process: Optional[subprocess.Popen] = None
    _log_start: int = 0  # bytes of the log when the newest process began

    @property
    def is_there(self) -> bool:
        """Return whether a process was started and has not been forgotten."""
        return self._process is not None

    def start(self, threads: Optional[int] = None) -> None:
        """Start a process.

        Args:
            threads: of OpenMP, unless the environment sets them; None: the program's default.
        """
        # The user's variables count more than the default, credentials more than these.
        environment = {}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        environment.update(launchers.without(os.environ))
        environment.update(credentials.environment())
        with open(self.log, "ab") as stream:
            # The log shows each command before its output.
            line = f"$ {shlex.join(self.command)}\n"
            stream.write(line.encode("utf-8", "surrogateescape"))
            self._log_start = stream.tell()
            stream.flush()
            self._process = subprocess.Popen(
                bound_to_parent(self.command),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C is for the command alone
            )
        self.starts += 1

    def poll(self) -> Optional[int]:
        """Return the exit code of the process, or minus the signal that ended it.

        None while it runs, or where there is none.
        """
        return None if self._process is None else self._process.poll()

    def stop(self, at_once: bool = False) -> None:
        """Let the process finish its step, save and end.

        Args:
            at_once: kill it instead, with all that it has started.
        """
        if self._process is None:
            return
        if not at_once:
            self._process.terminate()
            return
        # Its whole session: workers and compilers, too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def forget(self) -> None:
        """Forget a process that has ended, so that another may be started."""
        self._process = None

    def last_line(self) -> str:
        """Return the last line of the newest process's output, or nothing."""
        with open(self.log, "rb") as stream:
            # Behind the output of the processes before it.
            stream.seek(self._log_start)
            text = stream.read().decode("utf-8", "replace")
        # Programs end with a line that says why: see `one_line` in common/command.py.
        lines = text.strip().split("\n")
        return lines[-1].strip()[:_MAX_LINE]


class StopRequest(StopSignals):
    """Context in which SIGTERM, SIGINT and SIGUSR1 are noted.

    The first lets processes save and end, the second kills them. SIGUSR1 never kills: SLURM may
    send it to a command and its runs alike, as it does to runs.

    name: of the first signal; "" before it.
    at_once: a second one came.
    """

    def __init__(self) -> None:
        super().__init__(self._note)
        self.name = ""
        self.at_once = False
        self._since = 0.0  # when the first signal came

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        """Handle a signal."""
        if not self.name:
            self.name = signal.Signals(number).name
            self._since = time.monotonic()
        elif number != signal.SIGUSR1 and time.monotonic() - self._since > _SAME_SECONDS:
            self.at_once = True

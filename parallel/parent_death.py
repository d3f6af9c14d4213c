"""Processes that die with the one that started them (parent-death signal), whatever kills it. Needs no torch.

Linux kills such a process once the thread that started it has ended.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import popen_spawn_posix, spawn
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import List, Sequence

# Becomes the program. prctl 1 is PR_SET_PDEATHSIG; elsewhere than on Linux there is nothing like it.
_BECOME = """\
import ctypes, os, signal, sys
parent, ignored, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(parent):
    sys.exit(1)
if ignored:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
os.execv(command[0], command)
"""


def bound_to_parent(command: Sequence[str], ignores_interrupts: bool = False) -> List[str]:
    """The command line that starts `command`, which begins with a program's full path, as a child of this process.

    Args: ignores_interrupts: Ctrl-C is left to this process, from the child's first moment on.
    """
    ignored = "SIGINT" if ignores_interrupts else ""
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), ignored, *command]


def context(way: str) -> BaseContext:
    """The context of multiprocessing that starts processes by `way` ("spawn", "fork" or "forkserver").

    Spawned ones are bound to this process before they import anything, which takes seconds where that is torch.
    """
    return _BoundContext() if way == "spawn" else multiprocessing.get_context(way)


class _BoundPopen(popen_spawn_posix.Popen):
    def _launch(self, process: BaseProcess) -> None:
        command_line = spawn.get_command_line
        # There is no public way to start such a process by a command line of one's own.
        spawn.get_command_line = lambda **keywords: bound_to_parent(command_line(**keywords))
        try:
            super()._launch(process)
        finally:
            spawn.get_command_line = command_line


class _BoundProcess(SpawnProcess):
    @staticmethod
    def _Popen(process: BaseProcess) -> _BoundPopen:
        return _BoundPopen(process)


class _BoundContext(SpawnContext):
    Process = _BoundProcess


def die_with_parent() -> None:
    """Bind this process to the one that started it: the first call of every function that multiprocessing runs.

    After a fork server, or on another system than Linux, a thread waits for the end of the parent process.
    """
    parent = multiprocessing.parent_process()
    if sys.platform == "linux" and (parent is None or os.getppid() == parent.pid):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    elif parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)

"""Processes that die with the one that started them (parent-death signal), whatever kills it.

Needs no torch.

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

# Becomes the program. prctl 1 is PR_SET_PDEATHSIG, which only Linux has. The parent may have ended
# before the call: hence the look at it afterwards.
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
    """Return the command line that starts a command as a child of this process, with which it dies.

    Args:
        command: begins with a program's full path.
        ignores_interrupts: Ctrl-C is left to this process, from the child's first moment on.
    """
    ignored = "SIGINT" if ignores_interrupts else ""
    # -I and -S: nothing of the user's or of site-packages is imported before the program begins.
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), ignored, *command]


def context(way: str) -> BaseContext:
    """Return the context of multiprocessing that starts processes in one `way`.

    Spawned ones are bound to this process before they import anything, which takes seconds where
    that is torch.
    """
    if way == "spawn":
        return _BoundContext()
    return multiprocessing.get_context(way)


class _BoundPopen(popen_spawn_posix.Popen):
    """Starts a spawned process bound to this one.

    There is no public way to start such a process by a command line of one's own, so the function
    that makes the command line is replaced while the process is started. This relies on private
    names of multiprocessing: `popen_spawn_posix.Popen._launch` asks `spawn.get_command_line` for
    the whole command line, and starts it without a shell. Another thread that spawns a process
    meanwhile would bind that one, too, to this process, which does no harm. Tried with Python 3.8
    to 3.13. Were the names to change, an attribute would be missing here, or spawned processes
    would survive this one: tests/parallel/test_parent_death.py kills a parent and looks for them.
    """

    def _launch(self, process: BaseProcess) -> None:
        command_line = spawn.get_command_line
        spawn.get_command_line = lambda **keywords: bound_to_parent(command_line(**keywords))
        try:
            super()._launch(process)  # type: ignore[misc]  # private, so its types are not known
        finally:
            spawn.get_command_line = command_line


class _BoundProcess(SpawnProcess):
    @staticmethod
    def _Popen(process: BaseProcess) -> _BoundPopen:
        return _BoundPopen(process)


class _BoundContext(SpawnContext):
    Process = _BoundProcess


def die_with_parent() -> None:
    """Bind this process to the one that started it.

    This is the first call of every function that multiprocessing runs.

    After a fork server, or on another system than Linux, a thread waits for the end of the parent
    process.
    """
    parent = multiprocessing.parent_process()
    # Linux kills a process after the one that forked it: that may be a fork server.
    if sys.platform == "linux" and (parent is None or os.getppid() == parent.pid):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    elif parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    """End this process once its parent has ended."""
    parent.join()
    os._exit(1)

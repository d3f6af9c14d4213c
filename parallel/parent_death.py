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


def die_with_parent() -> None:
    """Bind this process to the one that started it: the first call of every function that multiprocessing runs.

    After a fork server, or on another system than Linux, a thread waits for the end of the parent process.
    """
    parent = multiprocessing.parent_process()
    if sys.platform == "linux" and (parent is None or os.getppid() == parent.pid):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    elif parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)

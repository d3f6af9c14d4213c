"""How a rank ends when another one is gone: at once, and with at most one line."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Optional

import torch.distributed as dist

# What the messages of such errors have in them.
_LOST_PEER = ("gloo/transport", "NCCL error", "ncclRemoteError", "ncclSystemError")
# What torch raises then; torch 2.0.1, beside IPUs, has no such class: there messages alone tell.
_DIST_ERROR = getattr(dist, "DistError", ())
_PRINT_SECONDS = 1.0  # for a rank that fails by itself to print its reason first

_quiet_code: Optional[int] = None  # see leave_quietly
_last_word = threading.Lock()


def connected() -> bool:
    """Return whether this process is one of several ranks that have met and not yet parted."""
    return dist.is_available() and dist.is_initialized()


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an `error` only says that another process, or the way to it, is gone."""
    if isinstance(error, _DIST_ERROR):
        return True
    return any(sign in str(error) for sign in _LOST_PEER)


def leave_if_peer_lost(error: BaseException, code: int) -> None:
    """End this process with `code` if an `error` only says that another one is gone."""
    if is_lost_peer(error):
        time.sleep(_PRINT_SECONDS)
        leave(f"rank {dist.get_rank()}: lost another rank; leaving", code)


def leave_quietly(code: int) -> None:
    """Take note that this process is about to end with `code`, and that another prints why.

    The end of that one is not reported then.
    """
    global _quiet_code
    _quiet_code = code


def leave_after(fault: str) -> None:
    """End this process because another one has ended.

    Args:
        fault: a line that says so; it is not printed after `leave_quietly`.
    """
    time.sleep(_PRINT_SECONDS)
    if _quiet_code is not None:
        leave("", _quiet_code)
    leave(fault)


def leave(message: str, code: int = 1) -> None:
    """End this process without cleaning up, which would wait for ranks that are gone.

    Args:
        message: a line for the user, or "".
        code: exit code.
    """
    # Two threads may find at the same moment that a rank is gone: one prints, the other waits here.
    _last_word.acquire()
    if message:
        print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)

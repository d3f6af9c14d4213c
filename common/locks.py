"""Locks between processes that would otherwise do the same work, by files that they share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Iterator

_POLL_SECONDS = 0.01


@contextlib.contextmanager
def alone(file: Path, seconds: float) -> Iterator[None]:
    """Wait while another process is within such a block for the same file, if locks work there.

    Args:
        file: is made, and removed at the end; its folder is there.
        seconds: to wait at most; the block then begins all the same.
    """
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    if descriptor is None:
        yield
        return
    try:
        _lock(descriptor, seconds)
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()  # who has it open still waits for it
        os.close(descriptor)


def _lock(descriptor: int, seconds: float) -> None:
    """Lock a file, or go on without after so many `seconds`."""
    # Not by a lock that waits: its holder may hang, and then the same work twice is the lesser evil.
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
        except OSError:  # a file system without locks
            return

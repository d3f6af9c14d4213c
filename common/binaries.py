"""Compiled code in the user's cache: files that only this user writes, and that are read whole.

A file is named by a digest of all that its content depends on, and ends with a checksum of both:
code that is cut short, or altered, would crash the process that runs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import ContextManager, Optional

from common import files, locks

_MOST_BYTES = 1 << 28  # of a file
_CHECKSUM_BYTES = 32


def digest(*parts: object) -> str:
    """Return a digest of all that compiled code depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def place(folder_name: str, name: str) -> Optional[Path]:
    """Return a file's place in a folder of the cache.

    None if no folder there is writable by this user only: others could leave code in it.
    """
    folder = files.user_cache() / folder_name
    with contextlib.suppress(OSError):
        if folder.is_absolute():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _private(folder.stat()):
                return folder / name
    return None


def _private(state: os.stat_result) -> bool:
    """Return whether a file or folder is this user's, and nobody else can write it."""
    return state.st_uid == os.geteuid() and not state.st_mode & 0o022


def read(kept: Optional[Path], key: str) -> Optional[bytes]:
    """Return code from the cache; None where none is there, or it is damaged or of another key."""
    if kept is None:
        return None
    with contextlib.suppress(OSError):
        with files.open_regular(kept) as stream:
            if not _private(os.fstat(stream.fileno())):
                return None
            content = stream.read(_MOST_BYTES)
        binary = content[:-_CHECKSUM_BYTES]
        if content[-_CHECKSUM_BYTES:] == checksum(key, binary):
            return binary
    return None


def used(kept: Path) -> None:
    """Note that a file was used just now."""
    with contextlib.suppress(OSError):
        os.utime(kept)


def keep(kept: Optional[Path], key: str, binary: bytes, most_files: int) -> None:
    """Write code to the cache, or do nothing where there is no room, and remove what was not used
    for longest.

    Args:
        kept: its place, or None.
        key: of `digest`.
        binary: the code.
        most_files: that stay in the folder.
    """
    if kept is None:
        return
    with contextlib.suppress(OSError):
        with files.replacing(kept, shared=True) as temporary:
            temporary.touch(mode=0o600)
            temporary.write_bytes(binary + checksum(key, binary))
        oldest_first = sorted(kept.parent.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in oldest_first[:-most_files]:
            file.unlink()


def checksum(key: str, binary: bytes) -> bytes:
    """Return what follows code in its file; of its key, too, so that no file stands for another."""
    return hashlib.sha256(key.encode() + binary).digest()


def alone(kept: Optional[Path], seconds: float) -> ContextManager[None]:
    """Return a context that waits while another process compiles the same code.

    Args:
        kept: the place of the code, or None.
        seconds: to wait at most.
    """
    if kept is None:
        return contextlib.nullcontext()
    return locks.alone(kept.with_suffix(".lock"), seconds)

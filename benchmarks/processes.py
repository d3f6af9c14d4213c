"""Running processes, read from Linux's /proc, and the memory of this one."""

import contextlib
import ctypes
import sys
from pathlib import Path
from typing import Dict, List, Union

# Letters of the third field of /proc/PROCESS/stat: stopped, traced, zombie, dead.
_NOT_RUNNING = "TtZX"
# Options of mallopt, in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def children(parent: int) -> List[int]:
    """Return the child processes of a `parent`; none of one that is gone."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [int(number) for number in text.split()]
    return []


def tree(root: int) -> List[int]:
    """Return the process `root` and all that descend from it, each before its children."""
    processes = [root]
    for child in children(root):
        processes += tree(child)
    return processes


def runs(process: int) -> bool:
    """Return whether a `process` is there, and neither stopped nor dead."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/stat").read_text()
        # The second field, the name, is in brackets, and may itself hold brackets and blanks.
        fields_after_name = text.rpartition(")")[2].split()
        return fields_after_name[0] not in _NOT_RUNNING
    return False


def kilobytes(process: Union[int, str], file: str) -> Dict[str, int]:
    """Return all amounts of memory of a process, by name.

    Args:
        process: its number, or "self".
        file: `status` or `smaps_rollup`.

    Raises:
        OSError: the process is gone.
    """
    text = Path(f"/proc/{process}/{file}").read_text()
    amounts = {}
    for line in text.splitlines():
        words = line.split()
        # Other lines, such as the name of the process, are no amounts.
        if words and words[-1] == "kB":
            amounts[words[0].rstrip(":")] = int(words[1])
    return amounts


def keep_freed_memory() -> None:
    """Have this process keep the memory that it frees.

    By default glibc returns large blocks, such as those of tensors, to the kernel at once, and
    getting them again takes longer than a copy. Relies on mallopt(3) of glibc, whose malloc torch
    calls for tensors; tried with glibc 2.36.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    # No block is too large to be kept, and none is too much: -1 turns trimming off.
    options = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1}
    for option, value in options.items():
        is_set = libc.mallopt(option, value) == 1
        assert is_set, option

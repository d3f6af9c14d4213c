"""Rows of 64 elements, in which flat buffers are laid out, and how passes over their rows are run."""

from __future__ import annotations

from typing import Callable, List, Optional, Sequence

import torch

ROW = 64  # elements; each parameter begins with a row of its own
_CHUNK = 1 << 17  # elements computed at a time on a CPU: what is made of them stays in the cores' caches

# Calls a pass with tensors [rows, ...], some of which may be None, and with what is the same for all rows. What it
# returns, [rows] each, is put together.
Run = Callable[[Callable, Sequence[Optional[torch.Tensor]], Sequence], object]


def in_rows(flat: torch.Tensor) -> torch.Tensor:
    """A buffer as [rows, ROW]."""
    return flat.view(-1, ROW)


def in_parts(function: Callable, rows: Sequence[Optional[torch.Tensor]], constants: Sequence) -> object:
    """Runs a pass as it is: on a CPU in parts that fit into caches, elsewhere in one."""
    count = len(rows[0])
    size = _CHUNK // ROW if rows[0].device.type == "cpu" else count
    found: List[object] = []
    for start in range(0, count, size):
        part = [None if each is None else each[start : start + size] for each in rows]
        found.append(function(*part, *constants))
    if isinstance(found[0], tuple):
        return tuple(torch.cat(each) for each in zip(*found))
    return None if found[0] is None else torch.cat(found)

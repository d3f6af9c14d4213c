"""Measured latency and bandwidth of the links between replicas, at the start of a run."""

from __future__ import annotations

import time
from typing import Sequence

import numpy as np
import torch
from torch import distributed

from parallel import bruck
from parallel.costs import Link
from parallel.reduce import Group

_SIZES = (8, 2048, 16384, 65536, 262144)  # bytes
_REPETITIONS = 7
_BUDGET = 0.05  # seconds; the size that uses them up is the last, if bytes were what it spent them on


def measure(group: Group, device: torch.device) -> Link:
    """Cost of a message between neighbours in a ring, the same on all ranks of the group, which all call.

    Every rank sends to the next and receives from the one before it, all at once, as exchanges do, so ranks of a host
    share its link. The time of a message is the median of several on the slowest rank, for which an exchange waits in
    each round. Takes some tens of milliseconds, on slow links a few times that.

    Args: group: of the replicas; None: all processes. device: of the gradients. Raises RuntimeError: from
    torch.distributed, if another rank is gone or too late.
    """
    if distributed.get_world_size(group) == 1:
        return Link(0.0, 0.0)
    seconds, spent = [], 0.0
    for size in _SIZES:
        slowest = _around(size, group, device)
        seconds.append(float(slowest.median()))
        spent += float(slowest.sum())
        if spent > _BUDGET and seconds[-1] > 2 * seconds[0]:
            break
    return fit(_SIZES[: len(seconds)], seconds)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """The link whose messages of `sizes` bytes take `seconds`: non-negative least squares of the relative errors."""
    from scipy.optimize import nnls

    units = np.array([1.0, 1e-6])
    weights = np.stack([np.ones(len(sizes)), np.array(sizes, float)], axis=1) * units / np.array(seconds)[:, None]
    return Link(*(nnls(weights, np.ones(len(sizes)))[0] * units).tolist())


def _around(size: int, group: Group, device: torch.device) -> torch.Tensor:
    """Seconds, float64 [repetitions], of a message of `size` bytes on the slowest rank."""
    rank, count = distributed.get_rank(group), distributed.get_world_size(group)
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    around = (sent, (rank + 1) % count, torch.empty_like(sent), (rank - 1) % count)
    together = torch.zeros(1, device=device)
    seconds = torch.zeros(_REPETITIONS + 1, dtype=torch.float64, device=device)
    for number in range(len(seconds)):
        distributed.all_reduce(together, group=group)
        _wait_for(device)
        start = time.perf_counter()
        bruck.transfer([around], group)
        _wait_for(device)
        seconds[number] = time.perf_counter() - start
    distributed.all_reduce(seconds, distributed.ReduceOp.MAX, group=group)
    return seconds[1:].cpu()  # the first may have had to connect


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

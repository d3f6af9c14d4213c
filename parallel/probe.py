"""Measured latency and bandwidth of the links between replicas, at the start of a run."""

from __future__ import annotations

import time
from typing import Sequence

import numpy as np
import torch
from torch import distributed

from parallel import bruck
from parallel.costs import Link
from parallel.groups import Group

_SIZES = (8, 2048, 16384, 65536, 262144)  # bytes
_REPETITIONS = 7
# Seconds. The size that uses them up is the last, if its bytes were what took long.
_BUDGET = 0.05


def measure(group: Group, device: torch.device) -> Link:
    """Measure the cost of a message between neighbours in a ring. All ranks of the group call.

    Every rank sends to the next and receives from the one before it, all at once, as exchanges do,
    so ranks of a host share its link. The time of a message is the median of several on the slowest
    rank, for which an exchange waits in each round. Takes some tens of milliseconds, on slow links
    a few times that.

    Args:
        group: of the replicas; None: all processes.
        device: of the gradients.

    Returns:
        The same link on all ranks of the group.

    Raises:
        RuntimeError: from torch.distributed, if another rank is gone or too late.
    """
    if distributed.get_world_size(group) == 1:
        return Link(0.0, 0.0)
    # All ranks see the same times, and so go on to the same next size, or end.
    seconds = []
    spent = 0.0
    for size in _SIZES:
        slowest = _around(size, group, device)
        seconds.append(float(slowest.median()))
        spent += float(slowest.sum())
        if spent > _BUDGET and seconds[-1] > 2 * seconds[0]:
            break
    return fit(_SIZES[: len(seconds)], seconds)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Fit a link by non-negative least squares of the relative errors.

    That is the weighted regression of seconds on bytes, each message's weight one over the square
    of its seconds. Where a coefficient would be negative it is 0, and the other is fitted alone:
    the problem is convex, so the best link lies on that bound.

    Args:
        sizes: bytes of each message.
        seconds: that each took, above 0.
    """
    # Longer times have larger errors, so that relative ones are compared.
    x = np.array(sizes, float)
    y = np.array(seconds)
    weights = y**-2.0
    mean_x = float(np.average(x, weights=weights))
    mean_y = float(np.average(y, weights=weights))
    spread = float((weights * (x - mean_x) ** 2).sum())
    slope = float((weights * (x - mean_x) * (y - mean_y)).sum())
    # Messages of one size do not tell latency and bytes apart: all is latency.
    if spread == 0 or slope <= 0:
        return Link(mean_y, 0.0)
    seconds_per_byte = slope / spread
    latency = mean_y - seconds_per_byte * mean_x
    if latency < 0:
        return Link(0.0, float((weights * x * y).sum() / (weights * x**2).sum()))
    return Link(latency, seconds_per_byte)


def _around(size: int, group: Group, device: torch.device) -> torch.Tensor:
    """Time messages of `size` bytes.

    Return the seconds of each on the slowest rank, float64 [repetitions].
    """
    rank = distributed.get_rank(group)
    count = distributed.get_world_size(group)
    outgoing = torch.zeros(size, dtype=torch.uint8, device=device)
    message = bruck.Round(
        outgoing=outgoing,
        receiver=(rank + 1) % count,
        incoming=torch.empty_like(outgoing),
        sender=(rank - 1) % count,
    )
    together = torch.zeros(1, device=device)
    seconds = torch.zeros(_REPETITIONS + 1, dtype=torch.float64, device=device)
    for number in range(len(seconds)):
        # All ranks begin at the same moment.
        distributed.all_reduce(together, group=group)
        _wait_for(device)
        start = time.perf_counter()
        bruck.transfer([message], group)
        _wait_for(device)
        seconds[number] = time.perf_counter() - start
    # The slowest rank counts, as an exchange waits for it in each round.
    distributed.all_reduce(seconds, distributed.ReduceOp.MAX, group=group)
    # The first message may have had to connect.
    return seconds[1:].cpu()


def _wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

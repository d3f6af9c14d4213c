"""Measured latency and bandwidth of the links between replicas, at the start of a run."""

from __future__ import annotations

import time
from typing import Optional, Sequence

import torch
from torch import distributed

from parallel.costs import Link

_SIZES = (8, 2048, 16384, 65536, 262144)  # bytes
_REPETITIONS = 7
_BUDGET = 0.05  # seconds; the size that uses them up is the last, if bytes were what it spent them on


def measure(group: Optional[distributed.ProcessGroup], device: torch.device) -> Link:
    """Cost of a message between neighbours in a ring, the same on all ranks of the group.

    Every rank sends to the next and receives from the one before it, all at once, as exchanges do, so ranks of a host
    share its link. A message counts as long as on the slowest rank, for which an exchange waits in each round. The
    median of several counts: the fastest would be too good for an exchange of many rounds. Takes some tens of
    milliseconds, on slow links a few times that.

    Args:
        group: of the replicas, whose ranks all call; None: all processes.
        device: of the gradients.

    Raises:
        RuntimeError: from torch.distributed, if another rank is gone or too late.
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
    # Each time is 1 = a x + b y, with x and y the latency's and the bytes' weight in it.
    x = torch.tensor(seconds, dtype=torch.float64).reciprocal()
    y = torch.tensor(sizes, dtype=torch.float64) * x
    xx, xy, yy = float(x @ x), float(x @ y), float(y @ y)
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        latency = (float(x.sum()) * yy - float(y.sum()) * xy) / determinant
        per_byte = (float(y.sum()) * xx - float(x.sum()) * xy) / determinant
        if latency >= 0 and per_byte >= 0:
            return Link(latency, per_byte)
        if latency < 0:
            return Link(0.0, float(y.sum()) / yy)
    return Link(float(x.sum()) / xx, 0.0)


def _around(size: int, group: Optional[distributed.ProcessGroup], device: torch.device) -> torch.Tensor:
    """Seconds, float64 [repetitions], of a message of `size` bytes on the slowest rank."""
    rank, count = distributed.get_rank(group), distributed.get_world_size(group)
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    together = torch.zeros(1, device=device)
    seconds = torch.zeros(_REPETITIONS + 1, dtype=torch.float64, device=device)
    for number in range(len(seconds)):
        distributed.all_reduce(together, group=group)
        _wait_for(device)
        start = time.perf_counter()
        # As one batch: NCCL would let two neighbours wait for each other. The receiver first: gloo tells the sender of
        # it on the connection that a message to that rank would keep busy.
        receive = distributed.P2POp(distributed.irecv, received, group=group, group_peer=(rank - 1) % count)
        send = distributed.P2POp(distributed.isend, sent, group=group, group_peer=(rank + 1) % count)
        for work in distributed.batch_isend_irecv([receive, send]):
            work.wait()
        _wait_for(device)
        seconds[number] = time.perf_counter() - start
    distributed.all_reduce(seconds, distributed.ReduceOp.MAX, group=group)
    return seconds[1:].cpu()  # the first may have had to connect


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""What replicas do together besides their gradients: running statistics become those of one process."""

from __future__ import annotations

from typing import Sequence

import torch
import torch.distributed as dist

from parallel.topology import Topology


def combine_statistics(
    buffers: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    *,
    momentum: float,
    accumulation: int,
    topology: Topology,
    group: dist.ProcessGroup,
) -> None:
    """Makes each replica's running statistics those of one process that has seen all micro batches of the step.

    A replica's micro batches move a statistic from R to d^A R + T, with d = 1 - momentum and A = `accumulation`.
    One process, which takes the replicas' micro batches one after the other, would end at d^(A P) R + the sum over
    replicas r of d^(A (P - 1 - r)) T_r: that is put into `buffers`, equal on all replicas, in place of each one's own.

    Args:
        buffers: statistics after this replica's micro batches, one dtype.
        before: what they were before the step, the same on all replicas.
        group: the processes that compute this stage, ordered by replica.
    """
    replicas, decay = topology.replicas, 1 - momentum
    start, end = _flat(before), _flat(buffers)
    own = (end - start * decay**accumulation) * decay ** (accumulation * (replicas - 1 - topology.replica))
    dist.all_reduce(own, group=group)
    combined = own + start * decay ** (accumulation * replicas)
    for buffer, values in zip(buffers, combined.split([buffer.numel() for buffer in buffers])):
        buffer.copy_(values.view_as(buffer))


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors])

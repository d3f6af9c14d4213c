"""Running statistics of batch normalisation: of all replicas, and only of updates that count."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

import torch

from engines.listeners import StepListener
from parallel.processes import Processes
from recipe.course import Update
from recipe.division import Batch


class RunningStatistics(StepListener):
    """Makes the running statistics of replicas one, and takes them back where an update is left out.

    batch: whose shares replicas compute; to be replaced when these change.
    """

    def __init__(
        self,
        buffers: Dict[str, torch.Tensor],
        batch: Batch,
        processes: Processes,
        *,
        momentum: float,
        combined: bool,
    ):
        """
        Args:
            buffers: running statistics by name; the tensors stay the same.
            batch: as computed by `processes`.
            momentum: share of a micro batch's statistics in the running ones.
            combined: whether replicas are to have the same statistics.
        """
        self.batch = batch
        self._buffers = list(buffers.values())
        self._processes = processes
        self._momentum = momentum
        self._combined = combined
        self._before: List[torch.Tensor] = []

    def begin(self, update: Update) -> None:
        # An update that is left out gives them back.
        self._before = [buffer.clone() for buffer in self._buffers]

    def exchanged(self, divisor: Optional[torch.Tensor]) -> None:
        # Never beside a delay, which recipe/checks.py refuses: every update has its gradient.
        if not self._buffers or not self._combined:
            return
        combine_statistics(
            self._buffers,
            self._before,
            momentum=self._momentum,
            shares=self.batch.shares,
            processes=self._processes,
        )

    def applied(self, update: Update, finite: torch.Tensor) -> None:
        for buffer, before in zip(self._buffers, self._before):
            buffer.copy_(torch.where(finite, buffer, before))


def combine_statistics(
    buffers: Sequence[torch.Tensor],
    before: Sequence[torch.Tensor],
    *,
    momentum: float,
    shares: Sequence[range],
    processes: Processes,
) -> None:
    """Make each replica's running statistics those of one process that has seen all micro batches.

    A replica's m micro batches move a statistic from R to D^m R + T, with D = 1 - momentum. One
    process, which takes the N micro batches of all replicas one after the other, would end at
    D^N R + the sum over replicas of D^l T, with l micro batches that come later: that is put into
    `buffers`.

    Args:
        buffers: running statistics after this replica's micro batches of a step.
        before: the same before the step, equal on all replicas.
        momentum: share of a micro batch's statistics in the running ones.
        shares: micro batches of each replica.
        processes: of the run, all of which call.
    """
    place = processes.topology
    if place.replicas == 1:
        return
    decay = 1 - momentum
    share = shares[place.replica]
    count = shares[-1].stop
    # One message for all buffers: float64, so that the sum does not depend on the replicas' order.
    start = _joined(before)
    end = _joined(buffers)
    # This replica's T, made smaller by the micro batches that come later in the step.
    combined = (end - start * decay ** len(share)) * decay ** (count - share.stop)
    processes.sum_over_replicas(combined)
    # R only now: it is in all replicas, and counts once.
    combined = combined + start * decay**count
    lengths = [buffer.numel() for buffer in buffers]
    for buffer, values in zip(buffers, combined.split(lengths)):
        buffer.copy_(values.view_as(buffer))


def _joined(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([buffer.flatten().double() for buffer in buffers])

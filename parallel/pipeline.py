"""A replica's micro batches through its stages, by the schedules of torch.distributed.pipelining.

Shapes are given, never inferred, because inference runs a stray forward pass that moves running statistics. Schedules
get numbers in the place of images, so that each micro batch is fetched when its stage needs it. No
DistributedDataParallel and no zero-bubble schedules: docs/parallel.md has the reasons.

Sources: GPipe, Huang et al., 1811.06965; 1F1B, Narayanan et al., 2006.09503; interleaved, 2104.04473.
"""

from __future__ import annotations

from typing import Callable, Dict, Optional, Sequence, Type

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from parallel.work import Boundary, Work

_AHEAD = 4


class Pipeline:
    """The stages of one process in its replica's pipeline, for images of one size.

    Gradients are bit for bit those of `SingleProcess`: the same micro batches are added up in the same order.
    """

    def __init__(
        self,
        parts: Dict[int, nn.Module],
        boundaries: Sequence[Boundary],
        *,
        schedule: str,
        micro_batches: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        """
        Args:
            parts: by its number in the model, each part that this process computes: one, or several under
                the interleaved schedule.
            boundaries: what enters each of the model's parts, and what leaves the last.
            schedule: "gpipe", "1f1b" or "interleaved".
            micro_batches: of a training step.
            group: the processes of the replica, ordered by stage.
        """
        self._stages = _stages(parts, boundaries, group, device, _TrainingStage)
        self._schedule = _SCHEDULES[schedule](
            self._stages if schedule == "interleaved" else self._stages[0],
            micro_batches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        if device.type == "cpu" and len(parts) == 1:
            self._stages[0].ahead = _AHEAD
        self._numbers = torch.arange(micro_batches)
        self._work: Optional[Work] = None

    def train(self, work: Work) -> None:
        """Forward and backward passes of all micro batches of a step, as far as they are this process's."""
        self._work = work
        for stage in self._stages:
            stage.work = work
        self._schedule.step(target=self._numbers, return_outputs=False)

    def _loss(self, logits: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self._work.loss(int(number), logits)


class ForwardPipeline:
    """The same stages without gradients, for evaluation: one micro batch at a time, while the next one follows."""

    def __init__(
        self,
        parts: Dict[int, nn.Module],
        boundaries: Sequence[Boundary],
        *,
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        """Args as for `Pipeline`."""
        stages = _stages(parts, boundaries, group, device, PipelineStage)
        self._schedule = ScheduleInterleaved1F1B(stages, 1) if len(parts) > 1 else ScheduleGPipe(stages[0], 1)

    def predict(self, images: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """Logits on the last stage, None elsewhere. Args: images: on the first stage, None elsewhere."""
        with torch.no_grad():
            return self._schedule.step(*(() if images is None else (images,)))


class _TrainingStage(PipelineStage):
    """Torch's stage, but it fetches its images itself, reports what it does to `work`, and receives ahead.

    The schedules receive a micro batch when they need it. With gloo the sender's thread then wakes up to send it, on a
    core that computes: that cost 3 to 5 ms a micro batch. Received ahead, it is there. Not for NCCL, whose messages
    come in the order of their calls, nor for several parts on a device, whose messages cross.
    """

    work: Work
    own_number: int
    ahead = 0  # micro batches to receive before they are needed

    def get_fwd_recv_ops(self, fwd_chunk_id):
        return self._receive(super().get_fwd_recv_ops, fwd_chunk_id, self._coming[0])

    def get_bwd_recv_ops(self, bwd_chunk_id):
        return self._receive(super().get_bwd_recv_ops, bwd_chunk_id, self._coming[1])

    def clear_runtime_states(self):
        super().clear_runtime_states()
        self._coming: tuple = ({}, {})  # forward, backward: number of a micro batch -> its messages

    def _receive(self, operations: Callable, number: int, coming: Dict[int, list]) -> list:
        """Messages that the schedule waits for before micro batch `number`: none where this class waits itself."""
        if not self.ahead:
            return operations(number)
        for each in range(number, min(number + self.ahead, self.chunks)):
            if each not in coming:
                wanted = operations(each)
                coming[each] = dist.batch_isend_irecv(wanted) if wanted else []
        return []

    def _wait_for(self, number: int, coming: Dict[int, list]) -> None:
        for message in coming.get(number, ()):
            message.wait()

    def forward_one_chunk(self, fwd_chunk_id, args, *rest, **named):
        if self.is_first:
            with self.work.span("load", fwd_chunk_id):
                args = (self.work.images(fwd_chunk_id),)
        self._wait_for(fwd_chunk_id, self._coming[0])
        self.work.before_forward(fwd_chunk_id)
        with self.work.span("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, *rest, **named)

    def backward_one_chunk(self, bwd_chunk_id, *rest, last_backward=False, **named):
        self._wait_for(bwd_chunk_id, self._coming[1])
        self.work.before_backward(self.own_number, last_backward)
        with self.work.span("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *rest, last_backward=last_backward, **named)
        self.work.after_backward(self.own_number, last_backward)


_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def _stages(
    parts: Dict[int, nn.Module],
    boundaries: Sequence[Boundary],
    group: dist.ProcessGroup,
    device: torch.device,
    kind: Type[PipelineStage],
) -> list:
    stages, gradients = [], kind is _TrainingStage
    for own_number, (number, part) in enumerate(sorted(parts.items())):
        stage = kind(
            part,
            number,
            len(boundaries) - 1,
            device,
            input_args=_example(boundaries[number], device, gradients and number > 0),
            output_args=_example(boundaries[number + 1], device, gradients),
            group=group,
        )
        stage.own_number = own_number
        stages.append(stage)
    return stages


def _example(boundary: Boundary, device: torch.device, requires_grad: bool) -> torch.Tensor:
    """A tensor without memory: only its shape, strides and dtype are read."""
    example = torch.empty(tuple(boundary.shape), dtype=boundary.dtype, device="meta")
    return example.requires_grad_(requires_grad)

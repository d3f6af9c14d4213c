"""A replica's micro batches through its stages, by the schedules of torch.distributed.pipelining.

Shapes are given, never inferred, because inference runs a stray forward pass that moves running statistics. Schedules
get numbers in the place of images, so that each micro batch is fetched when its stage needs it. No
DistributedDataParallel and no zero-bubble schedules: docs/parallel.md has the reasons.

Sources: GPipe, Huang et al., 1811.06965; 1F1B, Narayanan et al., 2006.09503; interleaved, 2104.04473.
"""

from __future__ import annotations

from typing import Callable, Dict, Optional, Sequence

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
        schedule: Optional[str] = None,
        micro_batches: int = 1,
        group: dist.ProcessGroup,
        device: torch.device,
    ):
        """
        Args:
            parts: by its number in the model, each part that this process computes: one, or several under
                the interleaved schedule.
            boundaries: what enters each of the model's parts, and what leaves the last.
            schedule: "gpipe", "1f1b" or "interleaved"; None: `predict`, not `train`.
            micro_batches: of a training step.
            group: the processes of the replica, ordered by stage.
        """
        training = schedule is not None
        examples = [  # without memory: only their shapes, strides and dtypes are read
            torch.empty(tuple(shape), dtype=dtype, device="meta", requires_grad=training and number > 0)
            for number, (shape, dtype) in enumerate(boundaries)
        ]
        self._stages = []
        for own_number, (number, part) in enumerate(sorted(parts.items())):
            shapes = {"input_args": examples[number], "output_args": examples[number + 1]}
            stage = _TrainingStage if training else PipelineStage
            self._stages.append(stage(part, number, len(boundaries) - 1, device, group=group, **shapes))
            self._stages[-1].own_number = own_number
        kind = _SCHEDULES[schedule or ("interleaved" if len(parts) > 1 else "gpipe")]
        stages = self._stages if kind is ScheduleInterleaved1F1B else self._stages[0]
        self._schedule = kind(stages, micro_batches, loss_fn=self._loss if training else None, scale_grads=False)
        if training and device.type == "cpu" and len(parts) == 1:
            self._stages[0].ahead = _AHEAD
        self._numbers = torch.arange(micro_batches)
        self._work: Optional[Work] = None

    def train(self, work: Work) -> None:
        """Forward and backward passes of all micro batches of a step, as far as they are this process's."""
        self._work = work
        for stage in self._stages:
            stage.work = work
        self._schedule.step(target=self._numbers, return_outputs=False)

    def predict(self, images: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """Logits of a micro batch on the last stage, None elsewhere. The next one follows while others compute.

        Args: images: on the first stage, None elsewhere.
        """
        with torch.no_grad():
            return self._schedule.step(*(() if images is None else (images,)))

    def _loss(self, logits: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return self._work.loss(int(number), logits)


class _TrainingStage(PipelineStage):
    """Torch's stage, but it fetches its images itself, reports what it does to `work`, and receives ahead.

    With gloo a sender's thread wakes up to send what is received, on a core that computes, for 3 to 5 ms a micro batch.
    So the messages of the next `ahead` micro batches are received before. Not with NCCL, whose messages come in the
    order of their calls, nor for several parts on a device, whose messages cross.
    """

    work: Work
    own_number: int
    ahead = 0

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

    def forward_one_chunk(self, fwd_chunk_id, args, *rest, **named):
        if self.is_first:
            with self.work.span("load", fwd_chunk_id):
                args = (self.work.images(fwd_chunk_id),)
        for message in self._coming[0].get(fwd_chunk_id, ()):
            message.wait()
        self.work.before_forward(fwd_chunk_id)
        with self.work.span("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, *rest, **named)

    def backward_one_chunk(self, bwd_chunk_id, *rest, last_backward=False, **named):
        for message in self._coming[1].get(bwd_chunk_id, ()):
            message.wait()
        self.work.before_backward(self.own_number, last_backward)
        with self.work.span("backward", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *rest, last_backward=last_backward, **named)
        self.work.after_backward(self.own_number, last_backward)


_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}

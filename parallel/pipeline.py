"""A replica's micro batches through its stages, by the schedules of torch.distributed.pipelining.

Shapes are given, never inferred, because inference runs a stray forward pass that moves running
statistics. Schedules get numbers in the place of images, so that each micro batch is fetched when
its stage needs it. No DistributedDataParallel and no zero-bubble schedules: docs/parallel.md has
the reasons.

Sources: GPipe, Huang et al., 1811.06965; 1F1B, Narayanan et al., 2006.09503; interleaved,
2104.04473.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from parallel.groups import Group
from parallel.work import Boundary, Work

_AHEAD = 4  # micro batches whose messages are received before they are needed
_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
_Messages = Dict[int, List[dist.Work]]  # number of a micro batch -> its messages


class Pipeline:
    """The stages of one process in its replica's pipeline, for images of one size.

    Gradients are bit for bit those of `WholeModel`: the same micro batches are added up in the
    same order.
    """

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        boundaries: Sequence[Boundary],
        *,
        schedule: Optional[str] = None,
        micro_batches: int = 1,
        group: Group,
        device: torch.device,
    ):
        """
        Args:
            parts: by its number in the model, each part that this process computes: one, or several
                under the interleaved schedule.
            boundaries: what enters each of the model's parts, and what leaves the last.
            schedule: "gpipe", "1f1b" or "interleaved"; None: `predict`, not `train`.
            micro_batches: of a training step.
            group: the processes of the replica, ordered by stage.
            device: of this process.
        """
        training = schedule is not None
        stages = _stages(parts, boundaries, training, group, device)
        self._training_stages = [stage for stage in stages if isinstance(stage, _TrainingStage)]
        for place, training_stage in enumerate(self._training_stages):
            training_stage.place = place
            if device.type == "cpu" and len(parts) == 1:
                training_stage.ahead = _AHEAD
        # Any schedule has one forward pass a micro batch; only interleaved takes several parts.
        if schedule is None:
            schedule = "interleaved" if len(parts) > 1 else "gpipe"
        # Torch's interleaved schedule takes all stages of a process, the others their only one.
        self._schedule = _SCHEDULES[schedule](
            stages if schedule == "interleaved" else stages[0],
            micro_batches,
            loss_fn=self._loss if training else None,
            # The update divides sums of gradients: torch would divide by the micro batches, too.
            scale_grads=False,
        )
        self._numbers = torch.arange(micro_batches)

    def train(self, work: Work) -> None:
        """Compute this process's part of the forward and backward passes of a step.

        Args:
            work: the step.
        """
        self._work = work
        for stage in self._training_stages:
            stage.work = work
        # Torch divides the target into micro batches, so that the loss gets the number of each.
        self._schedule.step(target=self._numbers, return_outputs=False)

    def predict(self, images: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """Compute the logits of a micro batch. The next one follows while others compute.

        Args:
            images: on the first stage, None elsewhere.

        Returns:
            The logits on the last stage, None elsewhere.
        """
        with torch.no_grad():
            # Only the first stage's schedule takes an input.
            if images is None:
                return self._schedule.step()
            return self._schedule.step(images)

    def _loss(self, logits: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Return the loss of micro batch `number`, int64 []."""
        return self._work.loss(int(number), logits)


def _stages(
    parts: Mapping[int, nn.Module],
    boundaries: Sequence[Boundary],
    training: bool,
    group: Group,
    device: torch.device,
) -> List[PipelineStage]:
    """Return torch's stages of this process, in the order of the model; see Pipeline."""
    # Examples have the shapes, which torch's stages would else compute to learn them.
    examples = _examples(boundaries, training)
    stage_class = _TrainingStage if training else _Stage
    stages: List[PipelineStage] = []
    for number, part in sorted(parts.items()):
        stage = stage_class(
            part,
            number,
            len(boundaries) - 1,
            device,
            input_args=examples[number],
            output_args=examples[number + 1],
            group=group,
        )
        stages.append(stage)
    return stages


def _examples(boundaries: Sequence[Boundary], training: bool) -> List[torch.Tensor]:
    """Return a tensor without memory for each boundary, for its shape, strides and dtype."""
    examples = []
    for number, (shape, dtype) in enumerate(boundaries):
        needs_gradient = training and number > 0
        example = torch.empty(
            tuple(shape),
            dtype=dtype,
            device="meta",
            requires_grad=needs_gradient,
        )
        examples.append(example)
    return examples


class _Stage(PipelineStage):
    """Torch's stage, whose first takes images in any layout.

    Torch 2.11 compares the strides of what enters the first stage with those of its example, and
    raises an error where they differ; 2.14 has no such check. Loaders return images in the layout
    in which they are decoded, and stages compute from any.
    """

    def _validate_fwd_input(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        """Check nothing."""


class _TrainingStage(_Stage):
    """Torch's stage, which also fetches its images, reports to `work`, and receives ahead.

    With gloo a sender's thread wakes up to send what is received, on a core that computes, for 3 to
    5 ms a micro batch. So the messages of the next `ahead` micro batches are received before. Not
    with NCCL, whose messages come in the order of their calls, nor for several parts on a device,
    whose messages cross.

    Torch's schedules have no hooks for any of this, so the methods are overridden that they call
    for each micro batch. This relies on the following, which torch does not promise: schedules ask
    `get_fwd_recv_ops` and `get_bwd_recv_ops` for what they wait for before a pass, may be given
    nothing, and call `clear_runtime_states` between two steps; a stage has a buffer of its own for
    each micro batch's messages. Tried with torch 2.14. Were it to change, gradients would differ
    from a single process's, which tests/engines/test_distributed.py compares bit for bit, or ranks
    would wait in vain.

    work: the step.
    place: of this part among those of the process.
    ahead: micro batches whose messages are received before they are needed.
    """

    work: Work
    place: int
    ahead = 0

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> List[dist.P2POp]:
        """Return the messages to wait for before the forward pass of micro batch `fwd_chunk_id`."""
        forward, _ = self._coming
        return self._receive(super().get_fwd_recv_ops, fwd_chunk_id, forward)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> List[dist.P2POp]:
        """Return the messages to await before the backward pass of micro batch `bwd_chunk_id`."""
        _, backward = self._coming
        return self._receive(super().get_bwd_recv_ops, bwd_chunk_id, backward)

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        # Between two steps no message is on its way.
        self._coming: Tuple[_Messages, _Messages] = ({}, {})  # forward, backward

    def _receive(
        self,
        operations: Callable[[int], List[dist.P2POp]],
        number: int,
        coming: _Messages,
    ) -> List[dist.P2POp]:
        """Return the messages that the schedule waits for: none where this class waits itself.

        Args:
            operations: returns the messages of a micro batch.
            number: of the micro batch that is computed next.
            coming: of this pass, written.
        """
        if not self.ahead:
            return operations(number)
        assert self.chunks is not None, "a schedule says how many micro batches there are"
        # A message that was received ahead is not asked for again.
        for coming_number in range(number, min(number + self.ahead, self.chunks)):
            if coming_number not in coming:
                asked = operations(coming_number)
                coming[coming_number] = dist.batch_isend_irecv(asked) if asked else []
        return []

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: Tuple[Any, ...],
        *rest: Any,
        **named: Any,
    ) -> Any:
        """Compute the forward pass of micro batch `fwd_chunk_id`.

        The first stage's `args` are numbers, not images.
        """
        # Fetched only now: images of all micro batches would take their memory at once.
        if self.is_first:
            with self.work.span("load", fwd_chunk_id):
                args = (self.work.images(fwd_chunk_id),)
        # Only what was received ahead: torch's schedule waits for all others itself.
        forward, _ = self._coming
        for message in forward.get(fwd_chunk_id, ()):
            message.wait()
        self.work.before_forward(fwd_chunk_id)
        with self.work.span("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, *rest, **named)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Optional[torch.Tensor] = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Compute the backward pass of micro batch `bwd_chunk_id`.

        Args:
            bwd_chunk_id: number of the micro batch.
            loss, full_backward: see torch's class.
            last_backward: no other backward pass of this part follows.
        """
        _, backward = self._coming
        for message in backward.get(bwd_chunk_id, ()):
            message.wait()
        self.work.before_backward(self.place, last_backward)
        with self.work.span("backward", bwd_chunk_id):
            super().backward_one_chunk(
                bwd_chunk_id,
                loss=loss,
                full_backward=full_backward,
                last_backward=last_backward,
            )
        self.work.after_backward(self.place, last_backward)

"""Interface between a schedule and the passes that it computes; the schedule without stages."""

from __future__ import annotations

from typing import Callable, ContextManager, NamedTuple, Protocol, Sequence

import torch
from torch import nn


class Boundary(NamedTuple):
    """Shape and dtype of a micro batch between two parts of the model."""

    shape: Sequence[int]
    dtype: torch.dtype


class Work(Protocol):
    """A replica's passes of one update in pieces, which a schedule calls.

    Micro batches are numbered from 0 within the replica's share.

    images(number): the first stage's input; called once for each micro batch, in order.
    loss(number, logits): the last stage's loss [], to be differentiated; also once each, in order.
    before_forward(number): the layers that follow compute that micro batch.
    before_backward(part, last), after_backward(part, last): around the backward pass of a micro
        batch through the process's own part, which leaves gradients in its parameters; `last`: no
        other follows.
    span(kind, number): a context for the timeline.
    """

    images: Callable[[int], torch.Tensor]
    loss: Callable[[int, torch.Tensor], torch.Tensor]
    before_forward: Callable[[int], None]
    before_backward: Callable[[int, bool], None]
    after_backward: Callable[[int, bool], None]
    span: Callable[[str, int], ContextManager[None]]


class WholeModel:
    """The schedule of a process that computes the whole model, whether or not it has replicas.

    It computes micro batch by micro batch, forward and backward.
    """

    def __init__(self, model: nn.Module, micro_batches: int):
        """
        Args:
            model: all stages.
            micro_batches: of this replica in an update.
        """
        self._model = model
        self._micro_batches = micro_batches

    def train(self, work: Work) -> None:
        """Compute the forward and backward passes of an update, given as `work`."""
        for number in range(self._micro_batches):
            last = number == self._micro_batches - 1
            with work.span("load", number):
                images = work.images(number)
            work.before_forward(number)
            with work.span("forward", number):
                loss = work.loss(number, self._model(images))
            work.before_backward(0, last)
            with work.span("backward", number):
                loss.backward()
            work.after_backward(0, last)

"""Interface between a schedule and the step that it computes; the schedule of a process that computes all stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ContextManager, NamedTuple, Sequence

import torch
from torch import nn


class Boundary(NamedTuple):
    """Shape and dtype of a micro batch between two parts of the model."""

    shape: Sequence[int]
    dtype: torch.dtype


class Work(ABC):
    """One step in pieces, which a schedule calls. Micro batches are numbered from 0 within the replica's share."""

    @abstractmethod
    def images(self, number: int) -> torch.Tensor:
        """The first stage's input; called once for each micro batch, in order."""

    @abstractmethod
    def loss(self, number: int, logits: torch.Tensor) -> torch.Tensor:
        """The last stage's loss [], to be differentiated; called once for each micro batch, in order."""

    @abstractmethod
    def before_forward(self, number: int) -> None:
        """The layers that follow compute micro batch `number`."""

    @abstractmethod
    def before_backward(self, part: int, last: bool) -> None:
        """The backward pass of a micro batch through the process's own part `part` follows; `last`: no other will."""

    @abstractmethod
    def after_backward(self, part: int, last: bool) -> None:
        """That pass is done: gradients lie in the parameters of that part."""

    @abstractmethod
    def span(self, kind: str, number: int) -> ContextManager[Any]:
        """A context for what appears in the timeline."""


class SingleProcess:
    """One process that computes every stage: micro batch by micro batch, forward and backward."""

    def __init__(self, model: nn.Module, micro_batches: int):
        self._model, self._micro_batches = model, micro_batches

    def train(self, work: Work) -> None:
        """Forward and backward passes of all micro batches of a step."""
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

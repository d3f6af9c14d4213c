"""What an engine promises: it computes steps on some hardware, and the loop above it knows no more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ContextManager, Dict, Iterator, NamedTuple, Optional, Tuple

import torch

from data.loader import MicroBatch
from optim.half_weights import Norms
from parallel.topology import Topology
from recipe.batch import Batch

AVERAGES = ("step_average", "epoch_average")


class StepResult(NamedTuple):
    """One update. Tensors stay on the device: reading one waits for it.

    loss: float32 [], the objective averaged over the step's images. correct: int64 [], top-1 hits among
    `images` images. skipped, skipped_in_row: int64 [], updates left out so far, and lately without a break,
    because gradients were not finite. loss_scale: float32 []. norms: where they were asked for.
    unreadable: images that could not be decoded and were left out, a message each.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    images: int
    skipped: torch.Tensor
    skipped_in_row: torch.Tensor
    loss_scale: torch.Tensor
    norms: Optional[Norms]
    unreadable: Tuple[str, ...]


class Counts(NamedTuple):
    """Scores of evaluated images; they add up. loss: float64 [], cross entropy summed; top1, top5: int64 []."""

    images: int
    loss: torch.Tensor
    top1: torch.Tensor
    top5: torch.Tensor


class Engine(ABC):
    """A model with its weights and optimizer on some hardware."""

    batch: Batch
    topology: Topology
    device: torch.device

    @abstractmethod
    def train_step(
        self, micro_batches: Iterator[MicroBatch], step: int, lr: float, measure: bool = False
    ) -> StepResult:
        """One update. Pulls exactly the step's micro batches of this replica, each when it is needed.

        Args:
            step: number of the update, from 0: selects the random draws.
            lr: learning rate of this update.
            measure: also compute the norms and trust ratios.
        """

    @abstractmethod
    def end_epoch(self) -> None:
        """Takes the weights into the average over epochs, if there is one. The loop says when an epoch ends."""

    @abstractmethod
    def averages(self) -> Tuple[str, ...]:
        """Names of the averages that hold something: `step_average`, `epoch_average`."""

    @abstractmethod
    def using(self, weights: str) -> ContextManager[None]:
        """Within it, scores and predictions are those of an average; no training step may be made.

        Args:
            weights: one of `averages()`, or `trained` for the weights themselves.
        """

    @abstractmethod
    def evaluate_step(self, batch: MicroBatch) -> Counts:
        """Scores the valid images of `batch` with the weights in use, dropout off."""

    @abstractmethod
    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        """Logits of the valid images of `batch`, dropout off: float32 [valid, classes], on the device."""

    @abstractmethod
    def shapes(self) -> Dict[str, Tuple[int, ...]]:
        """Shapes of the model's parameters and persistent buffers, by name."""

    @abstractmethod
    def load_weights(self, weights: Dict[str, torch.Tensor]) -> None:
        """Puts floating-point tensors in the place of the parameters and buffers of those names; others stay.

        The optimizer's state stays, too. Raises ValueError for a name or shape that is not the model's.
        """

    @abstractmethod
    def state_dict(self) -> dict:
        """All that persists, on the CPU, whole-model: the same whatever the topology."""

    @abstractmethod
    def load_state_dict(self, state: dict) -> None:
        """Takes over what `state_dict` of any topology gave. Raises ValueError naming a tensor that does not fit."""

    @abstractmethod
    def peak_flops(self) -> float:
        """Floating-point operations per second that this hardware reaches in a large matrix product, measured."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until the device has done all it was given."""

    @abstractmethod
    def close(self) -> None:
        """Releases the hardware."""

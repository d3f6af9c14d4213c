"""What an engine promises: it computes steps on some hardware, and the loop above it knows no more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Iterator, NamedTuple, Optional, Tuple

import torch

from data.loader import MicroBatch
from optim.half_weights import Norms
from parallel.topology import Topology
from recipe.batch import Batch


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
    def evaluate_step(self, batch: MicroBatch) -> Counts:
        """Scores the valid images of `batch` with the current weights, dropout off."""

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

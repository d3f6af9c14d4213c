"""Interface of an engine, which computes steps on some hardware: the loop above it needs nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn import functional as F

from data.base import Source
from data.batches import MicroBatch
from engines.timeline import Recorder
from optim.averaging import WeightAverage
from optim.norms import Norms
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.course import Update, is_known
from recipe.division import Batch

AVERAGES = ("step_average", "epoch_average")


class Diverged(Exception):
    """The loss or the weights are not finite on a device that makes every update: the weights are lost."""


class StepResult(NamedTuple):
    """One update, over all replicas, on every rank. Tensors stay on the device: reading one waits for it.

    loss: float32 [], mean over the images. correct: int64 [], top-1 hits. skipped, skipped_in_row: int64 [], updates
    left out because of gradients that were not finite, in all and in a row until now. loss_scale: float32 []. norms: if
    requested and available. unreadable: a message for each image that could not be decoded.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    images: int
    skipped: torch.Tensor
    skipped_in_row: torch.Tensor
    loss_scale: torch.Tensor
    norms: Optional[Norms]
    unreadable: Tuple[str, ...]


def summable(losses: torch.Tensor) -> torch.Tensor:
    """Losses as float64, rounded to multiples of 2**-24: sums below 2**28 are exact, so in any order the same."""
    return (losses.double() * 2**24).round() / 2**24


class Counts(NamedTuple):
    """Sums over evaluated images. loss: float64 [], of `summable` cross entropies. top1, top5: int64 [], hits."""

    images: int
    loss: torch.Tensor
    top1: torch.Tensor
    top5: torch.Tensor


def scored(logits: torch.Tensor, labels: torch.Tensor) -> Counts:
    """Scores of images. Args: logits: float32 [images, classes]; labels: int64 [images]."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    loss = summable(F.cross_entropy(logits.double(), labels, reduction="none")).sum()
    return Counts(len(labels), loss, best[:, 0].sum(), best.any(1).sum())


def total(
    counts: Sequence[Counts], unreadable: Sequence[str], processes: Processes, device: torch.device
) -> Tuple[Counts, List[str]]:
    """The sum of the counts of all processes, and the messages of all, on every one."""
    own = [torch.stack([torch.as_tensor(value, device=device).double() for value in each]) for each in counts]
    sums = torch.stack(own).sum(0) if own else torch.zeros(4, dtype=torch.float64, device=device)
    images, loss, top1, top5 = processes.sum(sums)
    messages = [message for part in processes.gather(list(unreadable)) for message in part]
    return Counts(int(images), loss, top1.long(), top5.long()), messages


class NoiseScale(NamedTuple):
    """The gradient noise scale, `images` = noise / signal, and its standard error: see engines/noise_scale.py."""

    images: float
    error: float
    signal: float
    noise: float

    def __str__(self) -> str:
        """`1,310±90`; no figure where zero is within two standard errors."""
        return f"{self.images:,.0f}±{self.error:,.0f}" if is_known(self.images, self.error) else "unknown"


class Engine(ABC):
    """A model with its weights and optimizer on some hardware, or this process's part of it.

    Where a run has several processes, all of them call the same methods in the same order.
    """

    batch: Batch
    processes: Processes
    topology: Topology
    device: torch.device
    shapes: Dict[str, Tuple[int, ...]]  # of the model's parameters and persistent buffers
    notes: Tuple[str, ...]  # lines to print at the start of a run
    cut: Sequence[str] = ()  # the blocks that open each stage after the first, where processes have one each
    recorder: Optional[Recorder] = None  # of the steps that `log.trace` selects; None on devices without
    _averages: Dict[str, WeightAverage]

    @abstractmethod
    def training_batches(self, source: Optional[Source], steps: range) -> Iterator[Any]:
        """Micro batches for `train_step` in these steps; closing them ends the processes that load them. `source` is
        None, and there are none, where images do not enter (`topology.is_first`)."""

    @abstractmethod
    def evaluation_batches(self, source: Optional[Source], images: int) -> Any:
        """This process's share of the `images` validation images, which can be iterated repeatedly; with a method
        `close`. Where images do not enter, `source` is None and there are as many times None."""

    @abstractmethod
    def data_wait(self) -> float:
        """Seconds that the device waited for training images since `training_batches`, without the first wait."""

    @abstractmethod
    def train_step(
        self, micro_batches: Iterator[Any], step: int, lr: float, measure: bool = False, update: Optional[Update] = None
    ) -> StepResult:
        """Make one update. Takes exactly the update's images of this process, each when it is needed.

        Args:
            step: the first that the update takes, from 0: selects the random draws.
            measure: also compute the norms and trust ratios.
            update: where it takes several steps; None takes one, and is number `step`.

        Raises UnreadableImage under data.bad_images=error; Diverged on every rank.
        """

    def balance(self, step: int) -> List[str]:
        """Between two updates, the next of which begins at `step`: let replicas compute as many micro batches as they
        are fast, where the recipe asks for it; lines for the user. Waits; every process calls."""
        return []

    def noise_scale(self) -> Tuple[Optional[NoiseScale], Dict[str, NoiseScale]]:
        """The gradient noise scale of the whole model, if known, and by parameter. Waits; every process calls."""
        return None, {}

    def not_finite(self) -> List[str]:
        """Names of this process's parameters whose gradient of the last step was not finite, if known. Waits."""
        return []

    @abstractmethod
    def end_epoch(self) -> None:
        """Add the weights to the average over epochs, if there is one."""

    def averages(self) -> Tuple[str, ...]:
        """Those of `AVERAGES` that hold something."""
        return tuple(name for name, average in self._averages.items() if average.count)

    @abstractmethod
    def using(self, weights: str) -> ContextManager[None]:
        """A context in which scores and predictions are those of one of `averages()`, or of the weights themselves
        (`trained`); no training step may be made in it."""

    @abstractmethod
    def evaluate_step(self, batch: Optional[MicroBatch]) -> Counts:
        """Score the valid images with the weights in use, dropout off. Counts are 0 but on the replica's last stage.
        Args: batch: None where images do not enter."""

    @abstractmethod
    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        """Logits of the valid images, dropout off: float32 [valid, classes]; in a process that computes all stages."""

    @abstractmethod
    def load_weights(self, weights: Dict[str, torch.Tensor]) -> None:
        """Replace the parameters and buffers of those names; others and the optimizer's state stay.
        Raises ValueError for a name or shape that is not the model's."""

    @abstractmethod
    def state_dict(self) -> dict:
        """All that persists of the whole model, on the CPU, whatever the topology. Empty but on the main rank."""

    def live_state(self) -> Dict[str, torch.Tensor]:
        """All that steps change in this process' part of the model, where all replicas have the same: on the device, as
        it is, not copied. No other process takes part."""
        raise NotImplementedError

    def load_live_state(self, saved: Dict[str, torch.Tensor]) -> None:
        """Copy what `live_state` gave here, or to a process that has the same part of the model."""
        raise NotImplementedError

    @abstractmethod
    def load_state_dict(self, state: dict) -> None:
        """Load the `state_dict` of any topology. Raises ValueError naming a tensor that does not fit."""

    def replica_states(self) -> Iterator[dict]:
        """State that differs between replicas, one dictionary for each in order, on the CPU, made one at a time; on
        other ranks than the main one as many empty ones. Every rank iterates to the end."""
        return iter(())

    def load_replica_states(self, count: int, read: Callable[[int], dict]) -> None:
        """Load the `replica_states` of `count` replicas, which `read` returns on the main rank, in order. Each replica
        takes the share of those whose images it now computes. Every rank calls, after `load_state_dict`.

        Raises ValueError naming what does not fit, and the errors of `read`, on every rank.
        """
        if count:
            raise ValueError(f"{count} replicas have a state of their own there, none has one here")

    @abstractmethod
    def peak_flops(self) -> float:
        """Floating-point operations per second that all devices together reach in large matrix products, measured."""

    @abstractmethod
    def close(self) -> None:
        """Release the hardware at the end of a run without failure; waits for all ranks."""

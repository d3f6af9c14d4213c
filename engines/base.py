"""Interface of an engine, which computes steps on some hardware: the loop needs nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Tuple,
)

import torch
from torch.nn import functional as F

from data.base import Source
from data.batches import MicroBatch
from optim.norms import Norms
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.course import Update, is_known
from recipe.division import Batch

if TYPE_CHECKING:
    from engines.timeline import Recorder

AVERAGES = ("step_average", "epoch_average")


class ClosableIterator(Iterator[Any], Protocol):
    """An iterator over what processes load; `close` ends them, and may say whether they have ended."""

    def close(self) -> object: ...


class EvaluatedBatches(Protocol):
    """Micro batches that are to be scored, which can be iterated repeatedly."""

    def __iter__(self) -> Iterator[Optional[MicroBatch]]:
        """Return the micro batches; None for each where images do not enter."""

    def close(self) -> None:
        """End the processes that load them."""


_RESOLUTION = 2**24  # of summed losses, to an image


class Diverged(Exception):
    """The loss or the weights are not finite on a device that makes every update.

    So the weights are lost.
    """


class StepResult(NamedTuple):
    """One update, over all replicas, on every rank.

    Tensors stay on the device: reading one waits for it.

    loss: float32 [], mean over the images.
    correct: int64 [], top-1 hits.
    images: that were seen.
    skipped, skipped_in_row: int64 [], updates left out because of gradients that were not finite,
        in all and in a row until now.
    loss_scale: float32 [].
    norms: if requested and available.
    unreadable: a message for each image that could not be decoded.
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
    """Sums over evaluated images.

    loss: float64 [], of `summable` cross entropies.
    top1, top5: int64 [], hits.
    """

    images: int
    loss: torch.Tensor
    top1: torch.Tensor
    top5: torch.Tensor


class NoiseScale(NamedTuple):
    """The gradient noise scale, `images` = noise / signal: see engines/noise_scale.py.

    error: standard error of `images`.
    """

    images: float
    error: float
    signal: float
    noise: float

    def __str__(self) -> str:
        """Return `1,310±90`; no figure where zero is within two standard errors."""
        if not is_known(self.images, self.error):
            return "unknown"
        return f"{self.images:,.0f}±{self.error:,.0f}"


def one_step(step: int) -> Update:
    """Return the update that takes one step, if all before it do: number `step`, from 0."""
    return Update(step, 1, step)


def summable(losses: torch.Tensor) -> torch.Tensor:
    """Return losses whose sums are the same in any order.

    Args:
        losses: floating-point.

    Returns:
        float64, rounded to multiples of 2**-24, so that sums below 2**28 are exact.
    """
    return (losses.double() * _RESOLUTION).round() / _RESOLUTION


def scored(logits: torch.Tensor, labels: torch.Tensor) -> Counts:
    """Score images.

    Args:
        logits: float32 [images, classes].
        labels: int64 [images].
    """
    # A model may have fewer classes.
    guesses = min(5, logits.shape[1])
    hits = logits.topk(guesses, dim=1).indices == labels[:, None]
    losses = F.cross_entropy(logits.double(), labels, reduction="none")
    return Counts(
        images=len(labels),
        loss=summable(losses).sum(),
        top1=hits[:, 0].sum(),
        top5=hits.any(1).sum(),
    )


def total(
    counts: Sequence[Counts],
    unreadable: Sequence[str],
    processes: Processes,
    device: torch.device,
) -> Tuple[Counts, List[str]]:
    """Add up the counts of all processes, and join their messages. Every process calls.

    Args:
        counts: of this process.
        unreadable: messages of this process.
        processes: of the run.
        device: on which messages between processes lie.
    """
    # float64 holds these sums exactly, see `summable`, so that their order does not matter.
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    if counts:
        # All four counts of a batch in one row: processes then need one message for them.
        rows = []
        for row in counts:
            values = [torch.as_tensor(value, device=device).double() for value in row]
            rows.append(torch.stack(values))
        sums = torch.stack(rows).sum(0)
    images, loss, top1, top5 = processes.sum(sums)
    # A process without messages gathers as well: the others wait for its part.
    by_rank = processes.gather(list(unreadable))
    messages = [message for part in by_rank for message in part]
    return Counts(int(images), loss, top1.long(), top5.long()), messages


class Engine(ABC):
    """A model with its weights and optimizer on some hardware, or this process's part of it.

    Where a run has several processes, all of them call the same methods in the same order.

    batch: of a step.
    processes, topology: of the run.
    device: of inputs and outputs.
    shapes: of the model's parameters and persistent buffers, by name.
    notes: lines to print at the start of a run.
    cut: the blocks that open each stage after the first, where processes have one each.
    recorder: of the steps that `log.trace` selects (engines.timeline); None on devices without.
    """

    batch: Batch
    processes: Processes
    topology: Topology
    device: torch.device
    shapes: Dict[str, Tuple[int, ...]]
    notes: Tuple[str, ...]
    cut: Sequence[str] = ()
    recorder: Optional[Recorder] = None

    @abstractmethod
    def training_batches(self, source: Optional[Source], steps: range) -> ClosableIterator:
        """Return micro batches for `train_step`; closing them ends the processes that load them.

        Args:
            source: of the images; None where they do not enter (`topology.is_first`), and there
                are none then.
            steps: whose micro batches they are.
        """

    @abstractmethod
    def evaluation_batches(self, source: Optional[Source], images: int) -> EvaluatedBatches:
        """Return this process's share of the validation images.

        Args:
            source: of the images; None where they do not enter, and there are as many times None
                then.
            images: number of validation images.
        """

    @abstractmethod
    def data_wait(self) -> float:
        """Return the seconds that the device waited for training images since they were begun.

        The first wait, in which workers start, does not count.
        """

    @abstractmethod
    def train_step(
        self,
        micro_batches: Iterator[Any],
        update: Update,
        lr: float,
        measure: bool = False,
    ) -> StepResult:
        """Make one update.

        Args:
            micro_batches: of which exactly the update's are taken, each when it is needed.
            update: its steps and number, which select the random draws.
            lr: learning rate.
            measure: also compute the norms and trust ratios.

        Raises:
            UnreadableImage: under data.bad_images=error.
            Diverged: on every rank.
            Regroup: an elastic run has lost a replica, or gets one.
        """

    def balance(self, step: int) -> List[str]:
        """Let replicas compute as many micro batches as they are fast, if the recipe asks for it.

        Every process calls between two updates; waits for the device.

        Args:
            step: at which the next update begins.

        Returns:
            Lines for the user.
        """
        return []

    def noise_scale(self) -> Tuple[Optional[NoiseScale], Dict[str, NoiseScale]]:
        """Return the noise scale of the whole model, if known, and those by parameter.

        Every process calls; waits for the device.
        """
        return None, {}

    def not_finite(self) -> List[str]:
        """Return names of this process's parameters whose last gradient was not finite, if known.

        Waits for the device.
        """
        return []

    @abstractmethod
    def end_epoch(self) -> None:
        """Add the weights to the average over epochs, if there is one."""

    @abstractmethod
    def averages(self) -> Tuple[str, ...]:
        """Return those of `AVERAGES` that hold something."""

    @abstractmethod
    def using(self, weights: str) -> ContextManager[None]:
        """Return a context in which scores and predictions are those of other weights.

        No training step may be made in it.

        Args:
            weights: one of `averages()`, or "trained".
        """

    @abstractmethod
    def evaluate_step(self, batch: Optional[MicroBatch]) -> Counts:
        """Score the valid images of a `batch` with the weights in use, dropout off.

        It is None where images do not enter. Counts are 0 but on the replica's last stage.
        """

    @abstractmethod
    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        """Compute the logits of the valid images of a `batch`, dropout off.

        Only a process that computes all stages can.

        Returns:
            float32 [valid, classes].
        """

    @abstractmethod
    def load_weights(self, weights: Dict[str, torch.Tensor]) -> None:
        """Replace the parameters and buffers that `weights` names; all else stays.

        Raises:
            ValueError: a name or shape that is not the model's.
        """

    @abstractmethod
    def state_dict(self) -> dict:
        """Return all that persists of the whole model, on the CPU, whatever the topology.

        It is empty but on the main rank. Every process calls.
        """

    def live_state(self) -> Dict[str, torch.Tensor]:
        """Return all that steps change in this process's part of the model, as it is.

        All replicas have the same. It is on the device and not copied, and no other process takes
        part.
        """
        raise NotImplementedError

    def load_live_state(self, saved: Dict[str, torch.Tensor]) -> None:
        """Copy what `live_state` gave here, or to a process with the same part: `saved`."""
        raise NotImplementedError

    @abstractmethod
    def load_state_dict(self, saved: dict) -> None:
        """Load the `state_dict` of any topology, here `saved`.

        Raises:
            ValueError: a tensor does not fit; names it.
        """

    def replica_states(self) -> Iterator[dict]:
        """Yield the state that differs between replicas, on the CPU, one replica at a time.

        There is one dictionary for each replica, in order; on other ranks than the main one there
        are as many empty ones. Every rank iterates to the end.
        """
        return iter(())

    def load_replica_states(self, count: int, read: Callable[[int], dict]) -> None:
        """Load the `replica_states` of any number of replicas.

        Each replica takes the share of those whose images it now computes. Every rank calls, after
        `load_state_dict`.

        Args:
            count: number of replicas.
            read: returns their states on the main rank; called in order.

        Raises:
            ValueError: what does not fit; on every rank, as are the errors of `read`.
        """
        if count:
            raise ValueError(f"{count} replicas have a state of their own there, none has one here")

    @abstractmethod
    def peak_flops(self) -> float:
        """Return the operations per second that all devices together reach in matrix products.

        They are floating-point operations of large products, measured.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the hardware at the end of a run without failure; waits for all ranks."""

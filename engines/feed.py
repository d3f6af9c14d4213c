"""Micro batches of a step: images to the device, mixed; targets to the last stage."""

from __future__ import annotations

from collections import deque
from typing import (
    Callable,
    Deque,
    Dict,
    Generator,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Tuple,
    Union,
)

import torch
import torch.distributed as dist

from data import loader, mixing
from data.augmentation import Colours
from data.base import Source
from data.batches import MicroBatch
from data.epochs import RunOrder
from data.prefetch import Prefetcher, to_device
from parallel.groups import begun
from parallel.processes import Processes
from recipe.division import Batch
from recipe.images import Data

_LABELS = 1  # tag of the labels' messages, apart from those of the schedules
_MOST_SENT = 64  # labels of batches that are scored, on their way to the last stage

Batches = Union[Prefetcher, loader.TrainingBatches]


class ImageSettings(NamedTuple):
    """How the images of a run are read, mixed and labelled.

    data: section of the recipe.
    classes: number of classes.
    seed: of the run.
    colours: by which the model normalises images.
    batch_statistics: whether the model normalises by statistics of a micro batch.
    size_of_epoch: pixels a side of training images, of an epoch counted from 0.
    """

    data: Data
    classes: int
    seed: int
    colours: Colours
    batch_statistics: bool
    size_of_epoch: Callable[[int], int]


class _Mixed(NamedTuple):
    """How a micro batch is mixed; None where nothing is. draw: what it was drawn for."""

    draw: Optional[Tuple[Tuple[int, int], int, int, int]]
    plan: Optional[mixing.Mixing]


class Feed:
    """Images for the first stage, targets for the last, of the micro batches of this replica.

    The first stage has the loader. A last stage in another process receives the labels, and draws
    by itself how images are mixed: that is a function of (seed, step, micro batch).
    """

    def __init__(self, settings: ImageSettings, processes: Processes, device: torch.device):
        """
        Args:
            settings: of the run's images.
            processes: of the run.
            device: that computes.
        """
        self._settings = settings
        self._group = processes.host_stage_group
        self._topology = processes.topology
        self._device = device
        self._sent: Deque[Tuple[dist.Work, torch.Tensor]] = deque()
        # What was drawn last: a process with one stage asks for it twice.
        self._mixed = _Mixed(None, None)
        # Labels, where this stage has them; else messages that are on their way from the first one.
        self._ready: Deque[Tuple[torch.Tensor, int]] = deque()
        self._coming: Deque[Tuple[dist.Work, torch.Tensor]] = deque()

    @property
    def image_dtype(self) -> torch.dtype:
        """Return the dtype of training images as they enter the model.

        Mixed ones lie between the integers.
        """
        return torch.float32 if self._settings.data.mixes else torch.uint8

    def start(
        self,
        micro_batches: Iterator[MicroBatch],
        *,
        steps: range,
        share: range,
        rows: int,
        size: int,
    ) -> None:
        """Begin an update of some steps.

        Args:
            micro_batches: of this replica.
            steps: numbers of the update's steps.
            share: this replica's, of the micro batches of each step.
            rows: of a micro batch.
            size: pixels a side of its images, which the first stage sees itself.
        """
        self._micro_batches = micro_batches
        self._steps = steps
        self._share = share
        self._rows = rows
        self._size = size
        # What the loader says about each micro batch; it stays empty where images do not enter.
        self._own_numbers: Dict[int, int] = {}
        self.images_seen = 0
        self.unreadable: List[str] = []
        self._forget_labels()
        if self._topology.is_last and not self._topology.is_first:
            # All are received from now on, before the first is needed: the sender need not wait.
            for _ in range(len(steps) * len(share)):
                self._coming.append(self._receive_labels())

    def place(self, number: int) -> Tuple[int, int]:
        """Return a micro batch's step, and its number within that step over all replicas.

        Args:
            number: counted in this replica, from the update's first on.
        """
        # Where images enter, the loader has said which micro batch it was; elsewhere the share
        # does.
        index, place = divmod(number, len(self._share))
        return self._steps[index], self._own_numbers.get(number, self._share[place])

    def images(self, number: int) -> torch.Tensor:
        """Return the images of a micro batch on the device; called in order.

        Args:
            number: counted in this replica.

        Returns:
            uint8 or, mixed, float32 [rows, 3, size, size].
        """
        batch = next(self._micro_batches, None)
        assert batch is not None, f"only {number} micro batches came"
        if self._topology.world > 1:
            assert batch.number == self.place(number)[1], (batch.number, number)
        # Before the plan of mixing is drawn, which is keyed by the loader's number.
        self._own_numbers[number] = batch.number
        self._size = batch.images.shape[-1]
        self.images_seen += batch.valid
        self.unreadable.extend(batch.unreadable)
        # Labels leave before the images are mixed: the last stage may need them soon.
        self._send_labels(batch)
        images = batch.images.to(self._device, non_blocking=True)
        plan = self._plan(number, len(images), batch.valid)
        if plan is not None:
            images = mixing.mix_images(images.contiguous(), plan)
        if self._settings.batch_statistics and 0 < batch.valid < len(images):
            # Statistics of images, not of padding.
            images = images[torch.arange(len(images), device=self._device) % batch.valid]
        return images

    def targets(self, number: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return labels and targets of a micro batch, on the last stage; called in order.

        Args:
            number: counted in this replica.

        Returns:
            Labels, int64 [valid], and targets: the same, or float32 [valid, classes] where images
            are mixed. On the device.
        """
        labels, valid = self._labels()
        labels = to_device(labels, self._device)
        # By the same key as for its images, which another process may have mixed.
        plan = self._plan(number, self._rows, valid)
        targets = labels
        if plan is not None:
            targets = mixing.mix_targets(labels, plan, self._settings.classes)
        return labels[:valid], targets[:valid]

    def evaluation_images(self, batch: MicroBatch) -> torch.Tensor:
        """Return the images of `batch`, to be scored, on the device.

        Their labels go to the last stage.
        """
        self._forget_labels()  # of a batch whose scores nobody asked for
        # Labels of batches before the newest few have arrived, and would pile up.
        if len(self._sent) >= _MOST_SENT:
            self._sent.popleft()[0].wait()
        self._send_labels(batch)
        return batch.images.to(self._device, non_blocking=True)

    def evaluation_labels(self, rows: int) -> torch.Tensor:
        """Return the labels of what is being scored, on the last stage.

        Args:
            rows: with padding.

        Returns:
            int64 [valid], on the device.
        """
        self._rows = rows
        if not self._topology.is_first:
            self._coming.append(self._receive_labels())
        labels, valid = self._labels()
        return to_device(labels[:valid], self._device)

    def finish(self) -> None:
        """Wait until all labels have arrived: then their memory may be used again."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _plan(self, number: int, rows: int, valid: int) -> Optional[mixing.Mixing]:
        """Draw how a micro batch is mixed: once for its images and targets, where both are here."""
        place = self.place(number)
        draw = (place, rows, valid, self._size)
        if self._mixed.draw != draw:
            plan = mixing.draw(
                self._settings.data,
                self._settings.seed,
                place,
                rows=rows,
                valid=valid,
                size=(self._size, self._size),
                device=self._device,
            )
            self._mixed = _Mixed(draw, plan)
        return self._mixed.plan

    def _send_labels(self, batch: MicroBatch) -> None:
        if self._topology.is_last:
            self._ready.append((batch.labels, batch.valid))
            return
        # One message: how many rows are images, then the labels of all rows.
        message = torch.cat([torch.tensor([batch.valid]), batch.labels])
        last = self._topology.stages - 1
        work = dist.isend(message, group=self._group, tag=_LABELS, group_dst=last)
        # The message is kept until it has arrived: its memory must not be used again.
        self._sent.append((begun(work), message))

    def _receive_labels(self) -> Tuple[dist.Work, torch.Tensor]:
        message = torch.empty(1 + self._rows, dtype=torch.int64)
        work = dist.irecv(message, group=self._group, tag=_LABELS, group_src=0)
        return begun(work), message

    def _forget_labels(self) -> None:
        self._ready.clear()
        self._coming.clear()

    def _labels(self) -> Tuple[torch.Tensor, int]:
        """Return the labels of the next micro batch, and how many of its rows are images."""
        if self._topology.is_first:
            return self._ready.popleft()
        work, message = self._coming.popleft()
        work.wait()
        return message[1:], int(message[0])


def training_batches(
    source: Optional[Source],
    settings: ImageSettings,
    *,
    batch: Batch,
    replica: int,
    steps: range,
    device: torch.device,
) -> Batches:
    """Return a replica's micro batches of some steps.

    Args:
        source: of the images; None where they do not enter, and then there are no micro batches.
        settings: of the run's images.
        batch: of a step.
        replica: whose micro batches they are.
        steps: their numbers.
        device: to which they are sent.
    """
    if source is None:
        # The loop closes its batches and asks how long it waited, also where there are none.
        return Prefetcher(_no_batches(), device, depth=0)
    return loader.TrainingBatches(
        RunOrder(source, settings.data, settings.seed, batch.global_),
        steps,
        image_size=settings.size_of_epoch,
        micro=batch.micro,
        share=batch.shares[replica],
        device=device,
        colours=settings.colours,
    )


def _no_batches() -> Generator[MicroBatch, None, None]:
    """Yield nothing, as a generator, which can be closed."""
    yield from ()


class Nothing(List[None]):
    """Stands for batches where images do not enter: as many times None."""

    def close(self) -> None:
        """End nothing."""

"""Micro batches on their way into the model: to the device, mixed, and with their targets to the last stage."""

from __future__ import annotations

import functools
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
import torch.distributed as dist

from data import loader, mixing
from data.base import Source
from data.batches import MicroBatch
from data.prefetch import Prefetcher
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.batch import training_image_size
from recipe.config import Recipe
from recipe.division import Batch

_LABELS = 1  # tag of the labels' messages, apart from those of the schedules


class Targets(NamedTuple):
    """Targets of a micro batch on the last stage.

    valid: rows that are images; they come first. labels: int64 [valid]. targets: as `labels`, or float32
    [valid, classes] where images are mixed. All on the device.
    """

    valid: int
    labels: torch.Tensor
    targets: torch.Tensor


class Feed:
    """Images for the first stage, targets for the last, of the micro batches of this replica.

    The first stage has the loader. Where the last stage is another process it is sent the labels, micro batch by
    micro batch; how images are mixed it draws itself, for that is a function of (seed, step, micro batch).
    """

    def __init__(self, recipe: Recipe, processes: Processes, device: torch.device, whole_batches: bool):
        """
        Args:
            whole_batches: whether padding rows repeat images, as layers need that take statistics over the rows.
        """
        self._data, self._classes, self._seed = recipe.data, recipe.model.classes, recipe.run.seed
        self._processes, self._topology = processes, processes.topology
        self._device, self._whole_batches = device, whole_batches
        self._sent: List[tuple] = []

    @property
    def image_dtype(self) -> torch.dtype:
        """Dtype of training images as they enter the model: mixed ones lie between the integers."""
        return torch.float32 if mixing.mixes(self._data) else torch.uint8

    def start(
        self,
        micro_batches: Iterator[MicroBatch],
        count: int,
        step: int,
        first_number: int,
        rows: int,
        size: int,
    ) -> None:
        """A step begins.

        Args:
            micro_batches: of this replica; used on the first stage only.
            count, first_number: of them, and of the first within the step over all replicas.
            rows, size: rows of a micro batch, and pixels a side of its images.
        """
        self._micro_batches, self._step, self._first_number = micro_batches, step, first_number
        self._rows, self._size = rows, size
        self._waiting: Dict[int, Tuple[torch.Tensor, int]] = {}
        self._own_numbers: Dict[int, int] = {}
        if self._topology.is_last and not self._topology.is_first:
            self._coming = [self._ask() for _ in range(count)]
        self.images_seen = 0
        self.unreadable: List[str] = []

    def number_of(self, number: int) -> int:
        """The number within the step over all replicas, of a micro batch that is counted in this replica."""
        return self._own_numbers.get(number, self._first_number + number)

    def images(self, number: int) -> torch.Tensor:
        """Images of micro batch `number`, counted in this replica, on the device; in order."""
        batch = next(self._micro_batches, None)
        assert batch is not None, f"only {number} micro batches came"
        assert self._topology.world == 1 or batch.number == self._first_number + number, (batch.number, number)
        self._own_numbers[number] = batch.number
        self.images_seen += batch.valid
        self.unreadable.extend(batch.unreadable)
        self._hand_over(number, batch)
        images = batch.images.to(self._device, non_blocking=True)
        plan = self._plan(batch.number, len(images), batch.valid)
        if plan is not None:
            images = mixing.mix_images(images.contiguous(), plan)
        if self._whole_batches and 0 < batch.valid < len(images):
            # Statistics of images, not of padding.
            images = images[torch.arange(len(images), device=self._device) % batch.valid]
        return images

    def targets(self, number: int) -> Targets:
        """Targets of micro batch `number`, on the last stage; in order."""
        labels, valid = self._taken(number)
        labels = labels.to(self._device, non_blocking=True)
        plan = self._plan(self.number_of(number), self._rows, valid)
        targets = labels if plan is None else mixing.mix_targets(labels, plan, self._classes)
        return Targets(valid, labels[:valid], targets[:valid])

    def evaluation_images(self, batch: MicroBatch) -> torch.Tensor:
        """Images to be scored, on the device; their labels go to the last stage."""
        self._waiting = {}
        self._hand_over(0, batch)
        return batch.images.to(self._device, non_blocking=True)

    def evaluation_labels(self, rows: int) -> torch.Tensor:
        """Labels of the valid rows of what is being scored, int64 [valid], on the device; on the last stage."""
        self._rows = rows
        if not self._topology.is_first:
            self._coming = [self._ask()]
        labels, valid = self._taken(0)
        return labels[:valid].to(self._device)

    def finish(self) -> None:
        """All labels have arrived: their memory may be used again."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _plan(self, number: int, rows: int, valid: int) -> Optional[mixing.Mixing]:
        return mixing.draw(self._data, self._seed, self._step, number, rows, valid, self._size, self._size)

    def _hand_over(self, number: int, batch: MicroBatch) -> None:
        if self._topology.is_last:
            self._waiting[number] = batch.labels, batch.valid
            return
        message = torch.cat([torch.tensor([batch.valid]), batch.labels])
        group = self._processes.host_stage_group
        work = dist.isend(message, group=group, tag=_LABELS, group_dst=self._topology.stages - 1)
        self._sent.append((work, message))

    def _taken(self, number: int) -> Tuple[torch.Tensor, int]:
        if self._topology.is_first:
            return self._waiting.pop(number)
        work, message = self._coming[number]
        work.wait()
        return message[1:], int(message[0])

    def _ask(self) -> tuple:
        """Ask for labels; all before the first are needed, so that the sender need not wait."""
        message = torch.empty(1 + self._rows, dtype=torch.int64)
        return dist.irecv(message, group=self._processes.host_stage_group, tag=_LABELS, group_src=0), message


def training_batches(
    source: Optional[Source], recipe: Recipe, batch: Batch, topology: Topology, steps: range, device: torch.device
) -> Prefetcher:
    """This replica's micro batches of some steps; none where images do not enter."""
    if source is None:
        return Prefetcher((nothing for nothing in ()), device, depth=0)
    return loader.training_batches(
        source,
        data=recipe.data,
        image_size=functools.partial(training_image_size, recipe),
        global_batch=batch.global_,
        micro=batch.micro,
        seed=recipe.run.seed,
        first_step=steps.start,
        last_step=steps.stop,
        replica=topology.replica,
        replicas=batch.replicas,
        device=device,
    )


class _Nothing(list):
    """A list of None for each batch of the first stage."""

    def close(self) -> None:
        """There is nothing to end."""


def evaluation_batches(source: Optional[Source], recipe: Recipe, topology: Topology, images: int, device: torch.device):
    """This replica's share of the validation images; where images do not enter, as many times None."""
    rows = recipe.batch.evaluation
    if source is None:
        return _Nothing([None] * len(loader.evaluation_share(images, rows, topology.replica, topology.replicas)))
    return loader.EvaluationBatches(
        source,
        data=recipe.data,
        image_size=recipe.model.image_size,
        batch=rows,
        replica=topology.replica,
        replicas=topology.replicas,
        device=device,
    )

"""Micro batches of a step: images to the device, mixed; targets to the last stage; losses, and gradients added up."""

from __future__ import annotations

import functools
from collections import deque
from typing import Any, Callable, ContextManager, Deque, Dict, Iterator, List, Optional, Tuple, Union

import torch
import torch.distributed as dist
from torch.nn import functional as F

from data import loader, mixing
from data.base import Source
from data.batches import MicroBatch
from data.prefetch import Prefetcher, sent
from engines.base import summable
from engines.timeline import Recorder
from models.stochastic import Draws
from optim.gradients import Gradients
from optim.loss_scale import LossScale
from parallel.processes import Processes
from parallel.topology import Topology
from parallel.work import Work
from recipe.batch import training_image_size
from recipe.config import Recipe
from recipe.division import Batch

_LABELS = 1  # tag of the labels' messages, apart from those of the schedules


class Feed:
    """Images for the first stage, targets for the last, of the micro batches of this replica.

    The first stage has the loader. A last stage in another process receives the labels, and draws by itself how images
    are mixed: that is a function of (seed, step, micro batch).
    """

    def __init__(self, recipe: Recipe, processes: Processes, device: torch.device):
        self._data, self._classes, self._seed = recipe.data, recipe.model.classes, recipe.run.seed
        self._group, self._topology = processes.host_stage_group, processes.topology
        self._device, self._batch_statistics = device, recipe.model.batch_statistics
        self._sent: List[tuple] = []
        self._mixed: Tuple[tuple, Optional[mixing.Mixing]] = ((), None)
        self._waiting: Deque[tuple] = deque()  # labels on their way from the first stage to the last

    @property
    def image_dtype(self) -> torch.dtype:
        """Dtype of training images as they enter the model: mixed ones lie between the integers."""
        return torch.float32 if mixing.mixes(self._data) else torch.uint8

    def start(self, micro_batches: Iterator[MicroBatch], steps: range, share: range, rows: int, size: int) -> None:
        """Begin an update of some steps.

        Args:
            share: this replica's, of the micro batches of each step.
            rows, size: rows of a micro batch, and pixels a side of its images, which the first stage sees itself.
        """
        self._micro_batches, self._steps, self._share = micro_batches, steps, share
        self._rows, self._size = rows, size
        self._own_numbers: Dict[int, int] = {}
        self._waiting.clear()
        if self._topology.is_last and not self._topology.is_first:
            # All before the first are needed, so that the sender need not wait.
            self._waiting.extend(self._receive_labels() for _ in range(len(steps) * len(share)))
        self.images_seen = 0
        self.unreadable: List[str] = []

    def place(self, number: int) -> Tuple[int, int]:
        """Step of a micro batch that is counted in this replica, and its number within that step over all replicas."""
        step, place = divmod(number, len(self._share))
        return self._steps[step], self._own_numbers.get(number, self._share[place])

    def images(self, number: int) -> torch.Tensor:
        """Images of micro batch `number`, counted in this replica, on the device; in order."""
        batch = next(self._micro_batches, None)
        assert batch is not None, f"only {number} micro batches came"
        assert self._topology.world == 1 or batch.number == self.place(number)[1], (batch.number, number)
        self._own_numbers[number], self._size = batch.number, batch.images.shape[-1]
        self.images_seen += batch.valid
        self.unreadable.extend(batch.unreadable)
        self._send_labels(batch)
        images = batch.images.to(self._device, non_blocking=True)
        plan = self._plan(number, len(images), batch.valid)
        if plan is not None:
            images = mixing.mix_images(images.contiguous(), plan)
        if self._batch_statistics and 0 < batch.valid < len(images):
            # Statistics of images, not of padding.
            images = images[torch.arange(len(images), device=self._device) % batch.valid]
        return images

    def targets(self, number: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Labels of the images of micro batch `number`, int64 [valid], and their targets: the same, or where
        images are mixed float32 [valid, classes]. On the last stage, on the device; in order."""
        labels, valid = self._labels()
        labels = sent(labels, self._device)
        plan = self._plan(number, self._rows, valid)
        targets = labels if plan is None else mixing.mix_targets(labels, plan, self._classes)
        return labels[:valid], targets[:valid]

    def evaluation_images(self, batch: MicroBatch) -> torch.Tensor:
        """Images to be scored, on the device; their labels go to the last stage."""
        self._waiting.clear()  # of a batch whose scores nobody asked for
        self._send_labels(batch)
        return batch.images.to(self._device, non_blocking=True)

    def evaluation_labels(self, rows: int) -> torch.Tensor:
        """Labels of the valid rows of what is being scored, int64 [valid], on the device; on the last stage."""
        self._rows = rows
        if not self._topology.is_first:
            self._waiting.append(self._receive_labels())
        labels, valid = self._labels()
        return sent(labels[:valid], self._device)

    def finish(self) -> None:
        """Wait until all labels have arrived: then their memory may be used again."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _plan(self, number: int, rows: int, valid: int) -> Optional[mixing.Mixing]:
        """How a micro batch is mixed: drawn once for its images and its targets, where both are here."""
        drawn = (*self.place(number), rows, valid, self._size, self._size)
        if self._mixed[0] != drawn:
            self._mixed = drawn, mixing.draw(self._data, self._seed, *drawn, self._device)
        return self._mixed[1]

    def _send_labels(self, batch: MicroBatch) -> None:
        if self._topology.is_last:
            self._waiting.append((batch.labels, batch.valid))
            return
        message = torch.cat([torch.tensor([batch.valid]), batch.labels])
        work = dist.isend(message, group=self._group, tag=_LABELS, group_dst=self._topology.stages - 1)
        self._sent.append((work, message))

    def _receive_labels(self) -> tuple:
        message = torch.empty(1 + self._rows, dtype=torch.int64)
        return dist.irecv(message, group=self._group, tag=_LABELS, group_src=0), message

    def _labels(self) -> Tuple[torch.Tensor, int]:
        """Labels of the next micro batch, and how many of its rows are images."""
        if self._topology.is_first:
            return self._waiting.popleft()
        work, message = self._waiting.popleft()
        work.wait()
        return message[1:], int(message[0])


class TrainingStep(Feed, Work):
    """One training step as the schedules see it, in this process; the same object for all steps.

    total: float64 [], losses added up; correct: int64 [], top-1 hits. Both are 0 except on the last stage.
    """

    def __init__(
        self,
        recipe: Recipe,
        processes: Processes,
        device: torch.device,
        draws: Draws,
        gradients: Gradients,
        loss_scale: LossScale,
        recorder: Recorder,
        arm: Optional[Callable[[], None]],
    ):
        """Args: arm: called before the last backward pass of a step, where the exchange can overlap it."""
        super().__init__(recipe, processes, device)
        self._draws, self._gradients, self._loss_scale = draws, gradients, loss_scale
        self._recorder, self._arm, self._check = recorder, arm, processes.check

    def start(self, *arguments: Any) -> None:
        super().start(*arguments)
        self.total = torch.zeros((), dtype=torch.float64, device=self._device)
        self.correct = torch.zeros((), dtype=torch.int64, device=self._device)
        self._gradients.zero()

    def before_forward(self, number: int) -> None:
        self._check()
        self._draws.step, self._draws.micro_batch = self.place(number)

    def loss(self, number: int, logits: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy; an image that was left out counts as one with loss 0, so others keep their weight."""
        labels, targets = self.targets(number)
        logits = logits[: len(labels)].float()
        losses = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self._data.label_smoothing)
        loss = losses / self._rows
        self.total += summable(loss.detach())
        self.correct += (logits.detach().argmax(1) == labels).sum()
        return loss * self._loss_scale.scale

    def before_backward(self, part: int, last: bool) -> None:
        if last and self._arm is not None:
            self._arm()

    def after_backward(self, part: int, last: bool) -> None:
        self._gradients.accumulate(part)

    def span(self, kind: str, number: int) -> ContextManager[None]:
        return self._recorder.span(kind, number)


def training_batches(
    source: Optional[Source], recipe: Recipe, batch: Batch, topology: Topology, steps: range, device: torch.device
) -> Union[Prefetcher, loader.TrainingBatches]:
    """This replica's micro batches of some steps; none where images do not enter."""
    if source is None:
        return Prefetcher((nothing for nothing in ()), device, depth=0)
    return loader.TrainingBatches(
        source,
        data=recipe.data,
        image_size=functools.partial(training_image_size, recipe),
        global_batch=batch.global_,
        micro=batch.micro,
        seed=recipe.run.seed,
        first_step=steps.start,
        last_step=steps.stop,
        share=batch.shares[topology.replica],
        device=device,
    )


class Nothing(list):
    """In the place of batches, where images do not enter: as many times None."""

    def close(self) -> None:
        pass

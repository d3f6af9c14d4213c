"""Images for IPUs: those of one instance, position by position, in the order of all engines.

PopTorch's loader gathers positions into the batches of a whole update, in worker processes. So a step arrives as one
block of memory, which PopTorch takes without a copy.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing import resource_tracker
from typing import Callable, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch.utils.data import Dataset

from data import mixing
from data.base import Source, UnreadableImage
from data.batches import MicroBatch
from data.loader import EvaluationBatches, NotLeftOut, evaluation_share
from data.transforms import Training
from data.workers import signals_withheld
from engines.ipu_model import mixing_rows
from recipe.batch import steps_per_epoch, training_image_size
from recipe.config import Recipe
from recipe.division import Batch

UNREADABLE = -2  # label of an image that could not be decoded
_PATIENCE = 30.0  # seconds for PopTorch's process to end; it ignores the signals that PopTorch sends it


class StepImages(NamedTuple):
    """The images of one update that an instance computes: micro batches one behind the other.

    images: uint8 [rows, 3, H, W], rows = accumulation x replicas x micro. labels: int32 [rows]. mixing: float32
    [rows, 6], see engines.ipu_model.mixing_rows; None where the recipe does not mix. step: number of the update.
    """

    images: torch.Tensor
    labels: torch.Tensor
    mixing: Optional[torch.Tensor]
    step: int


class Positions(Dataset):
    """Position p of an instance: row p % share of its part of step first_step + p // share, `share` images a step.

    Order, augmentation and mixing are those of other devices, whatever the number of replicas and instances.
    """

    def __init__(
        self, source: Source, recipe: Recipe, batch: Batch, steps: range, instance: int = 0, instances: int = 1
    ):
        """Args: steps: numbers of the updates. instance, instances: this process, and how many there are."""
        self._source, self._recipe, self._batch, self._steps = source, recipe, batch, steps
        self._share = batch.global_ // instances
        self._first = instance * self._share
        self._per_epoch = steps_per_epoch(len(source), batch.global_)
        self._size = training_image_size(recipe, 0)
        self._transform = Training(recipe.data, recipe.run.seed)
        self._order: Tuple[int, Optional[np.ndarray]] = (-1, None)
        self._plan: Tuple[Optional[Tuple[int, int]], Optional[torch.Tensor]] = (None, None)

    def __len__(self) -> int:
        return len(self._steps) * self._share

    def __getitem__(self, position: int) -> tuple:
        """Image, uint8 [3, H, W]; label, int32 []; how its row is mixed, float32 [6], if anything is."""
        step, row, epoch, index = self._place(position)
        try:
            image = self._transform(self._source.open(index), self._size, epoch, index)
            label = int(self._source.labels[index])
        except UnreadableImage:  # the training process reports it: here it would be a worker's traceback
            image, label = torch.zeros(3, self._size, self._size, dtype=torch.uint8), UNREADABLE
        found = image, torch.tensor(label, dtype=torch.int32)
        number, row = divmod(row, self._batch.micro)
        return (*found, self._mixing(step, number)[row]) if mixing.mixes(self._recipe.data) else found

    def complain(self, position: int) -> None:
        """Raise UnreadableImage with the fault of the image at a position."""
        index = self._place(position)[3]
        try:
            self._source.read(index)
        except UnreadableImage as error:
            raise UnreadableImage(f"{error}; mend or remove the file") from None
        raise UnreadableImage(f"{self._source.name(index)}: could be read only the second time; start again")

    def _place(self, position: int) -> Tuple[int, int, int, int]:
        """Step, row within the step over all instances, epoch, and number of the image in its source."""
        number, row = divmod(position, self._share)
        step, row = self._steps[number], row + self._first
        epoch, within = divmod(step, self._per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, self._source.order(self._recipe.run.seed, epoch)
        return step, row, epoch, int(self._order[1][within * self._batch.global_ + row])

    def _mixing(self, step: int, number: int) -> torch.Tensor:
        if self._plan[0] != (step, number):
            micro, size = self._batch.micro, self._size
            plan = mixing.draw(self._recipe.data, self._recipe.run.seed, step, number, micro, micro, size, size)
            self._plan = (step, number), mixing_rows(plan, micro, size, size)
        return self._plan[1]


class TrainingFeed:
    """The steps of a run, from a loader of combined batches of `Positions`.

    waited: seconds spent waiting for images while the IPUs were idle, without the first step's.
    """

    def __init__(self, positions: Positions, steps: range, loader: Callable[[Positions], object]):
        """Args: loader: creates PopTorch's loader, which begins to read at once."""
        self._positions, self._first = positions, steps.start
        # A signal to all processes is for this one: it saves, and needs the images of the step until then. Starting
        # Python's resource tracker, which PopTorch's fork server needs, unblocks signals here.
        with signals_withheld():
            resource_tracker.ensure_running()
        before = multiprocessing.active_children()
        with signals_withheld():
            self._loader = loader(positions)
            self._batches = iter(self._loader)
        self._readers = [process for process in multiprocessing.active_children() if process not in before]
        self._number = 0
        self.waited = 0.0

    def __iter__(self) -> Iterator[StepImages]:
        return self

    def __next__(self) -> StepImages:
        """Raises UnreadableImage."""
        start = time.perf_counter()
        images, labels, *rows = next(self._batches)
        if self._number:  # the first waits for the workers to start
            self.waited += time.perf_counter() - start
        number, self._number = self._number, self._number + 1
        damaged = (labels == UNREADABLE).nonzero()
        if len(damaged):
            self._positions.complain(number * len(labels) + int(damaged[0]))
        return StepImages(images, labels, rows[0] if rows else None, self._first + number)

    def close(self) -> None:
        """Ends the worker processes, by force where a read hangs."""
        force = threading.Timer(_PATIENCE, lambda: [process.kill() for process in self._readers])
        force.daemon = True
        force.start()
        self._loader.terminate()
        force.cancel()


class EvaluationFeed:
    """This instance's share of the validation images. The replicas of all instances run in step, so an instance with
    fewer images ends with empty batches."""

    def __init__(self, source: Source, recipe: Recipe, rows: int, instance: int, instances: int):
        """Args: rows: images that the instance's replicas evaluate in one call."""
        size = recipe.model.image_size
        place = {"replica": instance, "replicas": instances}
        self._batches = EvaluationBatches(source, data=recipe.data, image_size=size, batch=rows, **place)
        shares = [len(evaluation_share(len(source), rows, each, instances)) for each in range(instances)]
        self._empty = max(shares) - shares[instance]
        self._shape = (rows, 3, size, size)

    def __iter__(self) -> Iterator[MicroBatch]:
        try:
            yield from self._batches
        except NotLeftOut as error:  # it advises to leave the image out, which IPUs cannot
            raise UnreadableImage(f"{error.reason}; mend or remove the file") from None
        for _ in range(self._empty):
            none = torch.zeros(self._shape[0], dtype=torch.int64)
            yield MicroBatch(torch.zeros(self._shape, dtype=torch.uint8), none, none - 1, 0, 0, 0, ())

    def close(self) -> None:
        """Ends the worker processes."""
        self._batches.close()


def padded(images: torch.Tensor, rows: int) -> List[torch.Tensor]:
    """Images in parts of `rows`, the last filled up with black images: a compiled program takes one size only."""
    missing = -len(images) % rows
    images = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
    return list(images.contiguous().split(rows))  # PopTorch copies others, with a warning

"""Images for IPUs: those that one instance reads, by position, in the order of all engines.

PopTorch's loader gathers positions into the batches of a whole update, in worker processes. So a
step arrives as one block of memory, which PopTorch takes without a copy.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing import resource_tracker
from typing import Callable, Iterator, List, NamedTuple, Optional, Protocol, Sequence, Tuple

import torch
from torch.utils.data import Dataset

from common import timers
from data import mixing
from data.augmentation import IMAGENET, Colours
from data.base import Source, UnreadableImage
from data.batches import MicroBatch
from data.epochs import RunOrder
from data.loader import EvaluationBatches, NotLeftOut, evaluation_share
from data.transforms import Training
from data.workers import signals_withheld
from engines.ipu_model import mixing_rows
from recipe.images import Data

UNREADABLE = -2  # label of an image that could not be decoded
# Seconds for PopTorch's process to end; it ignores the signals that PopTorch sends it.
_PATIENCE = 30.0


class StepImages(NamedTuple):
    """The images of one step that an instance computes: micro batches one behind the other.

    They are accumulation x replicas x micro rows.

    images: uint8 [rows, 3, H, W].
    labels: int32 [rows].
    mixing: float32 [rows, 6], see engines.ipu_model.mixing_rows; None where nothing is mixed.
    step: of the run, from 0; an update takes one.
    """

    images: torch.Tensor
    labels: torch.Tensor
    mixing: Optional[torch.Tensor]
    step: int


class _Place(NamedTuple):
    """The image at a position.

    row: within the step, over all instances.
    showing: see data/epochs.Shown.
    image: its number in the source.
    """

    step: int
    row: int
    showing: int
    image: int


class _Plan(NamedTuple):
    """How a micro batch is mixed.

    micro_batch: its step, and its number in it.
    rows: float32 [micro, 6], see engines.ipu_model.mixing_rows.
    """

    micro_batch: Tuple[int, int]
    rows: torch.Tensor


class Positions(Dataset):
    """The images that an instance reads, by their position in its run.

    With `share` images a step, position p is row p % share of the instance's part of step
    first_step + p // share. Order, augmentation and mixing are those of other devices, whatever the
    number of replicas and instances.
    """

    def __init__(
        self,
        order: RunOrder,
        steps: range,
        *,
        micro: int,
        size: int,
        colours: Colours = IMAGENET,
        instance: int = 0,
        instances: int = 1,
    ):
        """
        Args:
            order: of the images. Its section of the recipe says how they are cropped, augmented and
                mixed.
            steps: of the run, from 0, whose images are read.
            micro: images per micro batch.
            size: of the images, pixels a side.
            colours: by which the model normalises images.
            instance: number of this process.
            instances: how many there are.
        """
        self._order = order
        self._source = order.source
        self._steps = steps
        self._micro = micro
        self._size = size
        self._share = order.global_batch // instances
        self._first = instance * self._share
        self._transform = Training(order.data, order.seed, colours)
        # The newest plan of a micro batch; neighbours in a run share it.
        self._plan: Optional[_Plan] = None

    def __len__(self) -> int:
        return len(self._steps) * self._share

    def __getitem__(self, position: int) -> Tuple[torch.Tensor, ...]:
        """Return image, uint8 [3, H, W], and label, int32 [], at a position.

        Where anything is mixed, the row's plan, float32 [6], comes third.
        """
        place = self._place(position)
        try:
            stream = self._source.open(place.image)
            image = self._transform(stream, self._size, place.showing, place.image)
            label = int(self._source.labels[place.image])
        except UnreadableImage:
            # The training process reports it: here it would be a worker's traceback.
            image = torch.zeros(3, self._size, self._size, dtype=torch.uint8)
            label = UNREADABLE
        labelled = (image, torch.tensor(label, dtype=torch.int32))
        if not self._order.data.mixes:
            return labelled
        number, row = divmod(place.row, self._micro)
        return (*labelled, self._mixing(place.step, number)[row])

    def complain(self, position: int) -> None:
        """Raise UnreadableImage with the fault of the image at `position`."""
        number = self._place(position).image
        try:
            self._source.read(number)
        except UnreadableImage as error:
            raise UnreadableImage(f"{error}; mend or remove the file") from None
        name = self._source.name(number)
        raise UnreadableImage(f"{name}: could be read only the second time; start again")

    def _place(self, position: int) -> _Place:
        number, row = divmod(position, self._share)
        step = self._steps[number]
        row += self._first
        shown = self._order.shown(step, row)
        return _Place(step, row, shown.showing, shown.image)

    def _mixing(self, step: int, number: int) -> torch.Tensor:
        """Return the plan of a step's micro batch, float32 [micro, 6]."""
        plan = self._plan
        if plan is None or plan.micro_batch != (step, number):
            drawn = mixing.draw(
                self._order.data,
                self._order.seed,
                (step, number),
                rows=self._micro,
                valid=self._micro,
                size=(self._size, self._size),
            )
            assert drawn is not None, "asked for only where images are mixed"
            plan = _Plan((step, number), mixing_rows(drawn))
            self._plan = plan
        return plan.rows


class Loader(Protocol):
    """The part of PopTorch's loader that is used here."""

    def __iter__(self) -> Iterator[Sequence[torch.Tensor]]:
        """Return the batches of steps: images, labels and, where they are mixed, plans."""

    def terminate(self) -> None:
        """End the worker processes."""


class TrainingFeed:
    """The steps of a run, from a loader of combined batches of `Positions`.

    waited: seconds spent waiting for images while the IPUs were idle, without the first step's.
    """

    def __init__(
        self,
        positions: Positions,
        steps: range,
        loader: Callable[[Positions], Loader],
    ):
        """
        Args:
            positions: the images.
            steps: of the run, from 0, whose images are read.
            loader: creates PopTorch's loader, which begins to read at once.
        """
        self._positions = positions
        self._first = steps.start
        # A signal to all processes is for this one: it saves, and needs the images of the step
        # until then. Starting Python's resource tracker, which PopTorch's fork server needs,
        # unblocks signals here.
        with signals_withheld():
            resource_tracker.ensure_running()
        # PopTorch does not name its processes: they are those that start meanwhile.
        before = multiprocessing.active_children()
        with signals_withheld():
            self._loader = loader(positions)
            self._batches = iter(self._loader)
        started = multiprocessing.active_children()
        self._readers = [process for process in started if process not in before]
        self._number = 0
        self.waited = 0.0

    def __iter__(self) -> Iterator[StepImages]:
        return self

    def __next__(self) -> StepImages:
        """Return the images of the next step. Raises UnreadableImage."""
        start = time.perf_counter()
        images, labels, *plans = next(self._batches)
        # The first wait is for the workers to start.
        if self._number:
            self.waited += time.perf_counter() - start
        number = self._number
        self._number += 1
        # The label tells which image it was; reading it once more tells why.
        damaged = (labels == UNREADABLE).nonzero()
        if len(damaged):
            self._positions.complain(number * len(labels) + int(damaged[0]))
        plan = plans[0] if plans else None
        return StepImages(images, labels, plan, self._first + number)

    def close(self) -> None:
        """End the worker processes, by force where a read hangs."""
        with timers.after(_PATIENCE, self._kill_readers):
            self._loader.terminate()

    def _kill_readers(self) -> None:
        for process in self._readers:
            process.kill()


class EvaluationFeed:
    """This instance's share of the validation images.

    The replicas of all instances run in step, so an instance with fewer images ends with empty
    batches.
    """

    def __init__(
        self,
        source: Source,
        data: Data,
        rows: int,
        *,
        size: int,
        instance: int,
        instances: int,
    ):
        """
        Args:
            source: of the images.
            data: how they are cropped and read.
            rows: images that the instance's replicas evaluate in one call.
            size: of the images, pixels a side.
            instance: number of this process.
            instances: how many there are.
        """
        self._batches = EvaluationBatches(
            source,
            data=data,
            image_size=size,
            batch=rows,
            replica=instance,
            replicas=instances,
        )
        counts = []
        for number in range(instances):
            counts.append(len(evaluation_share(len(source), rows, number, instances)))
        self._empty = max(counts) - counts[instance]
        self._shape = (rows, 3, size, size)

    def __iter__(self) -> Iterator[MicroBatch]:
        try:
            yield from self._batches
        except NotLeftOut as error:
            # It advises to leave the image out, which IPUs cannot.
            raise UnreadableImage(f"{error.reason}; mend or remove the file") from None
        zeros = torch.zeros(self._shape[0], dtype=torch.int64)
        for _ in range(self._empty):
            yield MicroBatch(
                images=torch.zeros(self._shape, dtype=torch.uint8),
                labels=zeros,
                indices=zeros - 1,
                valid=0,
                number=0,
                step=0,
                unreadable=(),
            )

    def close(self) -> None:
        """End the worker processes."""
        self._batches.close()


def padded(images: torch.Tensor, rows: int) -> List[torch.Tensor]:
    """Divide images into parts of one size, which is all that a compiled program takes.

    Args:
        images: [N, ...].
        rows: of a part; the last is filled up with black images.
    """
    missing = -len(images) % rows
    images = torch.cat([images, images.new_zeros(missing, *images.shape[1:])])
    return list(images.contiguous().split(rows))  # PopTorch copies others, with a warning

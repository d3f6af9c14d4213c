"""Micro batches in the order of the run: who gets which images, loaded ahead by worker processes.

Each step takes the next global batch of an epoch's order, each micro batch the next images of that,
each replica a contiguous range of the step's micro batches. So replicas and workers never change
what is in a micro batch.
"""

import contextlib
from dataclasses import dataclass
from typing import Callable, Generator, Iterable, Iterator, Optional, Sequence, Union

import torch

from data import damage
from data.augmentation import IMAGENET, Colours
from data.base import Source, UnreadableImage
from data.batches import MicroBatch, ReadBatch, Request
from data.epochs import RunOrder
from data.prefetch import Prefetcher
from data.reader import Reader
from data.transforms import Evaluation, Training
from data.workers import Loader, is_full, shared_memory_is_full
from recipe.config import Data

_CPU = torch.device("cpu")


class NotLeftOut(UnreadableImage):
    """An unreadable image where data.bad_images=error; `reason` names the image and its fault."""

    def __init__(self, reason: str):
        self.reason = reason
        remedy = "mend or remove the file, or leave such images out with data.bad_images=skip"
        super().__init__(f"{reason}; {remedy}")


class TrainingBatches:
    """One replica's micro batches of some steps, in order.

    An iterator. Steps are counted from the start of the run, so a resumed run gets the same
    batches. Workers load ahead over the ends of epochs. Iterating raises UnreadableImage where
    data.bad_images is error.
    """

    def __init__(
        self,
        order: RunOrder,
        steps: range,
        *,
        image_size: Union[int, Callable[[int], int]],
        micro: int,
        share: Optional[range] = None,
        device: torch.device = _CPU,
        colours: Colours = IMAGENET,
    ):
        """
        Args:
            order: of the images. Its section of the recipe says how they are augmented and read.
            steps: numbers of the steps, counted from the start of the run.
            image_size: pixels a side, or a function from an epoch, counted from 0, to them, called
                ahead of the training.
            micro: images per micro batch; divides the global batch.
            share: the replica's, of the micro batches of a step; None for all.
            device: where the images are wanted.
            colours: by which the model normalises images.
        """
        # recipe/batch.py refuses this for a recipe, with the remedy.
        assert order.global_batch % micro == 0, (order.global_batch, micro)
        self._data = order.data
        self._device = device
        self._waited = 0.0
        self._requests = _Requests(
            order=order,
            image_size=image_size,
            micro=micro,
            steps=steps,
            share=range(order.global_batch // micro) if share is None else share,
        )
        self._reader = Reader(order.source, micro, Training(order.data, order.seed, colours))
        self._loader: Optional[Iterable[ReadBatch]]  # None once it is closed
        self._loader = _loader(self._reader, self._requests, self._data, device)
        self._ahead = _prefetched(self._loader, self._data, device)

    def __iter__(self) -> "TrainingBatches":
        return self

    def __next__(self) -> MicroBatch:
        return next(self._ahead)

    def set_share(self, step: int, share: range) -> None:
        """Go on with another share of the micro batches of each step.

        What was loaded ahead is lost. The workers stay, unless one takes too long to be waited for.

        Args:
            step: the first with the new share, of which the first micro batch comes next.
            share: the replica's, of the micro batches of a step.
        """
        # The loader looks at its requests when it is iterated, which a new prefetcher does anew.
        assert self._loader is not None, "closed batches have no shares"
        self._waited = self.waited()
        has_ended = self._ahead.close()
        self._requests.steps = range(step, self._requests.steps.stop)
        self._requests.share = share
        # A thread that still waits for the workers' next batch would take batches from whoever else
        # asks them: they are left to it.
        if not has_ended:
            self._loader = _loader(self._reader, self._requests, self._data, self._device)
        self._ahead = _prefetched(self._loader, self._data, self._device)

    def waited(self) -> float:
        """Return the seconds that the device was idle, waiting for images.

        The first wait, which starts workers, is left out.
        """
        return self._waited + self._ahead.waited()

    def close(self) -> None:
        """End the workers; the batches cannot be iterated any more."""
        self._ahead.close()
        self._loader = None  # the workers end with the last reference to it


@dataclass
class _Requests:
    """The requests of TrainingBatches; each iteration begins anew."""

    order: RunOrder
    image_size: Union[int, Callable[[int], int]]
    micro: int
    steps: range
    share: range

    def __iter__(self) -> Iterator[Request]:
        for step in self.steps:
            epoch = self.order.epoch(step)
            pixels = self._pixels(epoch)
            for number in self.share:
                start = number * self.micro
                rows = range(start, start + self.micro)
                shown = [self.order.shown(step, row) for row in rows]
                yield Request(
                    step,
                    epoch,
                    number,
                    image_size=pixels,
                    indices=[row.image for row in shown],
                    showing_numbers=[row.showing for row in shown],
                )

    def _pixels(self, epoch: int) -> int:
        """Return the pixels a side of an epoch's images."""
        if callable(self.image_size):
            return self.image_size(epoch)
        return self.image_size


class EvaluationBatches:
    """Every image of a source once, in order; can be iterated again with the same workers."""

    def __init__(
        self,
        source: Source,
        *,
        data: Data,
        image_size: int,
        batch: int,
        replica: int = 0,
        replicas: int = 1,
        device: torch.device = _CPU,
        order: Optional[Sequence[int]] = None,
    ):
        """
        Args:
            source: of the images.
            data: how images are cropped and read.
            image_size: pixels a side.
            batch: images per micro batch; the last is padded.
            replica: number of this replica, which gets its share of the micro batches.
            replicas: how many there are.
            device: where the images are wanted.
            order: of the images; None for that of the source.
        """
        assert 0 <= replica < replicas, (replica, replicas)
        # A list, not a generator: it is iterated once for each evaluation.
        if order is None:
            order = range(len(source))
        self._requests = []
        for number in evaluation_share(len(source), batch, replica, replicas):
            indices = list(order[number * batch : (number + 1) * batch])
            request = Request(0, 0, number, image_size=image_size, indices=indices)
            self._requests.append(request)
        self._data = data
        self._device = device
        reader = Reader(source, batch, Evaluation(data))
        self._loader = _loader(reader, self._requests, data, device)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Raises UnreadableImage on the way, where data.bad_images is error."""
        ahead = _prefetched(self._loader, self._data, self._device)
        with contextlib.closing(ahead) as batches:
            yield from batches

    def close(self) -> None:
        """End the workers; the batches cannot be iterated any more."""
        del self._loader


def evaluation_share(images: int, batch: int, replica: int, replicas: int) -> range:
    """Return the numbers of the micro batches that a replica evaluates.

    All replicas get nearly the same number.

    Args:
        images: in all micro batches.
        batch: images per micro batch.
        replica: number of the replica.
        replicas: how many there are.
    """
    # Rounded down at both ends: shares meet, and differ by one at most.
    total = -(-images // batch)
    return range(total * replica // replicas, total * (replica + 1) // replicas)


def _loader(
    reader: Reader,
    requests: Iterable[Request],
    data: Data,
    device: torch.device,
) -> Iterable[ReadBatch]:
    """Return what loads the requested micro batches, by the reader that the recipe names."""
    # DALI is a large package, which few runs need.
    if data.reader == "dali":
        from data.dali import DaliLoader

        return DaliLoader(reader, requests, max(1, data.workers), device)
    return Loader(reader, requests, data, forks=device.type != "cuda")


def _prefetched(loader: Iterable[ReadBatch], data: Data, device: torch.device) -> Prefetcher:
    """Return an iterator that takes micro batches ahead, unless this process decodes.

    Two threads that compute would hinder each other.
    """
    works_beside = data.workers > 0 or data.reader == "dali"
    batches = _delivered(iter(loader), data)
    return Prefetcher(batches, device, data.prefetch if works_beside else 0)


def _delivered(
    batches: Iterator[ReadBatch],
    data: Data,
) -> Generator[MicroBatch, None, None]:
    """Check what a loader gives, and give its labels and indices as tensors."""
    try:
        for batch in batches:
            damage.report(batch.damaged)
            # Readers leave out what they cannot read; whether that is allowed is decided here, in
            # the training process.
            if batch.unreadable and data.bad_images == "error":
                raise NotLeftOut(batch.unreadable[0])
            yield batch.with_tensors()
    except RuntimeError as error:  # from a worker, as a text
        if is_full(error):
            raise shared_memory_is_full() from None
        raise
    except (EOFError, ConnectionError, FileNotFoundError) as error:
        if not data.workers or "DataLoader worker" in str(error):
            raise  # raised by a source, perhaps in a worker
        fault = "DataLoader worker exited unexpectedly while it passed images on"
        raise RuntimeError(fault) from error
    finally:
        # Workers end with the last reference to their batches, which a traceback would otherwise
        # keep.
        del batches

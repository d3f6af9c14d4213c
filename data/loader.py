"""Micro batches in the order of the run: who gets which images, loaded ahead by worker processes.

An epoch has one global order. Each step takes the next global batch of it, each micro batch the next images of that,
each replica a contiguous range of the step's micro batches. So the number of replicas changes who computes a micro
batch, and the number of workers who loads it, never its contents.
"""

import errno
import os
from typing import TYPE_CHECKING, Callable, Iterable, Iterator, Union

import torch

from data.base import Source, UnreadableImage
from data.batches import Loaded, MicroBatch, Request
from data.prefetch import Prefetcher
from data.transforms import Evaluation, Training, Transform
from data.workers import WorkerReader, shared_memory_is_full
from recipe.batch import steps_per_epoch
from recipe.config import Data

if TYPE_CHECKING:
    from data.dali import DaliReader

_CPU = torch.device("cpu")


class NotLeftOut(UnreadableImage):
    """An unreadable image where data.bad_images=error. Attributes: reason: names the image and its fault."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(f"{reason}; mend or remove the file, or leave such images out with data.bad_images=skip")


def training_batches(
    source: Source,
    *,
    data: Data,
    image_size: Union[int, Callable[[int], int]],
    global_batch: int,
    micro: int,
    seed: int,
    first_step: int,
    last_step: int,
    replica: int = 0,
    replicas: int = 1,
    device: torch.device = _CPU,
) -> Prefetcher:
    """One replica's micro batches of the steps first_step <= step < last_step, in order.

    Steps count updates from the start of the run, so a resumed run gets the same batches. Workers
    start here, once, and load ahead over the ends of epochs; closing the iterator ends them.

    Args:
        image_size: pixels a side of the images, or the function from an epoch, counted from 0, to them. It is
            called in this process, once an epoch and ahead of the training; workers never see it.
        global_batch, micro: images per step and per micro batch; micro x replicas divides global_batch, and
            the source fills at least one.
        seed: of the run; order and augmentation are functions of it.
        replica, replicas: this replica's number, and how many there are.
        device: where the images go.

    Raises:
        UnreadableImage: while iterating, under data.bad_images=error.
    """
    assert global_batch % (micro * replicas) == 0 and 0 <= replica < replicas, (global_batch, micro, replicas)
    assert len(source) >= global_batch, (len(source), global_batch)
    share = global_batch // micro // replicas
    requests = _training_requests(
        source, image_size, global_batch, micro, seed, range(first_step, last_step),
        range(replica * share, (replica + 1) * share),
    )  # fmt: skip
    return _prefetched(_reader(source, micro, Training(data, seed), data, device), requests, data, device)


class EvaluationBatches:
    """Every image of a source once, in order; can be iterated again and again with the same workers."""

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
    ):
        """Args as for `training_batches`.

        `batch` is images per micro batch; the last is padded. Each replica gets a contiguous range of the
        micro batches, as equal in length as can be; `number` counts over all replicas, `step` is 0.
        """
        assert 0 <= replica < replicas, (replica, replicas)
        self._requests = [
            Request(0, 0, number, image_size, list(range(number * batch, min((number + 1) * batch, len(source)))))
            for number in evaluation_share(len(source), batch, replica, replicas)
        ]
        self._data, self._device = data, device
        self._reader = _reader(source, batch, Evaluation(data.crop_fraction), data, device, again=True)

    def __len__(self) -> int:
        """Micro batches in one pass of this replica."""
        return len(self._requests)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Raises UnreadableImage on the way, under data.bad_images=error."""
        batches = _prefetched(self._reader, self._requests, self._data, self._device)
        try:
            yield from batches
        finally:
            batches.close()

    def close(self) -> None:
        """End the workers; the batches cannot be iterated any more."""
        del self._reader


def evaluation_share(images: int, batch: int, replica: int, replicas: int) -> range:
    """Numbers of the micro batches of `batch` images that a replica evaluates: as many for each as can be."""
    total = -(-images // batch)
    return range(total * replica // replicas, total * (replica + 1) // replicas)


def _training_requests(
    source: Source,
    image_size: Union[int, Callable[[int], int]],
    global_batch: int,
    micro: int,
    seed: int,
    steps: range,
    numbers: range,
) -> Iterator[Request]:
    ordered = None
    for step in steps:
        epoch, within = divmod(step, steps_per_epoch(len(source), global_batch))
        if epoch != ordered:
            order, ordered = source.order(seed, epoch), epoch
            pixels = image_size(epoch) if callable(image_size) else image_size
        for number in numbers:
            start = within * global_batch + number * micro
            yield Request(step, epoch, number, pixels, order[start : start + micro].tolist())


def _reader(
    source: Source, rows: int, transform: Transform, data: Data, device: torch.device, again: bool = False
) -> Union[WorkerReader, "DaliReader"]:
    """The recipe's reader. Args: again: whether it loads several times, always the same requests."""
    if data.reader == "dali":
        from data.dali import DaliReader

        return DaliReader(source, rows, transform, max(1, data.workers), device)
    return WorkerReader(source, rows, transform, data, again)


def _prefetched(
    reader: Union[WorkerReader, "DaliReader"], requests: Iterable[Request], data: Data, device: torch.device
) -> Prefetcher:
    """Micro batches, taken ahead unless this process reads: two threads that compute would hinder each other."""
    return Prefetcher(_delivered(reader.load(requests), data), device, data.prefetch if reader.ahead else 0)


def _delivered(batches: Iterator[Loaded], data: Data) -> Iterator[MicroBatch]:
    try:
        for loaded in batches:
            yield _micro_batch(loaded, data)
    except RuntimeError as error:  # from a worker, as a text
        if "shared memory" in str(error) and os.strerror(errno.ENOSPC) in str(error):
            raise shared_memory_is_full() from None
        raise
    except (EOFError, ConnectionError, FileNotFoundError) as error:
        if not data.workers or "DataLoader worker" in str(error):  # raised by a source, perhaps in a worker
            raise
        raise RuntimeError("DataLoader worker exited unexpectedly while it passed images on") from error
    finally:
        # Workers end with the last reference to their batches, which a traceback would otherwise keep.
        del batches


def _micro_batch(loaded: Loaded, data: Data) -> MicroBatch:
    if loaded.unreadable and data.bad_images == "error":
        raise NotLeftOut(loaded.unreadable[0])
    valid = len(loaded.indices)
    padding = len(loaded.images) - valid
    labels = torch.tensor(loaded.labels + [0] * padding)
    indices = torch.tensor(loaded.indices + [-1] * padding)
    return MicroBatch(loaded.images, labels, indices, valid, loaded.number, loaded.step, loaded.unreadable)

"""Micro batches in the order of the run: who gets which images, loaded ahead by worker processes.

Each step takes the next global batch of an epoch's order, each micro batch the next images of that, each replica a
contiguous range of the step's micro batches. So replicas and workers never change what is in a micro batch.
"""

import contextlib
import errno
import os
from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, Optional, Sequence, Union

import torch

from data import damage
from data.base import Source, UnreadableImage
from data.batches import MicroBatch, Request
from data.prefetch import Prefetcher
from data.reader import Reader
from data.transforms import Evaluation, Training
from data.workers import Loader, shared_memory_is_full
from recipe.batch import steps_per_epoch
from recipe.config import Data

_CPU = torch.device("cpu")


class NotLeftOut(UnreadableImage):
    """An unreadable image where data.bad_images=error; `reason` names the image and its fault."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(f"{reason}; mend or remove the file, or leave such images out with data.bad_images=skip")


class TrainingBatches:
    """One replica's micro batches of the steps first_step <= step < last_step, in order; an iterator.

    Steps count updates from the start of the run, so a resumed run gets the same batches. Workers load ahead over the
    ends of epochs. Raises UnreadableImage while iterating, under data.bad_images=error.
    """

    def __init__(
        self,
        source: Source,
        *,
        data: Data,
        image_size: Union[int, Callable[[int], int]],
        global_batch: int,
        micro: int,
        seed: int,
        first_step: int,
        last_step: int,
        share: Optional[range] = None,
        device: torch.device = _CPU,
    ):
        """
        Args:
            image_size: pixels a side, or a function from an epoch, counted from 0, to them, called ahead of the
                training.
            global_batch, micro: images per step and per micro batch; the latter divides the former.
            share: the replica's, of the micro batches of a step; None for all.
        """
        assert global_batch % micro == 0 and len(source) >= global_batch, (len(source), global_batch, micro)
        share = range(global_batch // micro) if share is None else share
        self._data, self._device, self._waited = data, device, 0.0
        self._requests = _Requests(source, image_size, global_batch, micro, seed, range(first_step, last_step), share)
        self._loader = _loader(Reader(source, micro, Training(data, seed)), self._requests, data, device)
        self._ahead = _prefetched(self._loader, data, device)

    def __iter__(self) -> "TrainingBatches":
        return self

    def __next__(self) -> MicroBatch:
        return next(self._ahead)

    def divide(self, step: int, share: range) -> None:
        """Go on with another share of the micro batches, from the first one of a step. What was loaded ahead is lost,
        the workers stay."""
        self._waited = self.waited()
        self._ahead.close()
        self._requests.steps, self._requests.share = range(step, self._requests.steps.stop), share
        self._ahead = _prefetched(self._loader, self._data, self._device)

    def waited(self) -> float:
        """Seconds that the device was idle, waiting for images, without the first wait, which starts workers."""
        return self._waited + self._ahead.waited()

    def close(self) -> None:
        """End the workers; the batches cannot be iterated any more."""
        self._ahead.close()
        self._loader = None


@dataclass
class _Requests:
    """The requests of TrainingBatches; each iteration begins anew."""

    source: Source
    image_size: Union[int, Callable[[int], int]]
    global_batch: int
    micro: int
    seed: int
    steps: range
    share: range

    def __iter__(self) -> Iterator[Request]:
        ordered = None
        for step in self.steps:
            epoch, within = divmod(step, steps_per_epoch(len(self.source), self.global_batch))
            if epoch != ordered:
                order, ordered = self.source.order(self.seed, epoch), epoch
                pixels = self.image_size(epoch) if callable(self.image_size) else self.image_size
            for number in self.share:
                start = within * self.global_batch + number * self.micro
                yield Request(step, epoch, number, pixels, order[start : start + self.micro].tolist())


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
        order: Optional[Sequence[int]] = None,
    ):
        """Args: batch: images per micro batch; the last is padded. order: of the images. Others as for
        `TrainingBatches`."""
        assert 0 <= replica < replicas, (replica, replicas)
        order = order or range(len(source))
        self._requests = [
            Request(0, 0, number, image_size, list(order[number * batch : (number + 1) * batch]))
            for number in evaluation_share(len(source), batch, replica, replicas)
        ]
        self._data, self._device = data, device
        self._loader = _loader(Reader(source, batch, Evaluation(data.crop_fraction)), self._requests, data, device)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Raises UnreadableImage on the way, under data.bad_images=error."""
        with contextlib.closing(_prefetched(self._loader, self._data, self._device)) as batches:
            yield from batches

    def close(self) -> None:
        """End the workers; the batches cannot be iterated any more."""
        del self._loader


def evaluation_share(images: int, batch: int, replica: int, replicas: int) -> range:
    """Numbers of the micro batches of `batch` images that a replica evaluates: nearly the same number for each."""
    total = -(-images // batch)
    return range(total * replica // replicas, total * (replica + 1) // replicas)


def _loader(reader: Reader, requests: Iterable[Request], data: Data, device: torch.device) -> Iterable[MicroBatch]:
    if data.reader == "dali":
        from data.dali import DaliLoader

        return DaliLoader(reader, requests, max(1, data.workers), device)
    return Loader(reader, requests, data, forks=device.type != "cuda")


def _prefetched(loader: Iterable[MicroBatch], data: Data, device: torch.device) -> Prefetcher:
    """Micro batches, taken ahead unless this process decodes: two threads that compute would hinder each other."""
    works_beside = data.workers > 0 or data.reader == "dali"
    return Prefetcher(_delivered(iter(loader), data), device, data.prefetch if works_beside else 0)


def _delivered(batches: Iterator[MicroBatch], data: Data) -> Iterator[MicroBatch]:
    try:
        for batch in batches:
            damage.report(batch.damaged)
            if batch.unreadable and data.bad_images == "error":
                raise NotLeftOut(batch.unreadable[0])
            yield batch._replace(labels=torch.from_numpy(batch.labels), indices=torch.from_numpy(batch.indices))
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

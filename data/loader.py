"""Micro batches in the order of the run: who gets which images, loaded ahead by worker processes.

An epoch has one global order. Each step takes the next global batch of it, each micro batch the next
images of that, each replica a contiguous range of the step's micro batches. So the number of replicas
changes who computes a micro batch, and the number of workers who loads it, never what is in it.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from functools import partial
from types import TracebackType
from typing import Callable, Iterable, Iterator, List, NamedTuple, Optional, Tuple, Union

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.base import Source
from data.decode import UnreadableImage
from data.transforms import evaluation_transform, train_transform
from recipe.batch import steps_per_epoch
from recipe.config import Data
from recipe.randomness import bits32, key

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WAITS_FOR_SIGNALS = hasattr(signal, "sigwaitinfo")  # not on macOS


class MicroBatch(NamedTuple):
    """Images of one forward pass. Rows from `valid` on are padding: black, label 0, index -1.

    `valid` can be 0: with data.bad_images=skip, when none of the images can be read.
    """

    images: torch.Tensor  # uint8 [micro, 3, size, size]
    labels: torch.Tensor  # int64 [micro]
    indices: torch.Tensor  # int64 [micro], number of each image in its source
    valid: int
    number: int  # within the step, counted over all replicas
    step: int
    unreadable: Tuple[str, ...]  # why images were left out, one message each


def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """The order in which an epoch visits `size` images: int64 [size], a permutation of range(size).

    Images are sorted by 32 random bits each, of which no two are the same, because `bits32` of one draw maps
    numbers one to one. So no library's generator or sort, which may change between versions, has a say.
    """
    return np.argsort(bits32(key("order", seed, epoch), np.arange(size, dtype=np.int64)))


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
    pin_memory: bool = False,
) -> Iterator[MicroBatch]:
    """One replica's micro batches of the steps first_step <= step < last_step, in order.

    Steps count updates from the start of the run, so a resumed run gets what it would have got. Workers
    start once and load ahead over the ends of epochs; closing the iterator ends them.

    Args:
        image_size: pixels a side of the images, or the function from an epoch, counted from 0, to them. It is
            called in this process, once an epoch and ahead of the training; workers never see it.
        global_batch, micro: images per step and per micro batch; micro x replicas divides global_batch, and
            the source fills at least one.
        seed: of the run; order and augmentation are functions of it.
        replica, replicas: this replica's number, and how many there are.
        pin_memory: put the tensors into page-locked memory; needs an accelerator.

    Raises:
        UnreadableImage: while iterating, under data.bad_images=error.
    """
    assert global_batch % (micro * replicas) == 0 and 0 <= replica < replicas, (global_batch, micro, replicas)
    assert len(source) >= global_batch, (len(source), global_batch)
    share = global_batch // micro // replicas
    requests = _training_requests(
        len(source), image_size, global_batch, micro, seed, range(first_step, last_step),
        range(replica * share, (replica + 1) * share),
    )  # fmt: skip
    dataset = _MicroBatches(source, micro, partial(_for_training, data=data, seed=seed))
    return _delivered(_Loader(dataset, requests, data, pin_memory), data)


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
        pin_memory: bool = False,
    ):
        """Args as for `training_batches`.

        `batch` is images per micro batch; the last is padded. Each replica gets a contiguous range of the
        micro batches, as equal in length as can be; `number` counts over all replicas, `step` is 0.
        """
        assert 0 <= replica < replicas, (replica, replicas)
        self._requests = [
            _Request(0, 0, number, image_size, list(range(number * batch, min((number + 1) * batch, len(source)))))
            for number in evaluation_share(len(source), batch, replica, replicas)
        ]
        dataset = _MicroBatches(source, batch, partial(_for_evaluation, crop_fraction=data.crop_fraction))
        self._data = data
        self._loader = _Loader(dataset, self._requests, data, pin_memory, persistent_workers=data.workers > 0)

    def __len__(self) -> int:
        """Micro batches in one pass of this replica."""
        return len(self._requests)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Raises UnreadableImage on the way, under data.bad_images=error."""
        return _delivered(self._loader, self._data)

    def close(self) -> None:
        """End the workers; the batches cannot be iterated any more."""
        del self._loader


def evaluation_share(images: int, batch: int, replica: int, replicas: int) -> range:
    """Numbers of the micro batches of `batch` images that a replica evaluates: as many for each as can be."""
    total = -(-images // batch)
    return range(total * replica // replicas, total * (replica + 1) // replicas)


class _Request(NamedTuple):
    """What a worker is asked for: one micro batch."""

    step: int
    epoch: int
    number: int
    image_size: int
    indices: List[int]


def _training_requests(
    size: int,
    image_size: Union[int, Callable[[int], int]],
    global_batch: int,
    micro: int,
    seed: int,
    steps: range,
    numbers: range,
) -> Iterator[_Request]:
    ordered = None
    for step in steps:
        epoch, within = divmod(step, steps_per_epoch(size, global_batch))
        if epoch != ordered:
            order, ordered = epoch_order(seed, epoch, size), epoch
            pixels = image_size(epoch) if callable(image_size) else image_size
        for number in numbers:
            start = within * global_batch + number * micro
            yield _Request(step, epoch, number, pixels, order[start : start + micro].tolist())


class _Loaded(NamedTuple):
    """What a worker answers: a `MicroBatch` in the making.

    Each tensor that leaves a worker costs the training process 0.2 to 0.3 ms, lists of numbers next to
    nothing; so only the images are a tensor here.
    """

    images: torch.Tensor  # as in MicroBatch
    labels: List[int]  # [valid]
    indices: List[int]  # [valid]
    number: int
    step: int
    unreadable: Tuple[str, ...]


class _MicroBatches(Dataset):
    """Loads requested micro batches; lives in the workers, or in the training process if there are none."""

    def __init__(
        self,
        source: Source,
        rows: int,
        transform: Callable[[torch.Tensor, _Request, int], torch.Tensor],
    ):
        """Args: transform: from (pixels, request, index) to uint8 [3, image_size, image_size]."""
        self._source = source
        self._rows = rows
        self._transform = transform

    def __getitem__(self, request: _Request) -> _Loaded:
        images = torch.empty(self._rows, 3, request.image_size, request.image_size, dtype=torch.uint8)
        indices: List[int] = []
        unreadable = []
        for index in request.indices:
            try:
                image = self._source.read(index)
            except UnreadableImage as error:
                # Not raised here: torch would wrap it into the traceback of a worker.
                unreadable.append(str(error))
                continue
            images[len(indices)] = self._transform(image, request, index)
            indices.append(index)
        images[len(indices) :] = 0
        labels = [int(self._source.labels[index]) for index in indices]
        return _Loaded(images, labels, indices, request.number, request.step, tuple(unreadable))


def _for_training(image: torch.Tensor, request: _Request, index: int, *, data: Data, seed: int) -> torch.Tensor:
    return train_transform(image, request.image_size, data, seed, request.epoch, index)


def _for_evaluation(image: torch.Tensor, request: _Request, index: int, *, crop_fraction: float) -> torch.Tensor:
    return evaluation_transform(image, request.image_size, crop_fraction)


class _Loader(DataLoader):
    """torch's loader, told to take whole micro batches as they are and to leave global state alone."""

    def __init__(
        self,
        dataset: _MicroBatches,
        requests: Iterable[_Request],
        data: Data,
        pin_memory: bool,
        persistent_workers: bool = False,
    ):
        super().__init__(
            dataset,
            sampler=requests,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=data.workers,
            prefetch_factor=data.prefetch if data.workers else None,
            persistent_workers=persistent_workers,
            pin_memory=pin_memory,
            worker_init_fn=obey_only_the_parent,
            # Of its own, or else each iteration would take a number from torch's global generator.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[_Loaded]:
        with signals_withheld():
            return super().__iter__()

    def check_worker_number_rationality(self) -> None:
        """Do not warn of more workers than cores: they are right where reading waits for a network."""


def _as_it_is(loaded: _Loaded) -> _Loaded:
    return loaded


def _delivered(loader: _Loader, data: Data) -> Iterator[MicroBatch]:
    batches = iter(loader)
    try:
        for loaded in batches:
            yield _micro_batch(loaded, data, loader.pin_memory)
    finally:
        # Workers end with the last reference to their batches, which a traceback would otherwise keep.
        del batches, loader


def _micro_batch(loaded: _Loaded, data: Data, pin_memory: bool) -> MicroBatch:
    if loaded.unreadable and data.bad_images == "error":
        raise UnreadableImage(
            f"{loaded.unreadable[0]}; mend or remove the file, or leave such images out with data.bad_images=skip"
        )
    valid = len(loaded.indices)
    padding = len(loaded.images) - valid
    labels = torch.tensor(loaded.labels + [0] * padding)
    indices = torch.tensor(loaded.indices + [-1] * padding)
    if pin_memory:
        labels, indices = labels.pin_memory(), indices.pin_memory()
    return MicroBatch(loaded.images, labels, indices, valid, loaded.number, loaded.step, loaded.unreadable)


@contextlib.contextmanager
def signals_withheld() -> Iterator[None]:
    """Processes that are started within are born with SIGINT and SIGTERM blocked: no thread of theirs receives one."""
    if not _WAITS_FOR_SIGNALS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_only_the_parent(worker: int) -> None:
    """Leave it to the training process to end this worker, which must be started within `signals_withheld`.

    Terminals and schedulers send their signals to every process of a job. The training process saves
    before it ends, for that it must finish its step, and for that it needs its workers. If it dies
    without ending them, torch's watchdog does.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    _say_nothing_when_orphaned(parent.pid)
    if _WAITS_FOR_SIGNALS:
        threading.Thread(target=_await_termination, args=(parent.pid,), daemon=True).start()


def _say_nothing_when_orphaned(parent: int) -> None:
    """A training process that was killed while it took images leaves its worker with a broken connection."""
    before = sys.excepthook

    def hook(kind: type, error: BaseException, trace: Optional[TracebackType]) -> None:
        if not (issubclass(kind, (EOFError, ConnectionError)) and _lost(parent)):
            before(kind, error, trace)

    sys.excepthook = hook


def _lost(parent: int) -> bool:
    """Whether the parent is gone. A process that is killed closes its connections before its children change hands."""
    end = time.monotonic() + 1.0
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.01)
    return os.getppid() != parent


def _await_termination(parent: int) -> None:
    while True:
        received = signal.sigwaitinfo(_SIGNALS)
        if received.si_signo == signal.SIGTERM and received.si_pid == parent:
            os._exit(0)

"""Worker processes that load ahead: torch's loader, without effects on global state and signals."""

import contextlib
import copy
import errno
import functools
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from typing import Any, Iterable, Iterator, Optional, TypeVar

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from data.batches import Request
from data.reader import Reader
from recipe.config import Data

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # all that ask a run to stop
_WAITS_FOR_SIGNALS = hasattr(signal, "sigtimedwait")  # not on macOS
_GLANCE = 1.0  # seconds between two checks whether the parent is alive


T = TypeVar("T")


class Loader(DataLoader):
    """Loads whole micro batches in worker processes, or in this one if there are to be none."""

    def __init__(
        self,
        reader: Reader,
        requests: Iterable[Request],
        data: Data,
        forks: bool = True,
    ):
        """
        Args:
            reader: reads the micro batches.
            requests: one for each micro batch; iterated anew by each iteration of the loader.
            data: how many workers there are, and how far they read ahead.
            forks: whether workers may be copies of this process; not of one that uses CUDA, whose
                threads hold locks that nobody would open in a copy.
        """
        context = None
        prefetch_factor = None
        if data.workers:
            context = _quiet_context(_start_method(forks))
            prefetch_factor = data.prefetch
        # Without batch_size: a request is a whole micro batch, and nothing is left to collate.
        super().__init__(
            reader,
            sampler=requests,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=data.workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=data.workers > 0,
            worker_init_fn=begin_work,
            multiprocessing_context=context,
            # Each iteration would otherwise take a number from torch's global generator.
            generator=torch.Generator(),
        )

    def __iter__(self) -> _BaseDataLoaderIter:
        """Start the workers where they are not running; an iterator over `ReadBatch`es.

        Raises:
            OSError: there is no room for the workers' queues; before torch leaves half of them
                behind. Or none for images that the source holds, which a fork server's workers get
                by shared memory.
        """
        if self.num_workers:
            self._check_room_for_queues()
        try:
            with signals_withheld():
                return super().__iter__()
        except RuntimeError as error:
            if is_full(error):
                raise shared_memory_is_full() from None
            raise

    def check_worker_number_rationality(self) -> None:
        """Do not warn of more workers than cores.

        They are right where reading waits for a network.
        """

    def _check_room_for_queues(self) -> None:
        """Make as many queues as torch will, and drop them."""
        context = self.multiprocessing_context
        try:
            # Also withheld from Python's resource tracker, whose start ends it.
            with signals_withheld():
                made = [context.Event()]  # held, so that all need room at the same time
                for _ in range(self.num_workers + 1):
                    made.append(context.Queue())
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise shared_memory_is_full() from None
            raise error from None


def _start_method(forks: bool) -> Optional[str]:
    """Return how worker processes start: see `Loader`; None for the platform's default."""
    if not forks:
        return "forkserver"
    # By name: from Python 3.14 on, and in processes that a fork server has started, the default is
    # a fork server. Elsewhere the default is right: macOS has forks, but its libraries forbid them.
    return "fork" if sys.platform == "linux" else None


def _quiet_context(method: Optional[str] = None) -> BaseContext:
    """Return a context whose queues print nothing when their reader was killed: torch reports that.

    Args:
        method: by which it starts processes; None for the platform's default.
    """
    context = copy.copy(multiprocessing.get_context(method))
    if method == "forkserver":
        context.set_forkserver_preload([__name__])  # else every worker would load torch
    # In the copy only, whose attribute comes before the method of its class.
    vars(context)["Queue"] = functools.partial(_QuietQueue, ctx=context.get_context())
    return context


class _QuietQueue(Queue):
    """A queue of up to `maxsize` entries that ignores a broken pipe."""

    def __init__(self, maxsize: int = 0, *, ctx: Any):
        super().__init__(maxsize, ctx=ctx)
        # There is no public switch; concurrent.futures sets the same attribute.
        self._ignore_epipe = True


def is_full(error: RuntimeError) -> bool:
    """Return whether an error of torch says that shared memory is full."""
    text = str(error)
    return "shared memory" in text and os.strerror(errno.ENOSPC) in text


def shared_memory_is_full() -> OSError:
    """Return the error of a process that loads images, or of the one that starts it."""
    reason = (
        f"{os.strerror(errno.ENOSPC)} (images pass through it to the training process, and on GPUs "
        "data sets in memory to the workers; data.workers and data.prefetch say how many images, "
        "docker's --shm-size how much it holds)"
    )
    return OSError(errno.ENOSPC, reason, "/dev/shm")


def _unchanged(batch: T) -> T:
    """Return a batch as it is, so that torch does not collate it."""
    return batch


@contextlib.contextmanager
def signals_withheld() -> Iterator[None]:
    """Block these signals in processes that are started within: no thread of theirs gets one."""
    if not _WAITS_FOR_SIGNALS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_work(worker: int) -> None:
    """Set up a worker: without a GPU, and ended by the training process alone.

    It was started within `signals_withheld`. Terminals and schedulers signal every process of a
    job, but the training process needs its workers to finish its step. Workers end by themselves if
    it dies: torch's watchdog checks that only between two requests.

    Args:
        worker: its number, which torch passes.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # decoders would each make a context on the GPU
    parent = multiprocessing.parent_process()
    assert parent is not None
    if _WAITS_FOR_SIGNALS:
        processes = (parent.pid, os.getppid())
        threading.Thread(target=_await_termination, args=processes, daemon=True).start()


def _await_termination(parent: int, starter: int) -> None:
    """End this process when its parent says so, or has died.

    Args:
        parent: the training process.
        starter: the process that this one is a child of: the parent or its fork server.
    """
    # All threads have these signals blocked, so that only this one takes them.
    while True:
        received = signal.sigtimedwait(_SIGNALS, _GLANCE)
        if received is None:
            # An orphan is given another parent.
            if os.getppid() != starter:
                os._exit(1)
        elif received.si_signo == signal.SIGTERM and received.si_pid == parent:
            os._exit(0)

"""Worker processes that load ahead: torch's loader, without effects on global state and signals."""

import contextlib
import copy
import errno
import multiprocessing
import os
import signal
import threading
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from typing import Iterable, Iterator, Optional

import torch
from torch.utils.data import DataLoader

from data.batches import MicroBatch, Request
from data.reader import Reader
from recipe.config import Data

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # all that ask a run to stop
_WAITS_FOR_SIGNALS = hasattr(signal, "sigtimedwait")  # not on macOS
_GLANCE = 1.0  # seconds between two checks whether the parent is alive


class Loader(DataLoader):
    """Loads whole micro batches in worker processes, or in this process if there are to be none."""

    def __init__(self, reader: Reader, requests: Iterable[Request], data: Data, forks: bool = True):
        """Args: forks: whether workers may be copies of this process; not of one that uses CUDA, whose threads hold
        locks that nobody would open in a copy."""
        super().__init__(
            reader,
            sampler=requests,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=data.workers,
            prefetch_factor=data.prefetch if data.workers else None,
            persistent_workers=data.workers > 0,
            worker_init_fn=begin_work,
            multiprocessing_context=_quiet_context(None if forks else "forkserver") if data.workers else None,
            # Of its own, or else each iteration would take a number from torch's global generator.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        """Raises OSError if there is no room for the workers' queues, before torch leaves half of them behind."""
        if self.num_workers:
            context = self.multiprocessing_context
            try:
                with signals_withheld():  # also from Python's resource tracker, whose start ends it
                    context.Event(), [context.Queue() for _ in range(self.num_workers + 1)]
            except OSError as error:
                raise (shared_memory_is_full() if error.errno == errno.ENOSPC else error) from None
        with signals_withheld():
            return super().__iter__()

    def check_worker_number_rationality(self) -> None:
        """Do not warn of more workers than cores: they are right where reading waits for a network."""


def _quiet_context(way: Optional[str] = None) -> BaseContext:
    """A context, by default the default one, with queues that print nothing when their reader was killed: torch reports
    that."""
    context = copy.copy(multiprocessing.get_context(way))
    if way == "forkserver":
        context.set_forkserver_preload([__name__])  # else every worker would load torch
    make = context.Queue

    def queue(maxsize: int = 0) -> Queue:
        made = make(maxsize)
        made._ignore_epipe = True  # there is no public switch; concurrent.futures sets the same attribute
        return made

    context.Queue = queue
    return context


def shared_memory_is_full() -> OSError:
    """The error of a process that loads images, or of the one that starts it."""
    why = "images pass through it to the training process; data.workers and data.prefetch say how many, docker's"
    return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({why} --shm-size how much it holds)", "/dev/shm")


def _as_it_is(batch: MicroBatch) -> MicroBatch:
    return batch


@contextlib.contextmanager
def signals_withheld() -> Iterator[None]:
    """Block these signals in processes that are started within: no thread of theirs receives one."""
    if not _WAITS_FOR_SIGNALS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_work(worker: int) -> None:
    """Set up a worker, started within `signals_withheld`: without a GPU, and ended by the training process alone.

    Terminals and schedulers signal every process of a job, but the training process needs its workers to finish its
    step. Workers end by themselves if it dies: torch's watchdog checks that only between two requests.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # decoders would each make a context on the GPU
    parent = multiprocessing.parent_process()
    assert parent is not None
    if _WAITS_FOR_SIGNALS:
        threading.Thread(target=_await_termination, args=(parent.pid, os.getppid()), daemon=True).start()


def _await_termination(parent: int, started_by: int) -> None:
    """Args: started_by: the process that this one is a child of, the parent or its fork server."""
    while True:
        received = signal.sigtimedwait(_SIGNALS, _GLANCE)
        if received is None:
            if os.getppid() != started_by:
                os._exit(1)
        elif received.si_signo == signal.SIGTERM and received.si_pid == parent:
            os._exit(0)

"""Worker processes that load ahead: torch's loader, without effects on global state and signals."""

import contextlib
import copy
import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from types import TracebackType
from typing import Iterable, Iterator, Optional

import torch
from torch.utils.data import DataLoader

from data.base import Source
from data.batches import Loaded, Request
from data.reader import Reader
from data.transforms import Transform
from recipe.config import Data

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # all that ask a run to stop
_WAITS_FOR_SIGNALS = hasattr(signal, "sigtimedwait")  # not on macOS
_GLANCE = 1.0  # seconds between two checks whether the parent is alive


class WorkerReader:
    """Loads requested micro batches by worker processes, or in this process if there are to be none.

    Attributes:
        ahead: whether it works beside this process.
    """

    def __init__(self, source: Source, rows: int, transform: Transform, data: Data, again: bool = False):
        """Args: rows: as of `Reader`. again: whether `load` is called several times, always for the same requests."""
        self._reader, self._data, self.ahead = Reader(source, rows, transform), data, data.workers > 0
        self._again = again and self.ahead
        self._loader: Optional[Loader] = None

    def load(self, requests: Iterable[Request]) -> Iterator[Loaded]:
        """Answers in the order of the requests, one iteration after the other, with the same workers if again."""
        if self._loader is None or not self._again:
            self._loader = Loader(self._reader, requests, self._data, self._again)
        return iter(self._loader)


class Loader(DataLoader):
    """torch's loader, which takes whole micro batches as they are and leaves global state alone."""

    def __init__(self, reader: Reader, requests: Iterable[Request], data: Data, persistent_workers: bool = False):
        super().__init__(
            reader,
            sampler=requests,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=data.workers,
            prefetch_factor=data.prefetch if data.workers else None,
            persistent_workers=persistent_workers,
            worker_init_fn=begin_work,
            multiprocessing_context=_quiet_context() if data.workers else None,
            # Of its own, or else each iteration would take a number from torch's global generator.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[Loaded]:
        """Raises OSError if there is no room for the workers' queues, before torch leaves half of them behind."""
        if self.num_workers:
            context = self.multiprocessing_context
            try:
                context.Event(), [context.Queue() for _ in range(self.num_workers + 1)]
            except OSError as error:
                raise (shared_memory_is_full() if error.errno == errno.ENOSPC else error) from None
        with signals_withheld():
            return super().__iter__()

    def check_worker_number_rationality(self) -> None:
        """Do not warn of more workers than cores: they are right where reading waits for a network."""


def _quiet_context() -> BaseContext:
    """The default context with queues that print nothing when their reader was killed: torch reports that.

    There is no public switch; concurrent.futures sets the same attribute.
    """
    context = copy.copy(multiprocessing.get_context())
    make = context.Queue

    def queue(maxsize: int = 0) -> Queue:
        made = make(maxsize)
        made._ignore_epipe = True
        return made

    context.Queue = queue
    return context


def shared_memory_is_full() -> OSError:
    """The error of a process that loads images, or of the one that starts it."""
    why = "images pass through it to the training process; data.workers and data.prefetch say how many, docker's"
    return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({why} --shm-size how much it holds)", "/dev/shm")


def _as_it_is(loaded: Loaded) -> Loaded:
    return loaded


@contextlib.contextmanager
def signals_withheld() -> Iterator[None]:
    """Processes that are started within are born with these signals blocked: no thread of theirs receives one."""
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

    Terminals and schedulers send their signals to every process of a job, but the training process needs its workers to
    finish its step. Workers end by themselves if it dies without ending them: torch's watchdog checks that only between
    two requests.
    """
    # Decoders that can use a GPU would each make a context there, in memory that the training needs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    parent = multiprocessing.parent_process()
    assert parent is not None
    _quiet_when_orphaned(parent.pid)
    if _WAITS_FOR_SIGNALS:
        threading.Thread(target=_await_termination, args=(parent.pid, os.getppid()), daemon=True).start()


def _quiet_when_orphaned(parent: int) -> None:
    """Print no traceback of the connection that a killed training process leaves broken."""
    before = sys.excepthook

    def hook(kind: type, error: BaseException, trace: Optional[TracebackType]) -> None:
        # A process that is killed closes its connections before its children change hands.
        end = time.monotonic() + (1.0 if issubclass(kind, (EOFError, ConnectionError)) else 0.0)
        while os.getppid() == parent and time.monotonic() < end:
            time.sleep(0.01)
        if not issubclass(kind, (EOFError, ConnectionError)) or os.getppid() == parent:
            before(kind, error, trace)

    sys.excepthook = hook


def _await_termination(parent: int, started_by: int) -> None:
    """Args: started_by: the process that this one is a child of, the parent or its fork server."""
    while True:
        received = signal.sigtimedwait(_SIGNALS, _GLANCE)
        if received is None:
            if os.getppid() != started_by:
                os._exit(1)
        elif received.si_signo == signal.SIGTERM and received.si_pid == parent:
            os._exit(0)

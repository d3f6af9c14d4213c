"""Micro batches made ready on the device ahead of their step, and how long that waited for them."""

import contextlib
import functools
import queue
import threading
import time
import weakref
from collections import deque
from typing import Callable, Deque, Generator, Iterator, NamedTuple, Optional, Tuple, Union

import torch

from data.batches import MicroBatch

_PATIENCE = 10.0  # seconds that a thread gets to end: it may be waiting for a slow network

_Batches = Generator[MicroBatch, None, None]
# A batch whose images are on their way to the device, and the event of their arrival on CUDA.
_Moved = Tuple[MicroBatch, Optional[torch.cuda.Event]]
_Move = Callable[[MicroBatch], _Moved]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor of the host on a device; no GPU is waited for.

    Args:
        tensor: on the host.
        device: where it is wanted.
    """
    # A copy from memory that is not page-locked waits for the GPU.
    if device.type != "cpu" and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Prefetcher:
    """An iterator over micro batches whose images are on the device; the rest stays on the CPU.

    A thread takes up to `depth` of them ahead. For CUDA it copies them from page-locked memory by a
    stream of its own, beside the computation; memory is not reused before the computing stream is
    done with it.
    """

    def __init__(self, batches: _Batches, device: torch.device, depth: int):
        """
        Args:
            batches: on the host or the device; a generator, whose `close` is called in the end.
            device: where the images are wanted.
            depth: of the queue; with 0 each is taken when it is needed, in the calling thread.
        """
        self._device = device
        self._started = False
        self._pending: Deque[tuple] = deque()  # pairs of marks, around each wait
        self._waited = 0.0
        move = _to_cuda(device) if device.type == "cuda" else _stay
        self._ahead: Iterator[_Moved]
        # The end comes also if nobody closes it: a thread amid torch's code when the interpreter
        # ends would abort it.
        self._end: Callable[[], object]
        self._thread: Optional[threading.Thread] = None
        if depth:
            thread = _started(batches, move, depth)
            # _take raises an error or StopIteration in the end, it never returns None.
            self._ahead = iter(functools.partial(_take, thread.ready), None)
            self._end = weakref.finalize(self, _close, thread)
            self._thread = thread.thread
        else:
            self._ahead = map(move, batches)
            self._end = weakref.finalize(self, batches.close)

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> MicroBatch:
        """Raises what `batches` raises, at the place where it was raised."""
        before = self._mark()
        batch, arrival = next(self._ahead)
        # The host goes on: the computing stream waits for the copy, and its memory is kept until
        # that stream is done with it.
        if arrival is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(arrival)
            batch.images.record_stream(stream)
        if self._started:
            self._pending.append((before, self._mark()))
            self.waited()
        self._started = True
        return batch

    def waited(self) -> float:
        """Return the seconds that the device was idle, waiting for images.

        The first wait, which starts workers, is left out.
        """
        on_cpu = self._device.type != "cuda"
        # On CUDA only waits whose second event has passed: asking for others would wait for them.
        while self._pending and (on_cpu or self._pending[0][1].query()):
            before, after = self._pending.popleft()
            if on_cpu:
                self._waited += after - before
            else:
                self._waited += before.elapsed_time(after) / 1000  # from milliseconds
        return self._waited

    def close(self) -> bool:
        """End the thread and the iterator that it reads.

        Returns:
            Whether they have ended. If not, the thread waits for a batch, and uses its iterator
            until that has come.
        """
        self._end()
        return self._thread is None or not self._thread.is_alive()

    def _mark(self) -> Union[float, torch.cuda.Event]:
        """Return the time; on CUDA an event: the host may wait while the device still computes."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _stay(batch: MicroBatch) -> _Moved:
    """Leave a batch on the host."""
    return batch, None


def _to_cuda(device: torch.device) -> _Move:
    """Return the function that copies images to a GPU by a stream of its own."""
    side = torch.cuda.Stream(device)

    def move(batch: MicroBatch) -> _Moved:
        """Begin to copy the images of a `batch`."""
        with torch.cuda.stream(side):
            images = batch.images if batch.images.is_cuda else batch.images.pin_memory()
            images = images.to(device, non_blocking=True)
            arrival = torch.cuda.Event()
            arrival.record(side)
        # Few bytes: the engine copies them itself, without waiting, as they are page-locked.
        moved = batch._replace(
            images=images,
            labels=batch.labels.pin_memory(),
            indices=batch.indices.pin_memory(),
        )
        return moved, arrival

    return move


class _Thread(NamedTuple):
    """A thread that moves batches into a queue, which ends with an error or StopIteration."""

    ready: queue.Queue
    stop: threading.Event
    thread: threading.Thread


def _started(batches: _Batches, move: _Move, depth: int) -> _Thread:
    """Start a thread that moves up to `depth` batches ahead."""
    ready: queue.Queue = queue.Queue(depth)
    stop = threading.Event()
    # It must not hold the prefetcher, or that would never be garbage.
    thread = threading.Thread(
        target=_fill,
        args=(ready, stop, batches, move),
        name="prefetch",
        daemon=True,
    )
    thread.start()
    return _Thread(ready, stop, thread)


def _fill(
    ready: queue.Queue,
    stop: threading.Event,
    batches: _Batches,
    move: _Move,
) -> None:
    """Move batches into a queue until they end, or until `stop` is set. Runs in the thread."""
    try:
        while not stop.is_set():
            # Without a name: only batches in the queue stay alive.
            _put(ready, stop, move(next(batches)))
    except StopIteration:
        pass
    except BaseException as error:  # raised again where the batch is missed
        _put(ready, stop, error)
    finally:
        _put(ready, stop, StopIteration())
        batches.close()


def _put(ready: queue.Queue, stop: threading.Event, entry: Union[_Moved, BaseException]) -> None:
    """Put an entry into a queue, unless `stop` is set: nobody would make room any more."""
    if not stop.is_set():
        ready.put(entry)


def _take(ready: queue.Queue) -> _Moved:
    """Return the next batch of a queue, or raise the error that stands for it."""
    entry = ready.get()
    if not isinstance(entry, BaseException):
        return entry
    try:
        raise entry
    finally:
        # An error in a frame that its traceback holds would keep alive what the frames above hold.
        del entry


def _close(filling: _Thread) -> None:
    """End the thread that fills a queue, and empty it."""
    ready, stop, thread = filling
    stop.set()
    end = time.monotonic() + _PATIENCE
    # The thread may be waiting for room, and an error that is never raised would keep its frames
    # alive.
    while not ready.empty() or (thread.is_alive() and time.monotonic() < end):
        with contextlib.suppress(queue.Empty):
            ready.get(timeout=0.05)
    with contextlib.suppress(queue.Full):
        ready.put_nowait(StopIteration())

"""Micro batches made ready ahead of the step that needs them, on the device; and how long that step waited for them."""

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from typing import Callable, Deque, Iterator, Optional, Tuple, Union

import torch

from data.batches import MicroBatch

_PATIENCE = 10.0  # seconds that a thread gets to end: it may be waiting for a slow network

# A batch whose images are on their way to the device, and the event of their arrival on CUDA.
_Moved = Tuple[MicroBatch, Optional[torch.cuda.Event]]
_Move = Callable[[MicroBatch], _Moved]


class Prefetcher:
    """An iterator over micro batches whose images are on the device; labels and indices stay on the CPU.

    A thread takes up to `depth` of them ahead. For CUDA it copies them from page-locked memory by a stream of its own,
    beside the computation; memory is not reused before the computing stream is done with it.
    """

    def __init__(self, batches: Iterator[MicroBatch], device: torch.device, depth: int):
        """`batches.close` is called in the end. With depth 0 each is taken when it is needed, in the calling thread."""
        self._device, self._started = device, False
        self._pending: Deque[tuple] = deque()  # pairs of marks, around each wait
        self._waited = 0.0
        move = _to_cuda(device) if device.type == "cuda" else _stay
        self._ahead = _Ahead(batches, move, depth) if depth else _in_turn(batches, move)
        # Also if nobody closes it: a thread that is amid torch's code when the interpreter ends would abort it.
        self._end = weakref.finalize(self, self._ahead.close)

    def __iter__(self) -> "Prefetcher":
        return self

    def __next__(self) -> MicroBatch:
        """Raises what `batches` raises, at the place where it was raised."""
        before = self._mark()
        batch, copied = next(self._ahead)
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            batch.images.record_stream(stream)
        if self._started:
            self._pending.append((before, self._mark()))
            self.waited()
        self._started = True
        return batch

    def waited(self) -> float:
        """Seconds that the device was idle, waiting for images, without the first wait, which starts workers."""
        on_cpu = self._device.type != "cuda"
        while self._pending and (on_cpu or self._pending[0][1].query()):
            before, after = self._pending.popleft()
            self._waited += after - before if on_cpu else before.elapsed_time(after) / 1000
        return self._waited

    def close(self) -> None:
        """End the thread and the iterator that it reads."""
        self._end()

    def _mark(self) -> Union[float, torch.cuda.Event]:
        """The time, or on CUDA an event: the host may wait while the device still has work to do."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _stay(batch: MicroBatch) -> _Moved:
    return batch, None


def _to_cuda(device: torch.device) -> _Move:
    side = torch.cuda.Stream(device)

    def move(batch: MicroBatch) -> _Moved:
        with torch.cuda.stream(side):
            images = batch.images if batch.images.is_cuda else batch.images.pin_memory()
            images = images.to(device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(side)
        labels, indices = batch.labels.pin_memory(), batch.indices.pin_memory()
        return batch._replace(images=images, labels=labels, indices=indices), copied

    return move


def _in_turn(batches: Iterator[MicroBatch], move: _Move) -> Iterator[_Moved]:
    with contextlib.closing(batches):
        yield from map(move, batches)


class _Ahead:
    """Batches taken by a thread, as many ahead as the queue holds."""

    def __init__(self, batches: Iterator[MicroBatch], move: _Move, depth: int):
        self._batches, self._move = batches, move
        self._ready: queue.Queue[Union[_Moved, BaseException]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> _Moved:
        if self._ended:
            raise StopIteration
        taken = self._ready.get()
        if not isinstance(taken, BaseException):
            return taken
        self._ended = True
        try:
            raise taken
        finally:
            # An error in a frame that its traceback holds would keep alive what the frames above hold, such as workers.
            del taken

    def close(self) -> None:
        self._stop.set()
        end = time.monotonic() + _PATIENCE
        while self._thread.is_alive() and time.monotonic() < end:
            with contextlib.suppress(queue.Empty):  # the thread may be waiting for room
                self._ready.get(timeout=0.05)
        with contextlib.suppress(queue.Empty):  # an error that is never raised would keep its frames alive
            while True:
                self._ready.get_nowait()
        self._ended = True

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                # No name for the batch: only those in the queue stay alive.
                self._ready.put(self._move(next(self._batches)))
        except BaseException as error:  # raised again where the batch is missed
            self._ready.put(error)
        finally:
            self._batches.close()

"""Gradients that are applied some steps late, so that their exchange runs beside the next step's computation."""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from typing import Callable, Deque, List, NamedTuple, Optional

import torch

_PATIENCE = 10.0  # seconds that an exchange gets to end when the program ends without close()
_CHUNK = 1 << 18  # elements that are moved at once

# Sums a buffer over the replicas, in place, given the number of the update and the divisor.
Exchange = Callable[[torch.Tensor, int, torch.Tensor], None]


class Delay:
    """Takes in a step's gradient and gives out that of `steps` steps before.

    On a CPU one thread exchanges the gradients, in their order and one at a time; an exchange therefore needs a process
    group on which nothing else is sent meanwhile. If one fails, whatever is called next raises its error. On other
    devices a gradient is exchanged when it is taken in.
    """

    def __init__(self, gradients: torch.Tensor, steps: int, exchange: Optional[Exchange]):
        """
        Args:
            gradients: float32 [length], the buffer in which a step's gradients are summed, and from which the update is
                made; it stays the same tensor. Beside it `steps` of its size are kept.
            steps: >= 1.
            exchange: None where there are no other replicas.
        """
        assert steps >= 1 and gradients.dtype == torch.float32 and gradients.dim() == 1, (steps, gradients.shape)
        self._gradients, self._steps = gradients, steps
        self._exchange = exchange
        self._entries: Deque[_Entry] = deque()  # oldest first
        self._worker = _Worker() if exchange is not None and gradients.device.type == "cpu" else None
        # Also when nobody closes it: a thread that is amid torch's code when the interpreter ends would abort it.
        self._end = weakref.finalize(self, self._worker.close, _PATIENCE) if self._worker is not None else None

    def advance(self, step: int, divisor: torch.Tensor) -> Optional[torch.Tensor]:
        """Exchanges the gradient in the buffer for that of `steps` calls before, summed over the replicas.

        Args:
            step: the update that this gradient was computed for.
            divisor: float32 [], what it has to be divided by in the end.

        Returns:
            The divisor of the gradient that lies in the buffer now; None in the first steps, when none is due and the
            buffer is zero.
        """
        self._raise_failure()
        divisor = divisor.clone()
        if len(self._entries) < self._steps:
            due, gradient = None, self._gradients.clone()
            self._gradients.zero_()
        else:
            self._entries[0].done.result()
            oldest = self._entries.popleft()
            due, gradient = oldest.divisor, oldest.gradient
            _swap(self._gradients, gradient)
        self._entries.append(_Entry(gradient, divisor, self._started(gradient, step, divisor)))
        return due

    def wait(self) -> None:
        """Until nothing is on its way. Raises what an exchange raised."""
        for entry in self._entries:
            entry.done.result()

    def state_dict(self) -> List[dict]:
        """Gradients to be applied, oldest first: {"gradient": float32 [length], "divisor": float32 [], "step": int}.

        All are exchanged by then, and so the same on all replicas. Copies, on the CPU.
        """
        self.wait()
        return [
            {"gradient": entry.gradient.to("cpu", copy=True), "divisor": entry.divisor.to("cpu", copy=True)}
            for entry in self._entries
        ]

    def load_state_dict(self, saved: List[dict]) -> None:
        """Takes over what `state_dict` gave. Raises ValueError if it is more than fits here, or of another length."""
        if len(saved) > self._steps:
            raise ValueError(f"{len(saved)} gradients are still to be applied, but exchange.delay is {self._steps}")
        if any(entry["gradient"].shape != self._gradients.shape for entry in saved):
            raise ValueError(
                f"the gradients still to be applied do not have the model's {len(self._gradients)} elements"
            )
        self.wait()
        device = self._gradients.device
        self._entries = deque(
            _Entry(entry["gradient"].to(device, copy=True), entry["divisor"].to(device, copy=True), _done())
            for entry in saved
        )

    def close(self) -> None:
        """Ends the thread once all that was taken in is exchanged: the other replicas count on it."""
        if self._worker is not None:
            self._worker.close()
            self._end.detach()

    def _started(self, gradient: torch.Tensor, step: int, divisor: torch.Tensor) -> Future:
        """The exchange of a gradient, begun or done."""
        if self._exchange is None:
            return _done()
        task = functools.partial(self._exchange, gradient, step, divisor)
        if self._worker is not None:
            return self._worker.start(task)
        task()
        return _done()

    def _raise_failure(self) -> None:
        for entry in self._entries:
            if entry.done.done():
                entry.done.result()


class _Entry(NamedTuple):
    """A gradient that is still to be applied, and its exchange."""

    gradient: torch.Tensor
    divisor: torch.Tensor
    done: Future


class _Worker:
    """A thread that does one task after the other, until one fails: the next would meet others' previous ones.

    While idle it refers to nobody, so that who forgets to close it is collected as garbage all the same.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()

    def start(self, task: Callable[[], None]) -> Future:
        """The task, once those before it are done, with as many of torch's threads as the caller has."""
        done: Future = Future()
        self._tasks.put((done, torch.get_num_threads(), task))
        return done

    def close(self, patience: Optional[float] = None) -> None:
        """Ends the thread after what it was given, or gives up after so many seconds."""
        self._tasks.put(None)
        if self._thread is not threading.current_thread():  # which may collect its owner as garbage
            self._thread.join(patience)

    def _run(self) -> None:
        failure = None
        while failure is None and (given := self._tasks.get()) is not None:
            done, threads, task = given
            failure = _failure_of(task, threads)
            del given, task
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)
            del done


def _failure_of(task: Callable[[], None], threads: int) -> Optional[BaseException]:
    """Error that a task raises, or None."""
    try:
        torch.set_num_threads(threads)
        task()
    except BaseException as error:  # handed over, to be raised where the sum is missed
        return error
    return None


def _done() -> Future:
    done: Future = Future()
    done.set_result(None)
    return done


def _swap(left: torch.Tensor, right: torch.Tensor) -> None:
    """Their contents, without a third buffer of their size."""
    for one, other in zip(left.split(_CHUNK), right.split(_CHUNK)):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)

"""Gradients that are applied some steps late, so that their exchange runs beside the next step's computation."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Deque, List, NamedTuple, Optional

import torch

_CHUNK = 1 << 18  # elements that are moved at once

# Sums a buffer over the replicas, in place, given the number of the update and the divisor.
Exchange = Callable[[torch.Tensor, int, torch.Tensor], None]


class _Entry(NamedTuple):
    """A gradient that is still to be applied, and its exchange."""

    gradient: torch.Tensor
    divisor: torch.Tensor
    done: Future


class Delay:
    """Takes a step's gradient and returns that of `steps` steps before.

    On a CPU one thread exchanges the gradients, in order and one at a time; an exchange therefore needs a process group
    that nothing else uses meanwhile. If one fails, the next call raises its error, and no later one begins: it would
    meet the other replicas' earlier ones. On other devices a gradient is exchanged when it is taken.
    """

    def __init__(self, gradients: torch.Tensor, steps: int, exchange: Optional[Exchange]):
        """
        Args:
            gradients: float32 [length], the buffer of a step's gradients and of the update; it stays the same tensor.
            steps: >= 1: as many buffers are kept beside it.
            exchange: None where there are no other replicas.
        """
        self._gradients, self._steps, self._exchange = gradients, steps, exchange
        self._entries: Deque[_Entry] = deque()  # oldest first
        # The interpreter waits for this thread before it ends: amid torch's code it would abort the process.
        in_thread = exchange is not None and gradients.device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, "exchange") if in_thread else None

    def advance(self, step: int, divisor: torch.Tensor) -> Optional[torch.Tensor]:
        """Replace the gradient in the buffer, of update `step`, by that of `steps` calls before, summed over replicas;
        in the first steps, when none is due, by zeros.

        Args: divisor: float32 [], of the former. Returns: that of the latter, if one is due.
        """
        for entry in self._entries:
            if entry.done.done():
                entry.done.result()  # raises the error of its exchange
        divisor = divisor.clone()
        if len(self._entries) < self._steps:
            due, gradient = None, self._gradients.clone()
            self._gradients.zero_()
        else:
            self._entries[0].done.result()
            gradient, due, _ = self._entries.popleft()
            for one, other in zip(self._gradients.split(_CHUNK), gradient.split(_CHUNK)):
                copy = one.clone()  # not of the whole: memory is short
                one.copy_(other)
                other.copy_(copy)
        self._entries.append(_Entry(gradient, divisor, self._start(gradient, step, divisor)))
        return due

    def wait(self) -> None:
        """Wait until no exchange is under way. Raises the error of one that failed."""
        for entry in self._entries:
            entry.done.result()

    def state_dict(self) -> List[dict]:
        """Gradients to be applied, oldest first: {"gradient": float32 [length], "divisor": float32 []}, copies on the
        CPU. All are exchanged, and so the same on all replicas."""
        self.wait()
        return [
            {"gradient": entry.gradient.to("cpu", copy=True), "divisor": entry.divisor.to("cpu", copy=True)}
            for entry in self._entries
        ]

    def load_state_dict(self, saved: List[dict]) -> None:
        """Load the result of `state_dict`. Raises ValueError if it is more than fits here."""
        if len(saved) > self._steps:
            raise ValueError(f"{len(saved)} gradients are still to be applied, but exchange.delay is {self._steps}")
        self.wait()
        device = self._gradients.device
        self._entries = deque(
            _Entry(entry["gradient"].to(device, copy=True), entry["divisor"].to(device, copy=True), _done())
            for entry in saved
        )

    def close(self) -> None:
        """End the thread once all that was taken is exchanged: the other replicas wait for it."""
        if self._thread is not None:
            self._thread.shutdown()

    def _start(self, gradient: torch.Tensor, step: int, divisor: torch.Tensor) -> Future:
        call = (self._exchange, gradient, step, divisor)
        if self._thread is not None:
            before = self._entries[-1].done if self._entries else _done()
            return self._thread.submit(_after, before, torch.get_num_threads(), *call)
        if self._exchange is not None:
            self._exchange(*call[1:])
        return _done()


def _after(before: Future, threads: int, exchange: Exchange, *arguments: object) -> None:
    """Exchange a gradient, unless the exchange before it failed; with as many of torch's threads as the main thread."""
    before.result()
    torch.set_num_threads(threads)
    exchange(*arguments)


def _done() -> Future:
    done: Future = Future()
    done.set_result(None)
    return done

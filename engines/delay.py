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
            gradients: float32 [length], the buffer in which a step's gradients are summed, and from which the update is
                made; it stays the same tensor. `steps` buffers of its size are kept beside it.
            steps: >= 1.
            exchange: None where there are no other replicas.
        """
        assert steps >= 1 and gradients.dtype == torch.float32 and gradients.dim() == 1, (steps, gradients.shape)
        self._gradients, self._steps = gradients, steps
        self._exchange = exchange
        self._entries: Deque[_Entry] = deque()  # oldest first
        # The interpreter waits for this thread before it ends: amid torch's code it would abort the process.
        in_thread = exchange is not None and gradients.device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, "exchange") if in_thread else None

    def advance(self, step: int, divisor: torch.Tensor) -> Optional[torch.Tensor]:
        """Replace the gradient in the buffer by that of `steps` calls before, summed over the replicas.

        Args:
            step: the update that the gradient in the buffer was computed for.
            divisor: float32 [], what it has to be divided by in the end.

        Returns:
            The divisor of the gradient that lies in the buffer now; None in the first steps, when none is due and the
            buffer is zero.
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
            _swap(self._gradients, gradient)
        self._entries.append(_Entry(gradient, divisor, self._start(gradient, step, divisor)))
        return due

    def wait(self) -> None:
        """Wait until no exchange is under way. Raises the error of one that failed."""
        for entry in self._entries:
            entry.done.result()

    def state_dict(self) -> List[dict]:
        """Gradients to be applied, oldest first: {"gradient": float32 [length], "divisor": float32 []}.

        All are exchanged, and so the same on all replicas. Copies, on the CPU.
        """
        self.wait()
        return [
            {"gradient": entry.gradient.to("cpu", copy=True), "divisor": entry.divisor.to("cpu", copy=True)}
            for entry in self._entries
        ]

    def load_state_dict(self, saved: List[dict]) -> None:
        """Load the result of `state_dict`. Raises ValueError if it is more than fits here, or of another length."""
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
        """End the thread once all that was taken is exchanged: the other replicas wait for it."""
        if self._thread is not None:
            self._thread.shutdown()

    def _start(self, gradient: torch.Tensor, step: int, divisor: torch.Tensor) -> Future:
        """The exchange of a gradient, in the thread if there is one."""
        if self._thread is not None:
            before = self._entries[-1].done if self._entries else _done()
            call = (self._exchange, gradient, step, divisor)
            return self._thread.submit(_after, before, torch.get_num_threads(), *call)
        if self._exchange is not None:
            self._exchange(gradient, step, divisor)
        return _done()


def _after(before: Future, threads: int, exchange: Exchange, gradient: torch.Tensor, step: int, divisor: torch.Tensor):
    """Exchange a gradient, unless the exchange before it failed; with as many of torch's threads as the main thread."""
    before.result()
    torch.set_num_threads(threads)
    exchange(gradient, step, divisor)


def _done() -> Future:
    done: Future = Future()
    done.set_result(None)
    return done


def _swap(left: torch.Tensor, right: torch.Tensor) -> None:
    """Swap contents without a third buffer of their size."""
    for one, other in zip(left.split(_CHUNK), right.split(_CHUNK)):
        copy = one.clone()
        one.copy_(other)
        other.copy_(copy)

"""Gradients that are applied some steps late, and exchanged meanwhile (`exchange.delay`)."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Deque, NamedTuple, Optional

import torch

# Sums a buffer over the replicas, in place: float32 [length], the update's first step, and what
# makes a mean of the sum, float32 [].
Exchange = Callable[[torch.Tensor, int, torch.Tensor], None]


class Late(NamedTuple):
    """A gradient that is still to be applied.

    gradient: float32 [length].
    divisor: float32 [], makes a mean of it.
    exchange: under way; None where it is done.
    """

    gradient: torch.Tensor
    divisor: torch.Tensor
    exchange: Optional[Future] = None

    def finish(self) -> None:
        """Wait for the exchange. Raises its error."""
        if self.exchange is not None:
            self.exchange.result()


class Delay:
    """Takes a step's gradient and returns that of `steps` steps before.

    On a CPU one thread exchanges the gradients, in order and one at a time, beside the next step's
    computation; an exchange therefore needs a process group that nothing else uses meanwhile. If
    one fails, the next call raises its error, and no later one begins: it would meet the other
    replicas' earlier ones. On other devices a gradient is exchanged when it is taken.

    entries: gradients to be applied, oldest first.
    """

    def __init__(self, gradients: torch.Tensor, steps: int, exchange: Optional[Exchange]):
        """
        Args:
            gradients: float32 [length], the buffer of a step's gradients and of the update; it
                stays the same tensor.
            steps: 1 or more: as many buffers are kept beside it.
            exchange: sums a buffer over the replicas; None where there are no other replicas.
        """
        self._gradients = gradients
        self._steps = steps
        self._exchange = exchange
        self.entries: Deque[Late] = deque()
        # The interpreter waits for this thread before it ends: amid torch's code it would abort the
        # process.
        in_thread = exchange is not None and gradients.device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, "exchange") if in_thread else None

    def advance(self, step: int, divisor: torch.Tensor) -> Optional[torch.Tensor]:
        """Replace the gradient in the buffer by that of `steps` calls before, summed over replicas.

        In the first steps, when none is due, zeros take its place.

        Args:
            step: first step of the update whose gradient lies in the buffer, from 0.
            divisor: float32 [], makes a mean of that gradient.

        Returns:
            The divisor of the gradient that lies there afterwards; None if none was due.
        """
        # An exchange that has failed ends the run as soon as possible.
        for entry in self.entries:
            if entry.exchange is not None and entry.exchange.done():
                entry.finish()
        # The buffer gets another gradient below, and the caller may overwrite the divisor.
        new = self._gradients.clone()
        divisor = divisor.clone()
        due = None
        if len(self.entries) < self._steps:
            self._gradients.zero_()
        else:
            # It stays among the entries until it is there: a checkpoint must not miss it.
            oldest = self.entries[0]
            oldest.finish()
            self.entries.popleft()
            self._gradients.copy_(oldest.gradient)
            due = oldest.divisor
        self.entries.append(Late(new, divisor, self._start(new, step, divisor)))
        return due

    def wait(self) -> None:
        """Wait until no exchange is under way. Raises the error of one that failed."""
        for entry in self.entries:
            entry.finish()

    def close(self) -> None:
        """End the thread once all that was taken is exchanged: the other replicas wait for it."""
        if self._thread is not None:
            self._thread.shutdown()

    def _start(
        self,
        gradient: torch.Tensor,
        step: int,
        divisor: torch.Tensor,
    ) -> Optional[Future]:
        """Exchange a gradient after those before it: see `Exchange`."""
        exchange = self._exchange
        if exchange is None:
            return None
        if self._thread is None:
            exchange(gradient, step, divisor)
            return None
        # Torch counts threads for each thread by itself: this one gets as many as the main thread.
        threads = torch.get_num_threads()
        before = self.entries[-1] if self.entries else None

        def in_turn() -> None:
            # If the exchange before has failed its error ends this one, too.
            if before is not None:
                before.finish()
            torch.set_num_threads(threads)
            exchange(gradient, step, divisor)

        return self._thread.submit(in_turn)

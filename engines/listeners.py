"""What follows a training step without the engine knowing it: a noise meter, averages, a timeline.

A step has five phases. Replicas compute their gradients, exchange them, agree on what happened,
apply the update, and account for it. A listener is called between them. It may add numbers to the
one message by which processes agree, so that it costs no message of its own.
"""

from __future__ import annotations

import contextlib
from typing import ContextManager, Dict, Iterator, Optional, Sequence

import torch

from recipe.course import Update

# Spans are asked for three times a micro batch: this one costs nothing.
NOT_TIMED: ContextManager[None] = contextlib.nullcontext()


class StepListener:
    """Follows training steps; each method does nothing unless a subclass needs it.

    Every process of a run has the same listeners, in the same order. What one has to keep over a
    resume goes into `TorchEngine.state_dict` and `load_state_dict`, and what an elastic run takes
    back with a step into `live_state`: these name it, as checkpoints have one form for all engines.
    """

    def begin(self, update: Update) -> None:
        """Prepare for an `update` whose first micro batch comes next."""

    def computed(self, divisor: torch.Tensor) -> None:
        """Take note that this replica's gradients are complete, and not yet exchanged.

        Args:
            divisor: float32 [], makes means over this replica's images of the update: the loss
                scale, times the micro batches that were added.
        """

    def exchanged(self, divisor: Optional[torch.Tensor]) -> None:
        """Take note that the exchange is done.

        Args:
            divisor: float32 [], makes means of the gradients that are there now; None where a late
                gradient is still on its way, so that none is there.
        """

    def contribution(self) -> Dict[str, torch.Tensor]:
        """Return float64 tensors, by name, to be summed over all processes with the step's own."""
        return {}

    def agreed(self, sums: Dict[str, torch.Tensor], finite: torch.Tensor) -> None:
        """Take the sums of what all processes contributed.

        Args:
            sums: float64, by the names of `contribution`.
            finite: bool [], whether all processes have finite gradients; else the update is left
                out. On the device, as are the sums: reading one waits for it.
        """

    def applied(self, update: Update, finite: torch.Tensor) -> None:
        """Take note that the weights have been updated, or left as they were where not `finite`."""

    def span(self, kind: str, number: int) -> ContextManager[None]:
        """Return a context for an activity that begins now.

        Args:
            kind: "compute", "load", "forward", "backward", "exchange" or "update".
            number: of a micro batch within the replica's share; -1 where it belongs to none.
        """
        return NOT_TIMED


class Listeners(StepListener):
    """Some listeners as one."""

    def __init__(self, listeners: Sequence[StepListener]):
        """Join `listeners`, which are called in this order."""
        self._listeners = tuple(listeners)
        # Spans are opened for each micro batch: those who do not time them need not be asked.
        self._timing = [
            listener for listener in listeners if type(listener).span is not StepListener.span
        ]

    def begin(self, update: Update) -> None:
        for listener in self._listeners:
            listener.begin(update)

    def computed(self, divisor: torch.Tensor) -> None:
        for listener in self._listeners:
            listener.computed(divisor)

    def exchanged(self, divisor: Optional[torch.Tensor]) -> None:
        for listener in self._listeners:
            listener.exchanged(divisor)

    def contribution(self) -> Dict[str, torch.Tensor]:
        # By name: two listeners must not contribute the same one.
        joined: Dict[str, torch.Tensor] = {}
        for listener in self._listeners:
            joined.update(listener.contribution())
        return joined

    def agreed(self, sums: Dict[str, torch.Tensor], finite: torch.Tensor) -> None:
        for listener in self._listeners:
            listener.agreed(sums, finite)

    def applied(self, update: Update, finite: torch.Tensor) -> None:
        for listener in self._listeners:
            listener.applied(update, finite)

    def span(self, kind: str, number: int = -1) -> ContextManager[None]:
        spans = [listener.span(kind, number) for listener in self._timing]
        # Most spans are not timed: an ExitStack for nothing would cost more than they do.
        spans = [span for span in spans if span is not NOT_TIMED]
        if not spans:
            return NOT_TIMED
        return _together(spans)


@contextlib.contextmanager
def _together(spans: Sequence[ContextManager[None]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for span in spans:
            stack.enter_context(span)
        yield

"""Timeline of steps: spans of time of each rank, on one clock."""

from __future__ import annotations

import contextlib
import platform
import time
from typing import Iterator, List, NamedTuple

import torch

from engines.devices import synchronize
from parallel.processes import Processes


class Span(NamedTuple):
    """One activity of one rank.

    kind: "forward", "backward", "exchange", "update" or "load". micro_batch: its number within the replica's share of
    the step; -1 where the span belongs to none. step: number of the update. start, end: seconds on a clock that all
    ranks have in common.
    """

    replica: int
    stage: int
    rank: int
    kind: str
    micro_batch: int
    step: int
    start: float
    end: float


class Recorder:
    """Records spans of the steps that were begun so; on CUDA each waits for the device, so that it is its time.

    named: whether profilers are told the spans, too: torch.profiler, and Nsight on CUDA (NVTX). For them none waits.
    """

    def __init__(self, processes: Processes, device: torch.device):
        self._processes, self._device = processes, device
        self._on, self._step, self._start = False, 0, 0.0
        self._spans: List[Span] = []
        self.named = False

    def begin(self, step: int, on: bool) -> None:
        """Begin a step, recorded or not. The first that is starts the clocks of all ranks together."""
        self._on, self._step = on, step
        if on and not self._start:
            self._processes.wait_for_all()
            self._start = time.monotonic()

    @contextlib.contextmanager
    def span(self, kind: str, number: int = -1) -> Iterator[None]:
        """Record the time of a block. number: of the micro batch within the replica's share."""
        with self._naming(f"{kind} {number}" if number >= 0 else kind) if self.named else contextlib.nullcontext():
            if not self._on:
                yield
                return
            synchronize(self._device)
            start = time.monotonic()
            yield
            synchronize(self._device)
            place = self._processes.topology
            times = start, time.monotonic()
            self._spans.append(Span(place.replica, place.stage, place.rank, kind, number, self._step, *times))

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        nvtx = torch.cuda.nvtx.range(name) if self._device.type == "cuda" else contextlib.nullcontext()
        with torch.profiler.record_function(name), nvtx:
            yield

    def collect(self) -> List[Span]:
        """End the recording; return the spans of all ranks on the main rank, elsewhere none. Every rank calls.

        They are in seconds since all clocks were started; on other hosts than the main rank's they are off by the time
        that a barrier takes to end, less than a millisecond in a good network.
        """
        self._on = False
        host, start = self._processes.gather((platform.node(), self._start))[0]
        if platform.node() != host:
            start = self._start
        spans, self._spans = self._spans, []
        own = [span._replace(start=span.start - start, end=span.end - start) for span in spans]
        return [span for part in self._processes.gather_to_main(own) for span in part]

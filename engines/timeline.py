"""Timeline of steps: spans of time of each rank, on one clock."""

from __future__ import annotations

import contextlib
import platform
import time
from typing import ContextManager, Iterator, List, NamedTuple

import torch

from engines.devices import synchronize
from engines.listeners import NOT_TIMED, StepListener
from parallel.processes import Processes
from recipe.course import Update

KINDS = ("forward", "backward", "exchange", "update", "load")


class Span(NamedTuple):
    """One activity of one rank.

    replica, stage, rank: who.
    kind: one of `KINDS`.
    micro_batch: its number within the replica's share of the update; -1 where the span has none.
    step: first step of the update.
    start, end: seconds on a clock that all ranks have in common.
    """

    replica: int
    stage: int
    rank: int
    kind: str
    micro_batch: int
    step: int
    start: float
    end: float


class Recorder(StepListener):
    """Records spans of some updates; on CUDA each waits for the device, so that it is its time.

    named: whether profilers are told the spans, too: torch.profiler, and Nsight on CUDA (NVTX). For
        them none waits.
    """

    def __init__(self, processes: Processes, device: torch.device, updates: int = 0):
        """
        Args:
            processes: of the run, all of which record.
            device: that computes.
            updates: how many are recorded, from the second on: the first starts what is new.
        """
        self.named = False
        self._processes = processes
        self._device = device
        self._recorded = range(1, 1 + updates)
        self._begun = 0
        self._on = False
        self._step = 0
        self._start = 0.0
        self._spans: List[Span] = []

    def begin(self, update: Update) -> None:
        self._on = self._begun in self._recorded
        self._begun += 1
        self._step = update.step
        if self._on and not self._start:
            # The clocks of all ranks start together.
            self._processes.wait_for_all()
            self._start = time.monotonic()

    def span(self, kind: str, number: int = -1) -> ContextManager[None]:
        if kind not in KINDS or not (self._on or self.named):
            return NOT_TIMED
        return self._timed(kind, number)

    @contextlib.contextmanager
    def _timed(self, kind: str, number: int) -> Iterator[None]:
        with contextlib.ExitStack() as naming:
            if self.named:
                naming.enter_context(self._naming(f"{kind} {number}" if number >= 0 else kind))
            if not self._on:
                yield
                return
            synchronize(self._device)
            # The device has ended what came before, so that its time is this span's.
            start = time.monotonic()
            yield
            synchronize(self._device)
            self._note(kind, number, start)

    def _note(self, kind: str, number: int, start: float) -> None:
        place = self._processes.topology
        span = Span(
            replica=place.replica,
            stage=place.stage,
            rank=place.rank,
            kind=kind,
            micro_batch=number,
            step=self._step,
            start=start,
            end=time.monotonic(),
        )
        self._spans.append(span)

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as profilers:
            profilers.enter_context(torch.profiler.record_function(name))
            if self._device.type == "cuda":
                profilers.enter_context(torch.cuda.nvtx.range(name))
            yield

    def collect(self) -> List[Span]:
        """End the recording; return the spans of all ranks on the main rank, elsewhere none.

        Every rank calls. Spans are in seconds since all clocks were started; on other hosts than
        the main rank's they are off by the time that a barrier takes to end, less than a
        millisecond in a good network.
        """
        self._on = False
        host, start = self._processes.gather((platform.node(), self._start))[0]
        # Processes of one host have one clock; on another it began with the same barrier.
        if platform.node() != host:
            start = self._start
        spans = []
        for span in self._spans:
            spans.append(span._replace(start=span.start - start, end=span.end - start))
        self._spans = []
        by_rank = self._processes.gather_to_main(spans)
        return [span for rank_spans in by_rank for span in rank_spans]

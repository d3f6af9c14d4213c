"""parallel.shares: measured. Replicas compute as many micro batches as they are fast."""

from __future__ import annotations

import contextlib
from typing import ContextManager, Iterator, List, Optional, Sequence, Tuple

import torch

from engines.devices import Stopwatch
from engines.listeners import NOT_TIMED, StepListener
from parallel.processes import Processes
from parallel.speeds import Speeds

Shares = Sequence[range]


class MeasuredShares(StepListener):
    """Times the passes of steps, and proposes shares that would make the replicas end together."""

    def __init__(self, processes: Processes, device: torch.device, least: int):
        """
        Args:
            processes: of the run.
            device: that computes.
            least: micro batches that a replica computes in a step at least.
        """
        self._processes = processes
        self._stopwatch = Stopwatch(device)
        self._speeds = Speeds(least)
        self._warm = False

    def span(self, kind: str, number: int) -> ContextManager[None]:
        if kind != "compute":
            return NOT_TIMED
        return self._computing()

    def read(self) -> Tuple[float, int]:
        """Return the seconds of the passes since the last call, and of how many steps. Waits."""
        return self._stopwatch.read()

    def skip_next(self) -> None:
        """Leave out the next step: with other shares it also starts what is new."""
        self._warm = False

    def follow(self, shares: Shares) -> Tuple[Optional[List[range]], List[str]]:
        """Return the shares for the next steps, None where they stay, and lines for the user.

        Args:
            shares: micro batches of each replica in the steps since the last call.

        All processes call. Waits for the device.
        """
        place = self._processes.topology
        seconds, steps = self.read()
        # A replica with more micro batches takes longer without being slower.
        mean = seconds / (steps * len(shares[place.replica])) if steps else 0.0
        by_rank = self._processes.gather(mean)
        # A replica is as fast as the slowest of its stages.
        by_replica = []
        for first in range(0, len(by_rank), place.stages):
            by_replica.append(max(by_rank[first : first + place.stages]))
        if not all(by_replica):
            return None, []  # no step was measured
        return self._speeds.follow(shares, by_replica)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        if self._warm:
            with self._stopwatch.running():
                yield
        else:
            yield
        # Also after a step that was left out: the next one counts.
        self._warm = True

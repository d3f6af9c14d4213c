"""The batch of a step: the images of a step, divided into micro batches and over replicas by
batch.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import List, Tuple

from common.text import count


@dataclass(frozen=True)
class Batch:
    """The division of the `global_` images of a step.

    Each of `replicas` copies of the model, cut into `stages`, takes `accumulation` micro batches of
    `micro` images.

    uneven: where replicas take different numbers of micro batches, that of each, of which
    `accumulation` is the most.
    """

    global_: int
    micro: int
    accumulation: int
    replicas: int
    stages: int
    uneven: Tuple[int, ...] = ()

    @property
    def micro_batches(self) -> int:
        """Micro batches of one step over all replicas."""
        return self.global_ // self.micro

    @property
    def shares(self) -> List[range]:
        """The micro batches of each replica, of those of a step."""
        counts = self.uneven or (self.accumulation,) * self.replicas
        ends = accumulate(counts)
        return [range(end - size, end) for size, end in zip(counts, ends)]

    def with_shares(self, shares: List[range]) -> Batch:
        """Return the same batch with other shares, one range of micro batches for each replica."""
        # Empty where all are equal: two batches that divide alike are equal then.
        counts = tuple(len(share) for share in shares)
        is_even = len(set(counts)) == 1
        return replace(self, accumulation=max(counts), uneven=() if is_even else counts)

    def describe(self) -> str:
        """Return the line that every run prints, e.g. `6144 = 3 micro x 32 accumulation x 64
        replicas (...)`.
        """
        replicas = count(self.replicas, "replica")
        if self.uneven:
            product = f"{self.micro_batches} on {replicas}, accumulation {min(self.uneven)} to {self.accumulation}"
        else:
            product = f"{self.accumulation} accumulation x {replicas}"
        devices = count(self.replicas * self.stages, "device")
        if self.stages > 1:
            devices = f"{self.stages} stages each: {devices}"
        return f"{self.global_} = {self.micro} micro x {product} ({devices})"

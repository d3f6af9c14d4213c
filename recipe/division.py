"""Division of the images of a step: the result of the arithmetic in batch.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import List, Tuple

from common.text import count


@dataclass(frozen=True)
class Batch:
    """`global_` images make a step (an optimizer update): each of `replicas` copies of the model, cut into `stages`,
    takes `accumulation` micro batches of `micro` images.

    uneven: where replicas take different numbers of micro batches, that of each, of which `accumulation` is the most.
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
        return [range(end - own, end) for own, end in zip(counts, accumulate(counts))]

    def divided(self, shares: List[range]) -> Batch:
        """The same batch with other shares."""
        counts = tuple(map(len, shares))
        return replace(self, accumulation=max(counts), uneven=counts if len(set(counts)) > 1 else ())

    def describe(self) -> str:
        """The line that every run prints, e.g. `6144 = 3 micro x 32 accumulation x 64 replicas (...)`."""
        devices, replicas = self.replicas * self.stages, count(self.replicas, "replica")
        each = f"{self.stages} stages each: " if self.stages > 1 else ""
        product = f"{self.accumulation} accumulation x {replicas}"
        if self.uneven:
            product = f"{self.micro_batches} on {replicas}, accumulation {min(self.uneven)} to {self.accumulation}"
        return f"{self.global_} = {self.micro} micro x {product} ({each}{count(devices, 'device')})"

"""Division of the images of a step: the result of the arithmetic in batch.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """`global_` images make a step (an optimizer update): each of `replicas` copies of the model, cut into `stages`,
    takes `accumulation` micro batches of `micro` images."""

    global_: int
    micro: int
    accumulation: int
    replicas: int
    stages: int

    @property
    def micro_batches(self) -> int:
        """Micro batches of one step over all replicas."""
        return self.accumulation * self.replicas

    def describe(self) -> str:
        """The line that every run prints, e.g. `6144 = 3 micro x 32 accumulation x 64 replicas (...)`."""
        devices = self.replicas * self.stages
        each = f"{self.stages} stages each: " if self.stages > 1 else ""
        return (
            f"{self.global_} = {self.micro} micro x {self.accumulation} accumulation x "
            f"{count(self.replicas, 'replica')} ({each}{count(devices, 'device')})"
        )


def count(number: int, noun: str, plural: str = "") -> str:
    """`2 replicas`, `1 replica`. Args: plural: where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"

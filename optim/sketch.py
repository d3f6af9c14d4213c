"""Norms of sums of vectors of which each process has one: by a linear sketch, a few numbers of each."""

from __future__ import annotations

from typing import Sequence, Tuple

import torch

from recipe.randomness import bits32, key

_SIGNS = 1 << 20  # random signs in the table, about; longer vectors use them again


class Sketch:
    """Adds the elements of vectors up in few buckets, with random signs.

    The sketch of a sum is the sum of the sketches, and its norm that of the sum, to about 1 / sqrt(2 buckets): an
    element's bucket is its place modulo `buckets`, its sign a function of its place. Best is a prime number of
    buckets: the elements of a row or of a channel, which are alike, then fall into different ones.

    Source: Alon, Matias and Szegedy, 1996, The space complexity of approximating the frequency moments; buckets:
    Charikar, Chen and Farach-Colton, 2002, Finding frequent items in data streams.
    """

    def __init__(self, vectors: Sequence[Sequence[Tuple[int, int]]], buckets: int, device: torch.device):
        """
        Args:
            vectors: of each the pieces of a flat buffer, (first element, number of elements), that it consists of.
            buckets: numbers a vector.
        """
        assert buckets > 0
        self._vectors, self.buckets = vectors, buckets
        self._part = max(1, (1 << 17) // buckets) * buckets  # elements at a time: they stay in a core's cache
        count = -(-_SIGNS // self._part) * self._part
        numbers = torch.arange(count, device=device)
        self._signs = (bits32(key("sketch"), numbers) & 1).float().mul_(2).sub_(1)

    def __call__(self, flat: torch.Tensor) -> torch.Tensor:
        """The sketches of the vectors in a buffer, float32 [length]: float32 [vectors, buckets]."""
        found = torch.zeros(len(self._vectors), self.buckets, device=flat.device)
        for row, pieces in zip(found, self._vectors):
            place = 0  # signs depend on the place in the vector: where the vector lies does not matter
            for part in (part for start, count in pieces for part in flat[start : start + count].split(self._part)):
                place = 0 if place + len(part) > len(self._signs) else place
                self._add(part, self._signs[place : place + len(part)], row)
                place += -(-len(part) // self.buckets) * self.buckets
        return found

    def _add(self, values: torch.Tensor, signs: torch.Tensor, row: torch.Tensor) -> None:
        """Add values of a vector to its sketch, from the first bucket on."""
        signed = values * signs
        whole = len(signed) // self.buckets * self.buckets
        if whole:
            row += signed[:whole].view(-1, self.buckets).sum(0)
        row[: len(signed) - whole] += signed[whole:]

"""Sums of sparse vectors by owners: each replica sums a region of the elements, and the largest sums are gathered."""

from __future__ import annotations

from typing import Iterable, List, Optional, Sequence, Tuple

import torch
from torch import distributed

from parallel import bruck
from parallel.costs import BINS
from parallel.messages import Sparse, Wire
from parallel.reduce import Group
from parallel.selection import ranked

_INFINITE = 1 << 31  # beyond the bits of all magnitudes
_NEAR = 1 << 18  # bits of a 32nd of a power of two
_SPARE = 1 / 16  # of the entries of a result, that may be gathered beside them


class Owners:
    """Finds the k entries of largest magnitude of the sum of all replicas' vectors of k entries each.

    (1) Every replica sends each owner of a region its entries there. (2) The owner adds them up in the order of the
    replicas. (3) All count sums by magnitude, until they know a magnitude that k of them reach and few more. (4) The
    owners send these to all, who take the k largest, ties to the lower index. A replica keeps those of its own entries
    that are not in the result.

    Regions have equal shares of the result before (at first of the elements), and magnitudes are looked for around the
    least of the result before. That changes who adds and how much is sent, but not the result. With rounded messages it
    would, after a resume, so there nothing is taken from the result before.

    Source: Li and Hoefler, 2201.07598 (Ok-Topk), whose k varies and whose thresholds are those of earlier steps.
    """

    def __init__(self, group: Group, wire: Wire):
        self._group, self._wire = group, wire
        self._replicas = 1 if group is None else distributed.get_world_size(group)
        self._borders: Optional[torch.Tensor] = None  # first element of each region but the first
        self._range = (0, _INFINITE)  # of bits of magnitudes, in which the least of the result is looked for

    def __call__(self, own: Sparse, length: int) -> Tuple[Sparse, List[Sparse]]:
        """The result, in the order of the indices, and what this replica keeps. Every replica calls.

        Args: own: of this replica. length: elements of a vector.
        """
        if self._borders is None:
            starts = [region * length // self._replicas for region in range(1, self._replicas)]
            self._borders = torch.tensor(starts, device=own.indices.device)
        count = len(own.indices)
        sent, parts, kept = self._send_to_owners(own)
        candidates, lost = self._gather(*self._reaching(_added(parts), count))
        total = candidates.take(ranked(candidates.values, candidates.indices, count)[0])
        if self._wire.exact:
            least = int(_magnitudes(total.values).min())
            around = (BINS // 2 - 1) * _NEAR
            self._range = (max(0, least - around), min(least + around, _INFINITE))
            self._borders = total.indices[[region * count // self._replicas for region in range(1, self._replicas)]]
        kept.append(sent.take(~torch.isin(sent.indices, total.indices)))
        if lost is not None:
            kept.append(lost.take(torch.isin(lost.indices, total.indices)))
        return total, kept

    def _send_to_owners(self, own: Sparse) -> Tuple[Sparse, List[Sparse], List[Sparse]]:
        """Own entries as they were sent, what came from each replica, and what rounding took off."""
        regions = torch.searchsorted(self._borders, own.indices, right=True)
        counts = torch.bincount(regions, minlength=self._replicas)
        coming, numbers = bruck.all_to_all(counts.int(), self._group).tolist(), counts.tolist()
        packed = [self._wire.pack(own.take(places)) for places in regions.argsort(stable=True).split(numbers)]
        messages = [message for message, _ in packed]
        sent = _joined(self._wire.unpack(message, number) for message, number in zip(messages, numbers))
        words = [self._wire.words(count) for count in coming]
        received = messages[0].new_empty(sum(words))
        sizes = [len(message) for message in messages]
        distributed.all_to_all_single(received, torch.cat(messages), words, sizes, group=self._group)
        parts = [self._wire.unpack(message, count) for message, count in zip(received.split(words), coming)]
        return sent, parts, [lost for _, lost in packed if lost is not None]

    def _reaching(self, sums: Sparse, count: int) -> Tuple[Sparse, List[int]]:
        """Those of this owner's sums that may be among the `count` largest of all, and how many each owner has."""
        magnitudes, (low, high) = _magnitudes(sums.values), self._range
        while True:
            step = -(-(high - low) // (BINS - 2))
            edges = [0, *range(low, low + (BINS - 1) * step, step), _INFINITE]  # of bins; the first may be empty
            borders = torch.tensor(edges[1:-1], device=magnitudes.device)
            bins = torch.searchsorted(borders, magnitudes, right=True)
            own = torch.bincount(bins, minlength=BINS).int()
            every = torch.stack(bruck.all_gather(own, [BINS] * self._replicas, self._group))
            reached = every.flip(1).cumsum(1).flip(1)  # in this bin and those above it, by owner
            above = reached.sum(0).tolist()
            found = max((place for place in range(BINS) if above[place] >= count), default=0)
            low, high = edges[found], edges[found + 1]
            if high - low <= 1 or above[found] <= count * (1 + _SPARE):
                return sums.take(magnitudes >= low), reached[:, found].tolist()

    def _gather(self, own: Sparse, counts: Sequence[int]) -> Tuple[Sparse, Optional[Sparse]]:
        """All owners' sums, the same bits on all, and what rounding took off this one's. Args: counts: by owner."""
        message, lost = self._wire.pack(own)
        messages = bruck.all_gather(message, [self._wire.words(count) for count in counts], self._group)
        return _joined(self._wire.unpack(each, count) for each, count in zip(messages, counts)), lost


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Bits of the absolute values, int64, which ascend as these do."""
    return (values.view(torch.int32) & 0x7FFFFFFF).long()


def _joined(parts: Iterable[Sparse]) -> Sparse:
    return Sparse(*map(torch.cat, zip(*parts)))


def _added(parts: Sequence[Sparse]) -> Sparse:
    """The sum of vectors, each element's in the order of the parts; indices ascend."""
    indices, places = torch.unique(torch.cat([part.indices for part in parts]), return_inverse=True)
    values = torch.zeros(len(indices), device=indices.device)
    for part, own in zip(parts, places.split([len(part.indices) for part in parts])):
        values.index_add_(0, own, part.values)  # within a part no two are alike: the order does not matter
    return Sparse(indices, values)

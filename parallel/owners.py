"""Sums of sparse vectors by owners: each replica sums a region of the elements, and the largest sums are gathered."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
from torch import distributed

from parallel.costs import HISTOGRAM
from parallel.messages import Sparse, Wire
from parallel.reduce import all_gather
from parallel.selection import ranked

# Magnitudes are counted in bins of an eighth of a power of two, from 2**-56 to 2**8; the first and the last bin have
# those beyond. They only limit what is sent: the result is exact whatever the magnitudes.
BINS = HISTOGRAM // 4
_SHIFT, _LOWEST = 20, (127 - 56) << 3


class Owners:
    """Finds the k entries of largest magnitude of the sum of all replicas' vectors of k entries each.

    The elements are divided into as many regions as there are replicas. (1) Every replica sends each owner its entries
    in the owner's region. (2) The owner adds them up, replica by replica, so that the sum of an element depends on
    nothing else. (3) All add up how many sums of each magnitude there are, so all know a magnitude that at least k of
    them reach. (4) The owners send these to all, who take the k largest, ties to the lower index. A replica keeps those
    of its own entries that are not in the result.

    Regions have as many entries of the result before as each other, and at first as many elements; they decide who
    adds and how much is sent, not what comes out. Where messages are rounded, what ends in one does: so regions stay,
    or a resumed run would round otherwise.

    Source: Li and Hoefler, 2201.07598 (Ok-Topk), whose k varies and whose thresholds are those of earlier steps.
    """

    def __init__(self, group: Optional[distributed.ProcessGroup], wire: Wire):
        self._group, self._wire = group, wire
        self._replicas = 1 if group is None else distributed.get_world_size(group)
        self._borders: Optional[torch.Tensor] = None  # first element of each region but the first

    def __call__(self, own: Sparse, length: int) -> Tuple[Sparse, List[Sparse]]:
        """The result, in the order of the indices, and what this replica keeps. Every replica calls.

        Args:
            own: of this replica. length: elements of a vector.
        """
        if self._borders is None:
            starts = [region * length // self._replicas for region in range(1, self._replicas)]
            self._borders = torch.tensor(starts, device=own.indices.device)
        count = len(own.indices)
        sent, parts, kept = self._send_to_owners(own)
        candidates, lost = self._gather(self._reaching(_added(parts), count))
        largest, _ = ranked(candidates.values, candidates.indices, count)
        total = Sparse(candidates.indices.index_select(0, largest), candidates.values.index_select(0, largest))
        if self._wire.exact:
            self._borders = total.indices[[region * count // self._replicas for region in range(1, self._replicas)]]
        missing = ~_contained(sent.indices, total.indices)
        kept.append(Sparse(sent.indices[missing], sent.values[missing]))
        if lost is not None:
            there = _contained(lost.indices, total.indices)
            kept.append(Sparse(lost.indices[there], lost.values[there]))
        return total, kept

    def _send_to_owners(self, own: Sparse) -> Tuple[Sparse, List[Sparse], List[Sparse]]:
        """Own entries as they were sent, what came from each replica, and what rounding took off."""
        regions = torch.searchsorted(self._borders, own.indices, right=True)
        order = regions.argsort(stable=True)
        counts = torch.bincount(regions, minlength=self._replicas)
        coming = torch.empty_like(counts)
        distributed.all_to_all_single(coming, counts, group=self._group)
        numbers = counts.tolist()
        packed = [
            self._wire.pack(Sparse(*pair))
            for pair in zip(own.indices[order].split(numbers), own.values[order].split(numbers))
        ]
        messages = [message for message, _ in packed]
        sent = [self._wire.unpack(message, number) for message, number in zip(messages, numbers)]
        parts = self._exchange(messages, coming.tolist())
        whole = Sparse(torch.cat([part.indices for part in sent]), torch.cat([part.values for part in sent]))
        return whole, parts, [lost for _, lost in packed if lost is not None]

    def _reaching(self, sums: Sparse, count: int) -> Sparse:
        """Those of this owner's sums that may be among the `count` largest of all."""
        bins = ((sums.values.view(torch.int32) & 0x7FFFFFFF) >> _SHIFT).sub_(_LOWEST).clamp_(0, BINS - 1)
        histogram = torch.bincount(bins, minlength=BINS).int()
        distributed.all_reduce(histogram, group=self._group)
        above = histogram.flip(0).cumsum(0).flip(0)  # sums in this bin and in those above it
        reached = bins >= (above >= count).nonzero()[-1]
        return Sparse(sums.indices[reached], sums.values[reached])

    def _gather(self, own: Sparse) -> Tuple[Sparse, Optional[Sparse]]:
        """All owners' sums, the same bits on all, and what rounding took off this one's."""
        message, lost = self._wire.pack(own)
        counts = torch.empty(self._replicas, dtype=torch.int64, device=message.device)
        all_gather(counts, counts.new_tensor([len(own.indices)]), group=self._group)
        parts = self._exchange([message] * self._replicas, counts.tolist())
        return Sparse(torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])), lost

    def _exchange(self, messages: Sequence[torch.Tensor], counts: Sequence[int]) -> List[Sparse]:
        """Send each replica a message. Returns what came. Args: counts: entries that come from each."""
        words = [self._wire.words(count) for count in counts]
        received = messages[0].new_empty(sum(words))
        sizes = [len(message) for message in messages]
        distributed.all_to_all_single(received, torch.cat(list(messages)), words, sizes, group=self._group)
        return [self._wire.unpack(message, count) for message, count in zip(received.split(words), counts)]


def _added(parts: Sequence[Sparse]) -> Sparse:
    """The sum of vectors, each element's in the order of the parts; indices ascend."""
    indices, places = torch.unique(torch.cat([part.indices for part in parts]), return_inverse=True)
    values = torch.zeros(len(indices), device=indices.device)
    for part, own in zip(parts, places.split([len(part.indices) for part in parts])):
        values.index_add_(0, own, part.values)  # within a part no two are alike: the order does not matter
    return Sparse(indices, values)


def _contained(indices: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Mask of the `indices` that are among `others`, which ascend, bool."""
    places = torch.searchsorted(others, indices).clamp_(max=len(others) - 1)
    return others[places] == indices

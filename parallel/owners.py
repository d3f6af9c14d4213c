"""Sums of sparse vectors by owners: each replica adds up a region of the elements."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
from torch import distributed

from parallel import bruck
from parallel.costs import BINS
from parallel.groups import Group
from parallel.messages import Sparse, Wire
from parallel.selection import ranked

_INFINITE = 1 << 31  # beyond the bits of all magnitudes
_NEAR = 1 << 18  # bits of a 32nd of a power of two
_SPARE = 1 / 16  # of the entries of a result, that may be gathered beside them


class Owners:
    """Finds the k largest entries of the sum of all replicas' vectors of k entries each.

    (1) Every replica sends each owner of a region its entries there. (2) The owner adds them up in
    the order of the replicas. (3) All count sums by magnitude, until they know a magnitude that k
    of them reach and few more. (4) The owners send these to all, who take the k largest, ties to
    the lower index. A replica keeps those of its own entries that are not in the result.

    Regions have equal shares of the result before (at first of the elements), and magnitudes are
    looked for around the least of the result before. That changes who adds and how much is sent,
    but not the result. With rounded messages it would, after a resume, so there nothing is taken
    from the result before.

    Source: Li and Hoefler, 2201.07598 (Ok-Topk), whose k varies and whose thresholds are those of
    earlier steps.
    """

    def __init__(self, group: Group, wire: Wire):
        """
        Args:
            group: of the replicas; None for a single replica.
            wire: form of the messages.
        """
        self._group = group
        self._wire = wire
        self._replicas = 1 if group is None else distributed.get_world_size(group)
        self._borders: Optional[torch.Tensor] = None  # first element of each region but the first
        # The bits of magnitudes among which the least of the result is looked for.
        self._range = (0, _INFINITE)

    def __call__(self, vector: Sparse, length: int) -> Tuple[Sparse, List[Sparse]]:
        """Sum the replicas' vectors and keep the largest entries. Every replica calls.

        Args:
            vector: of this replica, k entries.
            length: elements of a vector.

        Returns:
            The result, k entries in the order of their indices, and what this replica keeps.
        """
        borders = self._borders
        if borders is None:
            starts = [region * length // self._replicas for region in range(1, self._replicas)]
            borders = torch.tensor(starts, device=vector.indices.device)
            self._borders = borders
        count = len(vector.indices)
        # (1) to (4) of the class's docstring.
        sent, parts, kept = self._send_to_owners(vector, borders)
        sums = _added(parts)
        largest, counts = self._reaching(sums, count)
        # All replicas rank the same candidates, and so find the same result without a message.
        candidates, lost = self._gather(largest, counts)
        chosen, _ = ranked(candidates.values, candidates.indices, count)
        total = candidates.take(chosen)
        if self._wire.exact:
            self._expect_alike(total)
        # A replica keeps its entries that are not in the result, and the rounding of its sums.
        kept.append(sent.take(~torch.isin(sent.indices, total.indices)))
        if lost is not None:
            kept.append(lost.take(torch.isin(lost.indices, total.indices)))
        return total, kept

    def _expect_alike(self, total: Sparse) -> None:
        """Choose the regions and the range of magnitudes for a next result like this one."""
        least = int(_magnitudes(total.values).min())
        around = (BINS // 2 - 1) * _NEAR
        self._range = (max(0, least - around), min(least + around, _INFINITE))
        count = len(total.indices)
        places = [region * count // self._replicas for region in range(1, self._replicas)]
        self._borders = total.indices[places]

    def _send_to_owners(
        self,
        vector: Sparse,
        borders: torch.Tensor,
    ) -> Tuple[Sparse, List[Sparse], List[Sparse]]:
        """Send each owner the entries in its region.

        Args:
            vector: entries of this replica.
            borders: int64 [owners - 1], first element of each region but the first.

        Returns:
            This replica's entries as they were sent, what came from each replica, and what rounding took off,
            by owner.
        """
        # Which entries go to which owner, and how many come from each replica?
        regions = torch.searchsorted(borders, vector.indices, right=True)
        counts = torch.bincount(regions, minlength=self._replicas)
        coming = bruck.all_to_all(counts.int(), self._group).tolist()
        leaving = counts.tolist()
        by_region = regions.argsort(stable=True).split(leaving)
        # One message for each owner.
        messages = []
        sent = []
        losses = []
        for places, count in zip(by_region, leaving):
            message, lost = self._wire.pack(vector.take(places))
            messages.append(message)
            # With the values that arrive: what is rounded off is not sent, but kept.
            sent.append(self._wire.unpack(message, count))
            if lost is not None:
                losses.append(lost)
        return _joined(sent), self._exchange(messages, coming), losses

    def _exchange(self, messages: Sequence[torch.Tensor], coming: Sequence[int]) -> List[Sparse]:
        """Send a message to each replica.

        Args:
            messages: int32, one for each replica.
            coming: number of entries that each replica sends here.

        Returns:
            The vector that came from each replica.
        """
        # The lengths of messages follow from the numbers of entries.
        words = [self._wire.words(count) for count in coming]
        received = messages[0].new_empty(sum(words))
        distributed.all_to_all_single(
            received,
            torch.cat(list(messages)),
            output_split_sizes=words,
            input_split_sizes=[len(message) for message in messages],
            group=self._group,
        )
        arrived = zip(received.split(words), coming)
        return [self._wire.unpack(message, count) for message, count in arrived]

    def _reaching(self, sums: Sparse, count: int) -> Tuple[Sparse, List[int]]:
        """Find the sums that may be among the `count` largest of all owners'.

        All owners count their sums in bins of magnitudes, then in bins of the one bin that the
        least of the result is in, until few more than `count` sums reach its lower edge, or all of
        them are alike.

        Returns:
            Those of this owner's sums, and how many each owner has.
        """
        magnitudes = _magnitudes(sums.values)
        low, high = self._range
        while True:
            # The first bin is what is below the range, and may be empty; the last what is above it.
            step = -(-(high - low) // (BINS - 2))
            edges = [0, *range(low, low + (BINS - 1) * step, step), _INFINITE]
            reached = self._count(magnitudes, edges)
            above = reached.sum(0).tolist()
            # The highest bin that, with those above it, holds enough sums.
            enough = [place for place in range(BINS) if above[place] >= count]
            place = max(enough, default=0)
            low = edges[place]
            high = edges[place + 1]
            # A bin of one magnitude cannot be divided: all of it is gathered, however many there are.
            if high - low <= 1 or above[place] <= count * (1 + _SPARE):
                return sums.take(magnitudes >= low), reached[:, place].tolist()

    def _count(self, magnitudes: torch.Tensor, edges: Sequence[int]) -> torch.Tensor:
        """Count the magnitudes of all owners' sums that reach an edge.

        Args:
            magnitudes: int64, of this owner's sums.
            edges: of BINS bins, and the end of the last one.

        Returns:
            int64 [owners, BINS]: sums in this bin and those above it; the same on all replicas.
        """
        borders = torch.tensor(edges[1:-1], device=magnitudes.device)
        bins = torch.searchsorted(borders, magnitudes, right=True)
        histogram = torch.bincount(bins, minlength=BINS).int()
        histograms = bruck.all_gather(histogram, [BINS] * self._replicas, self._group)
        return torch.stack(histograms).flip(1).cumsum(1).flip(1)

    def _gather(self, sums: Sparse, counts: Sequence[int]) -> Tuple[Sparse, Optional[Sparse]]:
        """Gather the sums of all owners.

        Args:
            sums: of this owner.
            counts: number of sums of each owner.

        Returns:
            All sums, the same bits on all replicas, and what rounding took off this owner's.
        """
        message, lost = self._wire.pack(sums)
        words = [self._wire.words(count) for count in counts]
        messages = bruck.all_gather(message, words, self._group)
        # This owner's sums, too, as they arrive: all replicas go on from the same bits.
        arrived = zip(messages, counts)
        parts = [self._wire.unpack(packed, count) for packed, count in arrived]
        return _joined(parts), lost


def _magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of the absolute values, int64, which ascend as these do."""
    return (values.view(torch.int32) & 0x7FFFFFFF).long()


def _joined(parts: Sequence[Sparse]) -> Sparse:
    """Return all entries of some vectors, one vector's after another's."""
    indices = torch.cat([part.indices for part in parts])
    values = torch.cat([part.values for part in parts])
    return Sparse(indices, values)


def _added(parts: Sequence[Sparse]) -> Sparse:
    """Return the sum of vectors, each element's in the order of the parts; indices ascend."""
    all_indices = torch.cat([part.indices for part in parts])
    indices, places = torch.unique(all_indices, return_inverse=True)
    values = torch.zeros(len(indices), device=indices.device)
    counts = [len(part.indices) for part in parts]
    for part, part_places in zip(parts, places.split(counts)):
        # No two indices of a part are alike, so their order does not matter.
        values.index_add_(0, part_places, part.values)
    return Sparse(indices, values)

"""Sums of sparse vectors over replicas: Top-k gathers them all, gTop-k merges two at a time and keeps the largest."""

from __future__ import annotations

from typing import List, Tuple

import torch
from torch import distributed

from parallel import bruck
from parallel.messages import Sparse, Wire
from parallel.owners import Owners
from parallel.reduce import Group, all_gather
from parallel.selection import ranked

PATTERNS = ("gather", "tree", "butterfly", "owners")
_ABSENT = 1 << 31  # added to an index: such an entry comes after all others


class SparseSum:
    """Sums the replicas' vectors of k entries each, in one fixed order: it gathers all of them (Top-k), or merges.

    To merge is to add two vectors and keep the k entries of largest magnitude, ties to the lower index. In round r of a
    tree replica i merges what replica i + 2**r has, down to replica 0, which sends the result back the same way (the
    gTop-k of Shi et al., 1901.04359, algorithm 3). In each of log2 P rounds of a butterfly two replicas swap what they
    have and both merge; where P is no power of two those beyond the largest one hand theirs in before, and get the
    result after. Owners: see `parallel/owners.py`. The replica that merges keeps what falls out, the lowest one where
    several make the same merge; the sender of a message keeps its rounding errors.
    """

    def __init__(self, group: Group, *, pattern: str, wire: str):
        """Args: group: of the replicas; None for a single replica. pattern: one of PATTERNS. wire: as of `Wire`."""
        assert pattern in PATTERNS, pattern
        self._group, self._wire = group, Wire(wire)
        self._size = 1 if group is None else distributed.get_world_size(group)
        self._rank = 0 if group is None else distributed.get_rank(group)
        self._sum = getattr(self, f"_{pattern}")
        self._owned = Owners(group, self._wire)

    def __call__(self, own: Sparse, scratch: torch.Tensor) -> Tuple[List[Sparse], List[Sparse]]:
        """(parts, residual) of the replicas' vectors; every replica calls, with as many entries.

        The sum is that of `parts`, added in this order to zeros, the same bits on all replicas, and of what each
        replica has to keep: its `residual`, to float32 rounding.

        Args: own: of this replica. scratch: int32 [elements of a vector], zeros; zeros again afterwards. Raises
        RuntimeError: from torch.distributed, if another replica is gone or too late.
        """
        if self._size == 1:
            return [own], []
        self._scratch, self._residual = scratch, []
        return self._sum(own), self._residual

    def _gather(self, own: Sparse) -> List[Sparse]:
        message, count = self._pack(own, keeps=True), len(own.indices)
        messages = message.new_empty(self._size * len(message))
        all_gather(messages, message, group=self._group)
        return [self._wire.unpack(each, count) for each in messages.view(self._size, -1)]

    def _tree(self, own: Sparse) -> List[Sparse]:
        part, count = own, len(own.indices)
        parent = self._rank & -self._rank  # distance to the replica that this one sends to; 0: none
        distances = [1 << bit for bit in range((self._size - 1).bit_length()) if not parent or 1 << bit < parent]
        children = [self._rank + distance for distance in distances if self._rank + distance < self._size]
        for child in children:
            part = self._merge(part, self._receive(count, child), keeps=True)
        message = self._pack(part, keeps=True)
        if parent:
            self._send(message, self._rank - parent)
            distributed.recv(message, group=self._group, group_src=self._rank - parent)
            self._send(message[:1], self._rank - parent)
        for child in reversed(children):
            self._send(message, child)
            # A send ends long before the message has left. The next one would share the link with it, and the
            # first, whose receiver has most to hand on, would be late: so the receiver says that it is there.
            distributed.recv(message.new_empty(1), group=self._group, group_src=child)
        return [self._wire.unpack(message, count)]

    def _butterfly(self, own: Sparse) -> List[Sparse]:
        power = 1 << (self._size.bit_length() - 1)
        extra, twin, count = self._size - power, self._rank + power, len(own.indices)
        if self._rank >= power:
            self._send(self._pack(own, keeps=True), self._rank - power)
            return [self._receive(count, self._rank - power)]
        part = own
        if self._rank < extra:
            part = self._merge(part, self._receive(count, twin), keeps=True)
        distance = 1
        while distance < power:
            # Replicas whose numbers differ in lower bits only have the same part by now: the lowest answers for it.
            message = self._pack(part, keeps=self._rank % distance == 0)
            # Both get the same bits: no sum of two depends on their order, nor a merge on that of the entries.
            ours, theirs = self._wire.unpack(message, count), self._swap(message, self._rank ^ distance, count)
            part = self._merge(ours, theirs, keeps=self._rank % (2 * distance) == 0)
            distance *= 2
        if extra:  # what the others are sent may be rounded, and all are to have the same
            message = self._pack(part, keeps=self._rank == 0)
            if self._rank < extra:
                self._send(message, twin)
            part = self._wire.unpack(message, count)
        return [part]

    def _owners(self, own: Sparse) -> List[Sparse]:
        total, kept = self._owned(own, len(self._scratch))
        self._residual += kept
        return [total]

    def _merge(self, first: Sparse, second: Sparse, keeps: bool) -> Sparse:
        """The k entries of largest magnitude of the sum. keeps: whether this replica keeps the others."""
        count = len(first.indices)
        places = self._scratch
        places.index_copy_(0, first.indices, torch.arange(1, count + 1, dtype=torch.int32, device=places.device))
        found = places.index_select(0, second.indices)
        places.index_fill_(0, first.indices, 0)
        common = found > 0
        sums = first.values.index_add(0, (found - 1).clamp_(min=0), torch.where(common, second.values, 0.0))
        values = torch.cat([sums, torch.where(common, 0.0, second.values)])
        union = Sparse(torch.cat([first.indices, second.indices]), values)
        # Without a mask, whose size a GPU would have to tell first: what went into the sum stays as the last of all.
        numbers = torch.cat([first.indices, second.indices + common * _ABSENT])
        largest, rest = ranked(values, numbers, count)
        if keeps:
            self._residual.append(union.take(rest))
        return union.take(largest)

    def _pack(self, part: Sparse, keeps: bool) -> torch.Tensor:
        """The message. keeps: whether this replica keeps what rounding takes off."""
        message, lost = self._wire.pack(part)
        if keeps and lost is not None:
            self._residual.append(lost)
        return message

    def _send(self, message: torch.Tensor, replica: int) -> None:
        distributed.send(message, group=self._group, group_dst=replica)

    def _receive(self, count: int, replica: int) -> Sparse:
        message = torch.empty(self._wire.words(count), dtype=torch.int32, device=self._scratch.device)
        distributed.recv(message, group=self._group, group_src=replica)
        return self._wire.unpack(message, count)

    def _swap(self, message: torch.Tensor, replica: int, count: int) -> Sparse:
        """Send the message and receive the other replica's, at the same time; return when both have come.

        By gloo a send ends long before the message has left, and the next swap would run one way after the other. So
        each tells the other that its message is there.
        """
        theirs = torch.empty_like(message)
        rounds = [(message, replica, theirs, replica)]
        if message.device.type == "cpu":
            rounds.append((message[:1], replica, theirs.new_empty(1), replica))
        bruck.transfer(rounds, self._group)
        return self._wire.unpack(theirs, count)

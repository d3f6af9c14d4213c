"""Sums of sparse vectors over replicas.

Top-k gathers them all, gTop-k merges two at a time and keeps the largest.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch
from torch import distributed

from parallel import bruck
from parallel.groups import Group
from parallel.messages import Sparse, Wire
from parallel.owners import Owners
from parallel.reduce import all_gather
from parallel.selection import ranked

PATTERNS = ("gather", "tree", "butterfly", "owners")
_ABSENT = 1 << 31  # added to an index: such an entry comes after all others


class SparseSum:
    """Sums the replicas' vectors of k entries each, in one fixed order.

    It gathers all of them (Top-k), or merges.

    To merge is to add two vectors and keep the k entries of largest magnitude, ties to the lower
    index. In round r of a tree replica i merges what replica i + 2**r has, down to replica 0, which
    sends the result back the same way (the gTop-k of Shi et al., 1901.04359, algorithm 3). In each
    of log2 P rounds of a butterfly two replicas swap what they have and both merge; where P is no
    power of two those beyond the largest one hand theirs in before, and get the result after.
    Owners: see `parallel/owners.py`. The replica that merges keeps what falls out, the lowest one
    where several make the same merge; the sender of a message keeps its rounding errors.
    """

    def __init__(self, group: Group, *, pattern: str, wire: str):
        """
        Args:
            group: of the replicas; None for a single replica.
            pattern: one of PATTERNS.
            wire: type of the values that travel, as of `Wire`.
        """
        assert pattern in PATTERNS, pattern
        self._group = group
        self._wire = Wire(wire)
        self._size = 1 if group is None else distributed.get_world_size(group)
        self._rank = 0 if group is None else distributed.get_rank(group)
        sums = {
            "gather": self._gather,
            "tree": self._tree,
            "butterfly": self._butterfly,
            "owners": self._owners,
        }
        self._sum = sums[pattern]
        self._owned = Owners(group, self._wire)

    def __call__(self, vector: Sparse, scratch: torch.Tensor) -> Tuple[List[Sparse], List[Sparse]]:
        """Sum the replicas' vectors. Every replica calls, with as many entries.

        `parts`, added in their order to zeros, are the same bits on all replicas. With the
        `residual` that each replica has to keep, they add up to the sum of all vectors, to float32
        rounding.

        Args:
            vector: of this replica.
            scratch: int32 [elements of a vector], zeros; zeros again afterwards.

        Returns:
            (parts, residual), vectors of as many elements.

        Raises:
            RuntimeError: from torch.distributed, if another replica is gone or too late.
        """
        if self._size == 1:
            return [vector], []
        self._scratch = scratch
        self._residual: List[Sparse] = []
        parts = self._sum(vector)
        return parts, self._residual

    def _gather(self, vector: Sparse) -> List[Sparse]:
        """Return the vectors of all replicas."""
        count = len(vector.indices)
        message = self._pack(vector, keeps=True)
        messages = message.new_empty(self._size * len(message))
        all_gather(messages, message, group=self._group)
        rows = messages.view(self._size, -1)
        return [self._wire.unpack(row, count) for row in rows]

    def _tree(self, vector: Sparse) -> List[Sparse]:
        """Return the merge of all vectors, made on the way up to replica 0 and sent back."""
        count = len(vector.indices)
        parent, children = self._place_in_tree()
        # Up: merge what the children have merged.
        part = vector
        for child in children:
            part = self._merge(part, self._receive(count, child), keeps=True)
        message = self._pack(part, keeps=True)
        if parent is not None:
            self._send(message, parent)
            distributed.recv(message, group=self._group, group_src=parent)
            # A word as a receipt, for which the parent waits below.
            self._send(message[:1], parent)
        # Down: hand on the result, to the child with the largest subtree first.
        for child in reversed(children):
            self._send(message, child)
            # A send ends long before the message has left. The next one would share the link with
            # it, and the first, whose receiver has most to hand on, would be late: so the receiver
            # says that it is there.
            distributed.recv(message.new_empty(1), group=self._group, group_src=child)
        return [self._wire.unpack(message, count)]

    def _place_in_tree(self) -> Tuple[Optional[int], List[int]]:
        """Return the replica that this one sends to, and those that it receives from, in order.

        Replica 0 sends to none.
        """
        # The lowest bit of a replica's number is the distance to its parent; replica 0 has none.
        distance_to_parent = self._rank & -self._rank
        children = []
        for bit in range((self._size - 1).bit_length()):
            distance = 1 << bit
            is_below = not distance_to_parent or distance < distance_to_parent
            if is_below and self._rank + distance < self._size:
                children.append(self._rank + distance)
        if not distance_to_parent:
            return None, children
        return self._rank - distance_to_parent, children

    def _butterfly(self, vector: Sparse) -> List[Sparse]:
        """Return the merge of all vectors, which pairs of replicas make in log2 P rounds."""
        count = len(vector.indices)
        power = 1 << (self._size.bit_length() - 1)
        # Replicas beyond the largest power of two have twins that take part for them.
        extra = self._size - power
        if self._rank >= power:
            twin = self._rank - power
            self._send(self._pack(vector, keeps=True), twin)
            return [self._receive(count, twin)]
        part = vector
        has_twin = self._rank < extra
        twin = self._rank + power
        if has_twin:
            part = self._merge(part, self._receive(count, twin), keeps=True)
        part = self._merge_in_pairs(part, power)
        if extra:
            # What the twins are sent may be rounded, and all are to have the same.
            message = self._pack(part, keeps=self._rank == 0)
            if has_twin:
                self._send(message, twin)
            part = self._wire.unpack(message, count)
        return [part]

    def _merge_in_pairs(self, part: Sparse, power: int) -> Sparse:
        """Return the merge of the parts of the first `power` replicas, a power of two."""
        count = len(part.indices)
        distance = 1
        while distance < power:
            # Replicas that differ in lower bits only have the same part by now: the lowest keeps.
            message = self._pack(part, keeps=self._rank % distance == 0)
            sent = self._wire.unpack(message, count)
            received = self._swap(message, self._rank ^ distance, count)
            # Both merge in the order of their ranks: values that are rounded share scales with
            # those beside them, so that the same entries in another order would round otherwise.
            is_lower = self._rank & distance == 0
            first, second = (sent, received) if is_lower else (received, sent)
            part = self._merge(first, second, keeps=self._rank % (2 * distance) == 0)
            distance *= 2
        return part

    def _owners(self, vector: Sparse) -> List[Sparse]:
        """Return the largest entries of the whole sum."""
        total, kept = self._owned(vector, len(self._scratch))
        self._residual += kept
        return [total]

    def _merge(self, first: Sparse, second: Sparse, keeps: bool) -> Sparse:
        """Return the k entries of largest magnitude of the sum of two vectors of k entries.

        Args:
            first, second: the vectors.
            keeps: whether this replica keeps the other entries of the sum.
        """
        count = len(first.indices)
        device = self._scratch.device
        # Number the first vector's entries, from 1, and find each entry of the second among them.
        numbers = torch.arange(1, count + 1, dtype=torch.int32, device=device)
        self._scratch.index_copy_(0, first.indices, numbers)
        partner = self._scratch.index_select(0, second.indices)
        # The next merge expects zeros, too: filling all of them would take a pass over the memory.
        self._scratch.index_fill_(0, first.indices, 0)
        common = partner > 0
        # Add the common entries to those of the first vector, and leave zeros in the second.
        added = torch.where(common, second.values, 0.0)
        sums = first.values.index_add(0, (partner - 1).clamp_(min=0), added)
        values = torch.cat([sums, torch.where(common, 0.0, second.values)])
        union = Sparse(torch.cat([first.indices, second.indices]), values)
        # Entries that were added stay, as the last of all: the size of a mask a GPU would have to
        # tell first.
        ranks = torch.cat([first.indices, second.indices + common * _ABSENT])
        largest, rest = ranked(values, ranks, count)
        if keeps:
            self._residual.append(union.take(rest))
        return union.take(largest)

    def _pack(self, part: Sparse, keeps: bool) -> torch.Tensor:
        """Return the message of a vector.

        Args:
            part: the vector.
            keeps: whether this replica keeps what rounding takes off.
        """
        message, lost = self._wire.pack(part)
        if keeps and lost is not None:
            self._residual.append(lost)
        return message

    def _send(self, message: torch.Tensor, replica: int) -> None:
        """Send a message to a replica."""
        distributed.send(message, group=self._group, group_dst=replica)

    def _receive(self, count: int, replica: int) -> Sparse:
        """Return the vector of `count` entries that a replica sends."""
        words = self._wire.words(count)
        message = torch.empty(words, dtype=torch.int32, device=self._scratch.device)
        distributed.recv(message, group=self._group, group_src=replica)
        return self._wire.unpack(message, count)

    def _swap(self, message: torch.Tensor, replica: int, count: int) -> Sparse:
        """Send the message and receive the other replica's, at the same time.

        Return when both have come.

        By gloo a send ends long before the message has left, and the next swap would run one way
        after the other. So each tells the other that its message is there.
        """
        received = torch.empty_like(message)
        rounds = [
            bruck.Round(outgoing=message, receiver=replica, incoming=received, sender=replica),
        ]
        # A word as a receipt, in a second round.
        if message.device.type == "cpu":
            arrived = bruck.Round(
                outgoing=message[:1],
                receiver=replica,
                incoming=received.new_empty(1),
                sender=replica,
            )
            rounds.append(arrived)
        bruck.transfer(rounds, self._group)
        return self._wire.unpack(received, count)

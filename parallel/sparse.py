"""Sums of sparse vectors over replicas: Top-k gathers them all, gTop-k merges two at a time and keeps the largest."""

from __future__ import annotations

from typing import List, Optional

import torch
from torch import distributed

from parallel.messages import Sparse, Total, Wire
from parallel.owners import Owners
from parallel.reduce import all_gather
from parallel.selection import ranked

PATTERNS = ("gather", "tree", "butterfly", "owners")
_ABSENT = 1 << 31  # added to an index: such an entry comes after all others


class SparseSum:
    """Sums the replicas' vectors of k entries each, in one fixed order.

    Patterns:
        gather: every replica gets all vectors (Top-k): P - 1 messages of k entries arrive at each. Nothing is left out.
        tree: ceil(log2 P) rounds in which replica i merges what replica i + 2**round has, down to replica 0, which
            sends the result back the same way: the gTop-k of Shi et al., 1901.04359, algorithm 3.
        butterfly: in each of log2 P rounds two replicas swap what they have and both merge, so that all have the
            result at the end: half of the tree's time on the network. Where P is no power of two those beyond the
            largest one hand theirs in before, and get the result after: two rounds more.
        owners: see `parallel/owners.py`.

    To merge is to add two vectors and keep the k entries of largest magnitude, ties to the lower index. Whoever merges
    keeps what falls out; where several replicas make the same merge the lowest of them does.

    The sender of a message (`parallel/messages.py`) keeps its rounding errors.
    """

    def __init__(self, group: Optional[distributed.ProcessGroup], *, pattern: str, wire: torch.dtype):
        """
        Args:
            group: of the replicas; None for a replica that is alone.
            pattern: one of PATTERNS. wire: torch.float32 or torch.float16, the type in which values travel.
        """
        assert pattern in PATTERNS, pattern
        self._group, self._wire = group, Wire(wire)
        self._size = 1 if group is None else distributed.get_world_size(group)
        self._rank = 0 if group is None else distributed.get_rank(group)
        self._sum = {"gather": self._gather, "tree": self._tree, "butterfly": self._butterfly, "owners": self._owners}[
            pattern
        ]
        self._owned = Owners(group, self._wire)

    def __call__(self, own: Sparse, scratch: torch.Tensor) -> Total:
        """The total of all replicas' vectors; every replica calls, with as many entries.

        Args:
            own: of this replica.
            scratch: int32 [elements of a vector], zeros; zeros again afterwards.

        Raises:
            RuntimeError: from torch.distributed, if another replica is gone or too late.
        """
        if self._size == 1:
            return Total([own], [])
        self._scratch, self._residual = scratch, []
        return Total(self._sum(own), self._residual)

    def _gather(self, own: Sparse) -> List[Sparse]:
        message, count = self._pack(own, keeps=True), len(own.indices)
        messages = message.new_empty(self._size * len(message))
        all_gather(messages, message, group=self._group)
        return [self._wire.unpack(each, count) for each in messages.view(self._size, -1)]

    def _tree(self, own: Sparse) -> List[Sparse]:
        part, count = own, len(own.indices)
        distances = [1 << bit for bit in range((self._size - 1).bit_length())]
        sends = next((distance for distance in distances if self._rank & distance), None)
        for distance in distances[: distances.index(sends)] if sends else distances:
            if self._rank + distance < self._size:
                other = self._wire.unpack(self._receive(count, self._rank + distance), count)
                part = self._merge(part, other, keeps=True)
        message = self._pack(part, keeps=True)
        if sends:
            self._send(message, self._rank - sends)
            message = self._receive(count, self._rank - sends)
            self._send(message[:1], self._rank - sends)
        for distance in reversed(distances[: distances.index(sends)] if sends else distances):
            if self._rank + distance < self._size:
                self._send(message, self._rank + distance)
                # A send ends long before the message has left. The next one would share the link with it, and the
                # first, whose receiver has most to hand on, would be late: so the receiver says that it is there.
                distributed.recv(message.new_empty(1), group=self._group, group_src=self._rank + distance)
        return [self._wire.unpack(message, count)]

    def _butterfly(self, own: Sparse) -> List[Sparse]:
        power = 1 << (self._size.bit_length() - 1)
        extra, twin, count = self._size - power, self._rank + power, len(own.indices)
        if self._rank >= power:
            self._send(self._pack(own, keeps=True), self._rank - power)
            return [self._wire.unpack(self._receive(count, self._rank - power), count)]
        part = own
        if self._rank < extra:
            part = self._merge(part, self._wire.unpack(self._receive(count, twin), count), keeps=True)
        distance = 1
        while distance < power:
            # Replicas whose numbers differ in lower bits only have the same part by now: the lowest answers for it.
            message = self._pack(part, keeps=self._rank % distance == 0)
            partner = self._rank ^ distance
            # Both get the same bits: no sum of two depends on their order, nor a merge on that of the entries.
            ours, theirs = self._wire.unpack(message, count), self._wire.unpack(self._swap(message, partner), count)
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
        indices = torch.cat([first.indices, second.indices])
        # Without a mask, whose size a GPU would have to tell first: what went into the sum stays as the last of all.
        numbers = torch.cat([first.indices, second.indices + common * _ABSENT])
        largest, rest = ranked(values, numbers, count)
        if keeps:
            self._residual.append(Sparse(indices.index_select(0, rest), values.index_select(0, rest)))
        return Sparse(indices.index_select(0, largest), values.index_select(0, largest))

    def _pack(self, part: Sparse, keeps: bool) -> torch.Tensor:
        """The message. keeps: whether this replica keeps what rounding takes off."""
        message, lost = self._wire.pack(part)
        if keeps and lost is not None:
            self._residual.append(lost)
        return message

    def _send(self, message: torch.Tensor, replica: int) -> None:
        distributed.send(message, group=self._group, group_dst=replica)

    def _receive(self, count: int, replica: int) -> torch.Tensor:
        message = torch.empty(self._wire.words(count), dtype=torch.int32, device=self._scratch.device)
        distributed.recv(message, group=self._group, group_src=replica)
        return message

    def _swap(self, message: torch.Tensor, replica: int) -> torch.Tensor:
        """Sends the message and receives the other's, at the same time."""
        theirs = torch.empty_like(message)
        if message.device.type == "cpu":
            self._swap_in_step(message, theirs, replica)
            return theirs
        pair = ((distributed.irecv, theirs), (distributed.isend, message))
        operations = [distributed.P2POp(each, tensor, group=self._group, group_peer=replica) for each, tensor in pair]
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
        return theirs

    def _swap_in_step(self, message: torch.Tensor, theirs: torch.Tensor, replica: int) -> None:
        """Swap on a CPU; return when both messages have come.

        Gloo sends when it has word that the receiver is ready. That word waits behind what the receiver still sends,
        be it in this swap, so receives come first, or from the one before: a send ends long before the message has
        left, and the next swap would run one way after the other. So each tells the other that its message is there.
        """
        word = message[:1].clone()
        receiving = [
            distributed.irecv(tensor, group=self._group, group_src=replica, tag=tag)
            for tag, tensor in enumerate((theirs, torch.empty_like(word)))
        ]
        sending = [distributed.isend(message, group=self._group, group_dst=replica, tag=0)]
        receiving[0].wait()
        sending.append(distributed.isend(word, group=self._group, group_dst=replica, tag=1))
        for work in (receiving[1], *sending):
            work.wait()

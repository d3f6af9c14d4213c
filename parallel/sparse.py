"""Sums of sparse vectors over replicas: Top-k gathers them all, gTop-k merges two at a time and keeps the largest."""

from __future__ import annotations

from typing import List, NamedTuple, Optional

import torch
from torch import distributed

from parallel.reduce import all_gather
from parallel.selection import ranked

PATTERNS = ("gather", "tree", "butterfly")
_LARGEST_EXPONENT = 120  # 2.0**120 is still a float32, and so is its inverse
_ABSENT = 1 << 31  # added to an index: such an entry comes after all others


class Sparse(NamedTuple):
    """Some elements of a vector: their distinct indices, int64 [k], and their values, float32 [k]."""

    indices: torch.Tensor
    values: torch.Tensor


class Total(NamedTuple):
    """The sum of the replicas' vectors, and what was left out of it.

    parts: vectors whose sum, added in this order to zeros, is the total; the same bits on all replicas. residual: the
    part of the rest that this replica has to keep: the sum of all replicas' vectors is that of `parts` and of all
    replicas' `residual`, to float32 rounding.
    """

    parts: List[Sparse]
    residual: List[Sparse]


class SparseSum:
    """Sums the replicas' vectors of k entries each, in one fixed order.

    Patterns:
        gather: every replica gets all vectors (Top-k): P - 1 messages of k entries arrive at each. Nothing is left out.
        tree: ceil(log2 P) rounds in which replica i merges what replica i + 2**round has, down to replica 0, which
            sends the result back the same way: the gTop-k of Shi et al., 1901.04359, algorithm 3.
        butterfly: in each of log2 P rounds two replicas swap what they have and both merge, so that all have the
            result at the end: half of the tree's time on the network. Where P is no power of two those beyond the
            largest one hand theirs in before, and get the result after: two rounds more.

    To merge is to add two vectors and keep the k entries of largest magnitude, ties to the lower index. Whoever merges
    keeps what falls out; where several replicas make the same merge the lowest of them does.

    A message is int32: the indices, then the bits of the values. As float16 they are multiplied before by a power of
    two that takes the largest of them to 2**14 or above, whose exponent comes first; the sender keeps the rounding
    errors.
    """

    def __init__(self, group: Optional[distributed.ProcessGroup], *, pattern: str, wire: torch.dtype):
        """
        Args:
            group: of the replicas; None for a replica that is alone.
            pattern: one of PATTERNS. wire: torch.float32 or torch.float16, the type in which values travel.
        """
        assert pattern in PATTERNS and wire in (torch.float32, torch.float16), (pattern, wire)
        self._group, self._wire = group, wire
        self._size = 1 if group is None else distributed.get_world_size(group)
        self._rank = 0 if group is None else distributed.get_rank(group)
        self._sum = {"gather": self._gather, "tree": self._tree, "butterfly": self._butterfly}[pattern]

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
        message = self._pack(own, keeps=True)
        messages = message.new_empty(self._size * len(message))
        all_gather(messages, message, group=self._group)
        return [self._unpack(each, own) for each in messages.view(self._size, -1)]

    def _tree(self, own: Sparse) -> List[Sparse]:
        part = own
        distances = [1 << bit for bit in range((self._size - 1).bit_length())]
        sends = next((distance for distance in distances if self._rank & distance), None)
        for distance in distances[: distances.index(sends)] if sends else distances:
            if self._rank + distance < self._size:
                other = self._unpack(self._receive(own, self._rank + distance), own)
                part = self._merge(part, other, keeps=True)
        message = self._pack(part, keeps=True)
        if sends:
            self._send(message, self._rank - sends)
            message = self._receive(own, self._rank - sends)
            self._send(message[:1], self._rank - sends)
        for distance in reversed(distances[: distances.index(sends)] if sends else distances):
            if self._rank + distance < self._size:
                self._send(message, self._rank + distance)
                # A send ends long before the message has left. The next one would share the link with it, and the
                # first, whose receiver has most to hand on, would be late: so the receiver says that it is there.
                distributed.recv(message.new_empty(1), group=self._group, group_src=self._rank + distance)
        return [self._unpack(message, own)]

    def _butterfly(self, own: Sparse) -> List[Sparse]:
        power = 1 << (self._size.bit_length() - 1)
        extra, twin = self._size - power, self._rank + power
        if self._rank >= power:
            self._send(self._pack(own, keeps=True), self._rank - power)
            return [self._unpack(self._receive(own, self._rank - power), own)]
        part = own
        if self._rank < extra:
            part = self._merge(part, self._unpack(self._receive(own, twin), own), keeps=True)
        distance = 1
        while distance < power:
            # Replicas whose numbers differ in lower bits only have the same part by now: the lowest answers for it.
            message = self._pack(part, keeps=self._rank % distance == 0)
            partner = self._rank ^ distance
            # Both get the same bits: no sum of two depends on their order, nor a merge on that of the entries.
            ours, theirs = self._unpack(message, own), self._unpack(self._swap(message, partner), own)
            part = self._merge(ours, theirs, keeps=self._rank % (2 * distance) == 0)
            distance *= 2
        if extra:  # what the others are sent may be rounded, and all are to have the same
            message = self._pack(part, keeps=self._rank == 0)
            if self._rank < extra:
                self._send(message, twin)
            part = self._unpack(message, own)
        return [part]

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
        """The message, int32. keeps: whether this replica keeps what rounding takes off."""
        indices = part.indices.int()
        if self._wire == torch.float32:
            return torch.cat([indices, part.values.view(torch.int32)])
        exponent = (15 - torch.frexp(part.values.abs().max())[1]).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
        halves = torch.ldexp(part.values, exponent).half()
        if keeps:
            self._residual.append(Sparse(part.indices, part.values - torch.ldexp(halves.float(), -exponent)))
        if len(halves) % 2:
            halves = torch.cat([halves, halves.new_zeros(1)])
        return torch.cat([exponent.int()[None], indices, halves.view(torch.int32)])

    def _unpack(self, message: torch.Tensor, like: Sparse) -> Sparse:
        """Vector in a message, of as many entries as `like` has."""
        count = len(like.indices)
        if self._wire == torch.float32:
            return Sparse(message[:count].long(), message[count:].view(torch.float32))
        halves = message[1 + count :].view(torch.float16)[:count]
        return Sparse(message[1 : 1 + count].long(), torch.ldexp(halves.float(), -message[0]))

    def _words(self, like: Sparse) -> int:
        count = len(like.indices)
        return 2 * count if self._wire == torch.float32 else 1 + count + (count + 1) // 2

    def _send(self, message: torch.Tensor, replica: int) -> None:
        distributed.send(message, group=self._group, group_dst=replica)

    def _receive(self, like: Sparse, replica: int) -> torch.Tensor:
        message = torch.empty(self._words(like), dtype=torch.int32, device=like.indices.device)
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

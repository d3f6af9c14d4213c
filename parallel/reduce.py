"""Sums of the replicas' whole gradients, in part while the last backward pass still computes."""

from __future__ import annotations

import functools
from typing import Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import distributed

from parallel.exchange import Running, Setup
from parallel.groups import Group, begun
from recipe.exchange import Exchange
from recipe.shares import additions, subtrees

# all_gather_single is new, and the older name warns where both exist.
all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def all_finite(buffer: torch.Tensor, everyone: Group) -> torch.Tensor:
    """Return whether all values of all processes' buffers are finite, bool []. Every process calls.

    Args:
        buffer: of this process, any shape.
        everyone: all replicas and stages; None for a single process.
    """
    lowest, highest = torch.aminmax(buffer)
    finite = torch.isfinite(lowest) & torch.isfinite(highest)
    if everyone is None:
        return finite
    faults = (~finite).float()
    distributed.all_reduce(faults, group=everyone)
    return faults == 0


class Reduction(Running):
    """Sums a flat gradient buffer over the replicas, in place, to the same bits on all.

    dense: all-reduce; the order of the additions is the library's. With order "tree", and for half,
    see `_SumInParts`.

    Buckets are launched from the end of the buffer, where the last layers are, to its start, in
    this order on every replica. No other collective may use the group between arm() and the call
    that ends the exchange.
    """

    def __init__(self, setup: Setup, section: Exchange, bucket_bytes: int = 25 * 2**20):
        """
        Args:
            setup: of the engine.
            section: of method dense or half.
            bucket_bytes: of float32 gradients in a bucket.
        """
        gradients = setup.gradients
        assert gradients.dtype == torch.float32, gradients.dtype
        assert gradients.dim() == 1 and gradients.is_contiguous(), gradients.shape
        self._gradients = gradients
        self._collect = setup.collect
        self._group = setup.group
        self._replicas = distributed.get_world_size(setup.group)
        # Buckets begin with the end of the buffer, whose gradients are ready first.
        size = max(1, bucket_bytes // gradients.element_size())
        self._buckets = [(max(0, end - size), end) for end in range(len(gradients), 0, -size)]
        # In a tree a replica may have several sums; the first of them is the gradients.
        self._in_tree = section.in_tree
        self._sums: Sequence[torch.Tensor] = [gradients]
        self._in_parts: Optional[_SumInParts] = None
        wire = getattr(torch, section.sent)
        if section.in_tree or wire != torch.float32:
            assert setup.batch is not None, "an engine gives it"
            self._in_parts = _SumInParts(
                setup.group,
                wire=wire,
                micro_batches=setup.batch.micro_batches,
                largest_bucket=min(size, len(gradients)),
            )
        self._flying: List[Iterator[None]] = []  # the sums of the buckets that have been launched
        self._launched = 0
        self._armed = False
        # A sum as a tree exists only after the last addition of the step.
        self.overlaps = self._replicas > 1 and not section.in_tree
        # Of each bucket: parameters that have gradients there, and those that have none yet.
        self._needs: List[Set[int]] = []
        self._waiting: List[Set[int]] = []
        if self.overlaps:
            self._follow(setup.places)

    def _follow(self, places: Sequence[Tuple[int, torch.Tensor]]) -> None:
        """Let the parameters' hooks say when gradients are ready."""
        self._needs = [_parameters_in(bucket, places) for bucket in self._buckets]
        for index, (_, parameter) in enumerate(places):
            hook = functools.partial(self._ready, index)
            parameter.register_post_accumulate_grad_hook(hook)

    def set_shares(self, shares: Sequence[range], sums: Sequence[torch.Tensor]) -> None:
        """Take note of the `shares` of replicas and of this one's `sums`; see Running."""
        if self._in_tree:
            assert self._in_parts is not None, "a tree is added up in parts"
            self._sums = sums
            self._in_parts.set_shares(shares)

    def arm(self) -> None:
        """Announce the last backward pass: buckets are sent as soon as they are ready."""
        assert not self._armed, "the exchange comes before the next arm()"
        if self.overlaps:
            self._armed = True
            self._waiting = [set(needed) for needed in self._needs]

    def disarm(self) -> None:
        """Take back arm(); see Running."""
        # Other replicas may have sent more or fewer buckets by now: all come to the same end.
        if self._armed:
            self._finish(self._gradients)

    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """Send what is not yet on its way, and leave the sum over replicas in the buffer.

        No GPU is waited for.

        Args:
            buffer: float32 [length]; another than the gradients only where nothing was armed.
            step, divisor: see Running.

        Raises:
            RuntimeError: from torch.distributed, if another replica is gone or too late.
        """
        is_free = buffer is self._gradients or not self._armed
        assert is_free, "an armed backward pass has sent parts of the gradients"
        assert buffer.dtype == torch.float32 and buffer.shape == self._gradients.shape
        self._finish(buffer)

    def _finish(self, buffer: torch.Tensor) -> None:
        """Send what is not yet on its way, and wait for the sums."""
        self._armed = False
        if self._replicas == 1:
            return
        # Parameters without a gradient in this step have called no hook: their buckets wait till now.
        while self._launched < len(self._buckets):
            self._launch(buffer)
        while self._flying:
            self._advance()
        self._launched = 0

    def _ready(self, index: int, _: torch.Tensor) -> None:
        """Launch the buckets whose last gradient is that of parameter `index`."""
        if not self._armed:
            return
        if self._collect is not None:
            self._collect(index)
        # Launch in order: a bucket waits for those before it, on all replicas alike.
        for number, waiting in enumerate(self._waiting):
            is_early = number >= self._launched or index not in self._needs[number]
            assert is_early, f"{index} came after it was sent"
            waiting.discard(index)
        while self._launched < len(self._buckets) and not self._waiting[self._launched]:
            self._launch(self._gradients)

    def _launch(self, buffer: torch.Tensor) -> None:
        """Begin the sum of the next bucket."""
        start, end = self._buckets[self._launched]
        self._launched += 1
        if self._in_parts is None:
            flying = self._all_reduce(buffer[start:end])
        else:
            # Of sums in two exchanges the earlier ones go on: two are on their way.
            self._advance()
            sums = [buffer, *self._sums[1:]]
            flying = self._in_parts.total([values[start:end] for values in sums])
        self._flying.append(flying)
        next(flying)

    def _advance(self) -> None:
        """Take each sum a step further, the oldest first.

        So all replicas call the collectives in one order.
        """
        # An iterator whose sum is done is exhausted; None stands for one that goes on.
        ended = object()
        self._flying = [total for total in self._flying if next(total, ended) is not ended]

    def _all_reduce(self, bucket: torch.Tensor) -> Iterator[None]:
        """Sum a bucket in place; yields while the sum is on its way."""
        work = distributed.all_reduce(bucket, group=self._group, async_op=True)
        yield
        begun(work).wait()


def _parameters_in(bucket: Tuple[int, int], places: Sequence[Tuple[int, torch.Tensor]]) -> Set[int]:
    """Return the parameters that have gradients in a bucket, by their index."""
    start, end = bucket
    indices = set()
    for index, (first, parameter) in enumerate(places):
        last = first + parameter.numel()
        if first < end and last > start:
            indices.add(index)
    return indices


class _Factors(NamedTuple):
    """The factors of a sum.

    sent: of what each replica sends.
    total: of the sum of these.
    result: of what comes back.
    """

    sent: float
    total: float
    result: float


class _Memory(NamedTuple):
    """Memory for what a replica sends and receives of the largest bucket, in the wire's dtype."""

    sent: torch.Tensor
    received: torch.Tensor


class _SumInParts:
    """Adds up all replicas' sums in float32, each replica a part, in two exchanges.

    In the first every replica gets its part of all replicas' partial sums, which it adds as the
    tree of `recipe/shares.py` says; in the second it sends the total to all. So the order of the
    additions does not depend on the library, nor on the number of replicas where their sums are
    subtrees.

    half: likewise, with a tree over replicas, but means over micro batches travel as float16 or
    bfloat16: each replica's own, then that of all. What overflows becomes inf or NaN on all
    replicas: check for that after the exchange.
    """

    def __init__(self, group: Group, wire: torch.dtype, micro_batches: int, largest_bucket: int):
        """
        Args:
            group: of the replicas.
            wire: in which values travel.
            micro_batches: of a step, over all replicas.
            largest_bucket: its elements.
        """
        self._group = group
        self._replicas = distributed.get_world_size(group)
        self._wire = wire
        self._factors = _Factors(1.0, 1.0, 1.0)
        if wire != torch.float32:
            assert micro_batches % self._replicas == 0, (micro_batches, self._replicas)
            # Means of one replica and of all are equally far from underflow.
            self._factors = _Factors(
                sent=self._replicas / micro_batches,
                total=1 / self._replicas,
                result=float(micro_batches),
            )
        self._largest = self._part_of(largest_bucket)
        self._rows = [1] * self._replicas  # sums that each replica sends
        leaves = [range(replica, replica + 1) for replica in range(self._replicas)]
        self._additions = additions(leaves)
        self._free: List[_Memory] = []  # that no sum uses

    def set_shares(self, shares: Sequence[range]) -> None:
        """Take note of the `shares` of replicas, of which they send the largest subtrees' sums."""
        rows = []
        leaves = []
        for share in shares:
            largest = subtrees(share, shares[-1].stop)
            rows.append(len(largest))
            leaves += largest
        self._rows = rows
        self._additions = additions(leaves)
        # Its size depends on how many sums there are.
        self._free.clear()

    def total(self, sums: Sequence[torch.Tensor]) -> Iterator[None]:
        """Leave the total of all replicas' sums of a bucket in the first of this replica's.

        Yields after each launch.

        Args:
            sums: of this replica, float32 [elements] each.
        """
        total = sums[0]
        part = self._part_of(len(total))
        memory = self._memory(len(sums), total.device)
        sent = memory.sent[: self._replicas * len(sums) * part]
        received = memory.received[: sum(self._rows) * part]
        # First exchange: each replica gets its part of all sums.
        self._fill(sent.view(self._replicas, len(sums), part), sums)
        work = self._exchange_parts(received, sent, rows=len(sums))
        yield
        work.wait()
        # Add up this replica's part; the sum takes the place of the first row.
        part_total = received[:part]
        added = self._add_up(received.view(-1, part).float())
        torch.mul(added, self._factors.total, out=part_total)
        # Second exchange: all get the total, in the memory of what was sent.
        gathered = sent[: self._replicas * part]
        gathering = all_gather(
            _bytes(gathered), _bytes(part_total), group=self._group, async_op=True
        )
        yield
        begun(gathering).wait()
        total.copy_(gathered[: len(total)]).mul_(self._factors.result)
        self._free.append(memory)

    def _exchange_parts(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        rows: int,
    ) -> distributed.Work:
        """Send each replica its part of this one's sums, and receive those of all.

        Args:
            received: [elements of a part x rows of all replicas], written.
            sent: [elements of a part x replicas x rows].
            rows: sums of this replica.
        """
        size = sent.element_size() * len(sent) // (self._replicas * rows)
        # As bytes, since not every library knows the dtypes; nothing is computed on the way.
        work = distributed.all_to_all_single(
            _bytes(received),
            _bytes(sent),
            output_split_sizes=[size * count for count in self._rows],
            input_split_sizes=[size * rows] * self._replicas,
            group=self._group,
            async_op=True,
        )
        return begun(work)

    def _fill(self, rows: torch.Tensor, sums: Sequence[torch.Tensor]) -> None:
        """Write the sums as they travel.

        What fills a bucket up to equal parts is whatever the memory held: its sum is not read.

        Args:
            rows: [replicas, sums, elements of a part], written: what each replica is sent.
            sums: of this replica, float32 [elements] each.
        """
        part = rows.shape[2]
        for number, values in enumerate(sums):
            # Replicas whose part is full, and the one that gets what remains.
            full = len(values) // part
            first = values[: full * part].view(full, part)
            torch.mul(first, self._factors.sent, out=rows[:full, number])
            rest = values[full * part :]
            if len(rest):
                torch.mul(rest, self._factors.sent, out=rows[full, number, : len(rest)])

    def _add_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of rows in the order of the tree, [elements].

        Args:
            rows: float32 [rows, elements]; overwritten.
        """
        for independent in self._additions:
            # Not public, but torch's optimizers rest on it: many additions in few kernels of a GPU.
            torch._foreach_add_(
                [rows[left] for left, _ in independent],
                [rows[right] for _, right in independent],
            )
        return rows[0]

    def _memory(self, sums: int, device: torch.device) -> _Memory:
        """Return memory for what a replica sends and receives of the largest bucket."""
        if self._free:
            return self._free.pop()
        sent = torch.empty(self._replicas * sums * self._largest, dtype=self._wire, device=device)
        received = torch.empty(sum(self._rows) * self._largest, dtype=self._wire, device=device)
        return _Memory(sent, received)

    def _part_of(self, elements: int) -> int:
        """Return the elements of a bucket that each replica adds up.

        The last ones may have fewer, or none.
        """
        return -(-elements // self._replicas)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory, uint8."""
    return tensor.view(torch.uint8)

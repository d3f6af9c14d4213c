"""Sums of the replicas' whole gradients: in part while the last backward pass still computes, or in few bits."""

from __future__ import annotations

import functools
from typing import Dict, Iterator, List, Optional, Sequence, Set

import torch
from torch import distributed, nn

from parallel.costs import BLOCK
from parallel.exchange import Running, Setup
from parallel.messages import Quantizer
from recipe.exchange import Exchange
from recipe.shares import additions, subtrees

Group = Optional[distributed.ProcessGroup]

# all_gather_single is new, and the older name warns where both exist.
all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def all_finite(buffer: torch.Tensor, everyone: Group) -> torch.Tensor:
    """Whether all values of all processes' buffers are finite, bool []. Every process calls.

    Args: everyone: all replicas and stages; None for a single process.
    """
    lowest, highest = torch.aminmax(buffer)
    finite = torch.isfinite(lowest) & torch.isfinite(highest)
    if everyone is None:
        return finite
    faults = (~finite).float()
    distributed.all_reduce(faults, group=everyone)
    return faults == 0


class Reduction(Running):
    """Sums a flat gradient buffer over the replicas of a group, in place, to the same bits on all of them.

    dense: all-reduce; the order of the additions is the library's. With order "tree" every replica gets a part of the
    elements of all replicas' partial sums, adds them in float32 as the tree of `recipe/shares.py` says, and sends the
    total to all. half: likewise, with a tree over replicas, but means over micro batches travel as float16 or bfloat16:
    each replica's own, then that of all. What overflows becomes inf or NaN on all replicas: check for that after the
    exchange.

    Buckets are launched from the end of the buffer, where the last layers are, to its start, in this order on every
    replica. No other collective may use the group between arm() and the call that ends the exchange.
    """

    def __init__(self, setup: Setup, section: Exchange, bucket_bytes: int = 25 * 2**20):
        """Args: section: of method dense or half. bucket_bytes: of float32 gradients in a bucket."""
        gradients, wire, micro_batches = setup.gradients, getattr(torch, section.sent), setup.batch.micro_batches
        assert gradients.dtype == torch.float32 and gradients.dim() == 1 and gradients.is_contiguous()
        self._gradients, self._collect, self._group = gradients, setup.collect, setup.group
        self._replicas = distributed.get_world_size(setup.group)
        self._wire, self._factors = wire, (1.0, 1.0, 1.0)
        self._in_tree, self._shards = section.in_tree, section.in_tree or wire != torch.float32
        self._sums, self._rows = [gradients], [1] * self._replicas  # sums that each replica sends
        self._additions = additions([range(each, each + 1) for each in range(self._replicas)])
        if wire != torch.float32:
            assert micro_batches % self._replicas == 0, (micro_batches, self._replicas)
            # Factors of what a replica sends, of the sum of these, and of what comes back. The middle one divides by
            # replicas: the mean of all replicas is as far from underflow as that of one.
            self._factors = (self._replicas / micro_batches, 1 / self._replicas, float(micro_batches))
        size = max(1, bucket_bytes // gradients.element_size())
        self._buckets = [(max(0, end - size), end) for end in range(len(gradients), 0, -size)]
        self._largest = self._part_of(min(size, len(gradients)))
        self._flying: List[Iterator[None]] = []  # the sums of the buckets that have been launched
        self._free: List[List[torch.Tensor]] = []  # memory of a sum that is not in use
        # A sum as a tree exists only after the last addition of the step.
        self.overlaps = self._replicas > 1 and not section.in_tree
        self._launched, self._armed = 0, False
        self._waiting: List[Set[int]] = []  # of each bucket the parameters whose gradients are not ready
        if self.overlaps:
            for index, (_, parameter) in enumerate(setup.places):
                parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, index))
            spans = [(start, start + parameter.numel()) for start, parameter in setup.places]
            self._needs = [
                {index for index, (first, last) in enumerate(spans) if first < end and last > start}
                for start, end in self._buckets
            ]

    def divide(self, shares: Sequence[range], sums: Sequence[torch.Tensor]) -> None:
        if self._in_tree:
            parts = [subtrees(share, shares[-1].stop) for share in shares]
            self._sums, self._rows = sums, [len(each) for each in parts]
            self._additions = additions([each for own in parts for each in own])
            self._free.clear()

    def arm(self) -> None:
        """Announce the step's last backward pass: buckets are sent as soon as their gradients are ready."""
        assert not self._armed, "the exchange comes before the next arm()"
        if self.overlaps:
            self._armed = True
            self._waiting = [set(needed) for needed in self._needs]

    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """Send what is not yet on its way, and leave the sum over replicas in the buffer; no GPU is waited for.

        Args: buffer: float32 [length]; another than the gradients only where nothing was armed.
        Raises RuntimeError: from torch.distributed, if another replica is gone or too late.
        """
        assert buffer is self._gradients or not self._armed, "an armed backward pass has sent parts of the gradients"
        self._armed = False
        if self._replicas == 1:
            return
        assert buffer.dtype == torch.float32 and buffer.shape == self._gradients.shape
        while self._launched < len(self._buckets):
            self._launch(buffer)
        while self._flying:
            self._advance()
        self._launched = 0

    def _ready(self, index: int, _: nn.Parameter) -> None:
        if not self._armed:
            return
        if self._collect is not None:
            self._collect(index)
        for number, waiting in enumerate(self._waiting):
            assert number >= self._launched or index not in self._needs[number], f"{index} came after it was sent"
            waiting.discard(index)
        while self._launched < len(self._buckets) and not self._waiting[self._launched]:
            self._launch(self._gradients)

    def _launch(self, buffer: torch.Tensor) -> None:
        """Begin the sum of the next bucket. Of sums in two exchanges the earlier ones go on: two are on their way."""
        if self._shards:
            self._advance()
        start, end = self._buckets[self._launched]
        self._launched += 1
        sums = [buffer, *self._sums[1:]]
        bucket = [each[start:end] for each in sums]
        self._flying.append(self._sum_in_parts(bucket) if self._shards else self._all_reduce(bucket[0]))
        next(self._flying[-1])

    def _advance(self) -> None:
        """Take each sum a step further, the oldest first: all replicas call the collectives in one order."""
        self._flying = [each for each in self._flying if next(each, self) is not self]

    def _all_reduce(self, bucket: torch.Tensor) -> Iterator[None]:
        work = distributed.all_reduce(bucket, group=self._group, async_op=True)
        yield
        work.wait()

    def _sum_in_parts(self, sums: Sequence[torch.Tensor]) -> Iterator[None]:
        """The total of a bucket of all replicas' sums, left in the first, each replica a part of it, in two exchanges.

        What fills a bucket up to equal parts is whatever the memory held: its sum is not read.
        """
        if not self._free:
            sizes = (self._replicas * len(sums) * self._largest, sum(self._rows) * self._largest)
            self._free.append([torch.empty(size, dtype=self._wire, device=sums[0].device) for size in sizes])
        memory, total = self._free.pop(), sums[0]
        part = self._part_of(len(total))
        ours, theirs = memory[0][: self._replicas * len(sums) * part], memory[1][: sum(self._rows) * part]
        whole = len(total) // part  # replicas whose part is full
        for number, values in enumerate(sums):
            rows = ours.view(self._replicas, len(sums), part)[:, number]
            torch.mul(values[: whole * part].view(whole, part), self._factors[0], out=rows[:whole])
            if whole * part < len(total):
                torch.mul(values[whole * part :], self._factors[0], out=rows[whole, : len(total) - whole * part])
        # As bytes: not every library and version knows the dtypes, and nothing is computed on the way.
        size = part * ours.element_size()
        sizes = [size * rows for rows in self._rows], [size * len(sums)] * self._replicas
        work = distributed.all_to_all_single(_bytes(theirs), _bytes(ours), *sizes, group=self._group, async_op=True)
        yield
        work.wait()
        rows, own = theirs.view(-1, part).float(), theirs[:part]
        for independent in self._additions:
            torch._foreach_add_([rows[left] for left, _ in independent], [rows[right] for _, right in independent])
        torch.mul(rows[0], self._factors[1], out=own)
        gathered = ours[: self._replicas * part]
        work = all_gather(_bytes(gathered), _bytes(own), group=self._group, async_op=True)
        yield
        work.wait()
        total.copy_(gathered[: len(total)]).mul_(self._factors[2])
        self._free.append(memory)

    def _part_of(self, elements: int) -> int:
        """Elements of a bucket that each replica adds up; the last ones may have fewer, or none."""
        return -(-elements // self._replicas)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


class QuantizedSum:
    """Sums vectors over replicas in few bits: each replica adds up a share of the elements, and sends the sum to all.

    Values are widened to float32 and added in the order of the replicas. Both roundings are kept: a replica's own, and
    by the owner of a share that of the sum. So sum(given) = sum of results + sum of what replicas keep.
    """

    def __init__(self, group: Group, bits: int):
        """Args: group: of the replicas; None for a single replica, which rounds all the same."""
        self._group, self._quantizer = group, Quantizer(bits)
        self._replicas = 1 if group is None else distributed.get_world_size(group)
        self._rank = 0 if group is None else distributed.get_rank(group)

    def __call__(self, values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The sum over replicas, the same bits on all. Every replica calls.

        Args: values: float32 [count], finite. kept: written: what is left for the next call; it may be `values`.
        """
        count, code = len(values), self._quantizer
        share = -(-count // self._replicas // BLOCK) * BLOCK  # the last ones may have less, or nothing
        given = torch.nn.functional.pad(values, (0, share * self._replicas - count))
        messages = torch.cat([code.encode(part) for part in given.split(share)])
        size = len(messages) // self._replicas
        left = given - torch.cat([code.decode(message, share) for message in messages.split(size)])
        arrived = messages
        if self._group is not None:
            arrived = torch.empty_like(messages)
            distributed.all_to_all_single(arrived, messages, group=self._group)
        total = torch.zeros(share, device=values.device)
        for message in arrived.split(size):
            total += code.decode(message, share)
        own = code.encode(total)
        left[self._rank * share :][:share] += total - code.decode(own, share)
        kept.copy_(left[:count])
        gathered = own
        if self._group is not None:
            gathered = torch.empty_like(messages)
            all_gather(gathered, own, group=self._group)
        return torch.cat([code.decode(message, share) for message in gathered.split(size)])[:count]


class QuantizedReduction(Running):
    """The sum of the replicas' gradients, in few bits; what rounding takes off is added to the next one.

    A gradient that is not finite on any replica or stage changes nothing here, and leaves NaN in the buffer.

    Sources: Seide et al., 2014, 1-bit SGD (error feedback); Karimireddy et al., 1901.09847.
    """

    def __init__(self, setup: Setup, bits: int):
        self._sum, self._everyone = QuantizedSum(setup.group, bits), setup.processes.further_group()
        self.residual = torch.zeros_like(setup.gradients)

    @torch.no_grad()
    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """As in Running. The residual is stored divided by `divisor`: loss scale and batch may change."""
        finite = all_finite(buffer, self._everyone)
        given = torch.where(finite, buffer / divisor, 0.0).add_(self.residual)
        total = self._sum(given, given)
        self.residual.copy_(torch.where(finite, given, self.residual))
        torch.mul(total, divisor, out=buffer)
        buffer[0] = torch.where(finite, buffer[0], float("nan"))

    def state(self) -> Dict[str, torch.Tensor]:
        return {"residual": self.residual}

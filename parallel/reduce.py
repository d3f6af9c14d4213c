"""Dense exchange: sums the replicas' gradients, in part while the last backward pass of a step still computes."""

from __future__ import annotations

import functools
from typing import Callable, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import distributed, nn

from parallel.exchange import Running

# all_gather_single is new, and the older name warns where both exist.
all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


def all_finite(buffer: torch.Tensor, everyone: Optional[distributed.ProcessGroup]) -> torch.Tensor:
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

    Methods:
        dense, order "fast": all-reduce; the order of the additions is the library's.
        dense, order "tree": every replica adds its share of the elements of all replicas in float32, as a binary tree
            over replica numbers, ((0+1)+(2+3))+..., an odd one passing up; then all gather the shares. With a power
            of two of replicas this continues the tree of optim/gradients.py.
        half: the same tree, but float16 or bfloat16 travels, at half the bytes, and what travels are means over micro
            batches: each replica's own, then that of all. An element is rounded twice. What overflows float16 becomes
            inf or NaN on all replicas and has to be found by a check for finite gradients after the exchange.

    Buckets of the buffer, from its end, where the last layers are, to its start, are launched in this order on every
    replica. No other collective may use the group between arm() and the call that ends the exchange.
    """

    def __init__(
        self,
        gradients: torch.Tensor,
        places: Sequence[Tuple[int, nn.Parameter]],
        group: Optional[distributed.ProcessGroup],
        *,
        method: str,
        order: str,
        wire: torch.dtype,
        micro_batches: int,
        bucket_bytes: int = 25 * 2**20,
        collect: Optional[Callable[[int], None]] = None,
    ):
        """
        Args:
            gradients, places, collect: as in Setup.
            group: of the processes that hold the same stage; None: all processes.
            method, order: "dense" or "half", "fast" or "tree".
            wire: what "half" sends, torch.float16 or torch.bfloat16.
            micro_batches: of a step over all replicas, a multiple of their number; for "half".
            bucket_bytes: of float32 gradients in a bucket.
        """
        assert gradients.dtype == torch.float32 and gradients.dim() == 1 and gradients.is_contiguous()
        assert method in ("dense", "half") and order in ("fast", "tree"), (method, order)
        self._gradients, self._collect, self._group = gradients, collect, group
        self._replicas = distributed.get_world_size(group)
        self._shards = method == "half" or order == "tree"
        self._wire, self._factors = torch.float32, (1.0, 1.0, 1.0)
        if method == "half":
            assert wire in (torch.float16, torch.bfloat16) and micro_batches % self._replicas == 0, wire
            # Factors of what a replica sends, of the sum of these, and of what comes back. The middle one divides by
            # replicas: the mean of all replicas is as far from underflow as that of one.
            self._wire = wire
            self._factors = (self._replicas / micro_batches, 1 / self._replicas, float(micro_batches))
        size = max(1, bucket_bytes // gradients.element_size())
        self._buckets = [(max(0, end - size), end) for end in range(len(gradients), 0, -size)]
        self._largest = self._filled_up(min(size, len(gradients)))
        self._flying: List[Iterator[None]] = []  # the sums of the buckets that have been launched
        self._free: List[torch.Tensor] = []  # memory of a sum that is not in use
        # A sum as a tree exists only after the last addition of the step.
        self.overlaps = self._replicas > 1 and order == "fast"
        self._launched = 0
        self._armed = False
        self._waiting: List[Set[int]] = []
        if self.overlaps:
            for index, (_, parameter) in enumerate(places):
                parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, index))
            spans = [(start, start + parameter.numel()) for start, parameter in places]
            self._needs = [
                {index for index, (first, last) in enumerate(spans) if first < end and last > start}
                for start, end in self._buckets
            ]

    def arm(self) -> None:
        """Announce the step's last backward pass: buckets are sent as soon as their gradients are ready."""
        assert not self._armed, "the exchange comes before the next arm()"
        if self.overlaps:
            self._armed = True
            self._waiting = [set(needed) for needed in self._needs]

    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """Sends what is not yet on its way, waits, and leaves the sum over replicas in the buffer.

        On CUDA "waits" concerns the current stream, not the host.

        Args:
            buffer: float32 [length]; another than the gradients only where nothing was armed.

        Raises:
            RuntimeError: from torch.distributed, if another replica is gone or too late.
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
        self._flying.append((self._sum_in_shards if self._shards else self._all_reduce)(buffer[start:end]))
        next(self._flying[-1])

    def _advance(self) -> None:
        """Take each sum a step further, the oldest first: all replicas call the collectives in one order."""
        self._flying = [each for each in self._flying if next(each, self) is not self]

    def _all_reduce(self, bucket: torch.Tensor) -> Iterator[None]:
        work = distributed.all_reduce(bucket, group=self._group, async_op=True)
        yield
        work.wait()

    def _sum_in_shards(self, bucket: torch.Tensor) -> Iterator[None]:
        """Sum as a binary tree over replicas, each replica its share of the bucket, in two exchanges.

        What fills a bucket up to equal shares is whatever the memory held: its sum is not read.
        """
        if not self._free:
            self._free.append(torch.empty(2, self._largest, dtype=self._wire, device=bucket.device))
        memory = self._free.pop()
        ours, theirs = memory[:, : self._filled_up(len(bucket))]
        torch.mul(bucket, self._factors[0], out=ours[: len(bucket)])
        # As bytes: not every library and version knows the dtypes, and nothing is computed on the way.
        work = distributed.all_to_all_single(_bytes(theirs), _bytes(ours), group=self._group, async_op=True)
        yield
        work.wait()
        rows = theirs.view(self._replicas, -1).float()
        share = theirs[: rows.shape[1]]
        torch.mul(_add_as_tree(rows), self._factors[1], out=share)
        work = all_gather(_bytes(ours), _bytes(share), group=self._group, async_op=True)
        yield
        work.wait()
        bucket.copy_(ours[: len(bucket)]).mul_(self._factors[2])
        self._free.append(memory)

    def _filled_up(self, elements: int) -> int:
        return -(-elements // self._replicas) * self._replicas


def _add_as_tree(rows: torch.Tensor) -> torch.Tensor:
    """Sum [n] of rows [count, n], ((0+1)+(2+3))+..., an odd one passing up; overwrites `rows`."""
    distance = 1
    while distance < len(rows):
        newer = rows[distance :: 2 * distance]
        rows[:: 2 * distance][: len(newer)].add_(newer)
        distance *= 2
    return rows[0]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)

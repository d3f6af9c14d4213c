"""Sums over replicas in few bits, with error feedback."""

from __future__ import annotations

from typing import Dict, Optional

import torch
from torch import distributed

from parallel.costs import BLOCK
from parallel.exchange import Running
from parallel.messages import Quantizer
from parallel.reduce import all_finite, all_gather


class QuantizedSum:
    """Sums vectors over replicas in few bits: each replica adds up a share of the elements, and sends the sum to all.

    Values are widened to float32 and added in the order of the replicas. Both roundings are kept: a replica's own, and
    by the owner of a share that of the sum. So sum(given) = sum of results + sum of what replicas keep.
    """

    def __init__(self, group: Optional[distributed.ProcessGroup], bits: int):
        """Args: group: of the replicas; None for a single replica, which rounds all the same."""
        self._group, self._quantizer = group, Quantizer(bits)
        self._replicas = 1 if group is None else distributed.get_world_size(group)
        self._rank = 0 if group is None else distributed.get_rank(group)

    def __call__(self, values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The sum over replicas, the same bits on all. Every replica calls.

        Args:
            values: float32 [count], finite.
            kept: float32 [count], written: what is left for the next call. It may be `values`.
        """
        count, code = len(values), self._quantizer
        share = -(-count // self._replicas // BLOCK) * BLOCK  # the last ones may have less, or nothing
        given = torch.nn.functional.pad(values, (0, share * self._replicas - count))
        messages = torch.cat([code.encode(part) for part in given.split(share)])
        arrived, size = messages, code.bytes(share)
        left = given - torch.cat([code.decode(message, share) for message in messages.split(size)])
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

    def __init__(
        self,
        group: Optional[distributed.ProcessGroup],
        everyone: Optional[distributed.ProcessGroup],
        length: int,
        bits: int,
        device: torch.device,
    ):
        """
        Args:
            group: of the replicas of this stage; None for a single replica.
            everyone: all replicas and stages, used for nothing else; None for a single process.
            length: elements of the buffer. bits: 8 or 4.
        """
        self._sum, self._everyone = QuantizedSum(group, bits), everyone
        self.residual = torch.zeros(length, dtype=torch.float32, device=device)

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

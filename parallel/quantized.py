"""Sums over replicas in few bits; what rounding takes off is kept and sent later."""

from __future__ import annotations

from typing import Dict

import torch
from torch import distributed

from parallel.costs import BLOCK
from parallel.exchange import Running, Setup
from parallel.groups import Group
from parallel.messages import Quantizer
from parallel.reduce import all_finite, all_gather


class QuantizedSum:
    """Sums vectors over replicas in few bits.

    Each replica adds up a share of the elements, and sends the sum to all.

    Values are widened to float32 and added in the order of the replicas. Both roundings are kept: a
    replica's own, and by the owner of a share that of the sum. So sum(given) = sum of results + sum
    of what replicas keep.
    """

    def __init__(self, group: Group, bits: int):
        """
        Args:
            group: of the replicas; None for a single replica, which rounds all the same.
            bits: of a value, 8 or 4.
        """
        self._group = group
        self._quantizer = Quantizer(bits)
        self._replicas = 1 if group is None else distributed.get_world_size(group)
        self._rank = 0 if group is None else distributed.get_rank(group)

    def __call__(self, values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Sum a vector of each replica. Every replica calls.

        Args:
            values: float32 [count], finite.
            kept: float32 [count], written: what is left for the next call; it may be `values`.

        Returns:
            The sum, float32 [count], the same bits on all replicas.
        """
        count = len(values)
        encode = self._quantizer.encode
        # Shares are whole blocks: the last ones may have less, or nothing.
        share = -(-count // self._replicas // BLOCK) * BLOCK
        padded = torch.nn.functional.pad(values, (0, share * self._replicas - count))
        # Round the vector, a message for each owner; what that takes off stays here.
        messages = torch.cat([encode(part) for part in padded.split(share)])
        left = padded - self._decode_all(messages, share)
        total = self._add_up_share(messages, share)
        # Round the sum; what that takes off stays with its owner, this replica.
        rounded = encode(total)
        first = self._rank * share
        left[first : first + share] += total - self._quantizer.decode(rounded, share)
        kept.copy_(left[:count])
        gathered = rounded
        if self._group is not None:
            gathered = torch.empty_like(messages)
            all_gather(gathered, rounded, group=self._group)
        return self._decode_all(gathered, share)[:count]

    def _add_up_share(self, messages: torch.Tensor, share: int) -> torch.Tensor:
        """Return the sum of this replica's share of all vectors, float32 [share].

        Args:
            messages: uint8, one for each owner behind the other, all of one length.
            share: elements of a share.
        """
        arrived = messages
        if self._group is not None:
            arrived = torch.empty_like(messages)
            distributed.all_to_all_single(arrived, messages, group=self._group)
        total = torch.zeros(share, device=messages.device)
        # In the order of the replicas, so that a run repeats to the bit.
        for message in arrived.split(len(arrived) // self._replicas):
            total += self._quantizer.decode(message, share)
        return total

    def _decode_all(self, messages: torch.Tensor, share: int) -> torch.Tensor:
        """Return the values of one message for each replica: float32 [replicas * share]."""
        size = len(messages) // self._replicas
        parts = [self._quantizer.decode(message, share) for message in messages.split(size)]
        return torch.cat(parts)


class QuantizedReduction(Running):
    """The sum of the replicas' gradients, in few bits.

    What rounding takes off is added to the next one.

    A gradient that is not finite on any replica or stage changes nothing here, and leaves NaN in
    the buffer.

    residual: float32 [length], what this replica has kept, divided by the divisor.

    Sources: Seide et al., 2014, 1-bit SGD (error feedback); Karimireddy et al., 1901.09847.
    """

    def __init__(self, setup: Setup, bits: int):
        """
        Args:
            setup: of the engine.
            bits: of a value, 8 or 4.
        """
        self._sum = QuantizedSum(setup.group, bits)
        self._everyone = setup.processes.further_group()
        self.residual = torch.zeros_like(setup.gradients)

    @torch.no_grad()
    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """Replace the gradient by the sum over replicas.

        Args:
            buffer, step, divisor: see Running.
        """
        finite = all_finite(buffer, self._everyone)
        # In units of the mean gradient: loss scale and batch may change until the residual is sent.
        values = torch.where(finite, buffer / divisor, 0.0).add_(self.residual)
        total = self._sum(values, kept=values)
        self.residual.copy_(torch.where(finite, values, self.residual))
        torch.mul(total, divisor, out=buffer)
        # The engine looks for what is not finite after the exchange, as it does with other methods.
        buffer[0] = torch.where(finite, buffer[0], float("nan"))

    def state(self) -> Dict[str, torch.Tensor]:
        return {"residual": self.residual}

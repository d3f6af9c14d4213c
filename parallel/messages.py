"""Sparse vectors, and the messages in which replicas send them."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple, Union

import torch

from parallel.quantizer import Quantizer

_LARGEST_EXPONENT = 120  # 2.0**120 is still a float32, and so is its inverse


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


class Wire:
    """The form of a message, int32: the indices, then the bits of the values.

    As float16 the values are multiplied before by a power of two that takes the largest of them to 2**14 or above,
    whose exponent comes first. In 8 or 4 bits they are those of `Quantizer`.
    """

    def __init__(self, form: Union[torch.dtype, int]):
        """Args: form: in which values travel: torch.float32, torch.float16, or 8 or 4 bits."""
        assert form in (torch.float32, torch.float16, 8, 4), form
        self.exact = form == torch.float32
        self._quantizer = Quantizer(form) if isinstance(form, int) else None

    def words(self, count: int) -> int:
        """Length of a message of so many entries."""
        if self._quantizer is not None:
            return count + self._quantizer.bytes(count) // 4
        return 2 * count if self.exact or not count else 1 + count + (count + 1) // 2

    def pack(self, part: Sparse) -> Tuple[torch.Tensor, Optional[Sparse]]:
        """The message, and what rounding took off the values; None where nothing is rounded."""
        indices = part.indices.int()
        if self.exact or not len(indices):
            return torch.cat([indices, part.values.view(torch.int32)]), None
        if self._quantizer is not None:
            message = self._quantizer.encode(part.values)
            lost = Sparse(part.indices, part.values - self._quantizer.decode(message, len(indices)))
            return torch.cat([indices, message.view(torch.int32)]), lost
        exponent = (15 - torch.frexp(part.values.abs().max())[1]).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
        halves = torch.ldexp(part.values, exponent).half()
        lost = Sparse(part.indices, part.values - torch.ldexp(halves.float(), -exponent))
        if len(halves) % 2:
            halves = torch.cat([halves, halves.new_zeros(1)])
        return torch.cat([exponent.int()[None], indices, halves.view(torch.int32)]), lost

    def unpack(self, message: torch.Tensor, count: int) -> Sparse:
        """The vector of so many entries in a message."""
        if self.exact or not count:
            return Sparse(message[:count].long(), message[count : 2 * count].view(torch.float32))
        if self._quantizer is not None:
            return Sparse(message[:count].long(), self._quantizer.decode(message[count:].view(torch.uint8), count))
        halves = message[1 + count :].view(torch.float16)[:count]
        return Sparse(message[1 : 1 + count].long(), torch.ldexp(halves.float(), -message[0]))

"""Sparse vectors, and the messages in which replicas send them: values in 32, 16, 8 or 4 bits."""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

import torch
from torch.nn import functional

from parallel.costs import BLOCK, message_bytes

_LARGEST_EXPONENT = 120  # 2.0**120 is still a float32, and so is its inverse


class Sparse(NamedTuple):
    """Some elements of a vector: their distinct indices, int64 [k], and their values, float32 [k]."""

    indices: torch.Tensor
    values: torch.Tensor

    def take(self, places: torch.Tensor) -> Sparse:
        """Those at some places, int64 [n] or a mask, bool [k]."""
        return Sparse(self.indices[places], self.values[places])


class Wire:
    """The form of a sparse message, int32: the indices, then the bits of the values."""

    def __init__(self, form: str):
        """Args: form: in which values travel: float32, float16, int8 or int4."""
        assert form in ("float32", "float16", "int8", "int4"), form
        self._form, self.exact = form, form == "float32"
        self._code = Quantizer(int(form[3:])) if form.startswith("int") else _Halves()

    def words(self, count: int) -> int:
        """Length of a message of so many entries."""
        return message_bytes(count, self._form) // 4

    def pack(self, part: Sparse) -> Tuple[torch.Tensor, Optional[Sparse]]:
        """The message, and what rounding took off the values; None where nothing is rounded."""
        indices, values = part.indices.int(), part.values
        if self.exact:
            return torch.cat([indices, values.view(torch.int32)]), None
        message = self._code.encode(values)
        lost = Sparse(part.indices, values - self._code.decode(message, len(values)))
        return torch.cat([indices, message.view(torch.int32)]), lost

    def unpack(self, message: torch.Tensor, count: int) -> Sparse:
        """The vector of so many entries in a message."""
        values = message[count:].view(torch.float32 if self.exact else torch.uint8)
        return Sparse(message[:count].long(), values if self.exact else self._code.decode(values, count))


class Quantizer:
    """Rounds values to whole multiples of a scale, one for each block of 256, the largest of which it makes 7 or 127.

    A message is uint8: the blocks' scales, float32, then 8 or 4 bits a value. Values are rounded to nearest: whoever
    sends them keeps the errors for later.
    """

    def __init__(self, bits: int):
        assert bits in (4, 8), bits
        self._bits, self._most = bits, (1 << (bits - 1)) - 1

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The message of float32 [count], finite."""
        blocks = functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / self._most
        # A block of zeros, or of values too small for float32's inverse, is all zeros.
        inverse = torch.where(scales > torch.finfo(torch.float32).tiny, 1 / scales, 0.0)
        codes = (blocks * inverse).round_().clamp_(-self._most, self._most).to(torch.int8)
        if self._bits == 4:
            low, high = (codes & 15).view(-1, BLOCK // 2, 2).unbind(2)
            codes = low | (high << 4)
        return torch.cat([scales.flatten().view(torch.uint8), codes.view(torch.uint8).flatten()])

    def decode(self, message: torch.Tensor, count: int) -> torch.Tensor:
        """The values of a message, float32 [count]."""
        blocks = -(-count // BLOCK)
        scales, codes = message[: 4 * blocks].clone().view(torch.float32), message[4 * blocks :].view(torch.int8)
        if self._bits == 4:
            codes = torch.stack([(codes << 4) >> 4, codes >> 4], 1)  # shifts keep the sign
        return (codes.view(blocks, BLOCK).float() * scales[:, None]).flatten()[:count]


class _Halves:
    """Like Quantizer, as float16: behind an exponent of two that takes the largest value to 2**14 or above."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(values, (0, 1))
        exponent = (15 - torch.frexp(padded.abs().max())[1]).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
        halves = torch.ldexp(padded, exponent).half()[: len(values) + len(values) % 2]
        return torch.cat([exponent.int()[None].view(torch.uint8), halves.view(torch.uint8)])

    def decode(self, message: torch.Tensor, count: int) -> torch.Tensor:
        return torch.ldexp(message[4:].view(torch.float16)[:count].float(), -message[:4].view(torch.int32)[0])

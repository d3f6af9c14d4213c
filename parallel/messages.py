"""Sparse vectors, and the messages in which replicas send them: values in 32, 16, 8 or 4 bits."""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple, Union

import torch
from torch.nn import functional

from parallel.costs import BLOCK, message_bytes

_LARGEST_EXPONENT = 120  # 2.0**120 is still a float32, and so is its inverse


class Sparse(NamedTuple):
    """Some elements of a vector.

    indices: distinct, int64 [k].
    values: float32 [k].
    """

    indices: torch.Tensor
    values: torch.Tensor

    def take(self, places: torch.Tensor) -> Sparse:
        """Select entries by their `places`: int64 [n], or a mask, bool [k]."""
        return Sparse(self.indices[places], self.values[places])


class Wire:
    """The form of a sparse message, int32: the indices, then the bits of the values.

    exact: values travel as float32, so that nothing is rounded.
    """

    def __init__(self, form: str):
        """
        Args:
            form: in which values travel: float32, float16, int8 or int4.
        """
        assert form in ("float32", "float16", "int8", "int4"), form
        self._form = form
        self.exact = form == "float32"
        self._code: Union[Quantizer, _Halves] = _Halves()
        if form.startswith("int"):
            self._code = Quantizer(bits=int(form[3:]))

    def words(self, count: int) -> int:
        """Return the length of a message of `count` entries, in int32 words."""
        return message_bytes(count, self._form) // 4

    def pack(self, part: Sparse) -> Tuple[torch.Tensor, Optional[Sparse]]:
        """Make the message that holds `part`, a vector of k entries.

        Returns:
            The message, int32 [words(k)], and what rounding took off the values; None where nothing
            is rounded.
        """
        indices = part.indices.int()
        if self.exact:
            return torch.cat([indices, part.values.view(torch.int32)]), None
        message = self._code.encode(part.values)
        # As the receiver will have them, so that what is lost is exact.
        arriving = self._code.decode(message, len(part.values))
        lost = Sparse(part.indices, part.values - arriving)
        return torch.cat([indices, message.view(torch.int32)]), lost

    def unpack(self, message: torch.Tensor, count: int) -> Sparse:
        """Return the vector of `count` entries in a `message`, int32 [words(count)]."""
        indices = message[:count].long()
        if self.exact:
            return Sparse(indices, message[count:].view(torch.float32))
        return Sparse(indices, self._code.decode(message[count:].view(torch.uint8), count))


class Quantizer:
    """Rounds values to whole multiples of a scale, one for each block of 256.

    The largest value of a block is 7 or 127 times its scale.

    A message is uint8: the blocks' scales, float32, then 8 or 4 bits a value. Values are rounded to
    nearest: whoever sends them keeps the errors for later.
    """

    def __init__(self, bits: int):
        """
        Args:
            bits: of a value, 4 or 8.
        """
        assert bits in (4, 8), bits
        self._bits = bits
        self._most = (1 << (bits - 1)) - 1  # the largest code

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the message, uint8, that holds `values`, float32 [count] and finite."""
        # Zeros in the last block change neither its scale nor its other values.
        padded = functional.pad(values, (0, -len(values) % BLOCK))
        blocks = padded.view(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / self._most
        # A block of zeros, or of values too small for float32's inverse, is all zeros.
        has_inverse = scales > torch.finfo(torch.float32).tiny
        inverse = torch.where(has_inverse, 1 / scales, 0.0)
        codes = (blocks * inverse).round_().clamp_(-self._most, self._most).to(torch.int8)
        if self._bits == 4:
            # Two codes share a byte: the first of a pair has the lower half.
            low, high = (codes & 15).view(-1, BLOCK // 2, 2).unbind(2)
            codes = low | (high << 4)
        return torch.cat([scales.flatten().view(torch.uint8), codes.view(torch.uint8).flatten()])

    def decode(self, message: torch.Tensor, count: int) -> torch.Tensor:
        """Return the values, float32 [count], of a `message` as `encode` makes it."""
        blocks = -(-count // BLOCK)
        # A copy: a message may begin anywhere in a buffer, and floats must lie at multiples of four.
        scales = message[: 4 * blocks].clone().view(torch.float32)
        codes = message[4 * blocks :].view(torch.int8)
        if self._bits == 4:
            # Shifts of int8 keep the sign.
            codes = torch.stack([(codes << 4) >> 4, codes >> 4], 1)
        values = codes.view(blocks, BLOCK).float() * scales[:, None]
        return values.flatten()[:count]


class _Halves:
    """Rounds values to float16 after a scale by a power of two, which leads the message.

    It takes the largest value to 2**14 or above.
    """

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the message, uint8, that holds `values`, float32 [count] and finite."""
        # One more value makes a whole word of the last one, and no values no error.
        padded = functional.pad(values, (0, 1))
        _, largest = torch.frexp(padded.abs().max())
        exponent = (15 - largest).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
        even = len(values) + len(values) % 2
        halves = torch.ldexp(padded, exponent).half()[:even]
        return torch.cat([exponent.int()[None].view(torch.uint8), halves.view(torch.uint8)])

    def decode(self, message: torch.Tensor, count: int) -> torch.Tensor:
        """Return the values, float32 [count], of a `message` as `encode` makes it."""
        exponent = message[:4].view(torch.int32)[0]
        halves = message[4:].view(torch.float16)[:count]
        return torch.ldexp(halves.float(), -exponent)

"""Values in 8 or 4 bits, with a scale for each block."""

from __future__ import annotations

import torch

from parallel.costs import BLOCK


class Quantizer:
    """Rounds values to whole multiples of a scale, one for each block of 256, the largest of which it makes 7 or 127.

    A message is uint8: the blocks' scales, float32, then 8 or 4 bits a value. Values are rounded to nearest: whoever
    sends them keeps the errors for later.
    """

    def __init__(self, bits: int):
        """Args: bits: 8 or 4."""
        assert bits in (4, 8), bits
        self._bits, self._most = bits, (1 << (bits - 1)) - 1

    def bytes(self, count: int) -> int:
        """Length of the message of so many values."""
        blocks = -(-count // BLOCK)
        return blocks * (4 + BLOCK * self._bits // 8)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The message of float32 [count], finite."""
        blocks = self._blocks(values)
        scales = blocks.abs().amax(1, keepdim=True) / self._most
        # A block of zeros, or of values too small for float32's inverse, is all zeros.
        inverse = torch.where(scales > torch.finfo(torch.float32).tiny, 1 / scales, 0.0)
        codes = (blocks * inverse).round_().clamp_(-self._most, self._most).to(torch.int8)
        if self._bits == 4:
            low, high = (codes & 15).view(-1, BLOCK // 2, 2).unbind(2)
            codes = low | (high << 4)
        return torch.cat([scales.view(torch.uint8).flatten(), codes.view(torch.uint8).flatten()])

    def decode(self, message: torch.Tensor, count: int) -> torch.Tensor:
        """The values of a message, float32 [count]."""
        blocks = -(-count // BLOCK)
        scales, codes = message[: 4 * blocks].clone().view(torch.float32), message[4 * blocks :].view(torch.int8)
        if self._bits == 4:
            codes = torch.stack([(codes << 4) >> 4, codes >> 4], 1)  # shifts keep the sign
        return (codes.view(blocks, BLOCK).float() * scales[:, None]).flatten()[:count]

    @staticmethod
    def _blocks(values: torch.Tensor) -> torch.Tensor:
        fill = -len(values) % BLOCK
        return (torch.nn.functional.pad(values, (0, fill)) if fill else values).view(-1, BLOCK)

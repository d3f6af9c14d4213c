"""Stochastic rounding of float32 to float16, with random bits that are a function of what is rounded.

The bits of element i of a parameter's tensor are `bits32` of recipe/randomness.py, of (seed, step, slot,
parameter name, i), so they agree on every device, at any number of stages or replicas, and after resume.
"""

from __future__ import annotations

from typing import Dict, Tuple

import torch

from recipe.randomness import key

LARGEST = 65504.0  # largest finite float16
_CHUNK = 1 << 17  # elements rounded at a time on a CPU: the scratch tensors stay in the cores' caches
_EXPONENT = 0x7F800000
_SMALLEST_NORMAL = 113 << 23  # exponent bits of 2**-14; below it float16's spacing stays 2**-24
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)


class RoundingBits:
    """Random bits for the elements of named tensors that lie in one flat buffer.

    Those of element i are `bits32(draw, i)`; the upper half of the draw is that of key("rounding", seed, step,
    slot), the lower half that of key("rounding", name).
    """

    def __init__(self, layout: Dict[str, Tuple[int, int]], length: int, seed: int, device: torch.device):
        """Args: layout: name -> (first element, number of elements) in a buffer of `length` elements."""
        self._seed = seed
        # The inner of the two mixing rounds does not depend on the step: done once, 4 bytes an element.
        self._inner = torch.zeros(length, dtype=torch.int32, device=device)
        for name, (start, count) in layout.items():
            low = key("rounding", name) & 0xFFFFFFFF
            part = torch.arange(count, dtype=torch.int32, device=device).bitwise_xor_(_signed(low))
            _mix_(part, torch.empty_like(part))
            self._inner[start : start + count] = part

    def fill(self, bits: torch.Tensor, scratch: torch.Tensor, start: int, step: int, slot: str) -> None:
        """Writes the bits of elements start, start + 1, ... into `bits` (int32, as `scratch`).

        Args:
            step: number of the update, from 0.
            slot: what is rounded, e.g. "weight": each slot of an element gets bits of its own.
        """
        high = key("rounding", self._seed, step, slot) >> 32
        torch.add(self._inner[start : start + len(bits)], _signed(high), out=bits)
        _mix_(bits, scratch)


def round_stochastically(
    source: torch.Tensor, bits: RoundingBits, step: int, slot: str, *, out: torch.Tensor, keep: torch.Tensor
) -> None:
    """Rounds to one of the two neighbouring float16 values, up with the probability that makes the mean exact.

    Exact in expectation for normal and subnormal results up to 65504, to 2**-31 of the spacing (2**-25 from
    -2**-25 to 0); beyond 65504 it saturates. What float16 can represent is kept, and so is NaN.

    Args:
        source: float32 [n], the whole buffer that `bits` was made for.
        out: float16 [n], written.
        keep: bool [], where False `out` keeps its values (a step that is skipped without asking the device).
    """
    length, on_cpu = source.numel(), source.device.type == "cpu"
    if on_cpu and not keep:
        return
    chunk = min(_CHUNK, length) if on_cpu else length
    floats = [torch.empty(chunk, dtype=torch.float32, device=source.device) for _ in range(2)]
    ints = [torch.empty(chunk, dtype=torch.int32, device=source.device) for _ in range(2)]
    for start in range(0, length, chunk):
        size = min(chunk, length - start)
        value, whole, random, exponent = (tensor[:size] for tensor in (*floats, *ints))
        bits.fill(random, exponent, start, step, slot)
        rounded = _round(source[start : start + size], value, whole, random, exponent)
        part = out[start : start + size]
        part.copy_(rounded if on_cpu else torch.where(keep, rounded.to(torch.float16), part))


def _round(
    source: torch.Tensor, value: torch.Tensor, whole: torch.Tensor, random: torch.Tensor, exponent: torch.Tensor
) -> torch.Tensor:
    """`source` rounded by the bits in `random`, as float32. The other four are scratch: two float32, two int32."""
    torch.clamp(source, -LARGEST, LARGEST, out=value)
    # spacing = 2**(e - 10) for the exponent e of the value, no finer than 2**-24; it and its inverse are exact.
    torch.bitwise_and(value.view(torch.int32), _EXPONENT, out=exponent).clamp_min_(_SMALLEST_NORMAL)
    inverse = torch.rsub(exponent, 264 << 23).view(torch.float32)
    value.mul_(inverse)
    torch.floor(value, out=whole)
    threshold = value.sub_(whole).mul_(2.0**31).to(torch.int32)
    # Up where the upper 31 random bits are below the threshold: the sign of their difference is then -1, not 0.
    # A fraction that was rounded to 1 wraps around or saturates as int32: up, and only for values of nearly 0.
    random.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF).sub_(threshold).bitwise_right_shift_(31)
    whole.sub_(value.copy_(random))
    spacing = exponent.sub_(10 << 23).view(torch.float32)
    return whole.mul_(spacing)


def _mix_(x: torch.Tensor, scratch: torch.Tensor) -> None:
    """`mix32` of recipe/randomness.py in place on int32: a third of the memory traffic of int64."""
    for shift, multiplier in zip((16, 15), _MULTIPLIERS):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1)).mul_(multiplier)
    torch.bitwise_right_shift(x, 16, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word

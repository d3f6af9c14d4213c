"""Stochastic rounding of float32 to float16, with random bits that are a function of what is rounded.

A parameter's elements are taken in rows of 64. The bits of element i are

    mix32(bits32(draw, i // 64) + (i % 64) 0x9E3779B1)

with the functions of recipe/randomness.py and a draw made of (seed, step, slot) and of the parameter's name: so they
agree on every device and backend, at any number of stages or replicas, and after resume. Within a row the last of the
three mixing rounds counts up in steps of the golden ratio; the two others, one number a row, cost next to nothing.
"""

from __future__ import annotations

from typing import Dict, Optional, Tuple, Union

import torch

from optim.layout import ROW, Run, in_parts, in_rows
from recipe.randomness import key

LARGEST = 65504.0  # largest finite float16
_GOLDEN = 0x9E3779B1
_EXPONENT = 0x7F800000
_SMALLEST_NORMAL = 113 << 23  # exponent bits of 2**-14; below it float16's spacing stays 2**-24
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)


class RoundingBits:
    """Random bits for the elements of named tensors that lie in one flat buffer, each from the start of a row.

    rows: int32 [rows, 1], the first mixing round of each row's number, which does not depend on the step.
    lanes: float32 [ROW], whose bit patterns are the int32 numbers that are added for the elements of a row. Compiled
        for AVX2, a load of int32 goes through memory a second time, which took as long as all the rest; one of float32
        does not, and `view` costs nothing.
    """

    def __init__(self, places: Dict[str, Tuple[int, int]], length: int, seed: int, device: torch.device):
        """Args: places: name -> (first element, number of elements) in a buffer of `length` elements."""
        self._seed = seed
        self.rows = torch.zeros(length // ROW, 1, dtype=torch.int32, device=device)
        for name, (start, count) in places.items():
            assert start % ROW == 0, f"{name} begins at {start}, within a row"
            low = _signed(key("rounding", name) & 0xFFFFFFFF)
            part = torch.arange(-(-count // ROW), dtype=torch.int32, device=device).bitwise_xor_(low)
            self.rows[start // ROW :][: len(part), 0] = _mix_(part)
        self.lanes = torch.arange(ROW, dtype=torch.int32, device=device).mul_(_signed(_GOLDEN)).view(torch.float32)

    def draw(self, step: int, slot: str) -> int:
        """What `random_bits` adds to all rows, a signed 32-bit number.

        Args:
            step: number of the update, from 0.
            slot: what is rounded, e.g. "weight": each slot of an element gets bits of its own.
        """
        return _signed(key("rounding", self._seed, step, slot) >> 32)


def random_bits(rows: torch.Tensor, lanes: torch.Tensor, draw: Union[int, torch.Tensor]) -> torch.Tensor:
    """The bits of all elements in these rows of a RoundingBits, int32 [rows, ROW]. draw: its, also as int32 []."""
    return _mix_(_mix_(rows + draw) + lanes.view(torch.int32))


def rounded(source: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """One of the two float16 values next to each float32 one: up with the probability that makes the mean exact.

    Exact in expectation for normal results, and for subnormal ones to 2**-24 of the spacing; beyond 65504 it
    saturates. What float16 can represent is kept, and so is NaN.

    Args:
        bits: int32, random, of which the upper 24 are used.
    """
    value = source.clamp(-LARGEST, LARGEST)
    # spacing = 2**(e - 10) for the exponent e of the value, no finer than 2**-24; it and its inverse are exact.
    exponent = (value.view(torch.int32) & _EXPONENT).clamp_min_(_SMALLEST_NORMAL)
    value = value.mul_(torch.rsub(exponent, 264 << 23).view(torch.float32))
    whole = value.floor()
    # Up where 24 random bits, as a fraction, are below the value's: the sign of the difference is exact, as it always
    # is with floating point, so rounding upwards makes it 1 or 0. (A comparison takes three times as long.)
    random = torch.bitwise_right_shift(bits, 8).bitwise_and_(0xFFFFFF).to(torch.float32).mul_(2.0**-24)
    whole.add_(value.sub_(whole).sub_(random).ceil_())
    return whole.mul_(exponent.sub_(10 << 23).view(torch.float32)).to(torch.float16)


def round_stochastically(
    source: torch.Tensor,
    bits: RoundingBits,
    step: int,
    slot: str,
    *,
    out: torch.Tensor,
    keep: torch.Tensor,
    run: Run = in_parts,
) -> None:
    """Writes what `rounded` makes of a whole buffer.

    Args:
        source: float32 [n], the buffer that `bits` was made for.
        out: float16 [n], written.
        keep: bool [], where False `out` keeps its values (a step that is skipped without asking the device).
        run: of the pass.
    """
    on_cpu = source.device.type == "cpu"
    if on_cpu and not keep:
        return
    rows = (in_rows(source), in_rows(out), bits.rows)
    run(_round_rows, rows, (bits.lanes, (bits.draw(step, slot),), None if on_cpu else keep))


def _round_rows(
    source: torch.Tensor,
    out: torch.Tensor,
    bit_rows: torch.Tensor,
    lanes: torch.Tensor,
    draws: tuple,
    keep: Optional[torch.Tensor],
) -> None:
    new = rounded(source, random_bits(bit_rows, lanes, draws[0]))
    out.copy_(new if keep is None else torch.where(keep, new, out))


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """`mix32` of recipe/randomness.py in place on int32."""
    for shift, multiplier in zip((16, 15), _MULTIPLIERS):
        x.bitwise_xor_(torch.bitwise_right_shift(x, shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(multiplier)
    return x.bitwise_xor_(torch.bitwise_right_shift(x, 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word

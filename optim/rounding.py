"""Stochastic rounding of float32 to float16, with random bits that are a function of what is rounded.

A parameter's elements are taken in rows of 64. Element i has one random word a step,

    mix32(bits32(draw, i // 64) + (i % 64) 0x9E3779B1)

with the functions of recipe/randomness.py and a draw made of (seed, step) and of the parameter's name: so the words
agree on every device and backend, at any number of stages or replicas, and after resume.

A float32 value has 13 more bits of mantissa than a float16 one, so 13 random bits make the mean exact: those at the top
of the word round the weight, those at the bottom the momentum. Adding them to the 13 bits and cutting these off carries
into the result with the probability that is wanted.
"""

from __future__ import annotations

from typing import Callable, Dict, Optional, Tuple

import torch

from optim.layout import ROW, Run, in_parts, in_rows
from recipe.randomness import key

LARGEST = 65504.0  # largest finite float16
VERSION = 2  # of the random bits and of what is made of them; in checkpoints. 1: 24 bits for each slot of an element
# The smallest normal float16. The spacing is 2**-24 below it, too; that of float32 numbers just above it is 2**-37.
_SMALLEST_NORMAL = 2.0**-14
_GOLDEN = 0x9E3779B1
_CUT = 0x1FFF  # the 13 bits of a float32 that float16 has not
_SIGN, _MAGNITUDE, _NAN = -(2**31), 2**31 - 1, 0x7FC00000
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)


def upper(words: torch.Tensor) -> torch.Tensor:
    """The 13 bits of random words, int32, that round weights, as int32 in [0, 2**13)."""
    return torch.bitwise_right_shift(words, 19).bitwise_and_(_CUT)


def lower(words: torch.Tensor) -> torch.Tensor:
    """The 13 bits that round momentum, in [0, 2**13)."""
    return words & _CUT


_SHARING = {"weight": upper, "momentum_buffer": lower}


class RoundingBits:
    """Random bits for the elements of named tensors that lie in one flat buffer, each from the start of a row.

    rows: int32 [rows, 1], the first mixing round of each row's number, which does not depend on the step.
    lanes: int32 [ROW], what is added for the elements of a row.
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
        self.lanes = torch.arange(ROW, dtype=torch.int32, device=device).mul_(_signed(_GOLDEN))

    def draw(self, step: int, slot: str) -> Tuple[int, Callable[[torch.Tensor], torch.Tensor]]:
        """What `random_bits` adds to all rows, a signed 32-bit number, and which bits of the words round this slot.

        step: number of the update, from 0. "weight" and "momentum_buffer" share words, any other slot has its own.
        """
        words = () if slot in _SHARING else (slot,)
        return _signed(key("rounding", self._seed, step, *words) >> 32), _SHARING.get(slot, upper)


def random_bits(rows: torch.Tensor, lanes: torch.Tensor, draw: int) -> torch.Tensor:
    """The words of all elements in these rows of a RoundingBits, int32 [rows, ROW]. draw: its number."""
    return _mix_(_mix_(rows + draw) + lanes)


def rounded(source: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """One of the two float16 values next to each float32 one, chosen so that the mean is exact.

    Exact in expectation for normal results. Below 2**-14, where float16 has subnormal numbers, the value is first
    rounded to a multiple of 2**-37, as float32 does just above 2**-14: at most 2**-14 of the spacing off. Beyond 65504
    the result saturates. What float16 can represent is kept, and so is NaN. noise: int32, uniform in [0, 2**13).
    """
    bits = source.view(torch.int32)
    magnitude = (bits & _MAGNITUDE).view(torch.float32)
    magnitude = torch.where(magnitude > LARGEST, LARGEST, magnitude)  # NaN stays, which a minimum takes more to do
    # Moved up by 2**-14, subnormal numbers are normal ones of the right spacing.
    moved = torch.where(magnitude < _SMALLEST_NORMAL, _SMALLEST_NORMAL, 0.0)
    # A NaN with all bits set, as GPUs make them, must not carry into the sign.
    cut = (magnitude + moved).view(torch.int32).clamp_max_(_NAN).add_(noise).bitwise_and_(~_CUT)
    magnitude = cut.view(torch.float32).sub_(moved)
    return (magnitude.view(torch.int32) | (bits & _SIGN)).view(torch.float32).to(torch.float16)


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
    """Write into `out`, float16 [n], what `rounded` makes of a buffer, float32 [n], that `bits` was made for.

    keep: bool [], where False `out` keeps its values (a step that is skipped without asking the device).
    """
    on_cpu = source.device.type == "cpu"
    if on_cpu and not keep:
        return
    draw, chosen = bits.draw(step, slot)
    rows = (in_rows(source), in_rows(out), bits.rows)
    run(round_rows, rows, (bits.lanes, draw, chosen, None if on_cpu else keep))


def round_rows(source, out, bit_rows, lanes, draw: int, chosen: Callable, keep: Optional[torch.Tensor]) -> None:
    """The pass of `round_stochastically` over rows."""
    new = rounded(source, chosen(random_bits(bit_rows, lanes, draw)))
    out.copy_(new if keep is None else torch.where(keep, new, out))


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """`mix32` of recipe/randomness.py in place on int32."""
    for shift, multiplier in zip((16, 15), _MULTIPLIERS):
        x.bitwise_xor_(torch.bitwise_right_shift(x, shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(multiplier)
    return x.bitwise_xor_(torch.bitwise_right_shift(x, 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word

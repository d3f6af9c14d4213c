"""Stochastic rounding of float32 to float16, with random bits that follow from what is rounded.

A parameter's elements are taken in rows of 64. Element i has one random word an update,

    mix32(bits32(draw, i // 64) + (i % 64) 0x9E3779B1)

with the functions of recipe/randomness.py and a draw made of (seed, index of the update) and of the
parameter's name: so the words agree on every device and backend, at any number of stages or
replicas, and after resume.

A float32 value has 13 more bits of mantissa than a float16 one, so 13 random bits make the mean
exact: those at the top of the word round the weight, those at the bottom the momentum. Adding them
to the 13 bits and cutting these off carries into the result with the probability that is wanted.
"""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch

from optim.layout import ROW, Run, in_parts, in_rows
from recipe.randomness import key

LARGEST = 65504.0  # largest finite float16
# Of the random bits and of what is made of them; in checkpoints. Version 1 had 24 bits for each
# slot of an element.
VERSION = 2
# The smallest normal float16. The spacing is 2**-24 below it, too; that of float32 numbers just
# above it is 2**-37.
_SMALLEST_NORMAL = 2.0**-14
_GOLDEN = 0x9E3779B1
_CUT = 0x1FFF  # the 13 bits of a float32 that float16 has not
_SIGN = -(2**31)
_MAGNITUDE = 2**31 - 1
_NAN = 0x7FC00000

Noise = Callable[[torch.Tensor], torch.Tensor]  # takes 13 bits out of random words


def upper(words: torch.Tensor) -> torch.Tensor:
    """Return the 13 bits of random `words`, int32, that round weights: int32 in [0, 2**13)."""
    return torch.bitwise_right_shift(words, 19).bitwise_and_(_CUT)


def lower(words: torch.Tensor) -> torch.Tensor:
    """Return the 13 bits of `words` that round momentum: int32 in [0, 2**13)."""
    return words & _CUT


# LARS rounds two numbers of an element in an update; one random word has enough bits for both.
_SHARING: Dict[str, Noise] = {"weight": upper, "momentum_buffer": lower}


class RoundingBits:
    """Random bits for named tensors that lie in one flat buffer, each from the start of a row.

    rows: int32 [rows, 1], the first mixing round of each row's number, which does not depend on the
        update.
    lanes: int32 [ROW], what is added for the elements of a row.
    """

    def __init__(
        self,
        places: Dict[str, Tuple[int, int]],
        length: int,
        seed: int,
        device: torch.device,
    ):
        """
        Args:
            places: name -> (first element, number of elements) in the buffer.
            length: elements of the buffer.
            seed: of the run.
            device: of the buffer.
        """
        self._seed = seed
        self.rows = torch.zeros(length // ROW, 1, dtype=torch.int32, device=device)
        # A row is numbered within its parameter, and the name is mixed in: where the parameter lies
        # in a buffer, which depends on the stages, has no part in it.
        for name, (start, count) in places.items():
            assert start % ROW == 0, f"{name} begins at {start}, within a row"
            low = _signed(key("rounding", name) & 0xFFFFFFFF)
            rows = -(-count // ROW)
            numbers = torch.arange(rows, dtype=torch.int32, device=device)
            mixed = _mix_(numbers.bitwise_xor_(low))
            self.rows[start // ROW :][:rows, 0] = mixed
        lanes = torch.arange(ROW, dtype=torch.int32, device=device)
        self.lanes = lanes.mul_(_signed(_GOLDEN))

    def draw(self, index: int, slot: str) -> Tuple[int, Noise]:
        """Return the draw of an update, and which bits of the words round a slot.

        Args:
            index: of the update, from 0.
            slot: "weight" and "momentum_buffer" share words, any other slot has its own.

        Returns:
            What `random_bits` adds to all rows, a signed 32-bit number; and `upper` or `lower`.
        """
        separate = () if slot in _SHARING else (slot,)
        draw = _signed(key("rounding", self._seed, index, *separate) >> 32)
        return draw, _SHARING.get(slot, upper)


def random_bits(rows: torch.Tensor, lanes: torch.Tensor, draw: int) -> torch.Tensor:
    """Return the random words of all elements in some rows, int32 [rows, ROW].

    Args:
        rows: of a RoundingBits, or some of them.
        lanes: of the same.
        draw: its number for the update.
    """
    return _mix_(_mix_(rows + draw) + lanes)


def rounded(source: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round each value to one of the two float16 values next to it, so that the mean is exact.

    It is exact in expectation for normal results. Below 2**-14, where float16 has subnormal
    numbers, the value is first rounded to a multiple of 2**-37, as float32 does just above 2**-14: at most
    2**-14 of the spacing off. Beyond 65504 the result saturates. Values that float16 can represent
    are kept, and so is NaN.

    Args:
        source: float32.
        noise: int32, of the same shape, uniform in [0, 2**13).

    Returns:
        float16.
    """
    bits = source.view(torch.int32)
    magnitude = (bits & _MAGNITUDE).view(torch.float32)
    # NaN stays, for which a minimum would take more.
    magnitude = torch.where(magnitude > LARGEST, LARGEST, magnitude)
    # Moved up by 2**-14, subnormal numbers are normal ones of the right spacing.
    moved = torch.where(magnitude < _SMALLEST_NORMAL, _SMALLEST_NORMAL, 0.0)
    # A NaN with all bits set, as GPUs make them, must not carry into the sign.
    cut = (magnitude + moved).view(torch.int32).clamp_max_(_NAN)
    cut.add_(noise).bitwise_and_(~_CUT)
    # Exact: both are multiples of float16's spacing, and what remains fits into its mantissa.
    magnitude = cut.view(torch.float32).sub_(moved)
    result = magnitude.view(torch.int32) | (bits & _SIGN)
    return result.view(torch.float32).to(torch.float16)


def round_stochastically(
    source: torch.Tensor,
    bits: RoundingBits,
    index: int,
    slot: str,
    *,
    out: torch.Tensor,
    keep: torch.Tensor,
    run: Run = in_parts,
) -> None:
    """Write a buffer into another one, rounded by `rounded`.

    Args:
        source: float32 [length].
        bits: made for this buffer.
        index: of the update, from 0.
        slot: see `RoundingBits.draw`.
        out: float16 [length].
        keep: bool [], where False `out` keeps its values: an update that is skipped without waiting
            for the device.
        run: runs the pass.
    """
    # A CPU need not wait for `keep`, so it skips the pass instead of masking it.
    on_cpu = source.device.type == "cpu"
    if on_cpu and not keep:
        return
    draw, noise = bits.draw(index, slot)
    rows = RoundRows(in_rows(source), in_rows(out), bits.rows)
    run(round_rows, rows, RoundConstants(bits.lanes, draw, noise, None if on_cpu else keep))


class RoundRows(NamedTuple):
    """Rows of `round_rows`: float32 [rows, ROW], float16 [rows, ROW] and int32 [rows, 1]."""

    source: torch.Tensor
    out: torch.Tensor
    bits: torch.Tensor


class RoundConstants(NamedTuple):
    """The same for all rows: see `random_bits` and `round_stochastically`. keep: None is True."""

    lanes: torch.Tensor
    draw: int
    noise: Noise
    keep: Optional[torch.Tensor]


def round_rows(rows: RoundRows, constants: RoundConstants) -> None:
    """Make the pass of `round_stochastically` over `rows`, with `constants`."""
    words = random_bits(rows.bits, constants.lanes, constants.draw)
    write(rows.out, rounded(rows.source, constants.noise(words)), constants.keep)


def write(target: torch.Tensor, values: torch.Tensor, keep: Optional[torch.Tensor]) -> None:
    """Write values into a tensor, in its dtype.

    Args:
        target: the tensor.
        values: of its shape.
        keep: bool [], where False it keeps its values; None is True.
    """
    # A mask, where a branch would make the host wait for the device.
    if keep is not None:
        values = torch.where(keep, values.to(target.dtype), target)
    target.copy_(values)


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """Apply `mix32` of recipe/randomness.py in place to int32."""
    # Torch has no uint32 to compute with: int32 products have the same low bits, shifts need care.
    for shift, multiplier in ((16, 0x7FEB352D), (15, _signed(0x846CA68B))):
        x.bitwise_xor_(_logical_right_shift(x, shift)).mul_(multiplier)
    return x.bitwise_xor_(_logical_right_shift(x, 16))


def _logical_right_shift(x: torch.Tensor, shift: int) -> torch.Tensor:
    """Shift int32 to the right with zeros from the left, where torch repeats the sign."""
    return torch.bitwise_right_shift(x, shift).bitwise_and_((1 << (32 - shift)) - 1)


def _signed(word: int) -> int:
    """Return the int32 that has the bits of a uint32."""
    return word - 2**32 if word >= 2**31 else word

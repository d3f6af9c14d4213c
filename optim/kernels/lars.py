"""LARS on CUDA, in Triton: one launch for each pass over the memory, and small ones between them.

The same formulas as optim/lars_update.py, and the same random bits and rounding as
optim/rounding.py to the bit. A program takes a few rows of one parameter. What it adds up is merged
by parameter in a fixed order, without atomics: a step repeats to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional, Tuple

import torch
import triton
import triton.language as tl

from optim.lars_update import LarsUpdate, Sums
from optim.layout import ROW
from optim.norms import LARGEST, SMALLEST
from optim.optimizer_update import Target

if TYPE_CHECKING:
    from optim.lars import LARS

_ROWS = 32  # of a program: 2,048 elements
_MERGED = 128  # programs whose sums are read at a time
_SUMS = 4  # of g^2, w^2, u^2, and of what is not finite
_SMALLEST = tl.constexpr(SMALLEST)
_LARGEST = tl.constexpr(LARGEST)
_LARGEST_HALF = tl.constexpr(65504.0)
_SMALLEST_NORMAL_HALF = tl.constexpr(2.0**-14)


class TritonLarsUpdate(LarsUpdate):
    """LarsUpdate with its passes as Triton kernels."""

    def __init__(self, lars: LARS, target: Target):
        """
        Args:
            lars, target: see LarsUpdate.
        """
        super().__init__(lars, target)
        # Of each program: number of the parameter, first row, row behind the parameter's last. A
        # program has rows of one parameter only, so what it adds up is one parameter's.
        programs: List[Tuple[int, int, int]] = []
        firsts: List[int] = []  # first program of each parameter, and the number of programs
        for owner, rows in enumerate(self._layout.rows):
            firsts.append(len(programs))
            for first in range(rows.start, rows.stop, _ROWS):
                programs.append((owner, first, rows.stop))
        self._count = len(programs)
        firsts.append(self._count)
        device = self._layout.device
        table = torch.tensor(programs, dtype=torch.int32, device=device).T.contiguous()
        self._owners, self._first_rows, self._end_rows = table
        self._firsts = torch.tensor(firsts, dtype=torch.int32, device=device)

    def _sums(self, scale: torch.Tensor) -> Sums:
        # Squares over the rows of each program, then over the programs of each parameter.
        by_momentum = self._rules.by_momentum
        partial = torch.empty(_SUMS, self._count, dtype=torch.float64, device=scale.device)
        _add_squares[(self._count,)](
            gradients=self._buffers.gradients,
            weights=self._buffers.weights,
            momenta=self._buffers.slots["momentum_buffer"],
            decays=self._rules.decay,
            scale=scale,
            owners=self._owners,
            firsts=self._first_rows,
            ends=self._end_rows,
            partial=partial,
            programs=self._count,
            MU=self._rules.mu,
            MOMENTUM_FORM=by_momentum,
            ROWS=_ROWS,
            LANES=ROW,
        )
        gradient, weight, direction, wrong = self._merged(partial)
        # One launch, where operations of torch would be several for one bit.
        finite = torch.empty((), dtype=torch.bool, device=wrong.device)
        _none_wrong[(1,)](wrong, finite, len(wrong), triton.next_power_of_2(len(wrong)))
        return Sums(gradient, weight, direction if by_momentum else None, finite)

    def _ratios(self, weight: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        rules = self._rules
        ratios = torch.empty(len(weight), device=weight.device)
        _trust_ratios[(triton.cdiv(len(weight), _MERGED),)](
            weights=weight,
            directions=direction,
            adapted=rules.adapt,
            coefficients=rules.coefficient,
            eps=rules.eps,
            decays=rules.decay,
            ratios=ratios,
            parameters=len(weight),
            MOMENTUM_FORM=rules.by_momentum,
            BLOCK=_MERGED,
        )
        return ratios

    def _step(
        self,
        index: int,
        scale: torch.Tensor,
        lr: float,
        ratios: torch.Tensor,
        keep: Optional[torch.Tensor],
        measure: bool,
    ) -> Optional[torch.Tensor]:
        rules = self._rules
        buffers = self._buffers
        bits = self._bits
        # One kernel for both: it always reads a mask, and always stores sums, which are few.
        if keep is None:
            keep = torch.ones((), dtype=torch.bool, device=scale.device)
        partial = torch.empty(1, self._count, device=scale.device)
        _step[(self._count,)](
            gradients=buffers.gradients,
            weights=buffers.weights,
            momenta=buffers.slots["momentum_buffer"],
            working=buffers.working,
            ratios=ratios,
            lr=lr,
            lr_scales=rules.lr_scale,
            decays=rules.decay,
            scale=scale,
            keep=keep,
            bit_rows=None if bits is None else bits.rows,
            draw=0 if bits is None else bits.draw(index, "weight")[0],
            owners=self._owners,
            firsts=self._first_rows,
            ends=self._end_rows,
            partial=partial,
            MU=rules.mu,
            MOMENTUM_FORM=rules.by_momentum,
            NESTEROV=rules.nesterov,
            STOCHASTIC=bits is not None,
            COPIED=buffers.working is not buffers.weights,
            ROWS=_ROWS,
            LANES=ROW,
        )
        return self._merged(partial)[0] if measure else None

    def _merged(self, partial: torch.Tensor) -> torch.Tensor:
        """Add up by parameter what the programs did, [sums, count]: float64 [sums, parameters]."""
        sums = len(partial)
        parameters = len(self._firsts) - 1
        out = torch.empty(sums, parameters, dtype=torch.float64, device=partial.device)
        _merge[(sums * parameters,)](
            partial=partial,
            firsts=self._firsts,
            out=out,
            programs=self._count,
            parameters=parameters,
            BLOCK=_MERGED,
        )
        return out


@triton.jit
def _add_squares(
    # Buffers.
    gradients,  # float32 [length]
    weights,  # [length]
    momenta,  # [length]
    # Of each parameter, and the factor on all gradients.
    decays,  # float32 [parameters]
    scale,  # float32 []
    # Of each program.
    owners,  # int32 [programs]: number of the parameter
    firsts,  # int32 [programs]: first row
    ends,  # int32 [programs]: the row behind the parameter's last
    # Sums of g^2, of w^2 and of u^2; 0, or NaN where a gradient is not finite.
    partial,  # float64 [4, programs], written
    # Sizes.
    programs,
    # Constants.
    MU: tl.constexpr,
    MOMENTUM_FORM: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    LANES: tl.constexpr,  # elements of a row
):
    """Make the pass `sum_rows` of optim/lars_update.py."""
    # Read rows of one parameter, [ROWS, LANES]. Places have 64 bits: buffers may be longer than
    # 2^31 elements. Rows of the next parameter, which a last program would reach, are masked.
    program = tl.program_id(0)
    rows = tl.load(firsts + program) + tl.arange(0, ROWS)
    mask = (rows < tl.load(ends + program))[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    places = rows.to(tl.int64)[:, None] * LANES + lanes
    g = tl.load(gradients + places, mask=mask, other=0.0)
    g *= tl.load(scale)
    w = tl.load(weights + places, mask=mask, other=0.0).to(tl.float32)

    # Store a sum of each kind. The second form's direction is not the gradient.
    tl.store(partial + program, _squares(g))
    tl.store(partial + programs + program, _squares(w))
    if MOMENTUM_FORM:
        m = tl.load(momenta + places, mask=mask, other=0.0).to(tl.float32)
        average = m * MU + g * (1 - MU)
        decay = tl.load(decays + tl.load(owners + program))
        u = average + decay * w
        tl.store(partial + 2 * programs + program, _squares(u))
    else:
        tl.store(partial + 2 * programs + program, 0.0)
    # g - g is 0, or NaN where g is infinite or NaN: finiteness for no further read.
    tl.store(partial + 3 * programs + program, _total(g - g))


@triton.jit
def _squares(values):
    """Add up squares, float64: made in float32, and in float64 where that may be wrong.

    The rule is that of optim/norms.py.
    """
    total = _total(values * values).to(tl.float64)
    # In float64 only where float32 may be wrong, as it takes longer. NaN is neither: it stays.
    if (total < _SMALLEST) | (total > _LARGEST):
        exact = values.to(tl.float64)
        total = _total(exact * exact)
    return total


@triton.jit
def _merge(
    # Tensors.
    partial,  # [sums, programs]
    firsts,  # int32 [parameters + 1]: first program of each parameter, and the number of programs
    out,  # float64 [sums, parameters], written
    # Sizes.
    programs,
    parameters,
    # Constants.
    BLOCK: tl.constexpr,  # programs at a time
):
    """Add up one of the sums of one parameter over its programs, in a fixed order."""
    # Which sum, of which parameter, and the programs that have added parts of it.
    number = tl.program_id(0) // parameters
    owner = tl.program_id(0) % parameters
    first = tl.load(firsts + owner)
    end = tl.load(firsts + owner + 1)

    # A lane adds every BLOCK-th one, and lanes are added last: an order that depends on shapes
    # alone.
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(first, end, BLOCK):
        program = start + tl.arange(0, BLOCK)
        sums = tl.load(partial + number * programs + program, mask=program < end, other=0.0)
        total += sums.to(tl.float64)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _none_wrong(
    # Tensors.
    wrong,  # float64 [parameters]: 0 or NaN
    finite,  # bool [], written
    # Sizes.
    parameters,
    # Constants.
    BLOCK: tl.constexpr,  # a power of two, not less than `parameters`
):
    """Store whether no parameter has a sum `wrong` that is NaN."""
    parameter = tl.arange(0, BLOCK)
    sums = tl.load(wrong + parameter, mask=parameter < parameters, other=0.0)
    total = tl.sum(sums, 0)
    # NaN is the one number that is not equal to itself.
    tl.store(finite, total == total)


@triton.jit
def _trust_ratios(
    # Sums of squares.
    weights,  # float64 [parameters]
    directions,  # float64 [parameters]
    # Hyperparameters.
    adapted,  # bool [parameters]: whether there is a ratio
    coefficients,  # float64 [parameters]
    eps,  # float64 [parameters]
    decays,  # float32 [parameters]
    # The result.
    ratios,  # float32 [parameters], written
    # Sizes.
    parameters,
    # Constants.
    MOMENTUM_FORM: tl.constexpr,
    BLOCK: tl.constexpr,  # parameters of a program
):
    """Make `Rules.ratios` of optim/lars_update.py."""
    parameter = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = parameter < parameters

    # Norms. Lanes without a parameter compute with 1, which neither divides by 0 nor is NaN.
    weight = tl.sqrt(tl.load(weights + parameter, mask=mask, other=1.0))
    direction = tl.sqrt(tl.load(directions + parameter, mask=mask, other=1.0))

    # What divides, and the ratio without norms, which the two forms define in other ways.
    coefficient = tl.load(coefficients + parameter, mask=mask, other=1.0)
    below = direction + tl.load(eps + parameter, mask=mask, other=1.0)
    if MOMENTUM_FORM:
        without_norm = coefficient
    else:
        below += tl.load(decays + parameter, mask=mask, other=0.0) * weight
        without_norm = tl.full((BLOCK,), 1.0, tl.float64)

    # The ratio, at most float32's largest number: infinity times a gradient of 0 would be NaN.
    positive = (weight > 0) & (direction > 0)
    ratio = coefficient * weight / tl.where(positive, below, 1.0)
    ratio = tl.where(positive, ratio, without_norm)
    adapt = tl.load(adapted + parameter, mask=mask, other=0) != 0
    ratio = tl.minimum(tl.where(adapt, ratio, 1.0), _LARGEST)
    tl.store(ratios + parameter, ratio.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["lr", "draw"])  # they change from update to update
def _step(
    # Buffers.
    gradients,  # float32 [length]
    weights,  # [length], written
    momenta,  # [length], written
    working,  # [length], written with COPIED: the module's parameters
    # Of the rates.
    ratios,  # float32 [parameters]
    lr,  # a number
    lr_scales,  # float64 [parameters]
    decays,  # float32 [parameters]
    # Of all gradients.
    scale,  # float32 []
    keep,  # bool []: whether anything may change
    # Random bits with STOCHASTIC.
    bit_rows,  # int32 [rows]; else None
    draw,  # of the update, int32
    # Of each program.
    owners,  # int32 [programs]: number of the parameter
    firsts,  # int32 [programs]: first row
    ends,  # int32 [programs]: the row behind the parameter's last
    # Sums of squares of what is subtracted.
    partial,  # float32 [programs], written
    # Constants.
    MU: tl.constexpr,
    MOMENTUM_FORM: tl.constexpr,
    NESTEROV: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    COPIED: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
    LANES: tl.constexpr,  # elements of a row
):
    """Make the pass `step_rows` of optim/lars_update.py."""
    # Read rows of one parameter, [ROWS, LANES], as _add_squares does.
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    rows = tl.load(firsts + program) + tl.arange(0, ROWS)
    within = rows < tl.load(ends + program)
    lanes = tl.arange(0, LANES)[None, :]
    places = rows.to(tl.int64)[:, None] * LANES + lanes
    mask = within[:, None]
    g = tl.load(gradients + places, mask=mask, other=0.0)
    g *= tl.load(scale)
    w = tl.load(weights + places, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(momenta + places, mask=mask, other=0.0).to(tl.float32)
    m *= MU

    # The parameter's rate: made in float64 of a rate that Triton passes as float32, and at most
    # float32's largest number.
    ratio = tl.load(ratios + owner)
    rate = lr * tl.load(lr_scales + owner) * ratio
    rate = tl.minimum(rate, _LARGEST).to(tl.float32)
    decay = tl.load(decays + owner)

    # Step: see LARS for the three forms.
    if MOMENTUM_FORM:
        m += g * (1 - MU)
        subtracted = (m + decay * w) * rate
    else:
        added = (g + decay * w) * rate
        m += added
        subtracted = m
        if NESTEROV:
            subtracted = m * MU + added
    tl.store(partial + program, _total(subtracted * subtracted))
    w = w - subtracted

    # Round: one random word has the bits of a weight at its top, those of a momentum at its bottom.
    if STOCHASTIC:
        bits = tl.load(bit_rows + rows, mask=within, other=0)[:, None]
        words = _random_bits(bits, lanes, draw)
        w = _rounded(w, words >> 19)
        m = _rounded(m, words & 0x1FFF)

    # Write. The module's parameters are copies of what is stored, rounding among it: a run that
    # resumes from the weights must compute with the same ones.
    written = mask & (tl.load(keep) != 0)
    stored = w.to(weights.dtype.element_ty)
    tl.store(weights + places, stored, mask=written)
    tl.store(momenta + places, m.to(momenta.dtype.element_ty), mask=written)
    if COPIED:
        copied = stored.to(tl.float32).to(working.dtype.element_ty)
        tl.store(working + places, copied, mask=written)


@triton.jit
def _total(values):
    return tl.sum(tl.sum(values, 1), 0)


@triton.jit
def _random_bits(rows, lanes, draw):
    """Make `random_bits` of optim/rounding.py: rows [ROWS, 1], lanes [1, LANES]."""
    starts = _mix((rows + draw).to(tl.uint32, bitcast=True))
    return _mix(starts + lanes.to(tl.uint32) * 0x9E3779B1)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(source, noise):
    """Make `rounded` of optim/rounding.py; the result is still float32."""
    bits = source.to(tl.uint32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    # By comparison, which is false for NaN: a NaN stays.
    magnitude = tl.where(magnitude > _LARGEST_HALF, _LARGEST_HALF, magnitude)
    # Moved up by 2**-14, subnormal numbers are normal ones of the right spacing.
    moved = tl.where(magnitude < _SMALLEST_NORMAL_HALF, _SMALLEST_NORMAL_HALF, 0.0)
    cut = (magnitude + moved).to(tl.uint32, bitcast=True)
    # A NaN with all bits set must not carry into the sign.
    cut = (tl.where(cut > 0x7FC00000, 0x7FC00000, cut) + noise) & 0xFFFFE000
    magnitude = cut.to(tl.float32, bitcast=True) - moved
    result = magnitude.to(tl.uint32, bitcast=True) | (bits & 0x80000000)
    return result.to(tl.float32, bitcast=True)

"""LARS on CUDA, in Triton: one launch for each pass over the memory, and small ones between them for sums and ratios.

The same formulas as optim/lars_update.py, and the same random bits and rounding as optim/rounding.py to the bit. A
program takes a few rows of one parameter. What it adds up is merged by parameter in a fixed order, without atomics: a
step repeats to the bit.
"""

from __future__ import annotations

from typing import List, Optional

import torch
import triton
import triton.language as tl

from optim.lars_update import LarsUpdate
from optim.layout import ROW
from optim.norms import LARGEST, SMALLEST

_ROWS = 32  # of a program: 2,048 elements
_MERGED = 128  # programs whose sums are read at a time
_SMALLEST, _LARGEST = tl.constexpr(SMALLEST), tl.constexpr(LARGEST)
_SUMS = 4  # of g^2, w^2, u^2, and of what is not finite


class TritonLarsUpdate(LarsUpdate):
    """LarsUpdate with its passes as Triton kernels.

    _programs: int32 [count] each, of the programs: number of the parameter, first row, row behind the parameter's last.
    _firsts: first program of each parameter, and `count`.
    """

    def __init__(self, lars, target):
        super().__init__(lars, target)
        layout = target.layout
        edges = [start // ROW for start, _ in layout.places.values()] + [layout.length // ROW]
        programs = [
            (owner, row, end)
            for owner, (first, end) in enumerate(zip(edges, edges[1:]))
            for row in range(first, end, _ROWS)
        ]
        self._count = len(programs)
        self._programs = tuple(torch.tensor(programs, dtype=torch.int32, device=layout.device).T.contiguous())
        numbers = torch.arange(len(edges), dtype=torch.int32, device=layout.device)
        self._firsts = torch.searchsorted(self._programs[0], numbers).int()

    def _sums(self, scale: torch.Tensor) -> List[torch.Tensor]:
        buffers, form = self._buffers, self._rules.by_momentum
        partial = torch.empty(_SUMS, self._count, dtype=torch.float64, device=scale.device)
        _add_squares[(self._count,)](
            *(buffers.gradients, buffers.weights, buffers.slots["momentum_buffer"]),
            *(self._rules.decay, scale, *self._programs, partial, self._count),
            *(self._rules.mu, form, _ROWS, ROW),
        )
        gradient, weight, direction, wrong = self._merged(partial)
        finite = torch.empty((), dtype=torch.bool, device=wrong.device)
        _none_wrong[(1,)](wrong, finite, len(wrong), triton.next_power_of_2(len(wrong)))
        return [gradient, weight, finite, *([direction] if form else [])]

    def _ratios(self, weight: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        rules, ratios = self._rules, torch.empty(len(weight), device=weight.device)
        _trust_ratios[(triton.cdiv(len(weight), _MERGED),)](
            *(weight, direction, rules.adapt, rules.coefficient, rules.eps, rules.decay, ratios, len(weight)),
            *(rules.by_momentum, _MERGED),
        )
        return ratios

    def _step(
        self, step: int, scale: torch.Tensor, lr: float, ratios: torch.Tensor, keep: Optional[torch.Tensor], measure
    ) -> Optional[torch.Tensor]:
        rules, buffers, bits = self._rules, self._buffers, self._bits
        if keep is None:
            keep = torch.ones((), dtype=torch.bool, device=scale.device)
        rows, draw = (None, 0) if bits is None else (bits.rows, bits.draw(step, "weight")[0])
        partial = torch.empty(1, self._count, device=scale.device)
        _step[(self._count,)](
            *(buffers.gradients, buffers.weights, buffers.slots["momentum_buffer"], buffers.working),
            *(ratios, lr, rules.lr_scale, rules.decay, scale, keep, rows, draw, *self._programs, partial),
            *(rules.mu, rules.by_momentum, rules.nesterov, bits is not None, buffers.working is not buffers.weights),
            *(_ROWS, ROW),
        )
        return self._merged(partial)[0] if measure else None

    def _merged(self, partial: torch.Tensor) -> torch.Tensor:
        """Sums of what the programs added up, [sums, count], by parameter: float64 [sums, parameters]."""
        sums, parameters = len(partial), len(self._firsts) - 1
        out = torch.empty(sums, parameters, dtype=torch.float64, device=partial.device)
        _merge[(sums * parameters,)](partial, self._firsts, out, self._count, parameters, _MERGED)
        return out


@triton.jit
def _add_squares(
    gradients, weights, momenta, decays, scale, owners, firsts, ends, partial, programs,
    MU: tl.constexpr, MOMENTUM_FORM: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows = tl.load(firsts + program) + tl.arange(0, ROWS)
    mask = (rows < tl.load(ends + program))[:, None]
    places = rows.to(tl.int64)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    g = tl.load(gradients + places, mask=mask, other=0.0) * tl.load(scale)
    w = tl.load(weights + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(partial + program, _squares(g))
    tl.store(partial + programs + program, _squares(w))
    if MOMENTUM_FORM:
        m = tl.load(momenta + places, mask=mask, other=0.0).to(tl.float32) * MU + g * (1 - MU)
        u = m + tl.load(decays + tl.load(owners + program)) * w
        tl.store(partial + 2 * programs + program, _squares(u))
    else:
        tl.store(partial + 2 * programs + program, 0.0)
    tl.store(partial + 3 * programs + program, _total(g - g))


@triton.jit
def _squares(values):
    """Sum of squares, float64: made in float32, and in float64 where that may be wrong, as in optim/norms.py."""
    total = _total(values * values).to(tl.float64)
    if (total < _SMALLEST) | (total > _LARGEST):
        exact = values.to(tl.float64)
        total = _total(exact * exact)
    return total


@triton.jit
def _merge(partial, firsts, out, programs, parameters, BLOCK: tl.constexpr):
    which, owner = tl.program_id(0) // parameters, tl.program_id(0) % parameters
    first, end = tl.load(firsts + owner), tl.load(firsts + owner + 1)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(first, end, BLOCK):
        each = start + tl.arange(0, BLOCK)
        total += tl.load(partial + which * programs + each, mask=each < end, other=0.0).to(tl.float64)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _none_wrong(wrong, finite, parameters, BLOCK: tl.constexpr):
    each = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(wrong + each, mask=each < parameters, other=0.0), 0)
    tl.store(finite, total == total)


@triton.jit
def _trust_ratios(
    weights, directions, adapted, coefficients, eps, decays, ratios, parameters,
    MOMENTUM_FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rules.ratios, of sums of squares."""
    each = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = each < parameters
    weight = tl.sqrt(tl.load(weights + each, mask=mask, other=1.0))
    direction = tl.sqrt(tl.load(directions + each, mask=mask, other=1.0))
    coefficient = tl.load(coefficients + each, mask=mask, other=1.0)
    below = direction + tl.load(eps + each, mask=mask, other=1.0)
    if MOMENTUM_FORM:
        otherwise = coefficient
    else:
        below += tl.load(decays + each, mask=mask, other=0.0) * weight
        otherwise = tl.full((BLOCK,), 1.0, tl.float64)
    positive = (weight > 0) & (direction > 0)
    ratio = tl.where(positive, coefficient * weight / tl.where(positive, below, 1.0), otherwise)
    adapt = tl.load(adapted + each, mask=mask, other=0) != 0
    tl.store(ratios + each, tl.minimum(tl.where(adapt, ratio, 1.0), _LARGEST).to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["lr", "draw"])  # they change from step to step
def _step(
    gradients, weights, momenta, working, ratios, lr, lr_scales, decays, scale, keep,
    bit_rows, draw, owners, firsts, ends, partial,
    MU: tl.constexpr, MOMENTUM_FORM: tl.constexpr, NESTEROV: tl.constexpr, STOCHASTIC: tl.constexpr,
    COPIED: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    rows = tl.load(firsts + program) + tl.arange(0, ROWS)
    within = rows < tl.load(ends + program)
    lanes = tl.arange(0, LANES)[None, :]
    places, mask = rows.to(tl.int64)[:, None] * LANES + lanes, within[:, None]
    g = tl.load(gradients + places, mask=mask, other=0.0) * tl.load(scale)
    w = tl.load(weights + places, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(momenta + places, mask=mask, other=0.0).to(tl.float32) * MU
    rate = tl.minimum(lr * tl.load(lr_scales + owner) * tl.load(ratios + owner), _LARGEST).to(tl.float32)
    decay = tl.load(decays + owner)
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
    written = mask & (tl.load(keep) != 0)
    w = w - subtracted
    if STOCHASTIC:
        bits = tl.load(bit_rows + rows, mask=within, other=0)[:, None]
        words = _bits(bits, lanes, draw)
        w = _rounded(w, words >> 19)
        m = _rounded(m, words & 0x1FFF)
    stored = w.to(weights.dtype.element_ty)
    tl.store(weights + places, stored, mask=written)
    tl.store(momenta + places, m.to(momenta.dtype.element_ty), mask=written)
    if COPIED:
        tl.store(working + places, stored.to(tl.float32).to(working.dtype.element_ty), mask=written)


@triton.jit
def _total(values):
    return tl.sum(tl.sum(values, 1), 0)


@triton.jit
def _bits(rows, lanes, draw):
    """random_bits of optim/rounding.py: rows [ROWS, 1], lanes [1, LANES]."""
    starts = _mix((rows + draw).to(tl.uint32, bitcast=True))
    return _mix(starts + lanes.to(tl.uint32) * 0x9E3779B1)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(source, noise):
    """rounded of optim/rounding.py, still float32."""
    bits = source.to(tl.uint32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    magnitude = tl.where(magnitude > 65504.0, 65504.0, magnitude)
    moved = tl.where(magnitude < 6.103515625e-05, 6.103515625e-05, 0.0)  # 2**-14
    cut = (magnitude + moved).to(tl.uint32, bitcast=True)
    cut = (tl.where(cut > 0x7FC00000, 0x7FC00000, cut) + noise) & 0xFFFFE000
    magnitude = cut.to(tl.float32, bitcast=True) - moved
    return (magnitude.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)

"""The passes of an update on a CPU, compiled from kernels/update.cpp by its C++ compiler."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import torch

from common.cpp_compiler import CompilerError, library
from common.errors import first_line
from common.text import printable
from optim import lars_update, rounding
from optim.lars_update import StepConstants, StepRows, SumConstants, SumRows
from optim.layout import Buffers, Pass, Run, in_parts
from optim.rounding import Noise, RoundConstants, RoundRows

_SOURCE = Path(__file__).parent / "kernels" / "update.cpp"
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-shared",
    "-fPIC",
    # The bits of plain torch, which multiplies and adds in two operations, each of them rounded.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_FUNCTIONS = ("lars_sums", "lars_step", "round_rows")
_UNCOMPILED = "engine.compile: the update runs uncompiled"
# `Form` and `Working` of update.cpp. The latter: dtypes of the module's own weights.
_GRADIENT, _MOMENTUM, _NESTEROV = range(3)
_WORKING = {None: 0, torch.float32: 1, torch.bfloat16: 2}
# Shifts to the bits of a random word, in rounding.h.
_SHIFTS: Dict[Noise, int] = {rounding.upper: 19, rounding.lower: 0}


def compiled(buffers: Buffers, stochastic: bool) -> Tuple[Run, str]:
    """Return a runner of passes over these buffers, and a line to print.

    Args:
        buffers: of the update.
        stochastic: whether float16 state is rounded stochastically; only plain torch rounds it to
            nearest.

    Returns:
        A runner of compiled passes, or `in_parts` where there is none; the line says which, and
        why.
    """
    start = time.perf_counter()
    # None where the weights are the module's own: a step then writes no copies.
    working = None if buffers.working is buffers.weights else buffers.working.dtype
    to_nearest = buffers.weights.dtype == torch.float16 and not stochastic
    if working not in _WORKING or to_nearest:
        return in_parts, (
            f"{_UNCOMPILED}: not with these of precision.compute, precision.weights and precision.rounding"
        )
    # Without a compiler a run is slower but learns the same, so that is no error.
    try:
        passes = _Compiled(library(_SOURCE, _FUNCTIONS, _FLAGS))
    except (OSError, CompilerError) as error:  # no compiler, half installed, or a full disk
        return in_parts, f"{_UNCOMPILED}: {printable(first_line(error))}"
    return passes, f"the update is compiled: ready after {time.perf_counter() - start:.0f} s"


# The structures of update.cpp, field by field.
_ROWS_AND_THREADS = [("rows", ctypes.c_int64), ("threads", ctypes.c_int32)]


class _SumPass(ctypes.Structure):
    _fields_ = [
        *_ROWS_AND_THREADS,
        ("half", ctypes.c_int32),
        ("form", ctypes.c_int32),
        ("gradients", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("momenta", ctypes.c_void_p),
        ("decays", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("mu", ctypes.c_float),
        ("sums", ctypes.c_void_p),
    ]


class _StepPass(ctypes.Structure):
    _fields_ = [
        *_ROWS_AND_THREADS,
        ("half", ctypes.c_int32),
        ("form", ctypes.c_int32),
        ("working", ctypes.c_int32),
        ("gradients", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("momenta", ctypes.c_void_p),
        ("copies", ctypes.c_void_p),
        ("rates", ctypes.c_void_p),
        ("decays", ctypes.c_void_p),
        ("bit_rows", ctypes.c_void_p),
        ("draw", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("mu", ctypes.c_float),
        ("sums", ctypes.c_void_p),
    ]


class _RoundPass(ctypes.Structure):
    _fields_ = [
        *_ROWS_AND_THREADS,
        ("source", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("bit_rows", ctypes.c_void_p),
        ("draw", ctypes.c_uint32),
        ("shift", ctypes.c_int32),
    ]


class _Compiled:
    """A `Run` that makes passes by the library."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        # By the function of plain torch whose results a pass has.
        self._passes: Dict[Pass, Pass] = {
            lars_update.sum_rows: self._sum_rows,
            lars_update.step_rows: self._step_rows,
            rounding.round_rows: self._round_rows,
        }

    def __call__(self, function: Pass, rows: Any, constants: Any) -> Any:
        return self._passes[function](rows, constants)

    def _sum_rows(self, rows: SumRows, constants: SumConstants) -> Tuple[torch.Tensor, ...]:
        """Make the pass `sum_rows` of lars_update.py."""
        by_momentum = rows.momentum is not None
        sums = torch.empty(4 if by_momentum else 3, len(rows.gradient))
        # ctypes takes a scale [] as a number: reading it is free, as it lies on the CPU.
        arguments = _SumPass(
            rows=len(rows.gradient),
            threads=torch.get_num_threads(),
            half=rows.weight.dtype == torch.float16,
            form=_MOMENTUM if by_momentum else _GRADIENT,
            gradients=_address(rows.gradient),
            weights=_address(rows.weight),
            momenta=_address(rows.momentum),
            decays=_address(rows.decay),
            scale=constants.scale,
            mu=constants.mu,
            sums=_address(sums),
        )
        self._library.lars_sums(ctypes.byref(arguments))
        return tuple(sums)

    def _step_rows(self, rows: StepRows, constants: StepConstants) -> torch.Tensor:
        """Make the pass `step_rows` of lars_update.py."""
        assert constants.keep is None, "on a CPU an update is skipped without a mask"
        sums = torch.empty(len(rows.gradient))
        # NULL stands for what there is not: bits of a float32 state, copies of weights that are
        # the module's own.
        arguments = _StepPass(
            rows=len(rows.gradient),
            threads=torch.get_num_threads(),
            half=rows.weight.dtype == torch.float16,
            form=_step_form(constants),
            working=_WORKING[None if rows.working is None else rows.working.dtype],
            gradients=_address(rows.gradient),
            weights=_address(rows.weight),
            momenta=_address(rows.momentum),
            copies=_address(rows.working),
            rates=_address(rows.rate),
            decays=_address(rows.decay),
            bit_rows=_address(rows.bits),
            draw=constants.draw & 0xFFFFFFFF,
            scale=constants.scale,
            mu=constants.mu,
            sums=_address(sums),
        )
        self._library.lars_step(ctypes.byref(arguments))
        return sums

    def _round_rows(self, rows: RoundRows, constants: RoundConstants) -> None:
        """Make the pass `round_rows` of rounding.py."""
        arguments = _RoundPass(
            rows=len(rows.source),
            threads=torch.get_num_threads(),
            source=_address(rows.source),
            out=_address(rows.out),
            bit_rows=_address(rows.bits),
            draw=constants.draw & 0xFFFFFFFF,
            shift=_SHIFTS[constants.noise],
        )
        self._library.round_rows(ctypes.byref(arguments))


def _step_form(constants: StepConstants) -> int:
    """Return the `Form` of update.cpp of a step."""
    if constants.by_momentum:
        return _MOMENTUM
    return _NESTEROV if constants.nesterov else _GRADIENT


def _address(tensor: Optional[torch.Tensor]) -> Optional[int]:
    """Return where a tensor's elements lie; None for none."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()

"""The passes of an update on a CPU, compiled from kernels/update.cpp by this machine's C++ compiler."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Optional, Sequence, Tuple

import torch

from common.cpp_compiler import CompilerError, library
from common.errors import first_line
from common.text import printable
from optim import lars_update, rounding
from optim.layout import Buffers, Run, in_parts

_SOURCE = Path(__file__).parent / "kernels" / "update.cpp"
_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),  # the bits of plain torch
)
_FUNCTIONS = ("lars_sums", "lars_step", "round_rows")
_UNCOMPILED = "engine.compile: the update runs uncompiled"
_WORK = {None: 0, torch.float32: 1, torch.bfloat16: 2}  # dtypes of the module's own weights, as update.cpp has them


def compiled(buffers: Buffers, stochastic: bool) -> Tuple[Run, str]:
    """A runner of compiled passes over these buffers, or a plain one where there is none; and a line to print.

    stochastic: whether float16 state is rounded stochastically; to nearest only plain torch rounds.
    """
    start = time.perf_counter()
    working = None if buffers.working is buffers.weights else buffers.working.dtype
    if working not in _WORK or (buffers.weights.dtype == torch.float16 and not stochastic):
        return in_parts, f"{_UNCOMPILED}: not with these of precision.compute, precision.weights and precision.rounding"
    try:
        passes = _Compiled(library(_SOURCE, _FUNCTIONS, _FLAGS))
    except (OSError, CompilerError) as error:  # none, half installed, or a full disk
        return in_parts, f"{_UNCOMPILED}: {printable(first_line(error))}"
    return passes, f"the update is compiled: ready after {time.perf_counter() - start:.0f} s"


class _Compiled:
    """A `Run` that makes passes by the library."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        passes = (lars_update.sum_rows, lars_update.step_rows, rounding.round_rows)
        self._passes = dict(zip(passes, (self._sums, self._step, self._round)))

    def __call__(self, function, rows: Sequence[Optional[torch.Tensor]], constants: Sequence) -> object:
        return self._passes[function](*rows, *constants)

    def _sums(self, gradient, weight, momentum, decay, scale, mu) -> Tuple[torch.Tensor, ...]:
        form = int(momentum is not None)
        found = torch.empty(3 + form, len(gradient))
        self._library.lars_sums(
            *_shared(weight), form, *map(_address, (gradient, weight, momentum, decay)),
            ctypes.c_float(scale), ctypes.c_float(mu), _address(found),
        )  # fmt: skip
        return tuple(found)

    def _step(
        self, gradient, weight, momentum, working, rate, decay, bit_rows,
        by_momentum, nesterov, scale, mu, draws, keep,
    ) -> torch.Tensor:  # fmt: skip
        assert keep is None, "on a CPU an update is skipped without a mask"
        found = torch.empty(len(gradient))
        work = _WORK[None if working is None else working.dtype]
        form = 2 if nesterov else int(by_momentum)
        self._library.lars_step(
            *_shared(weight), form, work,
            *map(_address, (gradient, weight, momentum, working, rate, decay, bit_rows)),
            ctypes.c_uint32(draws[1] if draws else 0), ctypes.c_float(scale), ctypes.c_float(mu), _address(found),
        )  # fmt: skip
        return found

    def _round(self, source, out, bit_rows, lanes, draw: int, chosen, keep) -> None:
        shift = 19 if chosen is rounding.upper else 0
        count, threads, _ = _shared(source)
        addresses = map(_address, (source, out, bit_rows))
        self._library.round_rows(count, threads, *addresses, ctypes.c_uint32(draw), shift)


def _shared(state: torch.Tensor) -> tuple:
    """The first arguments of a pass: rows, threads, and whether the state is float16."""
    return ctypes.c_int64(len(state)), torch.get_num_threads(), int(state.dtype == torch.float16)


def _address(tensor: Optional[torch.Tensor]) -> Optional[ctypes.c_void_p]:
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())

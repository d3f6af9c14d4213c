"""The passes of an update, compiled by torch.compile: one loop over the memory each."""

from __future__ import annotations

import functools
import logging
import time
from typing import Callable, Optional, Sequence, Tuple

import torch

from optim import lars_passes
from optim.layout import Run, in_parts
from recipe.errors import first_line


def compiled(dry_pass: Callable[[Run], None]) -> Tuple[Run, str]:
    """A runner of compiled passes, or where this machine cannot compile of plain ones, and a line to print.

    Args:
        dry_pass: runs all passes by the runner that it is given, with tensors as they will come.
    """
    start = time.perf_counter()
    # It warns of CUDA, which a CPU's compiler does not use.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        dry_pass(_compiled)
    except Exception as error:  # a compiler may be missing or half installed, a disk full: there is no list of them
        return in_parts, f"engine.compile: the update runs uncompiled: {first_line(error)}"
    return _compiled, f"the update was compiled in {time.perf_counter() - start:.0f} s"


def _compiled(function: Callable, rows: Sequence[Optional[torch.Tensor]], constants: Sequence) -> object:
    """Runs a pass. What changes from step to step must be a tensor: a number would be compiled in."""
    constants = [
        tuple(torch.tensor(each, dtype=torch.int32) if isinstance(each, int) else each for each in constant)
        if isinstance(constant, tuple)
        else constant
        for constant in constants
    ]
    return _of_torch(function)(*rows, *constants)


@functools.lru_cache(maxsize=None)
def _of_torch(function: Callable) -> Callable:
    # LARS's new weights are stored twice where the module has others than the state: used twice, they would go
    # through memory in between, and the pass become two. Not for rounding alone: as one expression it would get vectors
    # as wide as float16's, for which the compiler has no bit casts.
    steps = (lars_passes.gradient_step, lars_passes.momentum_step)
    options = {"realize_opcount_threshold": 1000} if function in steps else None
    return torch.compile(function, dynamic=False, options=options)

"""The suite's section on the wait for the first update: with no Triton program in the cache, and with all of them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from typing import Iterator

import torch

from benchmarks import ranks
from benchmarks.gpu_measure import Plan, Row, Session, missing, reason, recipe
from benchmarks.gpu_training import ours
from engines.devices import synchronize

FIRST_STEP = "first step"
COLD = "no program in the cache"
WARM = "all programs in the cache"


def first_step(session: Session) -> Iterator[Row]:
    """Yield seconds from the creation of the engine to the end of its first update.

    They are of two fresh processes that share a cache. cuDNN's search is in both, as it keeps
    nothing on the disk.

    Args:
        session: of the section.
    """
    note = f"G16, bfloat16, micro batch {session.plan.micro}, from the engine's creation on"
    with tempfile.TemporaryDirectory() as folder:
        for what in (COLD, WARM):
            try:
                (seconds,) = ranks.stream(session.left(), _seconds, session.plan, folder)
            except (RuntimeError, TimeoutError) as error:
                # Where the first fails, the second would not find all programs.
                yield missing(session.section, what, reason(error))
                return
            yield Row(session.section, what, (seconds,), "s", note=note)


def _seconds(plan: Plan, folder: str) -> Iterator[float]:
    """Yield the seconds of a first update with Triton's cache in a `folder`."""
    # In this process alone, and before Triton compiles.
    os.environ["TRITON_CACHE_DIR"] = folder
    device = torch.device(plan.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)  # CUDA itself takes some seconds to start
    engine = (
        f"engine.memory_format={plan.layout}",
        f"engine.kernels={plan.kernels[0]}",
        "precision.compute=bfloat16",
    )
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        ours(recipe(plan, plan.micro, *engine), stack)()
        synchronize(device)
        yield time.perf_counter() - began

"""The suite's section on memory in float16: what a step takes with and without recomputation, and
the largest micro batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Callable, Dict, Iterator

import torch

from benchmarks.gpu_measure import Row, Session, free, missing, recipe
from benchmarks.gpu_training import ours
from engines.devices import synchronize

MEMORY = "memory"


def memory(session: Session) -> Iterator[Row]:
    """Return GB at most during a step, and the largest micro batch among doublings.

    Without cuDNN's search, which would take long for each size.

    Args:
        session: of the section.
    """
    plan = session.plan
    measures: Dict[str, Callable[[], Row]] = {}
    for kernels, recompute in itertools.product(plan.kernels, (False, True)):
        what = f"peak, {kernels}, recompute {recompute}".lower()
        measures[what] = functools.partial(_peak, session, what, kernels, recompute)
    for recompute in (False, True):
        what = f"largest micro batch, {plan.kernels[0]}, recompute {recompute}".lower()
        measures[what] = functools.partial(_largest_micro, session, what, recompute)
    return session.attempts(measures)


def _peak(session: Session, what: str, kernels: str, recompute: bool) -> Row:
    """Return the most memory that tensors take during two steps; 0 on a CPU, which counts none.

    Args:
        session: of the section.
        what: name of the figure.
        kernels: as engine.kernels.
        recompute: as parallel.recompute.
    """
    device = session.device
    micro = session.plan.micro
    free(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    _two_steps(session, micro, kernels, recompute)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    note = f"micro batch {micro}, allocated by tensors"
    return Row(session.section, what, (peak / 1e9,), "GB", note=note)


def _largest_micro(session: Session, what: str, recompute: bool) -> Row:
    """Return the last micro batch that fits, doubled from the plan's on.

    Args:
        session: of the section.
        what: name of the figure.
        recompute: as parallel.recompute.
    """
    if session.over():
        return missing(session.section, what, "no time was left")
    plan = session.plan
    micro = plan.micro
    fitting = 0
    note = "larger ones were not tried"
    while micro <= plan.most_images and not session.over():
        try:
            _two_steps(session, micro, plan.kernels[0], recompute)
        except torch.OutOfMemoryError:
            note = f"{micro} does not fit"
            break
        fitting = micro
        micro *= 2
    free(session.device)
    return Row(session.section, what, (fitting,), "images", note=note)


def _two_steps(session: Session, micro: int, kernels: str, recompute: bool) -> None:
    """Make two updates of one micro batch each.

    Args:
        session: of the section.
        micro: images of the micro batch.
        kernels: as engine.kernels.
        recompute: as parallel.recompute.
    """
    overrides = [
        "precision.compute=float16",
        f"engine.memory_format={session.plan.layout}",
        f"engine.kernels={kernels}",
        f"parallel.recompute={recompute}".lower(),
    ]
    with contextlib.ExitStack() as stack:
        step = ours(recipe(session.plan, micro, *overrides), stack)
        # The search, which creating the engine has turned on: see `memory`.
        torch.backends.cudnn.benchmark = False
        step()
        step()
        synchronize(session.device)
    free(session.device)

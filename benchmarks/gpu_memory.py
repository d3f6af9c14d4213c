"""The suite's section on memory in float16: what a step takes with and without recomputation, and
the largest micro batch."""

import contextlib
import functools
import itertools
from typing import Iterator

import torch

from benchmarks.gpu_measure import Row, Session, free, missing, recipe
from benchmarks.gpu_training import ours
from engines.devices import synchronize

MEMORY = "memory"


def memory(session: Session) -> Iterator[Row]:
    """GB at most during a step, and the largest micro batch among doublings. Without cuDNN's search, which would take
    long for each size."""
    plan, measures = session.plan, {}
    for kernels, recompute in itertools.product(plan.kernels, (False, True)):
        what = f"peak, {kernels}, recompute {recompute}".lower()
        measures[what] = functools.partial(_peak, session, what, kernels, recompute)
    for recompute in (False, True):
        what = f"largest micro batch, {plan.kernels[0]}, recompute {recompute}".lower()
        measures[what] = functools.partial(_largest_micro, session, what, recompute)
    return session.attempts(measures)


def _peak(session: Session, what: str, kernels: str, recompute: bool) -> Row:
    device, micro = session.device, session.plan.micro
    free(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    _two_steps(session, micro, kernels, recompute)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Row(session.section, what, (peak / 1e9,), "GB", note=f"micro batch {micro}, allocated by tensors")


def _largest_micro(session: Session, what: str, recompute: bool) -> Row:
    """The last size that fits, doubled from the plan's on."""
    if session.over():
        return missing(session.section, what, "no time was left")
    micro, fitting, note = session.plan.micro, 0, "larger ones were not tried"
    while micro <= session.plan.most_images and not session.over():
        try:
            _two_steps(session, micro, session.plan.kernels[0], recompute)
        except torch.OutOfMemoryError:
            note = f"{micro} does not fit"
            break
        fitting, micro = micro, 2 * micro
    free(session.device)
    return Row(session.section, what, (fitting,), "images", note=note)


def _two_steps(session: Session, micro: int, kernels: str, recompute: bool) -> None:
    layout = f"engine.memory_format={session.plan.layout}"
    changes = (layout, f"engine.kernels={kernels}", f"parallel.recompute={recompute}".lower())
    with contextlib.ExitStack() as stack:
        step = ours(recipe(session.plan, micro, "precision.compute=float16", *changes), stack)
        torch.backends.cudnn.benchmark = False
        step()
        step()
        synchronize(session.device)
    free(session.device)

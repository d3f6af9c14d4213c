"""What is this GPU good for, and do our kernels compute on it what they should? In less than eight minutes.

    python -m benchmarks.gpu_suite [--json]

In this order: checks of the kernels on fresh random inputs; what the device copies and multiplies at best; training
beside timm's loop, eager; the optimizer's update; the selection of the largest values; the loader beside the computation;
the cost of repeating bit for bit; memory; and at last, for as long as time is left, training compiled. Each section has
a time of its own. Tables are printed, and written to docs/results/gpu/DEVICE.md and .json after every section.

Sections run in a process of their own: a kernel that reads where it must not, or a compiler that does not end, costs
one figure. What was computed then says so, the next process goes on behind it.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Callable, Iterator, List, NamedTuple, Sequence

import torch

from benchmarks import claims, gpu_report
from benchmarks.gpu_checks import checks
from benchmarks.gpu_measure import REAL, ROOT, Clock, DeviceLost, Plan, Row, Session, is_lost, reason
from benchmarks.gpu_parts import CEILINGS, OPTIMIZER, SELECTION, ceilings, optimizer, selection
from benchmarks.gpu_runs import DETERMINISM, FEED, MEMORY, determinism, feed, memory
from benchmarks.gpu_training import SETTINGS, training
from recipe.errors import ConfigError

_GRACE = 40.0  # seconds that a section may take beyond its time, in which it only looks at the clock between turns
_RESTARTS = 3  # of a section whose process was lost
_START = 60.0  # seconds for a process to begin


class Section(NamedTuple):
    """A part of the suite: `measure` gives its rows within about so many seconds."""

    name: str
    seconds: float
    measure: Callable[[Session], Iterator[Row]]


def _training(number: int, seconds: float) -> Section:
    setting = SETTINGS[number]
    return Section(setting.name(), seconds, functools.partial(training, setting=setting))


SECTIONS = [
    Section(gpu_report.CHECKS, 45, checks),
    Section(CEILINGS, 8, ceilings),
    _training(0, 85),
    _training(1, 50),
    _training(2, 35),
    _training(3, 30),
    Section(OPTIMIZER, 15, optimizer),
    Section(SELECTION, 6, selection),
    Section(FEED, 30, feed),
    Section(DETERMINISM, 12, determinism),
    Section(MEMORY, 40, memory),
    # Nothing but its end ends a compiler, and it may take all that is left.
    _training(4, 300),
]


def main() -> None:
    as_json = claims.wants_json(__doc__)
    if not torch.cuda.is_available():
        raise ConfigError("benchmarks.gpu_suite: PyTorch finds no CUDA device here; run it where there is one")
    rows, machine = measured(REAL, SECTIONS, ROOT / "docs" / "results" / "gpu")
    shown = [
        {key: "-" if value is None else value for key, value in row.columns().items()} for row in rows
    ]
    claims.report("gpu_suite", shown, gpu_report.made_claims(rows), as_json=False)
    print(", ".join(f"{name} {machine[name]}" for name in ("device", "memory_gib", "cuda", "cudnn", "triton", "revision")))
    if as_json:
        print(json.dumps(gpu_report.result(rows, machine), allow_nan=False))


def measured(plan: Plan, sections: Sequence[Section], folder: Path) -> tuple:
    """Rows of all sections, and what machine they are of; written to `folder` section by section."""
    end = time.monotonic() + plan.total
    rows: List[Row] = []
    process = Process(plan)
    try:
        machine = process.machine
        for section in sections:
            print(f"{section.name}: {end - time.monotonic():.0f} s are left", file=sys.stderr, flush=True)
            for _ in range(1 + _RESTARTS):
                left = end - time.monotonic()
                if left <= 1:
                    rows.append(_missing(section, "all", "no time was left"))
                    break
                found, alive, finished = process.run(section, min(section.seconds, left), min(section.seconds + _GRACE, left), rows)
                rows += found
                if not alive:
                    process.end()
                    process = Process(plan)
                if finished:
                    break
            for file in gpu_report.write([*rows, *gpu_report.PUBLISHED_ROWS], machine, folder):
                print(f"  {file}", file=sys.stderr, flush=True)
    finally:
        process.end()
    return [*rows, *gpu_report.PUBLISHED_ROWS], machine


def _missing(section: Section, what: str, why: str) -> Row:
    return Session(section.name, REAL, Clock(0)).missing(what, why)

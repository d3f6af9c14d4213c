"""Measures this GPU and checks our kernels on it, in less than eight minutes.

    python -m benchmarks.gpu_suite [--quick] [--json]

In this order: checks of the kernels on fresh random inputs; what the device copies and multiplies at best; training
beside timm's loop, eager; the optimizer's update; the selection of the largest values; the loader beside the
computation; the cost of repeating bit for bit; memory; and at last, for as long as time is left, training compiled.
Each section has a time of its own. Tables are printed, and written to docs/results/gpu/DEVICE.md and .json after every
section.

Sections run in a process of their own: a kernel that reads where it must not, or a compiler that does not end, costs
one figure. What was computed then says so, the next process goes on behind it.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import dataclasses
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import List, Sequence, Tuple

import torch

from benchmarks import ROOT, claims, gpu_report
from benchmarks.gpu_checks import checks
from benchmarks.gpu_measure import REAL, Plan, Row, reason
from benchmarks.gpu_parts import CEILINGS, OPTIMIZER, SELECTION, ceilings, optimizer, selection
from benchmarks.gpu_process import Process, Section
from benchmarks.gpu_runs import DETERMINISM, FEED, MEMORY, determinism, feed, memory
from benchmarks.gpu_training import SETTINGS, training
from recipe.errors import ConfigError

_GRACE = 40.0  # seconds that a section may take beyond its time, which it only looks at between two turns
_RESERVE = 20.0  # seconds before the end of all, in which the last section may take its turns
_RESTARTS = 3  # of a section whose process was lost


def _training(number: int, seconds: float) -> Section:
    setting = SETTINGS[number]
    return Section(setting.name(), seconds, functools.partial(training, setting=setting))


SECTIONS = [
    Section(gpu_report.CHECKS, 45, checks),
    Section(CEILINGS, 8, ceilings),
    _training(0, 95),
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
    as_json = claims.begin(__doc__, takes="8 minutes of a GPU", quick="2 minutes of a GPU").json
    if not torch.cuda.is_available():
        raise ConfigError("benchmarks.gpu_suite: PyTorch finds no CUDA device here; run it where there is one")
    with tempfile.TemporaryDirectory() as folder:  # a page is of a whole measurement
        place = claims.less(ROOT / "docs" / "results" / "gpu", Path(folder))
        share = claims.less(1.0, 0.25)
        plan = dataclasses.replace(REAL, total=share * REAL.total)
        sections = [section._replace(seconds=share * section.seconds) for section in SECTIONS]
        rows, machine = measured(plan, sections, place)
    claims.report("gpu_suite", [row.columns() for row in rows], gpu_report.made_claims(rows), as_json=False)
    print(
        ", ".join(f"{name} {machine[name]}" for name in ("device", "memory_gib", "cuda", "cudnn", "triton", "revision"))
    )
    if as_json:
        print(json.dumps(gpu_report.result(rows, machine), allow_nan=False))


def measured(plan: Plan, sections: Sequence[Section], folder: Path) -> Tuple[List[Row], dict]:
    """Rows of all sections, and the machine they are of; the files in `folder` are renewed after every section."""
    end = time.monotonic() + plan.total
    rows: List[Row] = []
    process = Process(plan)
    machine = process.machine
    try:
        for section in sections:
            print(f"{section.name}: {end - time.monotonic():.0f} s are left", file=sys.stderr, flush=True)
            section_end = min(end, time.monotonic() + section.seconds + _GRACE)
            for _ in range(1 + _RESTARTS):
                left = section_end - time.monotonic()
                if left < 1:
                    rows.append(Row.missing(section.name, "the rest", "no time was left"))
                    break
                try:
                    process = process if process.alive else Process(plan)
                except (RuntimeError, EOFError) as error:
                    rows.append(Row.missing(section.name, "all", f"no process begins: {reason(error)}"))
                    break
                seconds = min(section.seconds, left - min(_RESERVE, left / 2))
                outcome = process.run(section._replace(seconds=seconds), rows, left)
                rows += outcome.rows
                if outcome.finished:
                    break
            files = gpu_report.write([*rows, *gpu_report.PUBLISHED_ROWS], machine, folder)
    finally:
        process.end()
    print(f"written: {', '.join(map(str, files))}", file=sys.stderr)
    return [*rows, *gpu_report.PUBLISHED_ROWS], machine

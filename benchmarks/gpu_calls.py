"""The sections of the GPU suite, in three calls; each section runs in a process of its own."""

import functools
import importlib.util
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence, Tuple

import torch

from benchmarks import claims, ranks
from benchmarks.gpu_checks import CHECKS, checks
from benchmarks.gpu_files import FILES, files
from benchmarks.gpu_first_step import FIRST_STEP, first_step
from benchmarks.gpu_kernels import KERNELS, SELECTION, UPDATE, kernels, selection, update
from benchmarks.gpu_measure import Plan, Row, Session, latest, missing, reason
from benchmarks.gpu_memory import MEMORY, memory
from benchmarks.gpu_results import Measured, read, write
from benchmarks.gpu_training import (
    AUTO,
    CLAIMED,
    EAGER,
    MICROS,
    VARIANTS,
    Comparison,
    automatic,
    compile_ahead,
    micro_batches,
    training,
)
from benchmarks.gpu_trainings import EXPORT, SAME, evaluation_and_export, same_accuracy
from common.errors import ConfigError
from training.run_folder import describe_environment

_FIRST = 120.0  # seconds in which the machine must be described, before all sections
_GRACE = 40.0  # seconds that a section may take beyond its time, which it only looks at between two turns
_RESERVE = 20.0  # seconds before the end of all, in which the last section may take its turns


class Section(NamedTuple):
    """A part of the suite: `measure` gives its rows within about so many seconds."""

    name: str
    seconds: float
    measure: Callable[[Session], Iterator[Row]]


class Call(NamedTuple):
    """Sections that are measured together, the most valuable first."""

    name: str
    summary: str
    sections: Tuple[Section, ...]


def _of(comparison: Comparison, seconds: float, measure: Callable[..., Iterator[Row]] = training) -> Section:
    return Section(comparison.name, seconds, functools.partial(measure, comparison=comparison))


FIRST = Call(
    "first", "checks of kernels; B4 G16 at 380 px beside timm, compiled and not, in bfloat16; other micro batches",
    (
        Section(CHECKS, 60, checks),
        Section("compilation", 240, functools.partial(compile_ahead, comparisons=CLAIMED)),
        *(_of(each, 120) for each in CLAIMED),
        _of(MICROS, 90, micro_batches),
    ),
)  # fmt: skip
SECOND = Call(
    "second", "kernels and the update beside a copy; JPEG to update; memory; torch's layers; ways to compile ours",
    (
        Section(KERNELS, 80, kernels),
        Section(UPDATE, 20, update),
        Section(FILES, 110, files),
        Section(MEMORY, 60, memory),
        _of(EAGER, 60),
        _of(VARIANTS, 200),
    ),
)  # fmt: skip
THIRD = Call(
    "third", "the first step; micro batch auto; evaluation and export; selection; accuracy beside the CPU's",
    (
        Section(FIRST_STEP, 80, first_step),
        _of(AUTO, 90, automatic),
        Section(EXPORT, 140, evaluation_and_export),
        Section(SELECTION, 20, selection),
        Section(SAME, 220, same_accuracy),
    ),
)  # fmt: skip
CALLS = (FIRST, SECOND, THIRD)


def chosen(names: Sequence[str]) -> Call:
    """The sections of these names as one call, in the order of the calls. Raises ConfigError: there is no such one."""
    sections = [section for call in CALLS for section in call.sections]
    known = [section.name for section in sections]
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name}: no section; the sections are {', '.join(known)}")
    found = tuple(section for section in sections if section.name in names)
    return Call(f"only {', '.join(names)}", ", ".join(section.name for section in found), found)


def measured(plan: Plan, call: Call, folder: Path) -> Measured:
    """Rows of all sections, after those that `folder` has of an earlier call; its files are renewed after every row."""
    end = time.monotonic() + plan.total
    (about,) = ranks.stream(min(_FIRST, plan.total), machine, plan.device)
    found = Measured([], {}) if call.name == FIRST.name else read(folder, about["device"])
    names = [section.name for section in call.sections]
    found = Measured([row for row in found.rows if row.section not in names], {**found.calls, call.name: about})
    for section in call.sections:
        left = min(end - time.monotonic(), section.seconds + _GRACE)
        print(f"{section.name}: {end - time.monotonic():.0f} s are left", file=sys.stderr, flush=True)
        for row in _within(left, section, plan):
            found = found._replace(rows=latest([*found.rows, row]))
            value = f"{claims.cell(row.value)} {row.unit}, " if row.value is not None else ""
            print(f"  {row.section}: {row.what}: {value}{row.note}", file=sys.stderr, flush=True)
            written = write(found, folder)
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    return found


def _within(left: float, section: Section, plan: Plan) -> Iterator[Row]:
    """A section's rows, from a process that is ended after `left` seconds; the last one says why there are no more."""
    section = section._replace(seconds=min(section.seconds, left - min(_RESERVE, left / 2)))
    try:
        yield from ranks.stream(max(0.0, left), perform, section, plan)
    except (RuntimeError, TimeoutError) as error:
        yield missing(section.name, "the rest", reason(error))


def perform(section: Section, plan: Plan) -> Iterator[Row]:
    return section.measure(Session(section.name, plan, section.seconds))


def machine(name: str) -> Iterator[dict]:
    """The machine and the program, as `claims.machine` and more."""
    device = torch.device(name)
    cuda = device.type == "cuda"
    yield {
        **claims.machine(),
        "device": torch.cuda.get_device_name(device) if cuda else name,
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30, 1) if cuda else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "triton": metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "revision": describe_environment()["revision"],
    }

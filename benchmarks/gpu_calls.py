"""The sections of the GPU suite, in three calls; each section runs in a process of its own."""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, NamedTuple, Sequence, Tuple

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
# Seconds that a section may take beyond its time, which it only looks at between two turns.
_GRACE = 40.0
_RESERVE = 20.0  # seconds before the end of all, in which the last section may take its turns


class Section(NamedTuple):
    """A part of the suite.

    seconds: within about which its rows come.
    measure: returns them.
    """

    name: str
    seconds: float
    measure: Callable[[Session], Iterator[Row]]


class Call(NamedTuple):
    """Sections that are measured together, the most valuable first."""

    name: str
    summary: str
    sections: Tuple[Section, ...]


def _of(
    comparison: Comparison,
    seconds: float,
    measure: Callable[..., Iterator[Row]] = training,
) -> Section:
    """Return the section that measures a comparison.

    Args:
        comparison: of whole steps.
        seconds: of the section.
        measure: takes a session and the comparison.
    """
    # No function of its own: a section is pickled for its process.
    return Section(comparison.name, seconds, functools.partial(measure, comparison=comparison))


FIRST = Call(
    "first",
    "checks of kernels; B4 G16 at 380 px beside timm, compiled and not, in bfloat16; other micro batches",
    (
        Section(CHECKS, 60, checks),
        Section("compilation", 240, functools.partial(compile_ahead, comparisons=CLAIMED)),
        *(_of(comparison, 120) for comparison in CLAIMED),
        _of(MICROS, 90, micro_batches),
    ),
)
SECOND = Call(
    "second",
    "kernels and the update beside a copy; JPEG to update; memory; torch's layers; ways to compile ours",
    (
        Section(KERNELS, 80, kernels),
        Section(UPDATE, 20, update),
        Section(FILES, 110, files),
        Section(MEMORY, 60, memory),
        _of(EAGER, 60),
        _of(VARIANTS, 200),
    ),
)
THIRD = Call(
    "third",
    "the first step; micro batch auto; evaluation and export; selection; accuracy beside the CPU's",
    (
        Section(FIRST_STEP, 80, first_step),
        _of(AUTO, 90, automatic),
        Section(EXPORT, 140, evaluation_and_export),
        Section(SELECTION, 20, selection),
        Section(SAME, 220, same_accuracy),
    ),
)
CALLS = (FIRST, SECOND, THIRD)


def chosen(names: Sequence[str]) -> Call:
    """Return some sections as one call, in the order of the calls.

    Args:
        names: of the sections.

    Raises:
        ConfigError: there is no section of a name.
    """
    sections = [section for call in CALLS for section in call.sections]
    known = [section.name for section in sections]
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name}: no section; the sections are {', '.join(known)}")
    wanted = tuple(section for section in sections if section.name in names)
    summary = ", ".join(section.name for section in wanted)
    return Call(f"only {', '.join(names)}", summary, wanted)


def measured(plan: Plan, call: Call, folder: Path) -> Measured:
    """Measure all sections of a call.

    Args:
        plan: sizes, and the time of the call.
        call: is measured.
        folder: of the files, which are renewed after every row; those of an earlier call are added
            to, unless this is the first.

    Returns:
        The earlier calls' rows, but those of these sections, and the new ones.
    """
    end = time.monotonic() + plan.total
    (about,) = ranks.stream(min(_FIRST, plan.total), machine, plan.device)
    result = _before(call, folder, about)
    for section in call.sections:
        left = end - time.monotonic()
        _say(f"{section.name}: {left:.0f} s are left")
        for row in _within(min(left, section.seconds + _GRACE), section, plan):
            result = result._replace(rows=latest([*result.rows, row]))
            _say(f"  {_described(row)}")
            write(result, folder)
    return result


def _before(call: Call, folder: Path, about: Dict[str, Any]) -> Measured:
    """Return what earlier calls have left, without what this one measures anew.

    Args:
        call: that begins.
        folder: of the files.
        about: the machine, see `machine`.
    """
    if call.name == FIRST.name:
        return Measured([], {call.name: about})
    earlier = read(folder, about["device"])
    names = [section.name for section in call.sections]
    rows = [row for row in earlier.rows if row.section not in names]
    return Measured(rows, {**earlier.calls, call.name: about})


def _described(row: Row) -> str:
    """Return a row as a line of progress."""
    value = f"{claims.cell(row.value)} {row.unit}, " if row.value is not None else ""
    return f"{row.section}: {row.what}: {value}{row.note}"


def _say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def _within(left: float, section: Section, plan: Plan) -> Iterator[Row]:
    """Yield a section's rows, from a process that is ended in time.

    The last one says why there are no more, if it was ended or failed.

    Args:
        left: seconds until it is ended.
        section: is measured.
        plan: sizes.
    """
    # The section's own time ends before the process does, so that turns which have begun may end.
    reserve = min(_RESERVE, left / 2)
    section = section._replace(seconds=min(section.seconds, left - reserve))
    try:
        yield from ranks.stream(max(0.0, left), perform, section, plan)
    except (RuntimeError, TimeoutError) as error:
        yield missing(section.name, "the rest", reason(error))


def perform(section: Section, plan: Plan) -> Iterator[Row]:
    """Return a section's rows as they come.

    Args:
        section: is measured in this process.
        plan: sizes.
    """
    return section.measure(Session(section.name, plan, section.seconds))


def machine(name: str) -> Iterator[Dict[str, Any]]:
    """Yield the machine and the program, as `claims.machine` and more.

    Args:
        name: of the device, as torch names it.
    """
    device = torch.device(name)
    device_name = name
    memory_gib = None
    cudnn = None
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        memory_gib = round(memory_bytes / 2**30, 1)
        cudnn = torch.backends.cudnn.version()
    has_triton = importlib.util.find_spec("triton") is not None
    yield {
        **claims.machine(),
        "device": device_name,
        "memory_gib": memory_gib,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "triton": metadata.version("triton") if has_triton else None,
        "revision": describe_environment()["revision"],
    }

"""Measures one NVIDIA GPU and checks our kernels on it, in three calls of less than ten minutes each.

    python -m benchmarks.gpu_suite [--second | --third | --only SECTION ...] [--quick] [--json] [--write]
    python -m benchmarks.gpu_suite --list
    python -m benchmarks.gpu_suite --dry-run [--second | --third | --only SECTION ...]

The first call: checks of the kernels on fresh random inputs; then images per second of
EfficientNet-B4 G16 at 380 px, our engine beside timm's efficientnet_b4, compiled and not, in
bfloat16; then other micro batches of ours. `--second`: kernels beside a copy, the optimizer's
update beside a copy, JPEG files to updates, memory, torch's layers, and ways to compile ours, in
float16. `--third`: the first step, micro batch auto, evaluation and export, selection, and the
accuracy of a short training beside the CPU's. `--only` measures sections by their names (`--list`).

Each section runs in a process and a time of its own: a kernel that reads where it must not, or a
compiler that does not end, costs the rest of one section. After each row tables are written to
DEVICE.md and .json; the first call begins them anew. They are in benchmarks/cache/gpu/, and with
--write in docs/results/gpu/, which git tracks.

`--dry-run` runs the same sections in small on the CPU, our Triton kernels in Triton's interpreter,
and writes nothing: what a GPU would need is missing there, and its rows say so.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import argparse
import dataclasses
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks import CACHE, RESULTS, claims, packages, tracked
from common.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.gpu_calls import Call
    from benchmarks.gpu_results import Measured


# Modules that define kernels, or need what `packages` checks, are imported within functions: after
# main has set Triton's variable and checked that all is installed.


def main() -> None:
    """Measure the sections that the command line asks for, and print their rows and claims."""
    if "--dry-run" in sys.argv:
        # Triton asks as kernels are defined.
        os.environ["TRITON_INTERPRET"] = "1"
    packages.check("benchmarks.gpu_suite")
    from benchmarks.gpu_results import made_claims

    options = _options()
    if options.list:
        _print_sections()
        return
    _check_device(options)
    call = _chosen(options)
    measured = _measured(options, call)
    rows = [row.columns() for row in measured.rows]
    claims.report(
        "gpu_suite",
        rows,
        made_claims(measured.rows),
        as_json=options.json,
        about=measured.calls[call.name],
    )


def _options() -> argparse.Namespace:
    """Read the command line, and print how long the measurement takes."""
    parser = claims.parser(__doc__)
    sections = parser.add_mutually_exclusive_group()
    sections.add_argument(
        "--second",
        dest="call",
        action="store_const",
        const=1,
        default=0,
        help="measure more, and add it",
    )
    sections.add_argument(
        "--third",
        dest="call",
        action="store_const",
        const=2,
        help="measure the rest, and add it",
    )
    sections.add_argument(
        "--only",
        nargs="+",
        metavar="SECTION",
        help="measure these sections, and add them",
    )
    sections.add_argument(
        "--list",
        action="store_true",
        help="print the sections and their time limits",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="run in small on the CPU, and write nothing",
    )
    tracked.add_option(parser)

    def duration(options: argparse.Namespace) -> str:
        """Return how long the call takes that some `options` choose."""
        return f"10 minutes at most for {_chosen(options).summary}"

    options = claims.begin(parser, duration, quick="3 minutes", where="on an NVIDIA GPU")
    if options.dry_run and options.write:
        parser.error("--write renews pages of whole measurements: give it without --dry-run")
    return options


def _chosen(options: argparse.Namespace) -> Call:
    """Return the call that the options ask for. Raises ConfigError: no section has such a name."""
    from benchmarks import gpu_calls

    if options.only:
        return gpu_calls.chosen(options.only)
    return gpu_calls.CALLS[options.call]


def _check_device(options: argparse.Namespace) -> None:
    """Raise ConfigError where there is no GPU and one is needed; with --json no claim holds."""
    from benchmarks.gpu_results import made_claims

    # PyTorch for AMD's GPUs calls them CUDA's as well.
    has_gpu = torch.cuda.is_available() and not torch.version.hip
    if has_gpu or options.dry_run:
        return
    fault = "PyTorch finds no NVIDIA GPU here"
    if options.json:
        claims.report("gpu_suite", [], made_claims([], absent=fault), as_json=True)
    raise ConfigError(f"benchmarks.gpu_suite: {fault}; run it where there is one")


def _measured(options: argparse.Namespace, call: Call) -> Measured:
    """Measure a call with the sizes that the options ask for, and write the files.

    Args:
        options: of the command line.
        call: that they have chosen.

    Returns:
        The rows of the call, and those of earlier ones that the files held.
    """
    from benchmarks import gpu_calls
    from benchmarks.gpu_measure import DRY_PASS, REAL

    share = claims.less(1.0, 0.3)  # of all times
    sections = []
    for section in call.sections:
        sections.append(section._replace(seconds=share * section.seconds))
    call = call._replace(sections=tuple(sections))
    with tempfile.TemporaryDirectory() as name:
        nowhere = Path(name)
        if options.dry_run:
            return gpu_calls.measured(DRY_PASS, call, nowhere)
        plan = dataclasses.replace(REAL, total=share * REAL.total)
        # The pages are of whole measurements.
        if options.quick:
            return gpu_calls.measured(plan, call, nowhere)
        pages = RESULTS if options.write else CACHE
        folder = pages / "gpu"
        measured = gpu_calls.measured(plan, call, folder)
        print(f"the files are in {folder}", file=sys.stderr)
        return measured


def _print_sections() -> None:
    """Print the sections of each call with their seconds, and how each is run alone."""
    from benchmarks import gpu_calls

    for call in gpu_calls.CALLS:
        seconds = sum(section.seconds for section in call.sections)
        print(f"{call.name} call: {seconds:.0f} s")
        for section in call.sections:
            command = f"python -m benchmarks.gpu_suite --only {shlex.quote(section.name)}"
            print(f"  {section.seconds:4.0f} s  {command}")

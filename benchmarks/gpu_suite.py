"""Measures one NVIDIA GPU and checks our kernels on it, in three calls of less than ten minutes each.

    python -m benchmarks.gpu_suite [--second | --third | --only SECTION ...] [--quick] [--json] [--write]
    python -m benchmarks.gpu_suite --list
    python -m benchmarks.gpu_suite --dry-run [--second | --third | --only SECTION ...]

The first call: checks of the kernels on fresh random inputs; then images per second of EfficientNet-B4 G16 at 380 px,
our engine beside timm's efficientnet_b4, compiled and not, in bfloat16; then other micro batches of ours. `--second`:
kernels beside a copy, the optimizer's update beside a copy, JPEG files to updates, memory, torch's layers, and ways to
compile ours, in float16. `--third`: the first step, micro batch auto, evaluation and export, selection, and the
accuracy of a short training beside the CPU's. `--only` measures sections by their names (`--list`).

Each section runs in a process and a time of its own: a kernel that reads where it must not, or a compiler that does not
end, costs the rest of one section. After each row tables are written to DEVICE.md and .json; the first call begins them
anew. They are in benchmarks/cache/gpu/, and with --write in docs/results/gpu/, which git tracks.

`--dry-run` runs the same sections in small on the CPU, our Triton kernels in Triton's interpreter, and writes nothing:
what a GPU would need is missing there, and its rows say so.
"""

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

import torch

from benchmarks import CACHE, RESULTS, claims, packages, tracked
from common.errors import ConfigError


def main() -> None:
    if "--dry-run" in sys.argv:
        # Triton asks as kernels are defined, so before the imports below.
        os.environ["TRITON_INTERPRET"] = "1"
    packages.check("benchmarks.gpu_suite")
    from benchmarks import gpu_calls
    from benchmarks.gpu_measure import DRY_PASS, REAL
    from benchmarks.gpu_results import made_claims

    def chosen(options: argparse.Namespace) -> gpu_calls.Call:
        if options.only:
            return gpu_calls.chosen(options.only)
        return gpu_calls.CALLS[options.call]

    def duration(options: argparse.Namespace) -> str:
        return f"10 minutes at most ({chosen(options).summary})"

    parser = claims.parser(__doc__)
    which = parser.add_mutually_exclusive_group()
    number = {"dest": "call", "action": "store_const"}
    which.add_argument("--second", **number, const=1, default=0, help="measure more, and add it")
    which.add_argument("--third", **number, const=2, help="measure the rest, and add it")
    which.add_argument("--only", nargs="+", metavar="SECTION", help="measure these sections, and add them")
    which.add_argument("--list", action="store_true", help="print the sections and their time limits")
    parser.add_argument("--dry-run", action="store_true", help="run in small on the CPU, and write nothing")
    tracked.add_option(parser)
    options = claims.begin(parser, duration, "3 minutes", "on an NVIDIA GPU")
    if options.list:
        _print_sections()
        return
    without = torch.version.hip or not torch.cuda.is_available()
    if without and not options.dry_run:
        fault = "PyTorch finds no NVIDIA GPU here"
        if options.json:
            claims.report("gpu_suite", [], made_claims([], absent=fault), as_json=True)
        raise ConfigError(f"benchmarks.gpu_suite: {fault}; run it where there is one")
    with tempfile.TemporaryDirectory() as folder:  # a page is of a whole measurement
        share, call = claims.less(1.0, 0.3), chosen(options)
        pages = RESULTS if options.write else CACHE
        plan = dataclasses.replace(REAL, total=share * REAL.total)
        place = claims.less(pages / "gpu", Path(folder))
        if options.dry_run:
            plan = DRY_PASS
            place = Path(folder)
        call = call._replace(sections=tuple(each._replace(seconds=share * each.seconds) for each in call.sections))
        found = gpu_calls.measured(plan, call, place)
    rows = [row.columns() for row in found.rows]
    claims.report("gpu_suite", rows, made_claims(found.rows), options.json, found.calls[call.name])


def _print_sections() -> None:
    """Print the sections of each call with their seconds, and how each is run alone."""
    from benchmarks import gpu_calls

    for call in gpu_calls.CALLS:
        print(f"{call.name} call: {sum(each.seconds for each in call.sections):.0f} s")
        for each in call.sections:
            print(f"  {each.seconds:4.0f} s  python -m benchmarks.gpu_suite --only {shlex.quote(each.name)}")

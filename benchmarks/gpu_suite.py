"""Measures one NVIDIA GPU and checks our kernels on it, in two calls of less than ten minutes each.

    python -m benchmarks.gpu_suite [--second] [--quick] [--json] [--write]

The first call: checks of the kernels on fresh random inputs; then images per second of EfficientNet-B4 G16 at 380 px,
our engine beside timm's efficientnet_b4 and timm's G16, both compiled, in bfloat16 and float16; then other micro
batches of ours. `--second` adds the rest: kernels beside a copy, the optimizer's update beside a copy, JPEG files to
updates, memory, timm uncompiled, and ways to compile ours.

Each section runs in a process and a time of its own: a kernel that reads where it must not, or a compiler that does not
end, costs the rest of one section. After each row tables are written to DEVICE.md and .json; the first call begins them
anew. They are in benchmarks/cache/gpu/, and with --write in docs/results/gpu/, which git tracks.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import argparse
import dataclasses
import tempfile
from pathlib import Path

import torch

from benchmarks import CACHE, RESULTS, claims, packages, tracked
from common.errors import ConfigError


def main() -> None:
    packages.check("benchmarks.gpu_suite")
    from benchmarks import gpu_calls
    from benchmarks.gpu_measure import REAL
    from benchmarks.gpu_results import made_claims

    def chosen(options: argparse.Namespace) -> gpu_calls.Call:
        return gpu_calls.SECOND if options.second else gpu_calls.FIRST

    parser = claims.parser(__doc__)
    parser.add_argument("--second", action="store_true", help="measure what the first call leaves, and add it")
    tracked.add_option(parser)
    where = "on an NVIDIA GPU"
    options = claims.begin(parser, lambda read: f"10 minutes at most ({chosen(read).summary})", "3 minutes", where)
    if torch.version.hip or not torch.cuda.is_available():
        fault = "PyTorch finds no NVIDIA GPU here"
        if options.json:
            claims.report("gpu_suite", [], made_claims([], absent=fault), as_json=True)
        raise ConfigError(f"benchmarks.gpu_suite: {fault}; run it where there is one")
    with tempfile.TemporaryDirectory() as folder:  # a page is of a whole measurement
        share, call = claims.less(1.0, 0.3), chosen(options)
        pages = RESULTS if options.write else CACHE
        plan = dataclasses.replace(REAL, total=share * REAL.total)
        call = call._replace(sections=tuple(each._replace(seconds=share * each.seconds) for each in call.sections))
        found = gpu_calls.measured(plan, call, claims.less(pages / "gpu", Path(folder)))
    rows = [row.columns() for row in found.rows]
    claims.report("gpu_suite", rows, made_claims(found.rows), options.json, found.calls[call.name])

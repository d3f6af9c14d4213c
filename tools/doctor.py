"""Finds why a recipe does not scale here, and what to fix first.

    python -m tools.doctor [--config FILE] [overrides]

Measures, within about a minute and with the recipe's own model, micro batch and images: reading and
decoding, copies to the device, links between replicas, every kind of exchange, and training steps,
each split into its parts. Under several processes all are measured:

    torchrun --nproc-per-node 2 -m tools.doctor --config FILE

Writes machine.yaml, from which tools.plan makes its predictions, and step.png. No run folder is
made or touched. With --json the last line is one JSON object. Exit codes: 0 done, 1 the machine
failed, 2 the input is wrong, 75 stopped. See docs/doctor.md.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from common.command import run

    run(__file__)

import argparse
import functools
import signal
from pathlib import Path
from typing import Optional, Sequence

from common.command import Parser, fail, naming, one_line
from common.errors import DONE, STOPPED, ConfigError, UserError
from common.files import check_file, write_text, writing
from common.json_io import json_text
from recipe import batch, loading
from recipe.config import Recipe
from recipe.idle import PREDICTED
from tools import packages
from tools.arguments import within

_OF_RUNS = ("config.yaml", "metrics.jsonl", "checkpoints")  # names by which a run's folder is known


@one_line()
def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None: those of the process.

    Returns:
        The exit code.
    """
    options = _parser().parse_intermixed_args(arguments)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    try:
        recipe = loading.load(options.config, options.overrides, used=PREDICTED)
        if recipe.run.device == "ipu":
            fault = "run.device ipu: the doctor measures CPUs and GPUs; of IPUs use ipu.profile (docs/ipu.md)"
            raise ConfigError(f"{options.config}: {fault}")
        # Faults that can be found without loading torch.
        naming(options.config, batch.describe, recipe)
        if _is_main():
            _check_output(options.output)
        naming(options.config, functools.partial(_examine, options), recipe)
        return DONE
    except KeyboardInterrupt:
        pass
    finally:
        # torchrun may end a rank that waits for another's complaint: at once, without an exception.
        signal.signal(signal.SIGTERM, before)
    return fail("stopped; nothing was written" if _is_main() else "", STOPPED)


def _parser() -> Parser:
    """Return the parser of the command line."""
    about = "Measure where a training step's time goes on these machines, and name what to fix first (docs/doctor.md)."
    parser = Parser(prog="python -m tools.doctor", description=about)
    add = parser.add_argument
    config = "configs/quickstart.yaml"
    folder = Path("doctor")
    seconds = within(1e-3, 86400, float)
    add("--config", default=config, metavar="FILE", help="recipe (%(default)s)")
    add("--json", action="store_true", help="end with one JSON object in one line")
    add("--output", type=Path, default=folder, metavar="FOLDER", help="for both files")
    add("--seconds", type=seconds, default=60.0, metavar="N", help="of measuring, about (60)")
    add("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the recipe")
    return parser


def _is_main() -> bool:
    """Return whether launchers call this process the first one.

    `parallel.topology` knows better, but loads torch.
    """
    for name in ("RANK", "SLURM_PROCID"):
        if name in os.environ:
            return os.environ[name] == "0"
    return True


def _check_output(output: Path) -> None:
    """Refuse, before anything is measured, a folder that cannot be written or holds a run.

    Raises UserError.
    """
    # A run's folder holds what the run has written, and nothing else.
    for name in _OF_RUNS:
        if (output / name).exists():
            raise UserError(
                f"{output}: is the folder of a run, as it holds {name}; choose another --output"
            )
    check_file(output / "machine.yaml")


def _examine(options: argparse.Namespace, recipe: Recipe) -> None:
    """Measure; on the main rank, print the findings and write them."""
    # Imported late: a wrong command line is refused before torch is loaded.
    from tools.diagnosis import rendering
    from tools.diagnosis.examination import examine
    from tools.planning.machine import dump

    findings = examine(recipe, options.seconds, functools.partial(print, flush=True))
    if findings is None:
        return
    print("\n".join(rendering.lines(findings, options.config)))
    files = []
    without_picture = packages.lacking("matplotlib")
    with writing(options.output):
        options.output.mkdir(parents=True, exist_ok=True)
        # Only where the figures are not in doubt.
        if findings.machine is not None:
            machine = options.output / "machine.yaml"
            write_text(machine, dump(findings.machine))
            files.append(machine)
        if not without_picture:
            picture = options.output / "step.png"
            rendering.draw(findings, options.config, picture)
            files.append(picture)
    if without_picture:
        print(f"picture    none: {without_picture}")
    names = [str(file) for file in files]
    if names:
        print(f"files      {', '.join(names)}")
    if options.json:
        data = rendering.as_data(findings, options.config)
        data["files"] = names
        print(json_text(data))

"""Find why a recipe does not scale here, and what to fix first: python -m tools.doctor [--config FILE] [overrides]

Measures, within about a minute and with the recipe's own model, micro batch and images: reading and decoding, copies to
the device, links between replicas, every kind of exchange, and training steps, each split into its parts. Under
several processes all are measured: torchrun --nproc-per-node 2 -m tools.doctor --config FILE (docs/doctor.md).

Writes machine.yaml, from which tools.plan makes its predictions, and step.png. No run folder is made or touched. With
--json the last line is one JSON object. Exit codes: 0 done, 1 the machine failed, 2 the input is wrong, 75 stopped.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import argparse
import functools
import signal
from pathlib import Path
from typing import Optional, Sequence

from recipe import batch, loading
from recipe.config import Recipe
from recipe.errors import DONE, STOPPED, ConfigError, UserError
from recipe.files import writing
from recipe.idle import PREDICTED
from recipe.json_text import json_text
from tools import output as outputs
from tools.arguments import within
from training.command import Parser, fail, naming, one_line


@one_line()
def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_intermixed_args(arguments)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    try:
        recipe = loading.load(options.config, options.overrides, used=PREDICTED)
        if recipe.run.device == "ipu":
            fault = "run.device ipu: the doctor measures CPUs and GPUs; of IPUs use ipu.profile (docs/ipu.md)"
            raise ConfigError(f"{options.config}: {fault}")
        naming(options.config, batch.describe, recipe)  # faults that can be found without loading torch
        if _is_main():
            _check_output(options.output)
        naming(options.config, functools.partial(_examine, options), recipe)
        return DONE
    except KeyboardInterrupt:
        pass
    finally:
        # torchrun may end a rank that waits for another's complaint: at once, and not by an exception.
        signal.signal(signal.SIGTERM, before)
    return fail("stopped; nothing was written" if _is_main() else "", STOPPED)


def _parser() -> Parser:
    about = "Measure where a training step's time goes on these machines, and name what to fix first (docs/doctor.md)."
    parser = Parser(prog="python -m tools.doctor", description=about)
    parser.add_argument("--config", default="configs/quickstart.yaml", metavar="FILE", help="recipe (%(default)s)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    parser.add_argument("--output", type=Path, default=Path("doctor"), metavar="FOLDER", help="for both files")
    seconds = within(1e-3, 86400, float)
    parser.add_argument("--seconds", type=seconds, default=60.0, metavar="N", help="of measuring, about (60)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the recipe")
    return parser


def _is_main() -> bool:
    """Whether launchers call this process the first one. `parallel.topology` knows better, but loads torch."""
    number = next((os.environ[name] for name in ("RANK", "SLURM_PROCID") if name in os.environ), "0")
    return number == "0"


def _check_output(output: Path) -> None:
    """Refuses, before anything is measured, a folder that cannot be written or holds a run. Raises UserError."""
    run = next((name for name in ("config.yaml", "metrics.jsonl", "checkpoints") if (output / name).exists()), None)
    if run is not None:
        raise UserError(f"{output}: is the folder of a run, as it holds {run}; choose another --output")
    outputs.check(output / "machine.yaml")


def _examine(options: argparse.Namespace, recipe: Recipe) -> None:
    # Imported late: a wrong command line is refused before torch is loaded.
    from tools.diagnosis import rendering
    from tools.diagnosis.examination import examine
    from tools.planning.machine import dump

    found = examine(recipe, options.seconds, lambda line: print(line, flush=True))
    if found is None:
        return
    print("\n".join(rendering.lines(found, options.config)))
    files = [options.output / "step.png"]
    with writing(options.output):
        options.output.mkdir(parents=True, exist_ok=True)
        rendering.draw(found, options.config, files[0])
        if found.machine is not None:
            files.append(options.output / "machine.yaml")
            files[1].write_text(dump(found.machine), encoding="utf-8")
    print(f"files      {', '.join(map(str, files))}")
    if options.json:
        print(json_text({**rendering.as_data(found, options.config), "files": list(map(str, files))}))

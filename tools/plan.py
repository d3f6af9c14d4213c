"""Plan of a recipe, its steps and its costs, made without an accelerator:

    python -m tools.plan --config FILE [--machine NAME|FILE] [--picture FILE.png] [--json]
                         [section.key=value ...]

First the plan of `train.py --dry-run`; then, on a machine that is known by published figures or
measured by `tools.doctor`: memory of each stage, the widest model that fits, a step's time by
cause, what must be read, and how all that changes from 1 to 4,096 replicas. With --json the last
line is one JSON object, where run.device is ipu with every option that PopTorch would be given.
Exit codes: 0 done, 1 the picture cannot be written, 2 the input is wrong.
"""

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from common.command import run

    run(__file__)

import functools
from pathlib import Path
from typing import Optional, Sequence, Tuple

from common.command import Parser, naming, one_line
from common.errors import DONE
from common.json_io import json_text
from recipe import batch, loading
from recipe.config import Recipe
from recipe.idle import PREDICTED
from tools.planning import machine, summary, text
from tools.planning.machine import Machine
from tools.planning.summary import Summary

# Device of a recipe -> the machine it is planned for unless another is named.
_MACHINES = {"ipu": "bow_pod", "cuda": "dgx_a100", "cpu": "two_cores"}
_MOST_HOURS = 30 * 24  # of training on a CPU, above which `auto` is taken for a GPU


@one_line()
def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None: those of this process.

    Returns:
        The exit code.
    """
    options = _parser().parse_intermixed_args(arguments)
    config = options.config
    recipe = loading.load(config, options.overrides, used=PREDICTED)
    # On IPUs `parallel.replicas: auto` fills the pod.
    recipe = naming(config, batch.whole_pod, recipe)
    described = naming(config, batch.described, recipe)
    print(described.text)
    # Errors of the machine's file name that file, those of planning the recipe.
    named = machine.load(options.machine) if options.machine else None
    planned = functools.partial(_plan, named=named, train_images=described.train_images)
    plan, note = naming(config, planned, recipe)
    print("\n".join(text.lines(plan, note)))
    if options.picture:
        from tools.planning import picture  # loads matplotlib

        picture.draw(plan, options.picture)
        print(f"picture    {options.picture}")
    if options.json:
        print(json_text(text.as_data(plan)))
    return DONE


def _plan(
    recipe: Recipe,
    named: Optional[Machine],
    train_images: Optional[int],
) -> Tuple[Summary, str]:
    """Return the plan, and a note on a machine that had to be guessed.

    Args:
        recipe: that is planned.
        named: machine that was named, if one was.
        train_images: in an epoch; None where it is not known.
    """

    def on(place: Machine) -> Summary:
        """Return the plan on a machine."""
        return summary.make(recipe, place, train_images)

    device = recipe.run.device
    if named:
        return on(named), ""
    if device != "auto":
        return on(machine.load(_MACHINES[device])), ""
    # Two cores, unless they would train for more than a month.
    plan = on(machine.load(_MACHINES["cpu"]))
    known = ", ".join(machine.names())
    note = f"others by --machine {known}, or a file that tools.doctor has written"
    if plan.step.hours is not None and plan.step.hours > _MOST_HOURS:
        days = f"{plan.step.hours / 24:,.0f} days"
        note = f"assumed, as two cores would train for {days}; {note}"
        plan = on(machine.load(_MACHINES["cuda"]))
    return plan, note


def _parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m tools.plan",
        description="Check a recipe and print what it would do and cost.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="recipe")
    known = f"one of {', '.join(machine.names())}, or a file that tools.doctor has written"
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help=f"{known} (default: by run.device)",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw the scaling from 1 to 4,096 replicas",
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="replaces a key of the recipe",
    )
    return parser

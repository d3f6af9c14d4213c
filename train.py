"""Trains a recipe: python train.py --config configs/quickstart.yaml [section.key=value ...]

Exit codes: 0 done, 1 the machine or the run failed, 2 the input is wrong (one line says what, where
and the remedy), 75 stopped by a signal after saving: the same command resumes.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run
    from training import stopping

    stopping.listen_early()
    run(__file__)

import functools
import os
import sys
from pathlib import Path

from common.command import AGAIN, Parser, fail, naming, one_line
from common.errors import DONE, FAILED, STOPPED, UserError
from parallel import launchers, topology
from recipe import batch, loading, suggestions
from recipe.ipu import poprun
from training import preflight, relaunch, stopping
from training.run_folder import check_owner

_FIRST_PRINTS_SECONDS = 3.0


@one_line()
def main(arguments=None) -> int:
    """Run the command.

    Args:
        arguments: words of the command line; None: those of this process.

    Returns:
        The exit code.
    """
    options = _parser().parse_intermixed_args(arguments)
    # Before torch is loaded, which takes seconds. As a command this file has done so at its
    # beginning: this is for programs that call main().
    before = stopping.listen_early()
    try:
        return _run(options)
    except UserError as error:
        # poprun starts many of this process with the same input: the first prints what is wrong
        # with it, and MPI ends the others as it ends. If only their host's files are wrong, they
        # print it themselves.
        if str(error) and not poprun.is_first_instance(os.environ):
            stopping.wait_for_termination(_FIRST_PRINTS_SECONDS)
        raise
    finally:
        stopping.put_back(before)


def _parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="train.py",
        description="Train a recipe; a run that was cut off resumes from its last checkpoint.",
        remedy=suggestions.for_flag,
    )
    parser.add_argument(
        "--config",
        default="configs/quickstart.yaml",
        metavar="FILE",
        help="recipe (default: %(default)s)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the recipe and print its plan, do not train",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="replaces a key of the recipe",
    )
    return parser


def _run(options) -> int:
    """Check the recipe, without torch; print its plan or train it. Returns the exit code."""
    # Quick checks first: a wrong recipe is refused before torch is loaded.
    config = options.config
    recipe = loading.load(config, options.overrides)
    naming(config, relaunch.settle, recipe)
    if options.dry_run:
        plan = naming(config, lambda recipe: batch.describe(batch.whole_pod(recipe)), recipe)
        naming(config, preflight.check, recipe)
        if poprun.is_first_instance(os.environ):
            print(plan)
        return DONE
    is_single = naming(config, topology.from_environment, recipe).world == 1
    # Several ranks divide the batch once they know how many they are. Each has the same to read, and
    # some need neither images nor weights.
    if is_single or recipe.run.device == "ipu":
        naming(config, functools.partial(batch.describe, here=is_single), recipe)
    else:
        naming(config, batch.check_length, recipe)
    # Of several ranks only the main one looks at the run folder, later.
    if is_single:
        _note_left_over(recipe.run.device)
        check_owner(recipe)
        naming(config, preflight.check, recipe)
    train = one_line(lambda: _again(recipe))(_train)
    return train(config, recipe)


def _note_left_over(device: str) -> None:
    """Print which variables of a launcher a single process sets aside; poprun's count on IPUs."""
    left_over = "" if device == "ipu" else launchers.left_over(os.environ)
    if left_over:
        line = f"{left_over} in the environment is set aside: one process trains"
        print(line, file=sys.stderr, flush=True)


def _train(config, recipe) -> int:
    """Train a recipe that was checked; return the exit code."""
    # Late: a wrong recipe is refused before torch is loaded.
    from training.loop import Stopped, TrainingError
    from training.run import run

    try:
        naming(config, run, recipe)
    except Stopped as error:
        return fail(error, STOPPED)
    except TrainingError as error:
        return fail(error, FAILED)
    return DONE


def _again(recipe) -> str:
    """Return what to do once a fault is mended."""
    saved = any(Path(batch.output_folder(recipe), "checkpoints").glob("step-*.json"))
    return f"{AGAIN} to resume from the last checkpoint" if saved else AGAIN

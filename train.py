"""Trains a recipe: python train.py --config configs/quickstart.yaml [section.key=value ...]

Exit codes: 0 done, 1 the machine or the run failed, 2 the input is wrong (one line says what, where and the
remedy), 75 stopped by a signal after saving: the same command resumes.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import functools
import os
import re
import sys
import time
from pathlib import Path

from common.command import AGAIN, Parser, fail, naming, one_line
from common.errors import DONE, FAILED, STOPPED, UserError
from parallel import launchers, topology
from recipe import batch, loading
from recipe.ipu import poprun
from training import preflight, relaunch, stopping
from training.run_folder import check_owner

_FIRST_PRINTS_SECONDS = 3.0
_RUNTIME_ERRORS = {  # pattern in torch's error -> the fault and its remedy
    "out of memory|can't allocate memory": "out of memory; lower batch.micro, batch.evaluation or model.image_size",
    r"DataLoader worker (\(pid|exited)": "a process that loads images was killed, perhaps as memory ran out; lower "
    "data.workers or data.prefetch",
}


@one_line()
def main(arguments=None) -> int:
    """Run the command; return its exit code."""
    description = "Train a recipe; a run that was cut off resumes from its last checkpoint."
    parser, default = Parser(prog="train.py", description=description), "configs/quickstart.yaml"
    parser.add_argument("--config", default=default, metavar="FILE", help="recipe (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="check the recipe and print its plan, do not train")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the recipe")
    options = parser.parse_intermixed_args(arguments)
    stopping.listen_early()
    try:
        return _checked(options)
    except UserError as error:
        # poprun starts many of this process with the same input: the first prints what is wrong with it, and MPI ends
        # the others as it ends. If only their host's files are wrong, they print it themselves.
        if str(error) and not poprun.is_first_instance(os.environ):
            time.sleep(_FIRST_PRINTS_SECONDS)
        raise


def _checked(options) -> int:
    """Check the recipe, without torch; print its plan or train it. Returns the exit code."""
    recipe = loading.load(options.config, options.overrides)
    naming(options.config, relaunch.settle, recipe)
    if options.dry_run:
        plan = naming(options.config, lambda recipe: batch.describe(batch.whole_pod(recipe)), recipe)
        naming(options.config, preflight.check, recipe)
        if poprun.is_first_instance(os.environ):
            print(plan)
        return DONE
    place = naming(options.config, topology.from_environment, recipe)
    # Each of several ranks has the same to read, and some need neither images nor weights.
    alone = place.world == 1
    naming(options.config, functools.partial(batch.describe, here=alone), recipe)
    if alone:  # of several ranks only the main one looks at the run folder, later
        left_over = "" if recipe.run.device == "ipu" else launchers.left_over(os.environ)
        if left_over:
            print(f"{left_over} in the environment is set aside: one process trains", file=sys.stderr, flush=True)
        check_owner(recipe)
        naming(options.config, preflight.check, recipe)
    return one_line(lambda: _again(recipe))(_train)(options.config, recipe)


def _train(config, recipe) -> int:
    from training.loop import Stopped, TrainingError  # late: a wrong recipe is refused before torch is loaded
    from training.run import run

    try:
        naming(config, run, recipe)
    except (Stopped, TrainingError) as error:
        return fail(error, STOPPED if isinstance(error, Stopped) else FAILED)
    except RuntimeError as error:
        fault = next((fault for sign, fault in _RUNTIME_ERRORS.items() if re.search(sign, str(error))), None)
        if fault is None:
            raise
        return fail(f"{fault}, then {_again(recipe)}", FAILED)
    return DONE


def _again(recipe) -> str:
    saved = any(Path(batch.output_folder(recipe), "checkpoints").glob("step-*.json"))
    return f"{AGAIN} to resume from the last checkpoint" if saved else AGAIN

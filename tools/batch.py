"""Costs of a run with other batches, and the largest batch that pays. See docs/batch.md.

From its gradient noise scale, which costs nothing:

    python -m tools.batch RUN [--batches 768,1536] [--machine NAME|FILE] [--replicas N]
                          [--picture FILE.png] [--json]

RUN is a run folder whose log has a noise scale. Prints the critical batch along the run, and for
each batch the updates and images to where the run came; on a machine that is known by published
figures or was measured by `tools.doctor` also the time.

Measured by short branches from its checkpoints, which takes a tenth of the run unless --share says
otherwise:

    python -m tools.batch RUN --branch [--share 0.1] [--points 3] [--output FOLDER]
                          [--picture FILE.png] [--json] [section.key=value ...]

Prints the cost beforehand, and in the end the critical batch at each checkpoint and a
`batch.schedule` to be pasted. The same command goes on where it was cut off.

With --json the last line is one JSON object. Exit codes: 0 done, 1 the picture cannot be written or
a branch failed, 2 the input is wrong, 75 stopped by a signal: the same command goes on.
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
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from common.command import Parser, fail, naming, one_line
from common.errors import DONE, FAILED, STOPPED
from common.json_io import json_text
from recipe import loading
from recipe.batch import planned
from recipe.config import Recipe
from tools import output
from tools.arguments import whole, within
from tools.branching import decision, report, session, source
from tools.branching import plan as plans
from tools.planning import batches, machine, prediction
from tools.planning.prediction import Prediction
from tools.reporting.run import noted_replicas, starts_in
from tools.training_process import StopRequest
from training.metrics import read_events

_SHARE = 0.1
_POINTS = 3
_POWERS = range(-2, 5)  # of two: the batches over the run's, unless others are named
_say = functools.partial(print, flush=True)


@one_line()
def main(
    arguments: Optional[Sequence[str]] = None,
    trainer: Sequence[str] = session.TRAINER,
) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None: those of this process.
        trainer: what trains a branch, as Python is given it.

    Returns:
        The exit code.
    """
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    _check_options(parser, options)
    # Before the branches are trained, which takes hours.
    if options.picture:
        made = _folder_of_branches(options) if options.branch else None
        output.check_picture(options.picture, made)
    if options.branch:
        return _branch(options, trainer)
    return _predict(options)


def _predict(options: argparse.Namespace) -> int:
    """Print what the noise scale predicts; return the exit code."""
    recipe = loading.load(options.run / "config.yaml")
    batch = recipe.batch.global_
    place = machine.load(options.machine) if options.machine else None
    events = read_events(options.run).get("train", [])
    run = naming(options.run, lambda train: batches.intervals(train, recipe), events)
    replicas = options.replicas or noted_replicas(starts_in(options.run))
    if replicas is None:
        replicas = planned(recipe).replicas
    # Without a noise scale that is told from zero, nothing follows from it.
    critical = None
    costs = []
    if batches.is_predictable(run):
        critical = batches.critical(run)
        for other in options.batches or _default_batches(batch):
            costs.append(batches.cost(run, recipe, other, place, replicas))
    result = Prediction(run, batch, replicas, critical, costs)
    print("\n".join(prediction.lines(result)))
    _draw(options.picture, functools.partial(prediction.draw, result))
    if options.json:
        print(json_text(prediction.as_data(result)))
    return DONE


def _default_batches(batch: int) -> List[int]:
    """Return the batches that are compared with a run's, ascending."""
    # A set: a quarter and half of a tiny batch are both 1.
    return sorted({max(1, int(batch * 2.0**power)) for power in _POWERS})


def _branch(options: argparse.Namespace, trainer: Sequence[str]) -> int:
    """Measure the critical batch by branches of the run; return the exit code."""
    folder = _folder_of_branches(options)
    # Signals are noted from the beginning: reading the run may take seconds.
    stop = StopRequest()
    with stop:
        origin = source.read(options.run, options.overrides)
        plan, recipes = _planned(origin, folder, options.points, options.share)
        _say("\n".join(report.announcement(origin, plan)))
        # Branches that have ended in an earlier session are not trained again.
        try:
            losses = session.train(origin, recipes, folder, stop=stop, say=_say, trainer=trainer)
        except session.Stopped as error:
            remedy = "the branches that have ended are kept; the same command goes on"
            return fail(f"{error}: {remedy}", STOPPED)
        except session.BranchFailed as error:
            return fail(f"{error}; fix this, then rerun the same command: it goes on", FAILED)
    points = decision.judge(plan, losses)
    growth = decision.growth(plan, points, origin.recipe)
    print("\n".join(report.lines(plan, points, growth)))
    _draw(options.picture, functools.partial(report.draw, plan, points, growth))
    if options.json:
        print(json_text(report.as_data(origin, plan, points, growth)))
    return DONE


def _folder_of_branches(options: argparse.Namespace) -> Path:
    """Return the folder that the branches are trained in."""
    return options.output or options.run / "branches"


def _planned(
    origin: source.Source,
    folder: Path,
    points: int,
    share: float,
) -> Tuple[plans.Plan, Dict[plans.Branch, Recipe]]:
    """Return the branches as an earlier session has stored them, or planned now; store them.

    Args:
        origin: the run.
        folder: of the branches.
        points: checkpoints to branch from.
        share: of the run's images that all branches may take.
    """
    wanted = {"points": points, "share": share}
    plan = session.stored(folder, wanted, origin.recipe)
    if plan is None:
        plan = _plan(origin, points, share)
    # All recipes are made before anything is stored: one that is refused leaves nothing behind.
    recipes = {}
    for branch in plan.branches():
        recipes[branch] = source.branch_recipe(origin, plan, branch, folder / branch.name)
    session.store(folder, wanted, origin.recipe, plan)
    return plan, recipes


def _draw(path: Optional[Path], draw: Callable[[Path], None]) -> None:
    """Draw a picture, if one is wanted, and name it."""
    if path:
        draw(path)
        print(f"picture: {path}")


def _plan(origin: source.Source, points: int, share: float) -> plans.Plan:
    """Plan branches from the checkpoints that the run has. Raises ConfigError with the place."""
    from training.checkpoint import CheckpointFolder  # loads torch

    place = origin.folder / "checkpoints"
    # Only manifests are read, so what the folder would keep does not matter.
    checkpoints = CheckpointFolder(place, keep_last=2, keep_best=True)
    steps = [manifest.step for manifest in checkpoints.manifests(_say)]
    make = functools.partial(
        plans.make,
        points=points,
        share=share,
        batch=origin.recipe.batch.global_,
        per_epoch=origin.per_epoch,
        total=origin.total,
    )
    return naming(place, make, steps)


def _check_options(parser: Parser, options: argparse.Namespace) -> None:
    """End the command for options that belong to the other of its two ways; set defaults."""
    refused: Sequence[str]
    if options.branch:
        refused = ("batches", "machine", "replicas")
        remedy = "goes without --branch"
    else:
        refused = ("share", "points", "output", "overrides")
        remedy = "goes with --branch"
    for name in refused:
        # No option of these has a default of argparse, which would look as if it were given.
        if getattr(options, name) not in (None, []):
            option = "section.key=value" if name == "overrides" else f"--{name}"
            parser.error(f"{option} {remedy}")
    # Defaults come after the check, which sees what was given.
    options.share = options.share or _SHARE
    options.points = options.points or _POINTS


def _parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m tools.batch",
        description="Predict or measure what other batches would cost a run.",
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="folder of a run, e.g. runs/quickstart",
    )
    parser.add_argument(
        "--batches",
        type=_numbers,
        metavar="N,N...",
        help="images in an update (default: a quarter to 16 times the run's)",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME|FILE",
        help=f"one of {', '.join(machine.names())}, or a file by tools.doctor",
    )
    parser.add_argument(
        "--replicas",
        type=whole,
        metavar="N",
        help="on that machine (default: those of the run's newest session)",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw the critical batch along the run",
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    # Options of the other way, in a group of their own.
    _add_branching(parser)
    return parser


def _add_branching(parser: Parser) -> None:
    """Add the arguments of the measurement by branches."""
    group = parser.add_argument_group("measured by branches")
    group.add_argument(
        "--branch",
        action="store_true",
        help="train short branches from the run's checkpoints",
    )
    group.add_argument(
        "--share",
        type=within(1e-6, 10, float),
        metavar="F",
        help=f"of the run's images that all branches may take ({_SHARE})",
    )
    group.add_argument(
        "--points",
        type=within(1, 100),
        metavar="N",
        help=f"checkpoints to branch from ({_POINTS})",
    )
    group.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="of the branches (default: RUN/branches)",
    )
    group.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="laid over the run's recipe in all branches",
    )


def _numbers(text: str) -> List[int]:
    """Return whole numbers that are separated by commas."""
    return [whole(part) for part in text.split(",")]

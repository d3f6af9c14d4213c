"""What would a run cost with other batches, and which is the largest that pays? See docs/batch.md.

From its gradient noise scale, which costs nothing:

    python -m tools.batch RUN [--batches 768,1536] [--machine NAME|FILE] [--replicas N] [--picture FILE.png] [--json]

RUN is a run folder whose log has a noise scale. Prints the critical batch along the run, and for each batch the updates
and images to where the run came; on a machine that is known by published figures or was measured by `tools.doctor` also
the time.

Measured by short branches from its checkpoints, which takes a tenth of the run unless --share says otherwise:

    python -m tools.batch RUN --branch [--share 0.1] [--points 3] [--output FOLDER] [--picture FILE.png] [--json]
                          [section.key=value ...]

Prints the cost beforehand, and in the end the critical batch at each checkpoint and a `batch.schedule` to be pasted.
The same command goes on where it was cut off.

With --json the last line is one JSON object. Exit codes: 0 done, 1 the picture cannot be written or a branch failed, 2
the input is wrong, 75 stopped by a signal: the same command goes on.
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
import textwrap
from pathlib import Path
from typing import Iterator, List, Optional, Sequence

from common.command import Parser, fail, naming, one_line
from common.errors import DONE, FAILED, STOPPED
from common.files import writing
from common.json_io import json_text
from common.text import count
from recipe import loading
from recipe.batch import planned
from tools import output
from tools.arguments import whole, within
from tools.branching import decision, report, session, source
from tools.branching import plan as plans
from tools.formats import duration
from tools.planning import batches, machine
from tools.planning.batches import Cost, Interval
from tools.training_process import StopRequest
from training.metrics import read_events

_WIDTH = 100  # of a line of text
_SHARE = 0.1
_POINTS = 3


@one_line()
def main(arguments: Optional[Sequence[str]] = None, trainer: Sequence[str] = session.TRAINER) -> int:
    """Runs the command; returns its exit code. Args: trainer: what trains a branch, as Python is given it."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    _check_options(parser, options)
    return _branch(options, trainer) if options.branch else _predict(options)


def _predict(options: argparse.Namespace) -> int:
    """Prints what the noise scale predicts; returns the exit code."""
    recipe = loading.load(options.run / "config.yaml")
    own, place = recipe.batch.global_, machine.load(options.machine) if options.machine else None
    events = read_events(options.run).get("train", [])
    run = naming(options.run, lambda train: batches.intervals(train, own), events)
    replicas = options.replicas or planned(recipe).replicas
    costs: List[Cost] = []
    critical = None
    if batches.is_predictable(run):
        others = options.batches or sorted({max(1, int(own * 2.0**power)) for power in range(-2, 5)})
        costs = [batches.cost(run, recipe, other, place, replicas) for other in others]
        critical = batches.critical(run)
    print("\n".join(_lines(run, critical, costs, replicas)))
    if options.picture:
        with writing(options.picture):
            _draw(run, own, costs, options.picture)
        print(f"picture: {options.picture}")
    if options.json:
        data = {
            "batch": own,
            "critical_batch": critical,
            "run": [{**each._asdict(), "known": each.known} for each in run],
            "costs": [each._asdict() for each in costs],
            "bias": batches.BIAS if any(each.upper_bound for each in costs) else None,
        }
        print(json_text(data))
    return DONE


def _branch(options: argparse.Namespace, trainer: Sequence[str]) -> int:
    """Measures the critical batch by branches of the run; returns the exit code."""
    folder = options.output or options.run / "branches"
    wanted = {"points": options.points, "share": options.share}
    stop = StopRequest()
    with stop:
        # What is to be trained: as an earlier session has stored it, or planned now.
        origin = source.read(options.run, options.overrides)
        plan = session.stored(folder, wanted, origin.recipe) or _planned(origin, options)
        recipes = {each: source.branch_recipe(origin, plan, each, folder / each.name) for each in plan.branches()}
        session.store(folder, wanted, origin.recipe, plan)
        print("\n".join(report.announcement(origin, plan)), flush=True)
        # The branches that have not ended yet.
        say = functools.partial(print, flush=True)
        try:
            losses = session.train(origin, plan, recipes, folder, stop=stop, say=say, trainer=trainer)
        except session.Stopped as error:
            return fail(f"{error}: the branches that have ended are kept; the same command goes on", STOPPED)
        except session.BranchFailed as error:
            return fail(f"{error}; fix this, then rerun the same command: it goes on", FAILED)
    # What they show.
    points = decision.judge(plan, losses)
    growth = decision.growth(plan, points, origin.recipe)
    print("\n".join(report.lines(plan, points, growth)))
    if options.picture:
        with writing(options.picture):
            report.draw(plan, points, growth, options.picture)
        print(f"picture: {options.picture}")
    if options.json:
        print(json_text(report.as_data(origin, plan, points, growth)))
    return DONE


def _planned(origin: source.Source, options: argparse.Namespace) -> plans.Plan:
    """The branches from the checkpoints that the run has. Raises ConfigError with the place."""
    from training.checkpoint import CheckpointFolder  # loads torch

    place = origin.folder / "checkpoints"
    manifests = CheckpointFolder(place, keep_last=2, keep_best=True).manifests(functools.partial(print, flush=True))
    steps = [manifest.step for manifest in manifests]

    def make(steps: Sequence[int]) -> plans.Plan:
        return plans.make(
            steps,
            points=options.points,
            share=options.share,
            batch=origin.recipe.batch.global_,
            per_epoch=origin.per_epoch,
            total=origin.total,
        )

    return naming(place, make, steps)


def _check_options(parser: Parser, options: argparse.Namespace) -> None:
    """Ends the command for options that belong to the other of its two ways."""
    predicting = ("batches", "machine", "replicas")
    branching = ("share", "points", "output", "overrides")
    for name in predicting if options.branch else branching:
        if getattr(options, name) not in (None, []):
            shown = "section.key=value" if name == "overrides" else f"--{name}"
            parser.error(f"{shown} goes {'without' if options.branch else 'with'} --branch")
    options.share = options.share or _SHARE
    options.points = options.points or _POINTS


def _parser() -> Parser:
    parser = Parser(prog="python -m tools.batch", description="Predict or measure what other batches would cost a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, e.g. runs/quickstart")
    images = "images in an update (default: a quarter to 16 times the run's)"
    parser.add_argument("--batches", type=_numbers, metavar="N,N...", help=images)
    known = f"one of {', '.join(machine.names())}, or a file by tools.doctor"
    parser.add_argument("--machine", metavar="NAME|FILE", help=known)
    parser.add_argument("--replicas", type=whole, metavar="N", help="on that machine (default: the run's)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the critical batch along the run")
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    measured = parser.add_argument_group("measured by branches")
    measured.add_argument("--branch", action="store_true", help="train short branches from the run's checkpoints")
    cost = f"of the run's images that all branches may take ({_SHARE})"
    measured.add_argument("--share", type=within(1e-6, 10, float), metavar="F", help=cost)
    measured.add_argument("--points", type=within(1, 100), metavar="N", help=f"checkpoints to branch from ({_POINTS})")
    measured.add_argument("--output", type=Path, metavar="FOLDER", help="of the branches (default: RUN/branches)")
    overrides = "laid over the run's recipe in all branches"
    measured.add_argument("overrides", nargs="*", metavar="section.key=value", help=overrides)
    return parser


def _numbers(text: str) -> List[int]:
    return [whole(part) for part in text.split(",")]


def _lines(run: Sequence[Interval], critical: Optional[float], costs: Sequence[Cost], replicas: int) -> Iterator[str]:
    updates = sum(each.updates for each in run)
    images = sum(each.updates * each.batch for each in run)
    along = [run[0], run[len(run) // 2], run[-1]] if len(run) > 2 else run
    scales = ", ".join(f"{_scale(each)} by epoch {each.epoch:.3g}" for each in along)
    yield f"run        {updates:,.0f} updates of {images / updates:,.0f} images"
    if critical is None:
        yield f"critical   unknown; noise scale {scales}"
        yield from _wrapped(
            "For most updates zero is within two standard errors of the noise scale, so nothing is predicted from it. "
            "A longer run measures it better, and so does one with more micro batches in an update."
        )
        return
    yield f"critical   {critical:,.0f} images over the whole run; noise scale {scales}"
    yield f"{'batch':>9} {'updates':>10} {'(range)':>19} {'images':>13} {'x images':>9} {'time':>12}"
    for each in costs:
        span = f"{each.updates_range[0]:,.0f}-{each.updates_range[1]:,.0f}"
        bound = "<= " if each.upper_bound else ""
        needed = f"{bound}{each.updates:,.0f}"
        row = f"{each.batch:9,} {needed:>10} {span:>19} {each.images:13,.0f} {each.images / images:9.2f}"
        yield row if each.seconds is None else f"{row} {duration(each.seconds):>12}"
    if any(each.upper_bound for each in costs):
        yield from _wrapped(f"{batches.BIAS}.")
    if costs[0].seconds is not None:
        yield f"times on {count(replicas, 'replica')}"


def _scale(interval: Interval) -> str:
    """A noise scale with its error; no figure where zero is within two of it."""
    return f"{interval.noise:,.0f} ± {interval.error:,.0f}" if interval.known else "unknown"


def _wrapped(text: str) -> List[str]:
    return textwrap.wrap(text, _WIDTH)


def _draw(run: Sequence[Interval], own: int, costs: Sequence[Cost], path: Path) -> None:
    figure = output.figure(path, (10, 4.2))
    left, right = figure.subplots(1, 2)
    known = [each for each in run if each.known]
    left.set(xlabel="epoch", ylabel="images", title="noise scale; dashed: the run's batch")
    left.axhline(own, color="grey", ls="--", lw=0.8)
    if known:
        errors = [each.error for each in known]
        left.errorbar([each.epoch for each in known], [each.noise for each in known], errors, fmt="o", ms=3, color="C0")
        left.set_yscale("log")
        output.few_ticks(left.yaxis)
    right.set(xlabel="images", ylabel="updates", title="to the same point, by batch" if costs else "updates: unknown")
    if costs:
        right.plot([each.images for each in costs], [each.updates for each in costs], "o-", color="C1")
        right.set(xscale="log", yscale="log")
        output.few_ticks(right.xaxis)
        output.few_ticks(right.yaxis)
    for each in costs:
        bound = ", at most" if each.upper_bound else ""
        right.annotate(f"{each.batch:,}{bound}", (each.images, each.updates), fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)

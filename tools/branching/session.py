"""Trains the branches of a run, one after the other, each as a process with a run folder of its own.

A session that is cut off goes on: branches that have ended are not trained again, and one that was killed resumes. The
plan is stored before the first branch begins, so that later sessions train the same branches.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence

from common.errors import DONE, STOPPED, WRONG_INPUT, CheckpointError, ConfigError, UserError
from common.files import write_text
from common.json_io import json_text, read_json
from recipe import loading
from recipe.config import Recipe
from tools.branching.plan import Branch, Plan
from tools.branching.source import Source
from tools.training_process import StopRequest, TrainingProcess
from training.metrics import NAME as METRICS
from training.metrics import last_events
from training.run_folder import first_difference

_ROOT = Path(__file__).resolve().parent.parent.parent
TRAINER = (str(_ROOT / "train.py"),)
_LAUNCHER = (str(_ROOT / "tools" / "launch.py"),)
_PLAN = "plan.json"
_RECIPE = "recipe.yaml"
_POLL_SECONDS = 0.1


class Stopped(Exception):
    """A signal stopped the session; what a branch had trained is saved."""


class BranchFailed(Exception):
    """A branch ended otherwise than by its last step: one line with the reason."""


def stored(output: Path, wanted: Mapping[str, float], recipe: Recipe) -> Optional[Plan]:
    """Return the plan of an earlier session in a folder; None where none has begun there.

    Args:
        output: the folder of the branches.
        wanted: options that the plan follows from.
        recipe: of the run.

    Raises:
        ConfigError: the folder holds something else. CheckpointError: it holds other branches.
    """
    remedy = "choose another folder by --output FOLDER"
    if not (output / _PLAN).exists():
        if output.is_dir() and {entry.name for entry in output.iterdir()} - {_RECIPE, f"{_RECIPE}.tmp", f"{_PLAN}.tmp"}:
            raise ConfigError(f"{output} holds files that are no branches; {remedy}")
        return None
    try:
        content = read_json(output / _PLAN)
        before = content["options"]
        plan = Plan(**content["plan"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{output / _PLAN}: damaged or not readable; {remedy}") from None
    difference = ""
    for key, value in wanted.items():
        if before.get(key) != value:
            difference = f"{key} is {before.get(key)} there, {value} here"
    difference = difference or first_difference(loading.load(output / _RECIPE), recipe)
    if difference:
        raise CheckpointError(f"{output} belongs to other branches: {difference}; {remedy}")
    return plan


def store(output: Path, wanted: Mapping[str, float], recipe: Recipe, plan: Plan) -> None:
    """Store a plan, so that `stored` returns it. Args: as of `stored`; plan: of the branches. Raises OSError."""
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / _RECIPE, loading.dump(recipe))
    write_text(output / _PLAN, json_text({"options": dict(wanted), "plan": plan._asdict()}, indent=1) + "\n")


def train(
    source: Source,
    plan: Plan,
    recipes: Mapping[Branch, Recipe],
    output: Path,
    *,
    stop: StopRequest,
    say: Callable[[str], None],
    trainer: Sequence[str] = TRAINER,
) -> Dict[Branch, float]:
    """Train all branches that have not ended yet; return the validation loss of each at its end.

    Args:
        source: the run.
        recipes: of all branches.
        output: the folder of the branches.
        stop: noted signals.
        say: takes a line about each branch that ends.
        trainer: what trains a branch in one process, as Python is given it.

    Returns:
        Losses; infinite where a branch diverged.

    Raises:
        Stopped: by a signal. BranchFailed: the machine failed. UserError: the input is wrong.
    """
    losses: Dict[Branch, float] = {}
    for number, (branch, recipe) in enumerate(recipes.items(), start=1):
        folder = output / branch.name
        if _loss(folder) is None:
            _train_one(source, branch, recipe, folder, stop=stop, trainer=trainer)
        loss = _loss(folder)
        # Only its losses are needed now; two checkpoints of each branch would fill a disk.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        losses[branch] = loss
        rate = f", rate by {branch.rule}" if branch.rule else f", order {branch.order}"
        place = f"step {branch.step:,}, {branch.multiple} x {plan.batch:,} images{rate}"
        say(f"branch {number} of {len(recipes)}: {place}: loss {loss:.4f}")
    return losses


def _train_one(
    source: Source, branch: Branch, recipe: Recipe, folder: Path, *, stop: StopRequest, trainer: Sequence[str]
) -> None:
    """Train a branch to its end. Raises as `train`."""
    from training import branching  # loads torch

    if not branching.is_begun(folder):
        branching.begin(source.folder, branch.step, recipe)
    process = TrainingProcess(_command(source, folder, trainer), folder.with_name(f"{folder.name}.log"))
    if stop.name:
        raise Stopped(stop.name)
    process.start()
    asked = False
    try:
        while process.poll() is None:
            if stop.name and (stop.at_once or not asked):
                process.stop(at_once=stop.at_once)
                asked = True
            time.sleep(_POLL_SECONDS)
    finally:
        if process.poll() is None:  # an error here must leave no process behind
            process.stop(at_once=True)
    code = process.poll()
    if code == DONE and _loss(folder) is not None:
        return
    if stop.name and (code == STOPPED or code < 0):
        raise Stopped(stop.name)
    line = process.last_line() or f"ended with {code}"
    if code == WRONG_INPUT:
        raise UserError(line)
    raise BranchFailed(f"{branch.name}: {line} ({process.log})")


def _command(source: Source, folder: Path, trainer: Sequence[str]) -> List[str]:
    """The command line that trains a branch, by the launcher where the run had several processes."""
    place = ["--config", str(folder / "config.yaml"), f"run.output={folder}"]
    if source.replicas * source.stages > 1:
        shape = ["--stages", str(source.stages), "--replicas", str(source.replicas)]
        return [sys.executable, "-u", *_LAUNCHER, *shape, *place]
    return [sys.executable, "-u", *trainer, *place]


def _loss(folder: Path) -> Optional[float]:
    """Validation loss at the end of a branch, infinite if it is no number; None before it has ended."""
    events = last_events(folder / METRICS)
    if "end" not in events or "eval" not in events:
        return None
    loss = events["eval"].get("loss")
    return math.inf if loss is None else loss

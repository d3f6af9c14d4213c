"""Trains the branches of a run, one after the other, each as a process with a folder of its own.

A session that is cut off goes on: branches that have ended are not trained again, and one that was
killed resumes. The plan is stored before the first branch begins, so that later sessions train the
same branches.
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence

from common import additions
from common.errors import (
    DONE,
    STOPPED,
    WRONG_INPUT,
    CheckpointError,
    ConfigError,
    UserError,
)
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
# Files that a session may leave behind which was killed before it had stored its plan.
_UNFINISHED = {_RECIPE, f"{_RECIPE}.tmp", f"{_PLAN}.tmp"}
_POLL_SECONDS = 0.1


class Stopped(Exception):
    """A signal stopped the session; what a branch had trained is saved."""


class BranchFailed(Exception):
    """A branch ended otherwise than by its last step: one line with the reason."""


def stored(output: Path, wanted: Mapping[str, float], recipe: Recipe) -> Optional[Plan]:
    """Read the plan of an earlier session in a folder.

    Args:
        output: the folder of the branches.
        wanted: options that the plan follows from.
        recipe: of the run.

    Returns:
        The plan; None where no session has begun there.

    Raises:
        ConfigError: the folder holds something else.
        CheckpointError: it holds other branches.
    """
    remedy = "choose another folder by --output FOLDER"
    if not (output / _PLAN).exists():
        if output.is_dir() and {entry.name for entry in output.iterdir()} - _UNFINISHED:
            raise ConfigError(f"{output} holds files that are no branches; {remedy}")
        return None
    try:
        # A plan that was edited by hand may be anything.
        content = read_json(output / _PLAN)
        before = content["options"]
        plan = Plan(**content["plan"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{output / _PLAN}: damaged or not readable; {remedy}") from None
    # Losses of branches with other options or another recipe cannot be compared.
    difference = _difference(before, wanted)
    if not difference:
        difference = first_difference(loading.load(output / _RECIPE), recipe)
    if difference:
        raise CheckpointError(f"{output} belongs to other branches: {difference}; {remedy}")
    return plan


def _difference(before: Mapping[str, float], wanted: Mapping[str, float]) -> str:
    """Return `KEY is OLD there, NEW here` for the last option that differs, or nothing."""
    difference = ""
    for key, value in wanted.items():
        if before.get(key) != value:
            difference = f"{key} is {before.get(key)} there, {value} here"
    return difference


def store(output: Path, wanted: Mapping[str, float], recipe: Recipe, plan: Plan) -> None:
    """Store a plan, so that `stored` returns it.

    Args:
        output: the folder of the branches.
        wanted: options that the plan follows from.
        recipe: of the run.
        plan: of the branches.

    Raises:
        OSError: the folder cannot be written.
    """
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / _RECIPE, loading.dump(recipe))
    # The plan comes last: where it is, `stored` also finds the recipe.
    content = {"options": dict(wanted), "plan": plan._asdict()}
    write_text(output / _PLAN, json_text(content, indent=1) + "\n")


def train(
    source: Source,
    recipes: Mapping[Branch, Recipe],
    output: Path,
    *,
    stop: StopRequest,
    say: Callable[[str], None],
    trainer: Sequence[str] = TRAINER,
) -> Dict[Branch, float]:
    """Train all branches that have not ended yet.

    Args:
        source: the run.
        recipes: of all branches.
        output: the folder of the branches.
        stop: noted signals.
        say: takes a line about each branch that ends.
        trainer: what trains a branch in one process, as Python is given it.

    Returns:
        The validation loss of each branch at its end, infinite where it diverged.

    Raises:
        Stopped: a signal stopped the session.
        BranchFailed: the machine failed.
        UserError: the input is wrong.
    """
    losses: Dict[Branch, float] = {}
    for number, (branch, recipe) in enumerate(recipes.items(), start=1):
        folder = output / branch.name
        loss = _loss(folder)
        if loss is None:
            loss = _train_branch(source, branch, recipe, folder, stop=stop, trainer=trainer)
        # Only its losses are needed now; two checkpoints of each branch would fill a disk.
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        losses[branch] = loss
        words = _in_words(branch, source.recipe.batch.global_)
        say(f"branch {number} of {len(recipes)}: {words}: loss {loss:.4f}")
    return losses


def _in_words(branch: Branch, size: int) -> str:
    """Return how a branch differs from the others. size: images of the run's batch."""
    batch = f"{branch.multiple} x {size:,} images"
    variant = f"rate by {branch.rule}" if branch.rule else f"order {branch.order}"
    return f"step {branch.step:,}, {batch}, {variant}"


def _train_branch(
    source: Source,
    branch: Branch,
    recipe: Recipe,
    folder: Path,
    *,
    stop: StopRequest,
    trainer: Sequence[str],
) -> float:
    """Train a branch to its end, and return its loss there. Raises as `train`.

    Args:
        source: the run.
        branch: to be trained.
        recipe: of the branch.
        folder: of the branch's run.
        stop: noted signals.
        trainer: as for `train`.
    """
    from training import branching  # loads torch

    if not branching.is_begun(folder):
        branching.begin(source.folder, branch.step, recipe)
    # Beside the folder, which must be that of a run and nothing else.
    log = folder.with_name(f"{folder.name}.log")
    process = TrainingProcess(_command(source, folder, trainer), log)
    # A signal may have come while torch was loading: then nothing is begun.
    if stop.name:
        raise Stopped(stop.name)
    process.start()
    code = _wait(process, stop)
    # Its files show whether it came to its end, its exit code why not.
    loss = _loss(folder) if code == DONE else None
    if loss is not None:
        return loss
    if stop.name and (code == STOPPED or code < 0):
        raise Stopped(stop.name)
    line = process.last_line() or f"ended with {code}"
    # It names the place and the remedy itself.
    if code == WRONG_INPUT:
        raise UserError(line)
    raise BranchFailed(f"{branch.name}: {line} ({process.log})")


def _wait(process: TrainingProcess, stop: StopRequest) -> int:
    """Wait until a process has ended, which signals make it do; return its exit code."""
    asked = False
    try:
        while True:
            code = process.poll()
            if code is not None:
                return code
            # The first signal is passed on once, a second one kills.
            if stop.name and (stop.at_once or not asked):
                process.stop(at_once=stop.at_once)
                asked = True
            time.sleep(_POLL_SECONDS)
    finally:
        if process.poll() is None:  # an error here must leave no process behind
            process.stop(at_once=True)


def _command(source: Source, folder: Path, trainer: Sequence[str]) -> List[str]:
    """Return the command line that trains a branch.

    It goes by the launcher where the run had several processes.
    """
    # Unbuffered: the last line of the log is the reason of a failure.
    command = [sys.executable, "-u"]
    if source.replicas * source.stages > 1:
        command += [*_LAUNCHER, "--stages", str(source.stages)]
        command += ["--replicas", str(source.replicas)]
    else:
        command += trainer
    command += additions.words()
    return [*command, "--config", str(folder / "config.yaml"), f"run.output={folder}"]


def _loss(folder: Path) -> Optional[float]:
    """Read the validation loss at the end of a branch, infinite if it is no number.

    None before the branch has ended.
    """
    events = last_events(folder / METRICS)
    if "end" not in events or "eval" not in events:
        return None
    loss = events["eval"].get("loss")
    return math.inf if loss is None else loss

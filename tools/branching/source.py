"""The run that branches are taken from, as its folder shows it, and the recipes of its branches."""

from __future__ import annotations

from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from common.errors import ConfigError, UserError
from optim import schedule
from recipe import batch as arithmetic
from recipe import loading
from recipe.config import Recipe
from tools.branching.plan import Branch, Plan
from tools.reporting import run as reading
from tools.reporting.session_times import SessionTime, session_times
from tools.sweeping.candidates import as_text
from training.run_folder import first_difference

_NEVER = "1e6"  # epochs between evaluations and checkpoints, besides those at the last step
_LINES = 10  # of a branch's log
# What a run may log beside its lines: of a branch only the last loss is read.
_QUIET = (
    "log.noise_scale=false",
    "log.trust_ratios=false",
    "log.tensorboard=false",
    "log.wandb=false",
    "log.mlflow=false",
    "log.trace=0",
    "log.profile=0",
    "log.memory=false",
)


class Source(NamedTuple):
    """A run to branch from.

    folder: of the run.
    recipe: of the run, with the overrides of all branches.
    per_epoch, total: steps of an epoch and of the whole run.
    replicas, stages: processes of its newest session that trained.
    images_per_second: in training, over all sessions.
    pause: seconds of an evaluation with a checkpoint; None where it has had none.
    """

    folder: Path
    recipe: Recipe
    per_epoch: int
    total: int
    replicas: int
    stages: int
    images_per_second: float
    pause: Optional[float]

    def rate(self, step: int) -> float:
        """Return the run's learning rate at a `step`, from 0."""
        images = self.per_epoch * self.recipe.batch.global_
        lengths = arithmetic.lengths(self.recipe, images)
        return schedule.create(self.recipe, lengths)(step)

    def seconds(self, plan: Plan) -> float:
        """Return the seconds that the branches take at the run's own pace.

        Those in which processes start are left out.

        Args:
            plan: of the branches.
        """
        training = plan.images / self.images_per_second
        return training + len(plan.branches()) * (self.pause or 0.0)


def read(folder: Path, overrides: Sequence[str]) -> Source:
    """Read a run's folder.

    Args:
        folder: of the run, which need not be finished.
        overrides: laid over its recipe in all branches.

    Raises:
        ConfigError: the recipe cannot be branched, or not with these overrides.
        UserError: there is no run, or its log has no line yet.
    """
    # The recipe must be one that branches can be made of.
    config = folder / "config.yaml"
    recipe = loading.load(config, overrides)
    difference = _difference_of_state(loading.load(config), recipe)
    if difference:
        reason = "branches begin in the run's own state, to which this key belongs"
        raise ConfigError(f"{config}: {difference}: {reason}; leave out the override")
    if recipe.batch.schedule is not None:
        raise ConfigError(
            f"{config}: batch.schedule: its batch grows by itself; branch a run with a constant batch"
        )
    # How far the run came, and at which pace.
    run = reading.read(folder)
    per_epoch = reading.steps_per_epoch(run)
    total = reading.total_steps(run)
    size = recipe.batch.global_
    times = session_times(run.metrics, run.starts, size)
    training = sum(session.computing + session.waiting for session in times)
    if not (per_epoch and total and training):
        raise UserError(
            f"{folder}: its log has no lines of training yet; let it train for an epoch or more"
        )
    # Sessions that lost work trained more images than the log shows: the pace is of those kept. A
    # run that evaluation.patience ended has made steps since its last line, whose time counts, too.
    logged = max(run.metrics.train["step"])
    if run.metrics.end:
        logged = run.metrics.end["step"]
    # The processes of the newest session that trained train the branches, too.
    newest = reading.newest_noted(run.starts)
    return Source(
        folder=folder,
        recipe=recipe,
        per_epoch=round(per_epoch),
        total=total,
        replicas=newest.get("replicas", 1),
        stages=newest.get("stages", 1),
        images_per_second=logged * size / training,
        pause=_pause(times, len(run.metrics.evaluation)),
    )


def _difference_of_state(own: Recipe, recipe: Recipe) -> str:
    """Return the first key that differs of those that a checkpoint's state belongs to, or nothing.

    Args:
        own: recipe of the run.
        recipe: of the run, with overrides.
    """
    # Whatever else differs is taken over: training/branching.py says what may.
    size = recipe.batch.global_
    weights = recipe.precision.weights
    changes = {
        "model": recipe.model,
        "optimizer": recipe.optimizer,
        "average": recipe.average,
        "data": recipe.data,
        "batch": own.batch.model_copy(update={"global_": size}),
        "precision": own.precision.model_copy(update={"weights": weights}),
    }
    return first_difference(own, own.model_copy(update=changes))


def _pause(times: Sequence[SessionTime], evaluations: int) -> Optional[float]:
    """Return the seconds of an evaluation with a checkpoint; None where there was none."""
    if not evaluations:
        return None
    return sum(session.rest for session in times) / evaluations


def branch_recipe(source: Source, plan: Plan, branch: Branch, folder: Path) -> Recipe:
    """Return the recipe of a branch: the run's, but for its length, rates, batch and draws.

    The rate begins with the run's at the checkpoint, follows the batch by the branch's rule, and
    falls linearly to 0: so all branches end without the noise that a larger rate leaves in the
    weights, and their losses show how far they came. It has no early end by a large loss: a branch
    that diverges takes the images that were announced.

    Args:
        source: the run.
        plan: of the branches.
        branch: one of them.
        folder: of the branch's run.

    Raises:
        ConfigError: the run's other sections do not go with a batch that grows.
    """
    end = branch.step + plan.steps
    # Polynomial decay of power 1 over the whole length, of which the branch is the end.
    peak = source.rate(branch.step) * end / plan.steps
    overrides = [
        f"run.name={as_text(branch.name)}",
        f"run.output={as_text(str(folder))}",
        f"run.steps={end}",
        f"run.seed={source.recipe.run.seed + branch.order}",
        "run.resume=auto",
        "run.loss_limit=1e30",
        "precision.max_skipped_steps=1000000000",
        "schedule.name=polynomial",
        "schedule.power=1",
        "schedule.final_ratio=0",
        f"schedule.peak={peak!r}",
        "schedule.batch_rule=none",
        "schedule.reference_batch=null",
        "schedule.warmup_steps=0",
        f"evaluation.every_epochs={_NEVER}",
        f"checkpoint.every_epochs={_NEVER}",
        "checkpoint.mirror=null",  # the run's is the run's alone
        f"log.every_steps={max(1, plan.steps // _LINES)}",
        *_QUIET,
        *_growth(plan, branch),
    ]
    config = str(source.folder / "config.yaml")
    # Checked as a whole: sections of the run may refuse a batch that grows.
    recipe = loading.loads(loading.dump(source.recipe), config, overrides)
    # Refuses a batch that the run's replicas cannot share, before anything is trained.
    arithmetic.divide(recipe, source.replicas)
    return recipe


def _growth(plan: Plan, branch: Branch) -> List[str]:
    """Return the overrides by which the batch grows at the checkpoint; none for the run's own."""
    if not branch.rule:
        return []
    size = plan.batch
    pairs = [[0, size], [branch.step * size, branch.multiple * size]]
    return [f"batch.schedule={as_text(pairs)}", f"batch.rate_rule={branch.rule}"]

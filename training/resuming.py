"""Where a run begins: at its newest checkpoint, at weights that the recipe names, or at step 0."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch

from common.errors import CheckpointError
from common.text import count, listed
from data.base import ClassNames
from data.sources import class_names
from engines.base import Engine
from optim import rounding
from recipe import loading
from recipe.batch import steps_per_epoch
from recipe.config import Recipe
from recipe.exchange import Local
from recipe.optimization import Precision
from training import classes, weights
from training.checkpoint import CheckpointFolder
from training.images import Images
from training.metrics import NAME, last_events
from training.progression import Progression
from training.run_folder import ACCEPT_IMAGES, differs_in_images, first_difference
from training.weights import TRAINED

_ELSEWHERE = "choose another folder by run.output=FOLDER"


class _Newest(NamedTuple):
    """The newest whole checkpoint. content: None where there is none. replicas: whose own files
    are to be loaded.
    """

    content: Optional[dict]
    replicas: int


def resume(
    engine: Engine,
    checkpoints: CheckpointFolder,
    recipe: Recipe,
    images: Images,
) -> Progression:
    """Load the newest whole checkpoint. All ranks call.

    The main rank reads it for all: hosts need not share a file system.

    Args:
        engine: that gets its state.
        checkpoints: of the run.
        recipe: of this session.
        images: of this session.

    Returns:
        How far the run was; the beginning where there is no checkpoint.

    Raises:
        CheckpointError: it is of another recipe or model, of other images that are not accepted, or
            of other classes.
    """
    newest = engine.processes.from_main(lambda: _newest(checkpoints, recipe, images))
    content = newest.content
    if content is None:
        return Progression()
    step = content["progression"]["step"]

    def load(kind: str, take_over: Callable[[], None]) -> None:
        """Call `take_over`; name another `kind` of thing as the cause where the state does not fit."""
        try:
            take_over()
        except (ValueError, KeyError) as error:
            path = checkpoints.path(step)
            raise CheckpointError(f"{path}: of {kind}: {error}; {_ELSEWHERE}") from None

    def load_engine() -> None:
        engine.load_state_dict(content["engine"])

    def load_replicas() -> None:
        read = functools.partial(checkpoints.replica_state, step)
        engine.load_replica_states(newest.replicas, read)

    together = engine.processes.together
    together(lambda: load("another model", load_engine))
    # Apart, since here ranks wait for each other: none may be missing because the model did not fit
    # there.
    together(lambda: load("other replicas", load_replicas))
    return Progression(**content["progression"])


def take_images(progression: Progression, images: Images, total: int) -> None:
    """Note which images a run goes on with.

    Args:
        progression: of the run.
        images: of this session.
        total: steps of the run with these.
    """
    # Fewer images may make a run complete that was not, at a step that was never scored; and scores
    # of other validation images are none of this run. The loop scores what has no scores.
    if _has_other_images(progression.images_digest, images) and progression.step >= total:
        progression.scores = {}
    # Neither is the best top-1 of others, with which patience compares.
    if _has_other_validation_images(progression, images):
        progression.best_top1 = 0.0
        progression.best_of_all = 0.0
        progression.best_weights = TRAINED
        progression.without_better = 0
        progression.validation_set += 1
    progression.images_digest = images.digest


def changes(
    progression: Progression,
    images: Images,
    precision: Precision,
    *,
    device: str,
    threads_before: Optional[int],
) -> List[str]:
    """Return lines about what is not as it was when the run was saved.

    Args:
        progression: as it was saved.
        images: of this session.
        precision: of the weights.
        device: "cpu", "cuda" or "ipu".
        threads_before: with which the run began on a CPU, if known.
    """
    lines = []
    if _has_other_images(progression.images_digest, images):
        lines.append("going on with other images than before (data.changed_images=accept)")
    if progression.best_of_all and _has_other_validation_images(progression, images):
        best = f"the best top1 so far, {progression.best_of_all:.2%}"
        lines.append(f"{best}, is of other validation images and does not count any more")
    # IPUs have a generator of their own.
    stochastic = precision.weights == "float16" and precision.rounding == "stochastic"
    if stochastic and device != "ipu" and progression.rounding != rounding.VERSION:
        versions = f"version {rounding.VERSION}, not {progression.rounding}"
        lines.append(f"weights are rounded by other random bits from here on: {versions}")
    # GPUs and IPUs sum in an order of their own.
    threads = torch.get_num_threads()
    if device == "cpu" and threads_before not in (None, threads):
        lines.append(
            f"{count(threads, 'thread')} here, {threads_before} when the run began: sums may round "
            f"differently in their last bits; run.threads={threads_before} computes as before"
        )
    return lines


def start_from(engine: Engine, recipe: Recipe, images: Images) -> List[str]:
    """Load the weights that the recipe names; return lines for the user. All ranks call.

    The main rank finds out whose classes they know.

    Args:
        engine: that gets the weights.
        recipe: of the run.
        images: on which it trains.

    Raises:
        ConfigError: the weights cannot be read, or do not fit.
    """
    processes = engine.processes
    model = recipe.model
    path = model.init_from
    assert path is not None
    # Read once, as hosts need not share a file system; each rank takes the tensors of its stage.
    stored = processes.from_main(lambda: weights.read(path, model.init_weights))
    tensors = processes.together(
        lambda: weights.fitted(stored, engine.shapes, model, new_classifier=True)
    )
    # On the main rank: later stages have no images.
    data_classes = processes.from_main(lambda: _trained_classes(recipe, images))
    fitted = processes.together(
        lambda: classes.for_data(
            stored,
            classes.Fitted(*tensors, note=""),
            model,
            data_classes,
        )
    )
    engine.load_weights(fitted.tensors)
    lines = [note for note in (*stored.notes, fitted.note) if note]
    fresh = f"; new: {', '.join(fitted.fresh)}" if fitted.fresh else ""
    return [*lines, f"starting from {stored.path}{fresh}"]


def _trained_classes(recipe: Recipe, images: Images) -> ClassNames:
    """Return the classes of the training images, on the main rank."""
    named = class_names(recipe.data, "train")
    if named:
        return named
    assert images.train is not None, "the main rank has them"
    return ClassNames(images.train.place, tuple(images.classes), sorted=False)


def _newest(checkpoints: CheckpointFolder, recipe: Recipe, images: Images) -> _Newest:
    """Read the newest checkpoint, and check that it is of this run. Raises CheckpointError."""
    warn = functools.partial(print, flush=True)
    content = checkpoints.load_newest(warn=warn, with_replicas=True)
    folder = checkpoints.folder.parent
    if content is None:
        _check_none_is_lost(checkpoints)
        return _Newest(None, 0)
    step = content["progression"]["step"]
    path = checkpoints.path(step)
    # config.yaml was compared as the folder was opened; a checkpoint may have been copied into it.
    saved_recipe = loading.loads(content["recipe"], str(path))
    difference = first_difference(saved_recipe, recipe)
    if difference:
        remedy = ACCEPT_IMAGES if differs_in_images(saved_recipe, recipe) else _ELSEWHERE
        raise CheckpointError(f"{path}: of another run: {difference}; {remedy}")
    if recipe.data.changed_images == "error":
        before = content["progression"].get("images_digest")
        _check_images(before, images.digest, path, recipe.data.place)
    saved_classes = content.get("classes") or images.classes
    _check_classes(saved_classes, images.classes, f"{path}: saved with", folder)
    replicas = checkpoints.replica_count(step)
    if _is_dense_again(content["progression"], recipe, images):
        replicas = 0
    return _Newest(content, replicas)


def _is_dense_again(progression: Dict[str, Any], recipe: Recipe, images: Images) -> bool:
    """Return whether other images may have taken a run back into its dense epochs.

    Their updates are the same on all replicas, which then have to begin with the same weights: the
    mean of those with which each went on alone.
    """
    exchange = recipe.exchange
    if not isinstance(exchange, Local):
        return False
    if not _has_other_images(progression.get("images_digest"), images):
        return False
    per_epoch = steps_per_epoch(images.training_images, recipe.batch.global_)
    return exchange.is_dense(progression["step"], per_epoch)


def _has_other_validation_images(progression: Progression, images: Images) -> bool:
    """Return whether a run was scored with other images before."""
    if not _has_other_images(progression.images_digest, images):
        return False
    # Both end with the digest of the validation images.
    before = progression.images_digest.rpartition("-")[2]
    return before != images.digest.rpartition("-")[2]


def _has_other_images(before: Optional[str], images: Images) -> bool:
    """Return whether a run has other images than those of a digest, which older versions lack."""
    return bool(before) and before != images.digest


def _check_none_is_lost(checkpoints: CheckpointFolder) -> None:
    """Raise CheckpointError where metrics.jsonl tells of a checkpoint that is not there."""
    # Starting from step 0 would cut off the metrics of a run whose checkpoints were moved away.
    lost = last_events(checkpoints.folder.parent / NAME).get("checkpoint")
    if lost and checkpoints.folder.is_dir():
        raise CheckpointError(
            f"{checkpoints.folder}: the checkpoint of step {lost['step']}, which metrics.jsonl "
            "tells of, is gone; restore all files of its number, or delete that folder to start "
            "from the beginning"
        )


def _check_images(before: Optional[str], now: str, path: Path, place: str) -> None:
    """Raise CheckpointError where a run was trained on other images than there are now."""
    if not before or before == now:
        return
    # The digest of a run is that of both splits: name the one that has changed.
    changed = []
    for split, old, new in zip(("training", "validation"), before.split("-"), now.split("-")):
        if old != new:
            changed.append(split)
    raise CheckpointError(
        f"{path}: saved with other {' and '.join(changed)} images than {place} has now (other "
        f"names, labels or shards); {ACCEPT_IMAGES}"
    )


def _check_classes(before: Sequence[str], now: Sequence[str], saved: str, folder: Path) -> None:
    """Raise CheckpointError where labels would count other classes than before."""
    if list(before) == list(now):
        return
    changed = [f"{old} is {new} now" for old, new in zip(before, now) if old != new]
    raise CheckpointError(
        f"{saved} other classes, or in another order ({listed(changed)}); bring those back, or "
        f"start another run from these weights by model.init_from={folder} run.output=FOLDER"
    )

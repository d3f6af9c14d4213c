"""One run from recipe to end event: opens the data, the engine and the run folder, resumes, trains."""

from __future__ import annotations

import functools

import torch

from data.loader import EvaluationBatches, training_batches
from data.sources import open_source
from engines import factory
from engines.base import Engine
from models.efficientnet import build
from models.stages import multiply_adds
from parallel import topology
from recipe import batch as arithmetic
from recipe import loading
from recipe.config import Model, Recipe
from recipe.errors import CheckpointError
from training import weights
from training.checkpoint import CheckpointFolder
from training.loop import Progression, Trainer, note_checkpoint
from training.monitor import Metrics, Monitor, create_progress, duration
from training.run_folder import RunFolder, first_difference


def run(recipe: Recipe) -> None:
    """Trains `recipe` to its end, resuming what its run folder holds. Prints the plan and the progress.

    Raises:
        UserError: recipe, data or run folder cannot be used.
        Stopped, TrainingError: see training.loop.
    """
    place = topology.from_environment(recipe)
    batch = arithmetic.divide(recipe, place.replicas)
    train, validation = (open_source(recipe.data, recipe.model.classes, split) for split in ("train", "validation"))
    lengths = arithmetic.lengths(recipe, len(train))
    folder = RunFolder(recipe)
    try:
        event = folder.finished()
        if event:
            print(
                f"{folder.path}: this run is finished: top1 {event['top1']:.2%} in {duration(event['seconds'])}; "
                "train again with run.output=FOLDER"
            )
            return
        print(batch.describe())
        if batch.stages > 1:
            print(f"one process computes all {batch.stages} stages itself, on one device")
        print(lengths.describe())
        _train(recipe, batch, lengths, factory.create(recipe, batch, place), train, validation, folder)
    finally:
        folder.close()


def _train(recipe, batch, lengths, engine: Engine, train, validation, folder: RunFolder) -> None:
    checkpoints = CheckpointFolder(folder.checkpoints, recipe.checkpoint.keep_last, recipe.checkpoint.keep_best)
    progression = _resume(engine, checkpoints, recipe)
    step = progression.step
    if step:
        print(f"resuming at step {step} of {lengths.total}")
    elif recipe.model.init_from:
        _start_from(engine, recipe.model)
    size_at, pin = functools.partial(arithmetic.training_image_size, recipe), engine.device.type == "cuda"
    micro_batches = training_batches(
        train,
        data=recipe.data,
        image_size=size_at,
        global_batch=batch.global_,
        micro=batch.micro,
        seed=recipe.run.seed,
        first_step=step,
        last_step=lengths.total,
        replica=engine.topology.replica,
        replicas=batch.replicas,
        pin_memory=pin,
    )
    evaluation = EvaluationBatches(
        validation,
        data=recipe.data,
        image_size=recipe.model.image_size,
        batch=recipe.batch.evaluation,
        pin_memory=pin,
    )
    if progression.metrics_bytes > (folder.metrics.stat().st_size if folder.metrics.exists() else 0):
        print(f"{folder.metrics}: shorter than at the checkpoint: the events before step {step} are lost", flush=True)
    metrics = Metrics(folder.metrics, keep_bytes=progression.metrics_bytes)
    tensorboard = folder.tensorboard if recipe.log.tensorboard else None
    monitor = Monitor(metrics, create_progress(lengths.total, step), tensorboard, step)
    try:
        if progression.logged_checkpoint:
            note_checkpoint(monitor, progression)
        sizes = {size for _, size in recipe.data.image_sizes or ()} | {recipe.model.image_size}
        flops = {size: flops_per_image(recipe, size) for size in sizes}
        trainer = Trainer(
            recipe,
            lengths,
            engine,
            evaluation,
            checkpoints,
            monitor,
            progression,
            flops_per_image=lambda epoch: flops[size_at(epoch)],
            classes=train.classes,
        )
        trainer.run(micro_batches)
    finally:
        micro_batches.close()
        evaluation.close()
        monitor.close()
        engine.close()


def flops_per_image(recipe: Recipe, image_size: int) -> float:
    """Floating-point operations of training on one image: forward once, backward twice, two to a multiply-add."""
    with torch.device("meta"):
        model = build(recipe.model, recipe.run.seed)
    return 3 * 2 * sum(multiply_adds(model, image_size).values())


def _start_from(engine: Engine, model: Model) -> None:
    """The weights of another run or file as the first ones of this run."""
    stored = weights.read(model.init_from, model.init_weights)
    tensors, fresh = weights.fitted(stored, engine.shapes(), new_classifier=True)
    engine.load_weights(tensors)
    new = f"; new: {', '.join(fresh)}" if fresh else ""
    print(f"starting from {stored.path}{new}")


def _resume(engine: Engine, checkpoints: CheckpointFolder, recipe: Recipe) -> Progression:
    """Loads the newest whole checkpoint into the engine, and says where the run is."""
    content = checkpoints.load_newest(warn=lambda line: print(f"{line}; trying the one before", flush=True))
    if content is None:
        return Progression()
    path, remedy = checkpoints.path(content["progression"]["step"]), "choose another folder by run.output=FOLDER"
    written_by = loading.loads(content["recipe"], str(path))
    difference = first_difference(written_by, recipe)
    if difference:
        raise CheckpointError(f"{path}: of another run: {difference}; {remedy}")
    try:
        engine.load_state_dict(content["engine"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: of another model: {error}; {remedy}") from None
    return Progression(**content["progression"])

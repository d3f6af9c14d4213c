"""What a run prints before it trains, and what it proposes when it has ended."""

from __future__ import annotations

import shlex
from typing import Iterator, List

import numpy as np

from common.text import count, duration
from data.balance import parts_of
from data.epochs import places_of
from models import shapes
from recipe import timm_weights
from recipe.batch import (
    Lengths,
    described_lengths,
    empty_average,
    output_folder,
    unusual_peak,
)
from recipe.config import Recipe
from recipe.division import Batch
from recipe.images import Data, scores_training_images
from training.images import Images


def lines(
    recipe: Recipe,
    images: Images,
    *,
    batch: Batch,
    lengths: Lengths,
    device: str,
) -> List[str]:
    """Return what a run is: its folder and device, model, images, batch and length.

    Args:
        recipe: of the run.
        images: that it trains on.
        batch: of a step.
        lengths: of the run.
        device: its name, for the user.
    """
    # Counted from shapes: the model is not built yet, and a rank may build a stage of it only.
    model = recipe.model
    assert model.image_size is not None, "recipe/checks.py refuses null"
    blocks = shapes.blocks(model, model.image_size)
    parameters = sum(block.parameters for block in blocks.values())
    classes = count(model.classes, "class", "classes")
    repeats = recipe.data.repeats
    preparation = timm_weights.preparation(model, recipe.data)
    described = [
        f"run {recipe.run.name} in {output_folder(recipe)}, on {device}",
        f"{model.describe()}: {parameters:,} parameters, {model.image_size} px",
        f"{images.training_images:,} training and {images.validation_images:,} validation images "
        f"of {classes} ({recipe.data.source})",
        *([preparation] if preparation else []),
        *([_repeated(repeats, lengths.steps_per_epoch * batch.global_)] if repeats > 1 else []),
        *_scored_on_training(recipe.data),
        *_balanced(recipe.data, images, lengths.steps_per_epoch * batch.global_),
        batch.describe(),
        described_lengths(recipe, lengths),
    ]
    unusual = (unusual_peak(recipe), empty_average(recipe, lengths))
    return [*described, *filter(None, unusual)]


def _scored_on_training(data: Data) -> Iterator[str]:
    """Yield the line about validation images that are trained on, where they are."""
    if scores_training_images(data, data):
        yield "the training images are validated on, too: scores say nothing about other images"


def _balanced(data: Data, images: Images, rows: int) -> Iterator[str]:
    """Yield the line about classes that are balanced, where they are.

    Args:
        data: whether they are, and how often images are repeated.
        images: that the run trains on.
        rows: of the steps of an epoch.
    """
    counts = [images_of_class for images_of_class in images.images_of_class if images_of_class]
    rarest = count(min(counts), "image")
    if data.balance == "sampling":
        part = max(parts_of(np.array(counts), places_of(rows, data.repeats)))
        shown = f"{part:,} images of each class in an epoch"
        most = -(-part // min(counts))
        yield f"data.balance=sampling: {shown}; those of the rarest ({rarest}) up to {most} times"
    elif data.balance == "loss":
        weights = [weight for weight in images.class_weights if weight]
        heaviest = f"{max(weights):.3g} (the rarest class, {rarest})"
        yield f"data.balance=loss: weights of the classes from {min(weights):.3g} to {heaviest}"


def _repeated(repeats: int, images: int) -> str:
    """Return the line about repeated augmentation.

    Args:
        repeats: times that each image is shown.
        images: of the steps of an epoch, with repetitions.
    """
    shown = places_of(images, repeats)
    return (
        f"data.repeats={repeats}: an epoch shows {shown:,} images {repeats} times each, in as many "
        "steps as without repetitions"
    )


def finished(output: str, event: dict) -> str:
    """Return the line about a run that has nothing left to do.

    Args:
        output: its folder.
        event: its last one, `end`.
    """
    result = f"top1 {event['top1']:.2%} in {duration(event['seconds'])}"
    return f"{output}: this run is finished: {result}; train again with run.output=FOLDER"


def next_commands(output: str) -> str:
    """Return the commands that a user may want next, for a run in the folder `output`."""
    folder = shlex.quote(output)
    commands = [
        f"python evaluate.py --checkpoint {folder} --best",
        f"python -m tools.report {folder}",
        f"python -m tools.export {folder}",
    ]
    return f"next: {' | '.join(commands)}"

"""What scores and classifies images: an engine that holds weights, or a program that was exported."""

from __future__ import annotations

from typing import Protocol

import torch

from data.batches import MicroBatch
from engines import factory
from engines.base import Engine
from recipe.batch import divide
from recipe.config import Recipe
from training import weights


class Predictor(Protocol):
    """Predicts as an engine does."""

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        """Logits of the valid images of `batch`: float32 [valid, classes]."""


def engine_with(stored: weights.StoredWeights, recipe: Recipe) -> Engine:
    """An engine of one replica that computes with stored weights as they are.

    Raises:
        ConfigError: the device that the recipe asks for is not there.
        CheckpointError: the weights are those of another model.
    """
    if recipe.run.device != "ipu":  # where weights live in the format of the arithmetic
        # Averages are float32: nothing is rounded on its way in.
        precision = recipe.precision.model_copy(update={"weights": "float32"})
        recipe = recipe.model_copy(update={"precision": precision})
    engine = factory.create(recipe, divide(recipe, 1))
    engine.load_weights(weights.fitted(stored, engine.shapes, new_classifier=False)[0])
    return engine

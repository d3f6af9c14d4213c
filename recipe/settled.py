"""Keys of a recipe that a file may leave open, as the numbers that they are in the end."""

from __future__ import annotations

from recipe.config import Model, Recipe


def image_size(model: Model) -> int:
    """Return the side of the images of a checked recipe's `model`, in pixels."""
    # A check of the recipe replaces null by the size of the named model, or refuses it.
    assert model.image_size is not None
    return model.image_size


def micro_batch(recipe: Recipe) -> int:
    """Return the images of a micro batch.

    Args:
        recipe: in which `batch.micro: auto` has been replaced (`recipe.batch.settled`).
    """
    assert recipe.batch.micro is not None
    return recipe.batch.micro

"""The model that a recipe names.

A family is a file that registers itself in `FAMILIES`; ours are imported here.
"""

from typing import Dict

from models import efficientnet, timm_model  # noqa: F401  (they register themselves)
from models.base import FAMILIES, BlockList
from recipe.config import Model


def build(section: Model, seed: int) -> BlockList:
    """Build the model of a `section` with weights drawn by `seed`: see `Family.build`."""
    return FAMILIES.of(section).build(section, seed)


def is_classifier(section: Model, name: str) -> bool:
    """Return whether a tensor belongs to the classifier, so that it has a row for each class.

    Args:
        section: of the model.
        name: of the tensor in it.
    """
    classifier = FAMILIES.of(section).classifier(section)
    return bool(classifier) and timm_name(section, name).startswith(f"{classifier}.")


def depths(section: Model) -> Dict[str, int]:
    """Return how deep each parameter of the section's model lies: see `Family.depths`."""
    return FAMILIES.of(section).depths(section)


def timm_name(section: Model, name: str) -> str:
    """Return timm's name of the parameter `name` of the section's model: see `Family.timm_name`."""
    return FAMILIES.of(section).timm_name(name)

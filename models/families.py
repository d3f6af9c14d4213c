"""The model that a recipe names.

A family is a file that registers itself in `FAMILIES`; ours are imported here.
"""

from models import efficientnet, timm_model  # noqa: F401  (they register themselves)
from models.base import FAMILIES, BlockList
from recipe.config import Model


def build(section: Model, seed: int) -> BlockList:
    """Build the model of a `section` with weights drawn by `seed`: see `Family.build`."""
    return FAMILIES.of(section).build(section, seed)


def timm_name(section: Model, name: str) -> str:
    """Return timm's name of the parameter `name` of the section's model: see `Family.timm_name`."""
    return FAMILIES.of(section).timm_name(name)

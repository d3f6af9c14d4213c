"""The network that a recipe names. A family is a file that registers itself in `FAMILIES`; that below comes along."""

from models import efficientnet  # noqa: F401  (registers itself)
from models.stages import FAMILIES, BlockList
from recipe.config import Model


def build(section: Model, seed: int) -> BlockList:
    """Build the model of a recipe: see `Family.build`."""
    return FAMILIES.of(section).build(section, seed)


def timm_name(section: Model, name: str) -> str:
    """Name of a parameter or buffer in timm's files: see `Family.timm_name`."""
    return FAMILIES.of(section).timm_name(name)

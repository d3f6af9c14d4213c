"""The network that a recipe names. A family is a file that registers itself in `FAMILIES`; that below comes along."""

from models import efficientnet  # noqa: F401  (registers itself)
from models.stages import FAMILIES, BlockList
from recipe.config import Model


def build(section: Model, seed: int) -> BlockList:
    """See `Family.build`."""
    return FAMILIES.of(section).build(section, seed)


def timm_name(section: Model, name: str) -> str:
    """See `Family.timm_name`."""
    return FAMILIES.of(section).timm_name(name)

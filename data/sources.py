"""The images that a recipe names. A source is a file that registers itself in `SOURCES`; those below come along."""

from data import digits, folder, glyphs, shards  # noqa: F401  (they register themselves)
from data.base import SOURCES, Source
from recipe.config import Data
from recipe.errors import DataError


def open_source(data: Data, classes: int, split: str) -> Source:
    """Open the images that a recipe names, after checks that need nothing decoded.

    Both splits must have the same classes (shards: in the same order), as labels are numbered by them; without training
    images (to score a checkpoint, say) the validation's own classes count.

    Args: classes: the recipe's `model.classes`. split: "train" or "validation".

    Raises:
        DataError: images that the recipe names are missing, incomplete or do not fit the recipe.
    """
    source = SOURCES.of(data)(data, classes, split)
    if len(source.classes) != classes:
        raise DataError(
            f"{source.place}: {len(source.classes)} classes, but model.classes is {classes}; "
            f"set model.classes={len(source.classes)}"
        )
    count_key, expected = f"{split}_images", data.images(split)
    if expected is not None and len(source) != expected:
        raise DataError(
            f"{source.place}: {len(source)} images, but data.{count_key} is {expected}; "
            f"complete the images or set data.{count_key}={len(source)}"
        )
    return source

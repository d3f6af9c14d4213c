"""The images that a recipe names. A source is a file that registers itself in `SOURCES`; those below come along."""

from data import digits, folder, glyphs, shards  # noqa: F401  (they register themselves)
from data.base import SOURCES, Source
from recipe.config import Data
from recipe.errors import DataError


def open_source(data: Data, classes: int, split: str) -> Source:
    """Open the "train" or "validation" images of a recipe with so many classes; nothing is decoded.

    Both splits must have the same classes (shards: in the same order), as labels are numbered by them; without training
    images (to score a checkpoint, say) the validation's own classes count.

    Raises DataError: images that the recipe names are missing, incomplete or do not fit the recipe.
    """
    source, expected = SOURCES.of(data)(data, classes, split), data.images(split)
    if len(source.classes) != classes:
        found = len(source.classes)
        raise DataError(f"{source.place}: {found} classes, but model.classes is {classes}; set model.classes={found}")
    if expected is not None and len(source) != expected:
        raise DataError(
            f"{source.place}: {len(source)} images, but data.{split}_images is {expected}; "
            f"complete the images or set data.{split}_images={len(source)}"
        )
    return source

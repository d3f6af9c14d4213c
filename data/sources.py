"""The images that a recipe names. A source numbers its images from 0; order, augmentation and batches are loader.py's.

A source is one file that registers itself in `data.base.SOURCES` for its section class; those below come along.
"""

from data import digits, folder, glyphs, shards  # noqa: F401  (they register themselves)
from data.base import SOURCES, Source
from recipe.config import Data
from recipe.errors import DataError


def open_source(data: Data, classes: int, split: str) -> Source:
    """Open the images that a recipe names, after checks that need nothing decoded.

    Validation labels are numbered by the training images' classes, so both splits must have the same (shards: in the
    same order); where there are no training images (to score a checkpoint, say), the validation's own are used.

    Args:
        data: the recipe's section.
        classes: the recipe's `model.classes`.
        split: "train" or "validation".

    Raises:
        DataError: images that the recipe names are missing, incomplete or do not fit the recipe.
    """
    assert split in ("train", "validation"), split
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

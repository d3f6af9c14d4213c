"""The images that a recipe names. A source is a file that registers itself in `SOURCES`; those below come along."""

from typing import List, Optional, Sequence

from common.errors import DataError
from common.text import count
from data import digits, folder, glyphs, huggingface, shards, torchvision  # noqa: F401  (they register themselves)
from data.base import CLASS_NAMES, SOURCES, ClassNames, Source
from data.classes import matched
from recipe.config import Data


def open_source(data: Data, classes: int, split: str, known: Optional[Sequence[str]] = None) -> Source:
    """Open the "train" or "validation" images of a recipe with so many classes; nothing is decoded.

    Labels of validation images follow the names of the model's classes, so they need neither have all of these nor be
    in their order.

    Args:
        known: names of the model's classes by label; images of other classes are left out, with a note. None: those of
            the training images, and other classes are an error. Without training images their own.

    Raises DataError: images that the recipe names are missing, incomplete or do not fit the recipe.
    """
    source, expected = SOURCES.of(data)(data, classes, split), data.images(split)
    trained = class_names(data, "train") if split == "validation" and known is None else None
    if known is None:
        _check_number(trained or ClassNames(source.place, source.classes, sorted=False), classes)
    if expected is not None and len(source) != expected:
        raise DataError(
            f"{source.place}: {count(len(source), 'image')}, but data.{split}_images is {expected}; "
            f"complete the images or set data.{split}_images={len(source)}"
        )
    if known is not None:
        return matched(source, known)
    return matched(source, trained.names, know_all=True) if trained is not None else source


def class_names(data: Data, split: str) -> Optional[ClassNames]:
    """Return the classes of the "train" or "validation" images without a look at the images.

    Returns:
        None where there are no such images, and for sources whose splits always have the same classes.

    Raises DataError: they are there, but cannot be read.
    """
    own = CLASS_NAMES.all_of(data)
    return own[0](data, split) if own else None


def candidates(data: Data, classes: int) -> List[ClassNames]:
    """Return the classes of the training and of the validation images, as far as they are there.

    Args:
        classes: of the model, for sources that are made for a number of classes.

    Raises DataError: neither is there, or one cannot be read.
    """
    found = [class_names(data, split) for split in ("train", "validation")]
    there = [each for each in found if each is not None]
    if there:
        return there
    source = open_source(data, classes, "validation")
    return [ClassNames(source.place, source.classes, sorted=False)]


def _check_number(found: ClassNames, classes: int) -> None:
    number = len(found.names)
    if number != classes:
        named = count(number, "class", "classes")
        raise DataError(f"{found.place}: {named}, but model.classes is {classes}; set model.classes={number}")

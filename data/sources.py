"""The images that a recipe names.

A source is a file that registers itself in `SOURCES`; those below come along.
"""

from typing import List, Optional, Sequence

from common.errors import DataError
from common.text import count
from data import (  # noqa: F401  (they register themselves)
    digits,
    folder,
    glyphs,
    huggingface,
    image_list,
    shards,
    torchvision,
)
from data.base import CLASS_NAMES, SOURCES, ClassNames, Source
from data.classes import matched
from recipe.config import Data


def open_source(
    data: Data,
    classes: int,
    split: str,
    known: Optional[Sequence[str]] = None,
) -> Source:
    """Open the images that a recipe names; nothing is decoded.

    Labels of validation images follow the names of the model's classes, so they need neither have
    all of these nor be in their order.

    Args:
        data: the section of the recipe.
        classes: of the model.
        split: "train" or "validation".
        known: names of the model's classes by label; images of other classes are left out, with a
            note. None: those of the training images, and other classes are an error. Without
            training images their own.

    Raises:
        DataError: images that the recipe names are missing, incomplete or do not fit the recipe.
    """
    source = SOURCES.of(data)(data, classes, split)
    # A validation folder may lack classes, and programs of others number them otherwise: labels
    # follow the names that the model was, or will be, trained on.
    trained = None
    if known is None:
        if split == "validation":
            trained = class_names(data, "train")
        names = trained or ClassNames(source.place, source.classes, sorted=False)
        _check_number(names, classes)
    expected = data.images(split)
    if expected is not None and len(source) != expected:
        fault = f"{count(len(source), 'image')}, but data.{split}_images is {expected}"
        remedy = f"complete the images or set data.{split}_images={len(source)}"
        raise DataError(f"{source.place}: {fault}; {remedy}")
    if known is not None:
        return matched(source, known)
    if trained is not None:
        return matched(source, trained.names, know_all=True)
    return source


def class_names(data: Data, split: str) -> Optional[ClassNames]:
    """Return the classes of some images without a look at the images.

    Args:
        data: the section of the recipe.
        split: "train" or "validation".

    Returns:
        None where there are no such images, and for sources whose splits always have the same
        classes.

    Raises:
        DataError: they are there, but cannot be read.
    """
    implementations = CLASS_NAMES.all_of(data)
    if not implementations:
        return None
    return implementations[0](data, split)


def candidates(data: Data, classes: int) -> List[ClassNames]:
    """Return the classes of the training and of the validation images, as far as they are there.

    Args:
        data: the section of the recipe.
        classes: of the model, for sources that are made for a number of classes.

    Raises:
        DataError: neither is there, or one cannot be read.
    """
    # Training images first: a model is more likely to know these.
    named = []
    for split in ("train", "validation"):
        names = class_names(data, split)
        if names is not None:
            named.append(names)
    if named:
        return named
    source = open_source(data, classes, "validation")
    return [ClassNames(source.place, source.classes, sorted=False)]


def _check_number(names: ClassNames, classes: int) -> None:
    """Raise DataError where a model has another number of classes."""
    named = len(names.names)
    if named != classes:
        fault = f"{count(named, 'class', 'classes')}, but model.classes is {classes}"
        raise DataError(f"{names.place}: {fault}; set model.classes={named}")

"""Counts the images of a recipe on this machine before a run, without torch and without decoding
one.

What counts is what data/folder.py reads, what the manifest of local shards lists, and what the
files of a data set say.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional

from common.errors import DataError
from common.json_io import read_json
from common.text import count, listed, printable
from recipe import image_lists, torchvision_sets, validation_share
from recipe.class_folders import class_folders, images_below
from recipe.config import Data, Recipe
from recipe.images import MANIFEST, Folder, ImageList, Shards, Torchvision
from recipe.kinds import Registry


class Found(NamedTuple):
    """The images of a split.

    place: their folder. by_class: images of each class folder; None where there are no such
    folders.
    """

    place: str
    images: int
    classes: int
    by_class: Optional[Dict[str, int]] = None


# By section class: counts the "train" or "validation" images at a place that the section located.
_COUNTS: Registry[Callable[[Any, str, str], Found]] = Registry("a count of images")


def find(data: Data, split: str) -> Optional[Found]:
    """Count the images of a split.

    Args:
        data: the section of the recipe.
        split: "train" or "validation".

    Returns:
        None where the images are not stored, lie elsewhere, or cannot be counted here.

    Raises:
        DataError: there is no such folder or file.
    """
    place = data.located(split)
    if place is None:
        return None
    # What is wrong with the images, the run reports best, which reads more of them.
    try:
        return _COUNTS.of(data)(data, split, place)
    except (DataError, OSError, ValueError, KeyError, TypeError):
        return None


def check(recipe: Recipe, images: Found, split: str) -> None:
    """Check the images of a split against a recipe.

    Args:
        recipe: of the run.
        images: what `find` counted.
        split: "train" or "validation".

    Raises:
        DataError: a run would refuse them: there are none, or another number than the recipe's, or
            for training that of their classes, or a class folder is empty or holds the validation
            images.
    """
    if split == "train":
        recipe.data.check_splits()
        _check_training_classes(images, recipe.model.classes)
    expected = recipe.data.images(split)
    counted = images.images
    if not counted:
        raise DataError(_without_images(recipe.data, images.place, split))
    if expected is None or expected == counted:
        return
    # The length of an epoch, and so all rates, follow from the number of training images.
    size = recipe.batch.global_
    steps = ""
    if split == "train" and expected // size != counted // size:
        steps = f" ({count(counted // size, 'step')} an epoch instead of {expected // size})"
    key = f"data.{split}_images"
    remedy = f"complete the images or set {key}={counted}"
    raise DataError(f"{images.place}: {counted} images, but {key} is {expected}{steps}; {remedy}")


def _without_images(data: Data, place: str, split: str) -> str:
    """Return the fault of a place without images of a split, and the remedy."""
    share = getattr(data, "validation_share", 0)
    if share:
        return validation_share.no_images(place, share)
    return f"{place}: holds no {split} images; fill it"


def _check_training_classes(images: Found, classes: int) -> None:
    """Raise DataError for an empty class folder, or another number of classes than the model's."""
    for name, of_class in (images.by_class or {}).items():
        if not of_class:
            folder = printable(os.path.join(images.place, name))
            raise DataError(
                f"{folder}: no .jpg, .jpeg or .png files in this class folder; fill it or remove it"
            )
    if images.classes != classes:
        remedy = f"set model.classes={images.classes}"
        raise DataError(
            f"{images.place}: {images.classes} classes, but model.classes is {classes}; {remedy}"
        )


def check_classes(train: Found, validation: Found) -> None:
    """Raise DataError where a class has validation images, but no training folder.

    Args:
        train: the training images.
        validation: the validation images.
    """
    if train.by_class is None or validation.by_class is None:
        return
    # An empty folder is no fault: nothing is scored under a class that was not learned.
    known = set(train.by_class)
    unknown = [
        printable(name)
        for name, images in validation.by_class.items()
        if images and name not in known
    ]
    if unknown:
        classes = count(len(unknown), "class", "classes")
        remedy = "training and validation need the same class names"
        raise DataError(
            f"{validation.place}: {classes} without training images: {listed(unknown)}; {remedy}"
        )


@_COUNTS.implements(Shards)
def _of_shards(data: Shards, split: str, place: str) -> Found:
    """Count the images that the manifest of local shards lists."""
    content = read_json(Path(place, MANIFEST))
    return Found(
        place, sum(shard["images"] for shard in content["shards"]), len(content["classes"])
    )


@_COUNTS.implements(Folder)
def _of_folder(data: Folder, split: str, place: str) -> Found:
    """Count the images of each class folder; what is left out is not reported here."""
    folder = os.fsencode(place)
    names = [os.fsencode(name) for name in class_folders(place)]
    by_class = {}
    for name in names:
        images = list(images_below(folder, name, leave_out=lambda *_: None))
        chosen = validation_share.of_split(images, data.validation_share, split)
        by_class[os.fsdecode(name)] = sum(chosen)
    return Found(place, sum(by_class.values()), len(names), by_class)


@_COUNTS.implements(ImageList)
def _of_list(data: ImageList, split: str, place: str) -> Found:
    """Count the images of each class of a list."""
    classes = {}
    listed = image_lists.read(place, data.list_folder(place))
    for label, rows in image_lists.by_class(listed).items():
        names = [os.fsencode(row.path) for row in rows]
        classes[label] = sum(validation_share.of_split(names, data.validation_share, split))
    return Found(place, sum(classes.values()), len(classes), classes)


@_COUNTS.implements(Torchvision)
def _of_set(data: Torchvision, split: str, place: str) -> Found:
    """Read the number of images from the file that has them."""
    images = torchvision_sets.count_images(data.named(), split, place)
    return Found(os.path.dirname(place), images, data.possible_classes[0])

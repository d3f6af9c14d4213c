"""Counts the images of a recipe on this machine before a run, without torch and without decoding one.

What counts is what data/folder.py reads, what the manifest of local shards lists, and what the files of a data set say.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Callable, Dict, NamedTuple, Optional

from common.errors import DataError
from common.json_io import read_json
from common.text import count, listed, printable
from recipe import torchvision_sets
from recipe.class_folders import class_folders, images_below
from recipe.config import Data, Recipe
from recipe.images import MANIFEST, Files, Shards, Torchvision
from recipe.kinds import Registry


class Found(NamedTuple):
    """The images of a split. place: their folder. by_class: images of each class folder; None where there are no such
    folders."""

    place: str
    images: int
    classes: int
    by_class: Optional[Dict[str, int]] = None


# By section class: counts the "train" or "validation" images at a place that the section located.
_COUNTS: Registry[Callable[[Data, str, str], Found]] = Registry("a count of images")


def find(data: Data, split: str) -> Optional[Found]:
    """Count the "train" or "validation" images.

    Returns:
        None where the images are not stored, lie elsewhere, or cannot be counted here.

    Raises:
        DataError: there is no such folder or file.
    """
    place = data.located(split)
    if place is None:
        return None
    try:
        return _COUNTS.of(data)(data, split, place)
    except (DataError, OSError, ValueError, KeyError, TypeError):  # what is wrong there, the run says best
        return None


def check(recipe: Recipe, found: Found, split: str) -> None:
    """Raises DataError where a run would refuse these images: their number is another than the recipe's, or for
    training that of their classes."""
    place, classes = found.place, recipe.model.classes
    empty = [name for name, images in (found.by_class or {}).items() if not images]
    if split == "train" and empty:
        folder = printable(os.path.join(place, empty[0]))
        raise DataError(f"{folder}: no .jpg, .jpeg or .png files in this class folder; fill it or remove it")
    if split == "train" and found.classes != classes:
        remedy = f"set model.classes={found.classes}"
        raise DataError(f"{place}: {found.classes} classes, but model.classes is {classes}; {remedy}")
    expected = recipe.data.images(split)
    if expected is None or expected == found.images:
        return
    size = recipe.batch.global_
    steps = ""
    if split == "train" and expected // size != found.images // size:
        steps = f" ({count(found.images // size, 'step')} an epoch instead of {expected // size})"
    raise DataError(
        f"{place}: {found.images} images, but data.{split}_images is {expected}{steps}; "
        f"complete the images or set data.{split}_images={found.images}"
    )


def check_classes(train: Found, validation: Found) -> None:
    """Raises DataError where a class has validation images, but no training folder."""
    if train.by_class is None or validation.by_class is None:
        return
    known = set(train.by_class)
    unknown = [printable(name) for name, images in validation.by_class.items() if images and name not in known]
    if unknown:
        classes = count(len(unknown), "class", "classes")
        remedy = "training and validation need the same class names"
        raise DataError(f"{validation.place}: {classes} without training images: {listed(unknown)}; {remedy}")


@_COUNTS.implements(Shards)
def _of_shards(data: Shards, split: str, place: str) -> Found:
    content = read_json(Path(place, MANIFEST))
    return Found(place, sum(shard["images"] for shard in content["shards"]), len(content["classes"]))


@_COUNTS.implements(Files)
def _of_folder(data: Files, split: str, place: str) -> Found:
    folder = os.fsencode(place)
    names = [os.fsencode(name) for name in class_folders(place)]
    by_class = {os.fsdecode(name): sum(1 for _ in images_below(folder, name, lambda *_: None)) for name in names}
    return Found(place, sum(by_class.values()), len(names), by_class)


@_COUNTS.implements(Torchvision)
def _of_set(data: Torchvision, split: str, place: str) -> Found:
    images = torchvision_sets.count_images(data.named(), split, place)
    return Found(os.path.dirname(place), images, data.possible_classes[0])

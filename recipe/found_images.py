"""Counts the images of a recipe on this machine before a run, without torch and without opening one.

What counts is what data/folder.py reads, and what the manifest of local shards lists.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Optional

from recipe.bounded import read_json
from recipe.class_folders import class_folders, images_below
from recipe.config import Data, Recipe
from recipe.division import count
from recipe.errors import DataError
from recipe.images import MANIFEST, split_folder


class Found(NamedTuple):
    """The images of a split. place: their folder."""

    place: str
    images: int
    classes: int


def find(data: Data, split: str) -> Optional[Found]:
    """Count the "train" or "validation" images.

    Returns:
        None where the images are no files, lie behind a URL, or cannot be counted here.

    Raises:
        DataError: there is no such folder.
    """
    if not data.files:
        return None
    place = split_folder(data, split)
    if "://" in place:
        return None
    try:
        return _of_shards(place) if data.urls else _of_folder(place)
    except (DataError, OSError, ValueError, KeyError, TypeError):  # what is wrong there, the run says best
        return None


def check(recipe: Recipe, found: Found, split: str) -> None:
    """Raises DataError where a run would refuse these images: their number is another than the recipe's, or for
    training that of their classes."""
    place, classes = found.place, recipe.model.classes
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


def _of_shards(place: str) -> Found:
    content = read_json(Path(place, MANIFEST))
    return Found(place, sum(shard["images"] for shard in content["shards"]), len(content["classes"]))


def _of_folder(place: str) -> Found:
    folder = os.fsencode(place)
    names = [os.fsencode(name) for name in class_folders(place)]
    images = (1 for name in names for _ in images_below(folder, name, lambda *_: None))
    return Found(place, sum(images), len(names))

"""Counts the images of a recipe on this machine before a run, without torch and without opening one.

What counts is what data/folder.py reads, and what the manifest of local shards lists.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator, NamedTuple, Optional, Tuple

from recipe.bounded import read_json
from recipe.config import Data, Recipe
from recipe.division import count
from recipe.errors import DataError
from recipe.images import MANIFEST, split_folder

_EXTENSIONS = (b".jpg", b".jpeg", b".png")


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
    except (OSError, ValueError, KeyError, TypeError):  # what is wrong there, the run says best
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
    classes = [entry.path for entry in _entries(folder) if _leads_on(entry, (folder,))]
    return Found(place, sum(_images(path, (folder,)) for path in classes), len(classes))


def _images(folder: bytes, around: Tuple[bytes, ...]) -> int:
    """Return the number of images at any depth in a folder."""
    inside = (*around, folder)
    number = 0
    for entry in _entries(folder):
        if os.path.splitext(entry.name)[1].lower() in _EXTENSIONS:
            number += 1
        elif _leads_on(entry, inside):
            number += _images(entry.path, inside)
    return number


def _entries(folder: bytes) -> Iterator[os.DirEntry[bytes]]:
    with os.scandir(folder) as entries:
        yield from [entry for entry in entries if not entry.name.startswith(b".")]


def _leads_on(entry: os.DirEntry[bytes], around: Tuple[bytes, ...]) -> bool:
    """Return whether an entry is a folder, or a link to one that is not around it."""
    if not entry.is_symlink():
        return entry.is_dir()
    target = os.path.join(os.path.realpath(entry.path), b"")
    inside = any(os.path.join(os.path.realpath(folder), b"").startswith(target) for folder in around)
    return not inside and os.path.isdir(entry.path)

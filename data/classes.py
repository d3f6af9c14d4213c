"""Classes by name: the images of a source under a model's labels, whatever the order of the source's own classes."""

import re
from typing import Dict, List, Sequence, Tuple, Union

import numpy as np
import torch

from common.errors import DataError
from common.text import count, listed, printable
from data.base import Image, Source, UnreadableImage


def in_timm_order(names: Sequence[str]) -> Tuple[str, ...]:
    """Return class names in the order in which timm numbers class folders: numbers in them by value, case ignored.

    Names that are equal then, which timm puts in a random order, keep theirs.

    Source: natural_key in timm/utils/misc.py, used by timm/data/readers/reader_image_folder.py.
    """
    return tuple(sorted(names, key=_natural_key))


def _natural_key(name: str) -> List[Union[int, str]]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name.lower())]


def places(names: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """Return the place of each of `names` among `others`, -1 for those that are not there: int64 [names].

    The second of two equal names is the second of those among `others`.
    """
    found = {each: place for place, each in enumerate(_distinct(others))}
    return np.array([found.get(each, -1) for each in _distinct(names)], dtype=np.int64)


def _distinct(names: Sequence[str]) -> List[Tuple[str, int]]:
    """Each name with the number of equal ones before it: ImageNet has two cranes."""
    seen: Dict[str, int] = {}
    found = []
    for name in names:
        found.append((name, seen.get(name, 0)))
        seen[name] = seen.get(name, 0) + 1
    return found


def matched(source: Source, names: Sequence[str], know_all: bool = False) -> Source:
    """Return the images of `source` whose classes are among `names`, labelled by their places there.

    Args:
        names: of a model's classes, by label.
        know_all: whether an image of another class is an error; else a note counts those that are left out.

    Raises DataError: none of the images is of those classes, or see `know_all`.
    """
    labels = places(source.classes, names)[source.labels]
    unknown = [source.classes[label] for label in np.unique(source.labels[labels < 0]).tolist()]
    if know_all and unknown:
        classes = count(len(unknown), "class", "classes")
        remedy = "training and validation need the same class names"
        raise DataError(f"{source.place}: {classes} without training images: {listed(unknown)}; {remedy}")
    if not (labels >= 0).any():
        remedy = "give images of those classes, under the same names"
        raise DataError(
            f"{source.place}: none of its images is of a class that the model knows: it has {listed(source.classes)}; "
            f"the model knows {listed(names)}; {remedy}"
        )
    present = np.bincount(labels[labels >= 0], minlength=len(names))
    absent = [name for name, images in zip(names, present.tolist()) if not images]
    notes = []
    if unknown:
        images = count(int((labels < 0).sum()), "image")
        classes = count(len(unknown), "class", "classes")
        notes.append(f"{source.place}: left out {images} of {classes} that the model does not know: {listed(unknown)}")
    if absent:
        classes = count(len(absent), "class", "classes")
        notes.append(f"{source.place}: has no images of {classes}: {listed(absent)}")
    if tuple(names) == source.classes and not notes:
        return source
    return _Matched(source, tuple(names), labels, tuple(map(printable, notes)))


class _Matched(Source):
    """Images of another source, with labels of a model's classes.

    Args:
        labels: int64 [images of `source`], -1 for images that are left out.
    """

    def __init__(self, source: Source, names: Tuple[str, ...], labels: np.ndarray, notes: Tuple[str, ...]):
        self.place = source.place
        self.classes = names
        self.digest = source.digest
        self.notes = (*source.notes, *notes)
        self._source = source
        self._kept = np.flatnonzero(labels >= 0)  # numbers of the images there
        self.labels = labels[self._kept]

    def read(self, index: int) -> torch.Tensor:
        return self._source.read(int(self._kept[index]))

    def name(self, index: int) -> str:
        return self._source.name(int(self._kept[index]))

    def open(self, index: int) -> Image:
        return self._source.open(int(self._kept[index]))

    def open_all(self, indices: Sequence[int]) -> List[Union[Image, UnreadableImage]]:
        return self._source.open_all(self._kept[list(indices)].tolist())

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The other source's order, without the images that are left out."""
        numbers = np.full(len(self._source), -1, dtype=np.int64)
        numbers[self._kept] = np.arange(len(self._kept))
        order = numbers[self._source.order(seed, epoch)]
        return order[order >= 0]

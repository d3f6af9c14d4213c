"""Classes by name: the images of a source under a model's labels.

The order of the source's own classes does not matter.
"""

import re
import unicodedata
from typing import Dict, List, Sequence, Tuple, Union

import numpy as np
import torch

from common.errors import DataError
from common.text import count, listed, printable
from data.base import Image, Source, UnreadableImage

_ABSENT = -1


def in_timm_order(names: Sequence[str]) -> Tuple[str, ...]:
    """Return class names in the order in which timm numbers class folders.

    Numbers in them count by value, case is ignored. Names that are equal then, which timm puts in a
    random order, keep theirs.

    Source: natural_key in timm/utils/misc.py, used by timm/data/readers/reader_image_folder.py.

    Args:
        names: of the classes.
    """
    return tuple(sorted(names, key=_natural_key))


def _natural_key(name: str) -> List[Union[int, str]]:
    """Return the digits of a name as numbers, and the text between them in small letters."""
    parts = re.split(r"(\d+)", name.lower())
    return [int(part) if part.isdecimal() else part for part in parts]


def places(names: Sequence[str], others: Sequence[str]) -> np.ndarray:
    """Return the place of each name among others.

    The second of two equal names is the second of those among `others`. Names are equal whichever
    of Unicode's forms they are written in: copies by way of macOS have another than the original.

    Args:
        names: that are looked for.
        others: among which they are looked for.

    Returns:
        int64 [names], -1 for those that are not there.
    """
    # Equal names are told apart by how many stand before them, and names that differ by their form
    # by this.
    if not _differ_by_form(names) and not _differ_by_form(others):
        names = _composed(names)
        others = _composed(others)
    place_of = {name: place for place, name in enumerate(_distinct(others))}
    positions = [place_of.get(name, _ABSENT) for name in _distinct(names)]
    return np.array(positions, dtype=np.int64)


def _composed(names: Sequence[str]) -> List[str]:
    """Return names in Unicode's composed form, in which é is one character."""
    return [unicodedata.normalize("NFC", name) for name in names]


def _differ_by_form(names: Sequence[str]) -> bool:
    """Return whether some of the names differ by their form in Unicode alone."""
    return len(set(_composed(names))) < len(set(names))


def _distinct(names: Sequence[str]) -> List[Tuple[str, int]]:
    """Return each name with the number of equal ones before it: ImageNet has two cranes."""
    seen: Dict[str, int] = {}
    numbered = []
    for name in names:
        equal_before = seen.get(name, 0)
        numbered.append((name, equal_before))
        seen[name] = equal_before + 1
    return numbered


def matched(source: Source, names: Sequence[str], know_all: bool = False) -> Source:
    """Return the images whose classes a model knows, labelled by their places among them.

    Args:
        source: of the images.
        names: of a model's classes, by label.
        know_all: whether an image of another class is an error; else a note counts those that are
            left out.

    Raises:
        DataError: none of the images is of those classes, or see `know_all`.
    """
    # Labels of the model for the source's images, -1 for images of classes that it does not know.
    label_of_class = places(source.classes, names)
    labels = label_of_class[source.labels]
    is_left_out = labels < 0
    unknown_labels = np.unique(source.labels[is_left_out]).tolist()
    unknown = [source.classes[label] for label in unknown_labels]
    if know_all and unknown:
        fault = f"{_classes(unknown)} without training images: {listed(unknown)}"
        remedy = "training and validation need the same class names"
        raise DataError(f"{source.place}: {fault}; {remedy}")
    if is_left_out.all():
        raise DataError(
            f"{source.place}: none of its images is of a class that the model knows: it has "
            f"{listed(source.classes)}; the model knows {listed(names)}; "
            "give images of those classes, under the same names"
        )
    notes = _differences(labels, names, unknown)
    # Without the indirection that `_Matched` puts before each image.
    if tuple(names) == source.classes and not notes:
        return source
    lines = tuple(printable(f"{source.place}: {note}") for note in notes)
    return _Matched(source, tuple(names), labels, lines)


def _differences(labels: np.ndarray, names: Sequence[str], unknown: Sequence[str]) -> List[str]:
    """Return notes on differences between a model's classes and the data's that are no errors.

    Args:
        labels: int64 [images], -1 for images of classes that the model does not know.
        names: of the model's classes, by label.
        unknown: names of the classes that it does not know.
    """
    notes = []
    is_left_out = labels < 0
    if unknown:
        images = count(int(is_left_out.sum()), "image")
        left_out = f"{images} of {_classes(unknown)}"
        notes.append(f"left out {left_out} that the model does not know: {listed(unknown)}")
    images_of_class = np.bincount(labels[~is_left_out], minlength=len(names)).tolist()
    absent = [name for name, images in zip(names, images_of_class) if not images]
    if absent:
        notes.append(f"has no validation images of {_classes(absent)}: {listed(absent)}")
    return notes


def _classes(names: Sequence[str]) -> str:
    """Return how many classes there are, in words."""
    return count(len(names), "class", "classes")


class _Matched(Source):
    """Images of another source, with labels of a model's classes."""

    def __init__(
        self,
        source: Source,
        names: Tuple[str, ...],
        labels: np.ndarray,
        notes: Tuple[str, ...],
    ):
        """
        Args:
            source: of the images.
            names: of the model's classes, by label.
            labels: int64 [images of `source`], -1 for images that are left out.
            notes: lines for the user.
        """
        self.place = source.place
        self.classes = names
        self.digest = source.digest
        self.notes = (*source.notes, *notes)
        self._source = source
        self._kept = np.flatnonzero(labels >= 0)  # numbers of the images there
        self.labels = labels[self._kept]

    def read(self, index: int) -> torch.Tensor:
        """Return the pixels of image number `index`: see `Source.read`."""
        return self._source.read(int(self._kept[index]))

    def name(self, index: int) -> str:
        """Return the other source's name of image `index`."""
        return self._source.name(int(self._kept[index]))

    def open(self, index: int) -> Image:
        """Open image number `index`: see `Source.open`."""
        return self._source.open(int(self._kept[index]))

    def open_all(self, indices: Sequence[int]) -> List[Union[Image, UnreadableImage]]:
        """Open the images of `indices`: see `Source.open_all`."""
        return self._source.open_all(self._kept[list(indices)].tolist())

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the other source's order of (`seed`, `epoch`), without what is left out."""
        # Relative order stays, so the images of a shard are still read together.
        number_here = np.full(len(self._source), _ABSENT, dtype=np.int64)
        number_here[self._kept] = np.arange(len(self._kept))
        order = number_here[self._source.order(seed, epoch)]
        return order[order >= 0]

"""Images that a CSV file lists with their classes."""

import hashlib
import itertools
import os
from typing import Iterable, List, Optional

import numpy as np

from common.errors import DataError
from common.text import printable
from data.base import CLASS_NAMES, SOURCES, ClassNames, Names, Source
from data.encoded import FileSource
from recipe import image_lists, validation_share
from recipe.image_lists import Row
from recipe.images import ImageList


class ListSource(FileSource):
    """The images of a list, in the order of class and path as bytes.

    That is the order of class folders, so a list of the paths in class folders gives the same
    numbers as the folders do. A path that is listed twice is two images.
    """

    def __init__(self, file: str, folder: str, share: float = 0.0, split: str = "train"):
        """
        Args:
            file: path of the CSV file.
            folder: to which the paths in it are relative.
            share: of the images that validate, where the list has both splits; else 0.
            split: "train" or "validation", the images to take of such a list.

        Raises:
            DataError: the list cannot be read, has no images of the split, or its first image is
                not there.
        """
        self.place = file
        self._folder = os.fsencode(folder)
        names = []
        rows: List[Row] = []
        images_of_class = []
        for label, of_class in image_lists.by_class(image_lists.read(file, folder)).items():
            paths = [os.fsencode(row.path) for row in of_class]
            chosen = validation_share.of_split(paths, share, split)
            kept = list(itertools.compress(of_class, chosen))
            names.append(label)
            rows += kept
            images_of_class.append(len(kept))
        if not rows:
            raise DataError(validation_share.no_images(file, share))
        self._check_there(rows[0])
        self.classes = tuple(map(printable, names))
        self.labels = np.repeat(np.arange(len(names), dtype=np.int64), images_of_class)
        self.digest = _digest(rows)
        encoded = [os.fsencode(row.path) for row in rows]
        lengths = np.array([len(path) for path in encoded], dtype=np.uint64)
        self._paths = Names([b"".join(encoded)], [lengths])

    def _check_there(self, row: Row) -> None:
        """Raise DataError where an image is missing: of a wrong folder all are."""
        path = os.path.join(self._folder, os.fsencode(row.path))
        if not os.path.exists(path):
            fault = f"line {row.line}: no file {os.fsdecode(path)}"
            remedy = "correct the path, or set data.root to the folder that paths are relative to"
            raise DataError(printable(f"{self.place}: {fault}; {remedy}"))


def _digest(rows: Iterable[Row]) -> str:
    """Return the digest of labels and paths: a row may change its label alone."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(os.fsencode(row.label) + b"\0" + os.fsencode(row.path) + b"\0")
    return digest.hexdigest()


@SOURCES.implements(ImageList)
def _open(data: ImageList, classes: int, split: str) -> Source:
    """Open the list of a split."""
    file = data.located(split)
    assert file is not None, "a list is a file of this machine"
    return ListSource(file, data.list_folder(file), share=data.validation_share, split=split)


@CLASS_NAMES.implements(ImageList)
def _class_names(data: ImageList, split: str) -> Optional[ClassNames]:
    """Return the labels of a list, whose images are not looked at."""
    file = data.list_file(split)
    if not os.path.isfile(file):
        return None
    labels = image_lists.by_class(image_lists.read(file, data.list_folder(file)))
    return ClassNames(file, tuple(map(printable, labels)), sorted=True)

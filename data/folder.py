"""Class folders on disk: one folder per class, JPEG and PNG files at any depth inside it."""

import hashlib
import itertools
import os
from collections import defaultdict
from typing import Dict, Iterator, List, Optional, Tuple

import numpy as np

from common.errors import DataError
from common.text import printable
from data.base import CLASS_NAMES, SOURCES, ClassNames, Names, Source
from data.encoded import FileSource
from recipe import validation_share
from recipe.class_folders import (
    class_folders,
    images_below,
    is_folder,
    is_image,
    listed,
    why_left_out,
)
from recipe.images import Folder, split_folder, split_place


class FolderSource(FileSource):
    """The images of a folder of class folders, in the order of class and path as bytes.

    So the order is the same everywhere. Hidden files and folders, those of file systems, other
    files, files beside the class folders, and links that lead back to a folder around them are left
    out.
    """

    def __init__(
        self,
        folder: str,
        empty_classes: bool = False,
        share: float = 0.0,
        split: str = "train",
    ):
        """
        Args:
            folder: of the class folders.
            empty_classes: whether a class folder may be without images.
            share: of the images that validate, where the folder has both splits; else 0.
            split: "train" or "validation", the images to take of such a folder.

        Raises:
            DataError: the folder cannot be listed, or has no class folders, no images, or a class
                without images.
        """
        self.place = folder
        self._folder = os.fsencode(folder)
        scan = Scan(folder)
        names = scan.classes()
        blocks: List[bytes] = []
        lengths: List[np.ndarray] = []
        digest = hashlib.sha256()
        # Class by class: a folder's paths are joined before the next folder is listed, because
        # millions of separate strings would fill the memory.
        for name in names:
            paths = _paths_of_class(scan, folder, name, may_be_empty=empty_classes)
            chosen = validation_share.of_split(paths, share, split)
            paths = list(itertools.compress(paths, chosen))
            blocks.append(b"".join(paths))
            lengths.append(np.array([len(path) for path in paths], dtype=np.uint64))
            if paths:  # so that an empty folder is the same as none
                digest.update(b"\0".join(paths) + b"\0")  # each begins with its class
        if not any(blocks):
            raise DataError(_no_images(folder, share))
        self.digest = digest.hexdigest()
        # Labels are in the order of the blocks, so they need no path.
        self.classes = tuple(map(printable, names))
        images_of_class = [len(of_class) for of_class in lengths]
        self.labels = np.repeat(np.arange(len(names), dtype=np.int64), images_of_class)
        self._paths = Names(blocks, lengths)
        self.notes = scan.notes()


def _no_images(folder: str, share: float) -> str:
    """Return the fault of a folder without images of a split, and the remedy."""
    if share:
        return validation_share.no_images(folder, share)
    return f"{folder}: no .jpg, .jpeg or .png files in its class folders; fill them"


def _paths_of_class(scan: "Scan", folder: str, name: str, may_be_empty: bool) -> List[bytes]:
    """Return the paths of the images of a class, relative to the folder of all classes, sorted.

    Raises DataError where there are none, unless there may be none.
    """
    paths = sorted(scan.images(os.fsencode(name)))
    if not paths and not may_be_empty:
        place = os.path.join(folder, name)
        fault = "no .jpg, .jpeg or .png files in this class folder"
        raise DataError(f"{place}: {fault}; fill it or remove it")
    return paths


@SOURCES.implements(Folder)
def _open(data: Folder, classes: int, split: str) -> Source:
    """Open the class folders of a split; only validation may lack images of a class."""
    if split == "train":
        data.check_splits()
    return FolderSource(
        split_folder(data, split),
        # Where one folder has both splits, a class without images has none of either.
        empty_classes=split == "validation" and not data.validation_share,
        share=data.validation_share,
        split=split,
    )


@CLASS_NAMES.implements(Folder)
def _class_names(data: Folder, split: str) -> Optional[ClassNames]:
    """Return the names of the class folders, which are listed without their images."""
    place = split_place(data, split)
    if not os.path.isdir(place):
        return None
    names = tuple(map(printable, class_folders(place)))
    return ClassNames(place, names, sorted=True)


class Scan:
    """Lists a folder of class folders, and counts what it leaves out."""

    def __init__(self, folder: str):
        self._place = folder
        self._folder = os.fsencode(folder)
        # Paths by kind, and extension of images.
        self._left_out: Dict[Tuple[str, str], List[bytes]] = defaultdict(list)

    def classes(self) -> Tuple[str, ...]:
        """Return names of the class folders, in the order of their labels. Raises DataError."""
        # A second look, as class_folders(), which plans also use, does not report what it leaves out.
        for entry in listed(self._folder):
            reason = why_left_out(entry, (self._folder,))
            if reason is None and is_image(entry.name) and not is_folder(entry):
                reason = "images beside the class folders"
            if reason is not None:
                self._leave_out(reason, "", entry.name)
        return class_folders(self._place)

    def images(self, name: bytes) -> Iterator[bytes]:
        """Return relative paths of the images in the class folder `name`, in no order."""
        return images_below(self._folder, name, self._leave_out)

    def notes(self) -> Tuple[str, ...]:
        """Return a line for each kind of thing that was left out."""
        lines = []
        for (kind, extension), paths in sorted(self._left_out.items()):
            amount = f"{len(paths):,}{extension}"
            first = os.fsdecode(paths[0])
            lines.append(f"{self._place}: left out {kind}: {amount}; the first: {first}")
        return tuple(map(printable, lines))

    def _leave_out(self, kind: str, extension: str, path: bytes) -> None:
        """Note a path that is left out: its kind, and the extension of an image."""
        self._left_out[kind, extension].append(path)

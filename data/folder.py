"""Class folders on disk: one folder per class, JPEG and PNG files at any depth inside it."""

import hashlib
import os
from collections import defaultdict
from typing import Dict, Iterator, List, Optional, Tuple

import numpy as np

from common.errors import DataError
from common.text import printable
from data.base import CLASS_NAMES, SOURCES, ClassNames, Names, Source
from data.encoded import EncodedSource, read_image
from recipe.class_folders import class_folders, images_below, listed, why_left_out
from recipe.images import Folder, split_folder, split_place


class FolderSource(EncodedSource):
    """The images of a folder of class folders, in the order of class and path as bytes, the same everywhere.

    Hidden files and folders, those of file systems, other files, files beside the class folders, and links that lead
    back to a folder around them are left out.
    """

    def __init__(self, folder: str, empty_classes: bool = False):
        """
        Args:
            empty_classes: whether a class folder may be without images.

        Raises DataError: the folder cannot be listed, or has no class folders, no images, or a class without images.
        """
        self.place, self._folder = folder, os.fsencode(folder)
        scan = _Scan(folder)
        blocks: List[bytes] = []
        lengths: List[np.ndarray] = []
        digest = hashlib.sha256()
        names = scan.classes()
        for name in names:
            paths = sorted(scan.images(os.fsencode(name)))
            if not paths and not empty_classes:
                place = os.path.join(folder, name)
                raise DataError(f"{place}: no .jpg, .jpeg or .png files in this class folder; fill it or remove it")
            blocks.append(b"".join(paths))
            lengths.append(np.array([len(path) for path in paths], dtype=np.uint64))
            if paths:  # so that an empty folder is the same as none
                digest.update(b"\0".join(paths) + b"\0")  # each begins with its class
        if not any(blocks):
            raise DataError(f"{folder}: no .jpg, .jpeg or .png files in its class folders; fill them")
        self.digest = digest.hexdigest()
        self.classes = tuple(printable(name) for name in names)
        self.labels = np.repeat(np.arange(len(names), dtype=np.int64), [len(each) for each in lengths])
        self._paths = Names(blocks, lengths)
        self.notes = scan.notes()

    def name(self, index: int) -> str:
        return printable(self._path(index))

    def encoded(self, index: int) -> bytes:
        return read_image(self._path(index))

    def _path(self, index: int) -> str:
        return os.fsdecode(os.path.join(self._folder, self._paths[index]))


@SOURCES.implements(Folder)
def _open(data: Folder, classes: int, split: str) -> Source:
    return FolderSource(split_folder(data, split), empty_classes=split == "validation")


@CLASS_NAMES.implements(Folder)
def _class_names(data: Folder, split: str) -> Optional[ClassNames]:
    place = split_place(data, split)
    if not os.path.isdir(place):
        return None
    names = tuple(printable(name) for name in class_folders(place))
    return ClassNames(place, names, sorted=True)


class _Scan:
    """Lists a folder of class folders, and counts what it leaves out."""

    def __init__(self, folder: str):
        self._place, self._folder = folder, os.fsencode(folder)
        self._left_out: Dict[Tuple[str, str], List[bytes]] = defaultdict(list)  # paths by kind, and extension of images

    def classes(self) -> Tuple[str, ...]:
        """Names of the class folders, in the order of their labels. Raises DataError."""
        for entry in listed(self._folder):
            reason = why_left_out(entry, (self._folder,))
            if reason is not None:
                self._leave_out(reason, "", entry.name)
        return class_folders(self._place)

    def images(self, name: bytes) -> Iterator[bytes]:
        """Relative paths, in no order, of the images at any depth in the class folder `name`."""
        return images_below(self._folder, name, self._leave_out)

    def notes(self) -> Tuple[str, ...]:
        """A line for each kind of thing that was left out."""
        found = [
            f"{self._place}: left out {kind[0]}: {len(paths):,}{kind[1]}; the first: {os.fsdecode(paths[0])}"
            for kind, paths in sorted(self._left_out.items())
        ]
        return tuple(map(printable, found))

    def _leave_out(self, kind: str, extension: str, path: bytes) -> None:
        self._left_out[kind, extension].append(path)

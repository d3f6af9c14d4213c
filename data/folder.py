"""Class folders on disk: one folder per class, JPEG and PNG files at any depth inside it."""

import hashlib
import os
from collections import defaultdict
from typing import Dict, Iterator, List, Tuple

import numpy as np

from data.base import SOURCES, Names, Source
from data.encoded import EncodedSource, read_image
from recipe.errors import DataError, printable
from recipe.images import Folder, split_folder

_EXTENSIONS = (b".jpg", b".jpeg", b".png")
_OTHER_IMAGES = frozenset(
    b".avif .bmp .gif .heic .heif .jfif .jp2 .jpe .jxl .pbm .pgm .ppm .tga .tif .tiff .webp".split()
)  # a user who has these beside others may think that they are read


class FolderSource(EncodedSource):
    """The images of a folder of class folders, in the order of class and path as bytes, the same everywhere.

    Hidden files and folders, other files, files beside the class folders, and links that lead back to a folder around
    them are left out.
    """

    def __init__(self, folder: str):
        """Raises DataError: the folder cannot be listed, or has no class folders or one without images."""
        self.place, self._folder = folder, os.fsencode(folder)
        scan = _Scan(folder)
        blocks: List[bytes] = []
        lengths: List[np.ndarray] = []
        digest = hashlib.sha256()
        names = scan.classes()
        for name in names:
            paths = sorted(scan.images(os.fsencode(name)))
            if not paths:
                place = os.path.join(folder, name)
                raise DataError(f"{place}: no .jpg, .jpeg or .png files in this class folder; fill it or remove it")
            blocks.append(b"".join(paths))
            lengths.append(np.array([len(path) for path in paths], dtype=np.uint64))
            digest.update(b"\0".join(paths) + b"\0")  # each begins with its class
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
    place = split_folder(data, split)
    train = os.path.join(str(data.root), data.train_folder)
    if split == "validation" and os.path.isdir(train):
        here, there = set(_Scan(place).classes()), set(_Scan(train).classes())
        if here != there:
            name = min(here ^ there)
            where, missing = (place, train) if name in here else (train, place)
            raise DataError(
                f"{os.path.join(where, name)}: this class is not in {missing}; "
                "training and validation need the same class folders"
            )
    return FolderSource(place)


class _Scan:
    """Lists a folder of class folders, and counts what it leaves out."""

    def __init__(self, folder: str):
        self._place, self._folder = folder, os.fsencode(folder)
        self._left_out: Dict[Tuple[str, str], List[bytes]] = defaultdict(list)  # paths by kind, and extension of images

    def classes(self) -> Tuple[str, ...]:
        """Names of the class folders, in the order of their labels. Raises DataError."""
        entries = [entry for entry in _entries(self._folder) if self._is_folder(entry, entry.name, (self._folder,))]
        if not entries:
            raise DataError(f"{self._place}: no class folders; it must hold one folder of images per class")
        return tuple(os.fsdecode(name) for name in sorted(entry.name for entry in entries))

    def images(self, below: bytes, around: Tuple[bytes, ...] = ()) -> Iterator[bytes]:
        """Relative paths, in no order, of the images at any depth in the folder `below`, with folders `around` it."""
        folder = os.path.join(self._folder, below)
        around = (*(around or (self._folder,)), folder)
        for entry in _entries(folder):
            path = below + b"/" + entry.name
            kind = os.path.splitext(entry.name)[1].lower()
            # Extensions first: the kind of an entry can cost a call to the file system. An image's name on something
            # that is no file is found when it is read.
            if kind in _EXTENSIONS:
                yield path
            elif self._is_folder(entry, path, around):
                yield from self.images(path, around)
            elif kind in _OTHER_IMAGES:
                self._left_out["images that are neither JPEG nor PNG", f" {kind.decode()}"].append(path)

    def notes(self) -> Tuple[str, ...]:
        """A line for each kind of thing that was left out."""
        found = [
            f"{self._place}: left out {kind[0]}: {len(paths):,}{kind[1]}; the first: {os.fsdecode(paths[0])}"
            for kind, paths in sorted(self._left_out.items())
        ]
        return tuple(map(printable, found))

    def _is_folder(self, entry: "os.DirEntry[bytes]", path: bytes, around: Tuple[bytes, ...]) -> bool:
        """Whether an entry is a folder, or a link to one that neither is nor holds one of those `around`."""
        if not entry.is_symlink():
            return entry.is_dir()
        target = os.path.join(os.path.realpath(entry.path), b"")
        if not any(os.path.join(os.path.realpath(folder), b"").startswith(target) for folder in around):
            return os.path.isdir(entry.path)
        self._left_out["links that lead back to a folder around them", ""].append(path)
        return False


def _entries(folder: bytes) -> "List[os.DirEntry[bytes]]":
    """The entries of a folder that are not hidden."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(b".")]
    except OSError as error:
        raise DataError(f"{os.fsdecode(folder)}: {error.strerror}") from None

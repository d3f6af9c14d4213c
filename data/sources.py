"""Where images come from: class folders on disk, tar shards, the digits that come with the repository, and glyphs.

A source numbers its images from 0 and reads any of them; order, augmentation and batches are loader.py's.
"""

import errno
import hashlib
import os
from typing import Dict, FrozenSet, Iterator, List, Optional, Tuple

import numpy as np
import torch

from data.base import Source
from data.encoded import EncodedSource, read_image
from data.glyphs import GlyphsSource
from data.local import MissingFile
from data.names import Names
from data.shard_index import read_manifest
from data.shards import ShardsSource, open_folder
from recipe.batch import image_count
from recipe.config import Data
from recipe.errors import DataError, printable
from recipe.images import below, split_folder
from recipe.randomness import bits32, key

_EXTENSIONS = (b".jpg", b".jpeg", b".png")
_OTHER_IMAGES = frozenset(
    b".avif .bmp .gif .heic .heif .jfif .jp2 .jpe .jxl .pbm .pgm .ppm .tga .tif .tiff .webp".split()
)  # whoever has these beside others may think that they are read
_NAMED = 3  # files that a note names
_DIGITS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "digits.npz")


class FolderSource(EncodedSource):
    """One folder per class, JPEG and PNG files at any depth inside it.

    Classes come in the order of their names, images in the order of class and path (both compared as bytes,
    so the order is the same everywhere). Hidden files and folders, other files, files beside the class
    folders, and links that lead back to a folder around them are left out.
    """

    def __init__(self, folder: str):
        """Scan `folder`.

        Raises:
            DataError: it is missing or cannot be listed, has no class folders, or one without images.
        """
        self._folder = os.fsencode(folder)
        aside = _Aside()
        names = class_folders(folder, aside)
        around = _around(self._folder)
        blocks: List[bytes] = []
        lengths: List[np.ndarray] = []
        counts = []
        digest = hashlib.sha256()
        for name in names:
            paths = sorted(_image_paths(self._folder, os.fsencode(name), around, aside))
            if not paths:
                raise DataError(
                    f"{os.path.join(folder, name)}: no .jpg, .jpeg or .png files in this class folder; "
                    "fill it or remove it"
                )
            blocks.append(b"".join(paths))
            lengths.append(np.array([len(path) for path in paths], dtype=np.uint64))
            counts.append(len(paths))
            digest.update(b"\0".join(paths) + b"\0")  # each begins with its class
        self.digest = digest.hexdigest()
        self.classes = tuple(printable(name) for name in names)
        self.labels = np.repeat(np.arange(len(names), dtype=np.int64), counts)
        self._paths = Names(blocks, lengths)
        self.notes = aside.notes(folder)

    def name(self, index: int) -> str:
        return printable(self._path(index))

    def encoded(self, index: int) -> bytes:
        return read_image(self._path(index))

    def _path(self, index: int) -> str:
        return os.fsdecode(os.path.join(self._folder, self._paths[index]))


class DigitsSource(Source):
    """The 1,797 handwritten digits of digits.npz, 8 x 8 grey: 1,437 to train on and 360 to validate with."""

    def __init__(self, split: str):
        """Args: split: "train" or "validation"."""
        with np.load(_DIGITS) as file:
            images, labels = file["images"], file["labels"].astype(np.int64)
        self.classes = tuple(str(digit) for digit in range(10))
        self._numbers = _digits_split(labels, split)
        self.labels = labels[self._numbers]
        grey = (images[self._numbers].astype(np.uint16) * 255 + 8) // 16
        self._images = torch.from_numpy(grey.astype(np.uint8))[:, None].repeat(1, 3, 1, 1)

    def name(self, index: int) -> str:
        return f"digits/{self._numbers[index]}"

    def read(self, index: int) -> torch.Tensor:
        return self._images[index]


def open_source(data: Data, classes: int, split: str) -> Source:
    """Open the images that a recipe names, after checks that need nothing decoded.

    Validation labels are numbered by the training folder's classes, so both folders must have the same (shards: in the
    same order); where there is no training folder (to score a checkpoint, say), the validation folder's own are used.

    Args:
        data: the recipe's section.
        classes: the recipe's `model.classes`.
        split: "train" or "validation".

    Raises:
        DataError: what the recipe names is missing, incomplete or does not fit the recipe.
    """
    assert split in ("train", "validation"), split
    if data.source == "digits":
        source: Source = DigitsSource(split)
        place = "data.source=digits"
    elif data.source == "glyphs":
        source = GlyphsSource(classes, image_count(data, split), split, data.glyph_size, data.glyph_difficulty)
        place = "data.source=glyphs"
    elif data.source == "shards":
        place = split_folder(data, split)
        source = ShardsSource(place, data.shuffle_window)
        if split == "validation":
            _check_same_names(place, source.classes, below(str(data.root), data.train_folder))
    else:
        place = split_folder(data, split)
        if split == "validation":
            _check_same_classes(place, os.path.join(str(data.root), data.train_folder))
        source = FolderSource(place)
    if len(source.classes) != classes:
        raise DataError(
            f"{place}: {len(source.classes)} classes, but model.classes is {classes}; "
            f"set model.classes={len(source.classes)}"
        )
    count_key = "train_images" if split == "train" else "validation_images"
    expected = data.images(split)
    if data.files and expected is not None and len(source) != expected:
        raise DataError(
            f"{place}: {len(source)} images, but data.{count_key} is {expected}; "
            f"complete the images or set data.{count_key}={len(source)}"
        )
    return source


class _Aside:
    """What a scan finds beside images and leaves out."""

    def __init__(self) -> None:
        self.kinds: Dict[str, int] = {}
        self.files: List[bytes] = []  # the first of them
        self.loops: List[bytes] = []

    def note_file(self, path: bytes) -> None:
        kind = os.path.splitext(path)[1].lower()
        if kind in _OTHER_IMAGES:
            self.kinds[kind.decode()] = self.kinds.get(kind.decode(), 0) + 1
            self.files += [path] if len(self.files) < _NAMED else []

    def notes(self, folder: str) -> Tuple[str, ...]:
        """A line for each kind of thing."""
        found = []
        if self.kinds:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.kinds.items()))
            found.append(
                f"{folder}: left out images that are neither JPEG nor PNG: {kinds}; {_first(self.files)}; convert them "
                "if they belong to the data"
            )
        if self.loops:
            found.append(
                f"{folder}: left out links that lead back to a folder around them: {len(self.loops):,}; "
                f"{_first(self.loops)}"
            )
        return tuple(printable(note) for note in found)


def _first(paths: List[bytes]) -> str:
    return f"the first: {', '.join(os.fsdecode(path) for path in paths[:_NAMED])}"


def class_folders(folder: str, aside: Optional[_Aside] = None) -> Tuple[str, ...]:
    """Names of the class folders in `folder`, in the order of their labels. Raises DataError.

    Args:
        aside: is told what is left out.
    """
    around = _around(os.fsencode(folder))
    aside = aside or _Aside()
    names = sorted(
        entry.name
        for entry in _entries(os.fsencode(folder))
        if not entry.name.startswith(b".") and _is_folder(entry, entry.name, around, aside)
    )
    if not names:
        raise DataError(f"{folder}: no class folders; it must hold one folder of images per class")
    return tuple(os.fsdecode(name) for name in names)


def _check_same_names(validation: str, classes: Tuple[str, ...], train: str) -> None:
    """Of shards, whose manifests name the classes."""
    try:
        trained = read_manifest(open_folder(train)).classes
    except MissingFile:
        return
    if len(trained) != len(classes):
        raise DataError(
            f"{validation}: {len(classes)} classes, but {train} has {len(trained)}; both need the same classes"
        )
    for label, (here, there) in enumerate(zip(classes, trained)):
        if here != there:
            raise DataError(
                f"{validation}: label {label} is {here!r}, but in {train} it is {there!r}; both need the same classes"
            )


def _check_same_classes(validation_folder: str, train_folder: str) -> None:
    if not os.path.isdir(train_folder):
        return
    pairs = (validation_folder, train_folder), (train_folder, validation_folder)
    for here, there in pairs:
        missing = sorted(set(class_folders(here)) - set(class_folders(there)))
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise DataError(
                f"{os.path.join(here, missing[0])}: this class is not in {there}{more}; "
                "training and validation need the same class folders"
            )


def _entries(folder: bytes) -> "List[os.DirEntry[bytes]]":
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise DataError(f"{os.fsdecode(folder)}: {error.strerror}") from None


def _around(folder: bytes) -> FrozenSet[Tuple[int, int]]:
    """Which folders a folder and those around it are: device and number of each."""
    path = os.path.realpath(folder)
    found = set()
    while os.path.dirname(path) != path:
        found.add(_identity(path))
        path = os.path.dirname(path)
    return frozenset(found)


def _identity(folder: bytes) -> Tuple[int, int]:
    try:
        found = os.stat(folder)
    except OSError as error:
        raise DataError(f"{os.fsdecode(folder)}: {error.strerror}") from None
    return found.st_dev, found.st_ino


def _is_folder(entry: "os.DirEntry[bytes]", path: bytes, around: FrozenSet[Tuple[int, int]], aside: _Aside) -> bool:
    """Whether an entry is a folder, or a link to one that does not lead back to those `around`."""
    try:
        if not entry.is_dir():
            return False
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise DataError(f"{os.fsdecode(entry.path)}: {error.strerror}") from None
        leads_back = True
    else:
        leads_back = entry.is_symlink() and _identity(entry.path) in around
    if leads_back:
        aside.loops.append(path)
    return not leads_back


def _image_paths(folder: bytes, below: bytes, around: FrozenSet[Tuple[int, int]], aside: _Aside) -> Iterator[bytes]:
    """Paths, relative to `folder`, of the images at any depth in its folder `below`, in no order.

    Args:
        around: the folders that `below` lies in.
        aside: is told what is left out.
    """
    around |= {_identity(os.path.join(folder, below))}
    for entry in _entries(os.path.join(folder, below)):
        if entry.name.startswith(b"."):
            continue
        path = below + b"/" + entry.name
        # Extensions first: asking for the kind of every file can cost a call to the file system each. What has the
        # name of an image but is no file is found when it is read.
        if entry.name.lower().endswith(_EXTENSIONS):
            yield path
        elif _is_folder(entry, path, around, aside):
            yield from _image_paths(folder, path, around, aside)
        else:
            aside.note_file(path)


def _digits_split(labels: np.ndarray, split: str) -> np.ndarray:
    """Numbers of the digits of a split, ascending. Every fifth of each class in a random order validates.

    The key is a constant: figures of different runs compare only as long as the split never changes.
    """
    shuffle = bits32(key("digits split"), np.arange(len(labels), dtype=np.int64))
    by_class = np.lexsort((shuffle, labels))
    validates = np.zeros(len(labels), dtype=bool)
    validates[by_class[::5]] = True
    return np.flatnonzero(validates if split == "validation" else ~validates)

"""Data sets of torchvision whose images have one size, in memory.

Images are numbered as those of class folders would be: by label, then in the data set's order. So a run learns the
same, to the bit, from the data set and from class folders or shards of its images.
"""

import contextlib
import fcntl
import functools
import gzip
import hashlib
import math
import os
import pickle
import struct
import warnings
import zlib
from typing import Any, Callable, Iterator, NamedTuple, Tuple

import numpy as np
import torch
from torchvision import datasets

from common.errors import DataError, first_line
from common.files import open_regular
from common.text import count
from data.base import SOURCES, Source
from recipe import torchvision_sets
from recipe.images import Torchvision
from recipe.torchvision_sets import SETS

_MOST_BYTES = 2**31  # of an unpacked file: a small packed one could fill the memory
_OF_UNSIGNED_BYTES = b"\0\0\x08"  # how a file of MNIST's kind begins; the number of dimensions follows
_SPLITS = {"train": "train", "validation": "test"}  # as torchvision names them
_NAMED_SPLITS = ("SVHN", "STL10")  # their readers take the name of a split, those of the others whether to train
# What torchvision's readers raise for files that are missing, damaged or of another kind, and for networks that fail.
_FAULTS = (RuntimeError, OSError, ValueError, EOFError, KeyError, IndexError, TypeError, pickle.UnpicklingError)


class Content(NamedTuple):
    """Images and labels in the order of their data set.

    images: uint8 [n, height, width], grey, or [n, height, width, 3]. labels: integers [n]. classes: names by label.
    place: folder of the files.
    """

    images: np.ndarray
    labels: np.ndarray
    classes: Tuple[str, ...]
    place: str


class TorchvisionSource(Source):
    """The images of a data set in memory. `digest` is of pixels and labels, so that other images are noticed."""

    def __init__(self, name: str, content: Content):
        """
        Args:
            name: of the data set and the split, before the number of an image.

        Raises:
            DataError: labels and images do not fit each other.
        """
        images, labels, self.classes, self.place = content
        if not len(labels) or len(labels) != len(images):
            numbers = f"{count(len(images), 'image')} and {count(len(labels), 'label')}"
            raise DataError(f"{self.place}: {numbers}; get these files anew")
        if not 0 <= labels.min() <= labels.max() < len(self.classes):
            span = f"labels from {labels.min()} to {labels.max()}, but {len(self.classes)} classes"
            raise DataError(f"{self.place}: {span}; get these files anew, or correct data.dataset")
        # As class folders are numbered: a stable sort keeps the data set's order within each label.
        self._name = name
        self._numbers = np.argsort(labels, kind="stable")  # in the data set
        self.labels = labels[self._numbers].astype(np.int64)
        pixels = np.ascontiguousarray(images[self._numbers])
        # Of the content: a file may be packed, moved or renamed.
        self.digest = _digest(pixels, self.labels, self.classes)
        if pixels.ndim == 3:
            pixels = np.repeat(pixels[..., None], 3, axis=3)
        # Channels last in memory, as decoded files have them: resizing then takes the same path, the short one.
        self._images = torch.from_numpy(pixels).permute(0, 3, 1, 2)

    def name(self, index: int) -> str:
        return f"{self._name}/{self._numbers[index]}"

    def read(self, index: int) -> torch.Tensor:
        return self._images[index]


@SOURCES.implements(Torchvision)
def _open(data: Torchvision, classes: int, split: str) -> Source:
    dataset = data.named()
    paths = _located(data, split)
    place = os.path.dirname(paths[0])
    if SETS[dataset].idx:
        images, labels = (read_idx(path, dimensions) for path, dimensions in zip(paths, (3, 1)))
        content = Content(images, labels, tuple(getattr(datasets, dataset).classes), place)
    else:
        content = _read(dataset, split, place, data.download)
    return TorchvisionSource(f"{dataset}/{_SPLITS[split]}", content)


def read_idx(path: str, dimensions: int) -> np.ndarray:
    """Read a file of MNIST's kind ("idx"), packed by gzip or not.

    Args:
        path: of the file; the name of a packed one ends with .gz.
        dimensions: that it must have, 1 to 255.

    Returns:
        uint8, with `dimensions` axes; not writable.

    Raises:
        DataError: it cannot be read, is damaged or cut short, or is of another kind.

    Source: The MNIST database, LeCun, Cortes and Burges, "File formats".
    """
    try:
        with open_regular(path) as file:
            if path.endswith(".gz"):
                with gzip.open(file) as unpacked:
                    content = unpacked.read(_MOST_BYTES + 1)
            else:
                content = file.read(_MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{path}: cannot be read ({reason}); get it anew") from None
    head = 4 + 4 * dimensions  # bytes
    if len(content) < head or not content.startswith(_OF_UNSIGNED_BYTES + bytes([dimensions])):
        raise DataError(f"{path}: no idx file of bytes in {count(dimensions, 'dimension')}; get it anew")
    sizes = struct.unpack_from(f">{dimensions}I", content, 4)
    expected = head + math.prod(sizes)
    if len(content) != expected:
        found = f"{len(content):,} bytes" if len(content) <= _MOST_BYTES else f"more than {_MOST_BYTES:,} bytes"
        raise DataError(f"{path}: damaged ({found} instead of {expected:,}); get it anew")
    return np.frombuffer(content, np.uint8, offset=head).reshape(sizes)


def _read(dataset: str, split: str, root: str, download: bool) -> Content:
    """Read a split by torchvision's reader.

    Args:
        root: torchvision's folder.
        download: whether files that are missing or damaged may be downloaded.

    Raises:
        DataError: they cannot be read.
    """
    try:
        with contextlib.ExitStack() as stack:
            if download:
                stack.enter_context(_alone(root))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # of NumPy, on how CIFAR's files describe their arrays
            found = _reader(dataset, split)(root, download=download)
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        raise DataError(f"data.dataset={dataset}: {first_line(error)}; pip install {package}") from None
    except _FAULTS as error:
        remedy = "remove its files, and set data.download=true or get them anew"
        raise DataError(f"{root}: {dataset}: missing or damaged files ({first_line(error)}); {remedy}") from None
    images = np.asarray(found.data)
    if images.ndim == 4 and images.shape[3] != 3:  # some readers give the channels first
        images = images.transpose(0, 2, 3, 1)
    labels = np.asarray(found.targets if hasattr(found, "targets") else found.labels)
    classes = getattr(found, "classes", None) or map(str, range(SETS[dataset].classes))
    return Content(images, labels, tuple(classes), root)


def _located(data: Torchvision, split: str) -> Tuple[str, ...]:
    """The paths of the split's files, which are downloaded where the recipe allows that. Raises DataError."""
    dataset = data.named()
    try:
        return torchvision_sets.find(dataset, split, data.root)
    except DataError:
        if not data.download:
            raise
    root = torchvision_sets.download_folder(data.root)
    try:
        os.makedirs(root, exist_ok=True)
        with _alone(root):
            _reader(dataset, split)(root, download=True)
    except ImportError:  # of a package for reading, after the download
        pass
    except _FAULTS as error:
        remedy = f"see whether this machine has a network, or put the files into {root}"
        raise DataError(f"data.dataset={dataset}: cannot be downloaded ({first_line(error)}); {remedy}") from None
    return torchvision_sets.find(dataset, split, root)


def _reader(dataset: str, split: str) -> Callable[..., Any]:
    """torchvision's class of a data set, for a split; it takes the folder and `download`."""
    chosen = {"split": _SPLITS[split]} if dataset in _NAMED_SPLITS else {"train": split == "train"}
    return functools.partial(getattr(datasets, dataset), **chosen)


@contextlib.contextmanager
def _alone(root: str) -> Iterator[None]:
    """Wait while another process of this host downloads into the folder: it then finds the files there."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a folder that cannot be written, a file system without locks
            file = stack.enter_context(open(os.path.join(root, ".download.lock"), "a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(images: np.ndarray, labels: np.ndarray, classes: Tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((images.shape, classes)).encode())
    digest.update(images.reshape(-1))
    digest.update(labels)
    return digest.hexdigest()

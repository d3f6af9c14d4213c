"""Data sets of torchvision whose images have one size, in memory.

Images are numbered as those of class folders would be: by label, then in the data set's order. So a
run learns the same, to the bit, from the data set and from class folders or shards of its images.
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
from data.base import SOURCES, MemorySource, Source
from recipe import torchvision_sets
from recipe.images import Torchvision
from recipe.torchvision_sets import SETS

_MOST_BYTES = 2**31  # of an unpacked file: a small packed one could fill the memory
# How a file of MNIST's kind with unsigned bytes begins; the number of dimensions follows.
_IDX_OF_BYTES = b"\0\0\x08"
_SPLITS = {"train": "train", "validation": "test"}  # as torchvision names them
# Their readers take the name of a split, those of the others whether to train.
_NAMED_SPLITS = ("SVHN", "STL10")
# What torchvision's readers raise for files that are missing, damaged or of another kind, and for
# networks that fail.
_FAULTS = (
    RuntimeError,
    OSError,
    ValueError,
    EOFError,
    KeyError,
    IndexError,
    TypeError,
    pickle.UnpicklingError,
)


class Content(NamedTuple):
    """Images and labels in the order of their data set."""

    images: np.ndarray  # uint8 [n, height, width], grey, or [n, height, width, 3]
    labels: np.ndarray  # integers [n]
    classes: Tuple[str, ...]  # names by label
    place: str  # folder of the files


class TorchvisionSource(MemorySource):
    """The images of a data set in memory.

    `digest` is of pixels and labels, so that other images are noticed.
    """

    def __init__(self, name: str, content: Content):
        """
        Args:
            name: of the data set and the split, before the number of an image.
            content: of the split.

        Raises:
            DataError: labels and images do not fit each other.
        """
        _check_labels(content)
        self._name = name
        self.classes = content.classes
        self.place = content.place
        # As class folders are numbered: a stable sort keeps the data set's order within each label.
        self._numbers = np.argsort(content.labels, kind="stable")  # in the data set
        self.labels = content.labels[self._numbers].astype(np.int64)
        pixels = np.ascontiguousarray(content.images[self._numbers])
        # Of the content: a file may be packed, moved or renamed.
        self.digest = _digest(pixels, self.labels, self.classes)
        if pixels.ndim == 3:
            pixels = np.repeat(pixels[..., None], 3, axis=3)
        # Channels last in memory, as decoded files have them: resizing then takes the same path,
        # the short one.
        self.pixels = torch.from_numpy(pixels).permute(0, 3, 1, 2)

    def name(self, index: int) -> str:
        """Return the data set, the split and the number there of image `index`."""
        return f"{self._name}/{self._numbers[index]}"


def _check_labels(content: Content) -> None:
    """Raise DataError for labels that do not fit images or classes."""
    images, labels, classes, place = content
    # Files of two downloads, or of two data sets, may lie in one folder.
    if not len(labels) or len(labels) != len(images):
        counts = f"{count(len(images), 'image')} and {count(len(labels), 'label')}"
        raise DataError(f"{place}: {counts}; get these files anew")
    least = labels.min()
    most = labels.max()
    if least < 0 or most >= len(classes):
        span = f"labels from {least} to {most}, but {len(classes)} classes"
        remedy = "get these files anew, or correct data.dataset"
        raise DataError(f"{place}: {span}; {remedy}")


@SOURCES.implements(Torchvision)
def _open(data: Torchvision, classes: int, split: str) -> Source:
    """Open a split, all of which is read into memory; downloaded first where the recipe allows it."""
    dataset = data.named()
    paths = _locate(data, split)
    folder = os.path.dirname(paths[0])
    # torchvision's reader takes neither packed files nor other folders than its own.
    if SETS[dataset].idx:
        images_path, labels_path = paths
        content = Content(
            images=read_idx(images_path, dimensions=3),
            labels=read_idx(labels_path, dimensions=1),
            classes=tuple(getattr(datasets, dataset).classes),
            place=folder,
        )
    else:
        content = _read(dataset, split, root=folder, download=data.download)
    return TorchvisionSource(f"{dataset}/{_SPLITS[split]}", content)


def read_idx(path: str, dimensions: int) -> np.ndarray:
    """Read a file of MNIST's kind ("idx"), packed by gzip or not.

    Source: The MNIST database, LeCun, Cortes and Burges, "File formats".

    Args:
        path: of the file; the name of a packed one ends with .gz.
        dimensions: that it must have, 1 to 255.

    Returns:
        uint8, with `dimensions` axes; not writable.

    Raises:
        DataError: it cannot be read, is damaged or cut short, or is of another kind.
    """
    content = _unpacked(path)
    head = 4 + 4 * dimensions  # bytes: the kind, and the size of each dimension
    if len(content) < head or not content.startswith(_IDX_OF_BYTES + bytes([dimensions])):
        fault = f"no idx file of bytes in {count(dimensions, 'dimension')}"
        raise DataError(f"{path}: {fault}; get it anew")
    # A file that is cut short, or continues, belongs to another download.
    sizes = struct.unpack_from(f">{dimensions}I", content, 4)
    expected = head + math.prod(sizes)
    if len(content) != expected:
        size = f"{len(content):,} bytes"
        if len(content) > _MOST_BYTES:
            size = f"more than {_MOST_BYTES:,} bytes"
        raise DataError(f"{path}: damaged ({size} instead of {expected:,}); get it anew")
    return np.frombuffer(content, np.uint8, offset=head).reshape(sizes)


def _unpacked(path: str) -> bytes:
    """Read up to _MOST_BYTES of a file, and one more of a longer one. Raises DataError."""
    try:
        with open_regular(path) as file:
            if not path.endswith(".gz"):
                return file.read(_MOST_BYTES + 1)
            with gzip.open(file) as unpacked:
                return unpacked.read(_MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"{path}: cannot be read ({reason}); get it anew") from None


def _read(dataset: str, split: str, root: str, download: bool) -> Content:
    """Read a split by torchvision's reader.

    Args:
        dataset: its name.
        split: "train" or "validation".
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
            # Of NumPy, on how CIFAR's files describe their arrays.
            warnings.simplefilter("ignore")
            opened = _reader(dataset, split)(root, download=download)
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        fault = f"data.dataset={dataset}: {first_line(error)}"
        raise DataError(f"{fault}; pip install {package}") from None
    except _FAULTS as error:
        fault = f"{root}: {dataset}: missing or damaged files ({first_line(error)})"
        remedy = "remove its files, and set data.download=true or get them anew"
        raise DataError(f"{fault}; {remedy}") from None
    # torchvision's data sets differ in the order of axes and in the names of attributes.
    images = np.asarray(opened.data)
    if images.ndim == 4 and images.shape[3] != 3:  # channels first
        images = images.transpose(0, 2, 3, 1)
    labels = opened.targets if hasattr(opened, "targets") else opened.labels
    classes = getattr(opened, "classes", None) or map(str, range(SETS[dataset].classes))
    return Content(images, np.asarray(labels), tuple(classes), place=root)


def _locate(data: Torchvision, split: str) -> Tuple[str, ...]:
    """Return the paths of a split's files, downloaded where the recipe allows. Raises DataError."""
    dataset = data.named()
    # A download is the last resort: files of a package, or in another layout, are used as they are.
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
        fault = f"data.dataset={dataset}: cannot be downloaded ({first_line(error)})"
        remedy = f"see whether this machine has a network, or put the files into {root}"
        raise DataError(f"{fault}; {remedy}") from None
    return torchvision_sets.find(dataset, split, root)


def _reader(dataset: str, split: str) -> Callable[..., Any]:
    """Return torchvision's class of a data set, for a split; it takes the folder and `download`."""
    reader = getattr(datasets, dataset)
    if dataset in _NAMED_SPLITS:
        return functools.partial(reader, split=_SPLITS[split])
    return functools.partial(reader, train=split == "train")


@contextlib.contextmanager
def _alone(root: str) -> Iterator[None]:
    """Wait while another process of this host downloads into a folder.

    It then finds the files there.
    """
    with contextlib.ExitStack() as stack:
        # A folder that cannot be written, or a file system without locks, is no reason to fail.
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(os.path.join(root, ".download.lock"), "a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(images: np.ndarray, labels: np.ndarray, classes: Tuple[str, ...]) -> str:
    """Return the SHA-256 of images, labels and names of classes."""
    digest = hashlib.sha256(repr((images.shape, classes)).encode())
    digest.update(images.reshape(-1).data)
    digest.update(labels.data)
    return digest.hexdigest()

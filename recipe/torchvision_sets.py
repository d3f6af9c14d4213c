"""Data sets of torchvision that it holds in memory: how large they are, and where their files lie.

Imports no torchvision, so that a recipe is checked and planned without it.
"""

import gzip
import os
import zlib
from typing import Dict, Iterator, Literal, Mapping, NamedTuple, Optional, Sequence, Tuple

from common.errors import DataError
from common.files import user_cache


class ImageSet(NamedTuple):
    """A data set of torchvision, under the name of its class there.

    images: of the splits "train" and "validation" (torchvision calls the second "test"). files: of
    each split, below the folder that torchvision calls root; a folder stands for all that is in it.
    idx: they are MNIST's kind of file, the images first, then the labels. package: of Debian and
    Ubuntu, and the folder that it fills.
    """

    classes: int
    images: Mapping[str, int]
    files: Mapping[str, Tuple[str, ...]]
    idx: bool = False
    package: Optional[Tuple[str, str]] = None


_IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "validation": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_MNIST_IMAGES = {"train": 60_000, "validation": 10_000}


def _one_folder(name: str) -> Dict[str, Tuple[str, ...]]:
    """Return files of a set that has both splits in one folder."""
    return {"train": (name,), "validation": (name,)}


# The names of `SETS`, in the same order.
SetName = Literal["FashionMNIST", "MNIST", "KMNIST", "CIFAR10", "CIFAR100", "SVHN", "STL10", "USPS"]
SETS: Dict[str, ImageSet] = {
    "FashionMNIST": ImageSet(
        10,
        _MNIST_IMAGES,
        _IDX_FILES,
        idx=True,
        package=("dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist"),
    ),
    "MNIST": ImageSet(10, _MNIST_IMAGES, _IDX_FILES, idx=True),
    "KMNIST": ImageSet(10, _MNIST_IMAGES, _IDX_FILES, idx=True),
    "CIFAR10": ImageSet(
        10, {"train": 50_000, "validation": 10_000}, _one_folder("cifar-10-batches-py")
    ),
    "CIFAR100": ImageSet(
        100, {"train": 50_000, "validation": 10_000}, _one_folder("cifar-100-python")
    ),
    "SVHN": ImageSet(
        10,
        {"train": 73_257, "validation": 26_032},
        {"train": ("train_32x32.mat",), "validation": ("test_32x32.mat",)},
    ),
    "STL10": ImageSet(10, {"train": 5_000, "validation": 8_000}, _one_folder("stl10_binary")),
    "USPS": ImageSet(
        10,
        {"train": 7_291, "validation": 2_007},
        {"train": ("usps.bz2",), "validation": ("usps.t.bz2",)},
    ),
}


def download_folder(root: Optional[str]) -> str:
    """Return the folder that a download fills: `root`, else one in the user's cache."""
    return root or str(user_cache() / "datasets")


def find(dataset: str, split: str, root: Optional[str]) -> Tuple[str, ...]:
    """Return the paths of a split's files, in the order of `ImageSet.files`.

    Files of MNIST's kind may be in root/DATASET/raw, where torchvision puts them, in root/raw or in
    root itself, each packed by gzip (NAME.gz) or not.

    Args:
        dataset: one of `SETS`.
        split: "train" or "validation".
        root: a folder; None looks where packages and downloads put files.

    Raises:
        DataError: not all of them are in one of these folders.
    """
    known = SETS[dataset]
    names = known.files[split]
    # Where a package of the system has the files, nothing need be downloaded.
    if root is not None:
        places = [root]
    else:
        places = [download_folder(None)]
        if known.package:
            places.insert(0, known.package[1])
    for place in places:
        for folder in _folders(dataset, place):
            paths = [_existing(os.path.join(folder, name), known.idx) for name in names]
            existing = tuple(path for path in paths if path is not None)
            # All in one folder: images of one download and labels of another would not fit.
            if len(existing) == len(names):
                return existing
    raise DataError(_not_found(dataset, names[0], root, places))


def _not_found(dataset: str, name: str, root: Optional[str], places: Sequence[str]) -> str:
    """Return the line about a data set whose files are missing.

    Args:
        dataset: one of `SETS`.
        name: of the first file.
        root: that the recipe names, or None.
        places: folders that were looked through.
    """
    known = SETS[dataset]
    file = f"{name} (or .gz)" if known.idx else name
    if root is not None:
        remedy = "correct data.root, or set data.download=true"
        return f"{root}: no {file} of {dataset} with all that belongs to it; {remedy}"
    package = f"apt-get install {known.package[0]}, or " if known.package else ""
    remedy = f"{package}set data.download=true, or data.root to their folder"
    return f"data.dataset={dataset}: no {file} in {' or '.join(places)}; {remedy}"


def count_images(dataset: str, split: str, path: str) -> int:
    """Return the number of images of a split.

    Files of MNIST's kind begin with it; those of the other sets are complete, or are refused when
    they are read.

    Args:
        dataset: one of `SETS`.
        split: "train" or "validation".
        path: of the first file that `find` returned.

    Raises:
        DataError: a file cannot be read that far.
    """
    if not SETS[dataset].idx:
        return SETS[dataset].images[split]
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as stream:
            # The kind of file, then the size of its first dimension.
            return int.from_bytes(stream.read(8)[4:], "big")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); get it anew") from None


def _folders(dataset: str, place: str) -> Iterator[str]:
    """Yield the folders in which files may be, the most particular first: MNIST's relatives use the
    same names.
    """
    if SETS[dataset].idx:
        yield os.path.join(place, dataset, "raw")
        yield os.path.join(place, "raw")
    yield place


def _existing(path: str, may_be_packed: bool) -> Optional[str]:
    """Return the path of a file, or that of the packed one, if it exists."""
    if os.path.exists(path):
        return path
    packed = f"{path}.gz"
    return packed if may_be_packed and os.path.exists(packed) else None

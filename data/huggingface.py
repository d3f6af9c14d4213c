"""Map-style data sets of the package datasets: of the Hugging Face hub, or of a local folder of parquet files.

Images stay encoded until they are read, and are decoded as files are. They are numbered as those of class folders would
be: by label, then in the data set's order. Only functions import the package, which may be missing.
"""

import hashlib
from typing import Any, Callable, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from common.errors import DataError, first_line
from common.text import count, listed, printable
from data.base import CLASS_NAMES, SOURCES, ClassNames, Source, UnreadableImage
from data.encoded import EncodedSource, read_image
from recipe.images import HuggingFace

_LABEL = "label"  # the column of labels where not exactly one is of class labels
_VALIDATION = ("validation", "test")  # splits; the first that is there is taken
_NO_BYTES = -1  # the length, in a digest, of an image that is not in the table


class _Table(NamedTuple):
    """A split of a data set.

    place: the data set and the split, as errors name them. images: a datasets.Dataset of encoded images, in one column.
    column: its name. labels: int64 [n]. classes: names by label; None where the labels are numbers without names.
    """

    place: str
    images: Any
    column: str
    labels: np.ndarray
    classes: Optional[Tuple[str, ...]]


class HuggingFaceSource(EncodedSource):
    """Images of a table. `digest` is of labels, class names and lengths of the encoded images, not of their bytes."""

    def __init__(self, table: _Table, classes: Tuple[str, ...]):
        """Args: classes: names by label."""
        self.place = table.place
        self.classes = classes
        self._images = table.images
        self._column = table.column
        self._numbers = np.argsort(table.labels, kind="stable")  # rows of the table
        self.labels = table.labels[self._numbers]
        digest = hashlib.sha256(repr(classes).encode())
        digest.update(table.labels)
        digest.update(_lengths(table))
        self.digest = digest.hexdigest()

    def name(self, index: int) -> str:
        return printable(f"{self.place}/{self._numbers[index]}")

    def encoded(self, index: int) -> bytes:
        found = self._images[int(self._numbers[index])][self._column]
        if isinstance(found, Mapping):  # a file, or where it is
            content, path = found.get("bytes"), found.get("path")
            found = content if content is not None or not path else read_image(path)
        if not isinstance(found, bytes):
            raise UnreadableImage(f"{self.name(index)}: there is no image in this row")
        return found


@SOURCES.implements(HuggingFace)
def _open(data: HuggingFace, classes: int, split: str) -> Source:
    table = _read(data, split)
    return HuggingFaceSource(table, _names(table))


@CLASS_NAMES.implements(HuggingFace)
def _class_names(data: HuggingFace, split: str) -> Optional[ClassNames]:
    if _split(data, split, _loaded(_package(), data)) is None:
        return None
    table = _read(data, split)
    return ClassNames(table.place, _names(table), sorted=False)


def _names(table: _Table) -> Tuple[str, ...]:
    """Names of the classes by label: those of the table, else 0, 1, 2 ... up to its largest label."""
    return table.classes or tuple(map(str, range(int(table.labels.max()) + 1)))


def _read(data: HuggingFace, split: str) -> _Table:
    """Open the "train" or "validation" images. Raises DataError."""
    datasets = _package()
    splits = _loaded(datasets, data)
    name = _split(data, split, splits)
    key = f"data.{split}_split"
    if name is None:
        wanted = data.train_split if split == "train" else data.validation_split or " or ".join(_VALIDATION)
        raise DataError(f"{data.place}: no split {wanted}, but {listed(list(splits))}; choose one by {key}")
    place = f"{data.place}/{name}"
    table = splits[name]
    if not len(table):
        raise DataError(f"{place}: no images; choose another split by {key}")
    image = _column("image", data.image_column, table.features, _holds_images(datasets), place)
    label = _label_column(datasets, data.label_column, table.features, place)

    # Labels are whole numbers of classes; hidden ones of a contest are -1, or are missing.
    names = getattr(table.features[label], "names", None)
    labels = np.empty(0)
    if str(getattr(table.features[label], "dtype", "")).startswith(("int", "uint")):
        labels = np.asarray(table.select_columns([label]).with_format("numpy")[:][label])
    if labels.dtype.kind not in "iu":
        raise DataError(f"{place}: column {label!r} holds no whole numbers; name another by data.label_column")
    if labels.min() < 0 or (names is not None and labels.max() >= len(names)):
        classes = "" if names is None else f", but {count(len(names), 'class', 'classes')}"
        span = f"labels from {labels.min()} to {labels.max()}{classes}"
        raise DataError(f"{place}: {span}; choose a split that has labels by {key}")

    # Encoded: our decoder decides what is decoded, and how.
    images = table.select_columns([image])
    if isinstance(images.features[image], datasets.Image):
        images = images.cast_column(image, datasets.Image(decode=False))
    return _Table(
        place=place,
        images=images,
        column=image,
        labels=labels.astype(np.int64),
        classes=None if names is None else tuple(map(printable, names)),
    )


def _package() -> Any:
    """The package datasets. Raises DataError."""
    try:
        import datasets
    except ImportError:
        fault = "data.source=huggingface: the package datasets is not installed"
        raise DataError(f"{fault}; pip install datasets") from None
    return datasets


def _loaded(datasets: Any, data: HuggingFace) -> Mapping[str, Any]:
    """All splits of the data set, by name. Raises DataError."""
    if data.root is None and data.dataset is None:
        remedy = "name a data set of the hub by data.dataset, or a folder of parquet files by data.root"
        raise DataError(f"data.source=huggingface: no images are named; {remedy}")
    data.located("train")
    try:
        return datasets.load_dataset(data.root or data.dataset, data.subset)
    except Exception as error:  # of the package, of formats of files, of the network: nearly everything
        keys = "data.root" if data.root else "data.dataset or data.subset, or log in where the data set asks for that"
        raise DataError(f"{data.place}: cannot be loaded ({first_line(error)}); correct {keys}") from None


def _split(data: HuggingFace, split: str, splits: Mapping[str, Any]) -> Optional[str]:
    """The data set's own name of the "train" or "validation" split; None where there is none."""
    given = data.train_split if split == "train" else data.validation_split
    wanted = _VALIDATION if given is None else (given,)
    return next((name for name in wanted if name in splits), None)


def _holds_images(datasets: Any) -> Callable[[Any], bool]:
    """Return whether a feature is of images, described as such, or as files of any kind."""

    def holds(feature: Any) -> bool:
        if isinstance(feature, Mapping):
            return "bytes" in feature
        return isinstance(feature, datasets.Image) or getattr(feature, "dtype", None) in ("binary", "large_binary")

    return holds


def _label_column(datasets: Any, given: Optional[str], features: Mapping[str, Any], place: str) -> str:
    """The column of the labels. Raises DataError."""

    def is_class(feature: Any) -> bool:
        return isinstance(feature, datasets.ClassLabel)

    if given is None and sum(map(is_class, features.values())) != 1 and _LABEL in features:
        given = _LABEL
    return _column("label", given, features, is_class, place)


def _column(
    what: str, given: Optional[str], features: Mapping[str, Any], fits: Callable[[Any], bool], place: str
) -> str:
    """The column that is given, else the only one that fits. Raises DataError."""
    if given is not None and given in features:
        return given
    found = [name for name, feature in features.items() if fits(feature)]
    if given is None and len(found) == 1:
        return found[0]
    fault = f"no column {given!r}" if given is not None else f"{count(len(found), 'column')} of {what}s"
    raise DataError(f"{place}: {fault}; name one of {listed(list(features))} by data.{what}_column")


def _lengths(table: _Table) -> np.ndarray:
    """Bytes of each image, int64 [n], in the order of the table; the bytes themselves are not read."""
    import pyarrow
    from pyarrow import compute

    column = table.images.with_format("arrow")[:].column(table.column)
    if pyarrow.types.is_struct(column.type):
        column = compute.struct_field(column, "bytes")
    lengths = compute.fill_null(compute.binary_length(column), _NO_BYTES)
    return np.asarray(lengths).astype(np.int64)

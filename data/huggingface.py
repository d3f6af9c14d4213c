"""Data sets of the package datasets: of the Hugging Face hub, or of a folder of parquet files.

Images stay encoded until they are read, and are decoded as files are. They are numbered as those of
class folders would be: by label, then in the data set's order. Only functions import the package,
which may be missing.
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
# Classes without names that a table may have, or as many as it has images: each is given one.
_MOST_UNNAMED = 2**20
_NO_BYTES = -1  # the length, in a digest, of an image that is not in the table


class _Table(NamedTuple):
    """A split of a data set."""

    place: str  # the data set and the split, as errors name them
    images: Any  # a datasets.Dataset of encoded images, in one column
    column: str  # its name
    labels: np.ndarray  # int64 [n]
    classes: Optional[Tuple[str, ...]]  # names by label; None where labels are numbers without


class HuggingFaceSource(EncodedSource):
    """Images of a table.

    `digest` is of labels, class names and lengths of the encoded images, not of their bytes.
    """

    def __init__(self, table: _Table, classes: Tuple[str, ...]):
        """
        Args:
            table: with encoded images and labels.
            classes: names by label.
        """
        self.place = table.place
        self.classes = classes
        self._images = table.images
        self._column = table.column
        self._numbers = np.argsort(table.labels, kind="stable")  # rows of the table
        self.labels = table.labels[self._numbers]
        # Reading every image to start a run could take hours; lengths change with nearly any image.
        digest = hashlib.sha256(repr(classes).encode())
        digest.update(table.labels.data)
        digest.update(_lengths(table).data)
        self.digest = digest.hexdigest()

    def name(self, index: int) -> str:
        """Return the split and the row of image `index`."""
        return printable(f"{self.place}/{self._numbers[index]}")

    def encoded(self, index: int) -> bytes:
        """Read the file of image number `index`: see `EncodedSource.encoded`."""
        content = self._images[int(self._numbers[index])][self._column]
        if isinstance(content, Mapping):  # a file, or where it is
            path = content.get("path")
            content = content.get("bytes")
            if content is None and path:
                content = read_image(path)
        if not isinstance(content, bytes):
            raise UnreadableImage(f"{self.name(index)}: there is no image in this row")
        return content


@SOURCES.implements(HuggingFace)
def _open(data: HuggingFace, classes: int, split: str) -> Source:
    """Open a split; its images stay encoded until they are read."""
    table = _read(data, split)
    return HuggingFaceSource(table, _names(table))


@CLASS_NAMES.implements(HuggingFace)
def _class_names(data: HuggingFace, split: str) -> Optional[ClassNames]:
    """Return the classes of a split; None where the data set has no such split."""
    if _split(data, split, _load(_package(), data)) is None:
        return None
    table = _read(data, split)
    return ClassNames(table.place, _names(table), sorted=False)


def _names(table: _Table) -> Tuple[str, ...]:
    """Return names of the classes by label: the table's, else 0, 1, 2 ... up to its last label."""
    return table.classes or tuple(map(str, range(int(table.labels.max()) + 1)))


def _read(data: HuggingFace, split: str) -> _Table:
    """Open the "train" or "validation" images. Raises DataError."""
    datasets = _package()
    key = f"data.{split}_split"
    name, table = _table_of(data, split, _load(datasets, data), key)
    place = f"{data.place}/{name}"
    # Its columns. A feature describes the values of one.
    features = table.features
    image = _column("image", data.image_column, features, _holds_images(datasets), place)
    label = _label_column(datasets, data.label_column, features, place)
    labels = _labels(table, label, place)
    class_names = getattr(features[label], "names", None)
    _check_labels(labels, class_names, place, key)
    if class_names is None:
        _check_numbers(labels, label, place)
    # Encoded: our decoder decides what is decoded, and how.
    images = table.select_columns([image])
    if isinstance(features[image], datasets.Image):
        images = images.cast_column(image, datasets.Image(decode=False))
    classes = None
    if class_names is not None:
        classes = tuple(map(printable, class_names))
    return _Table(
        place=place,
        images=images,
        column=image,
        labels=labels.astype(np.int64),
        classes=classes,
    )


def _table_of(
    data: HuggingFace,
    split: str,
    splits: Mapping[str, Any],
    key: str,
) -> Tuple[str, Any]:
    """Return the data set's own name of a split, and its table, which is not empty.

    Args:
        data: the section of the recipe.
        split: "train" or "validation".
        splits: of the data set, by name.
        key: of the recipe, by which a split is chosen.

    Raises:
        DataError: there is no such split, or nothing is in it.
    """
    name = _split(data, split, splits)
    if name is None:
        wanted = " or ".join(_wanted_splits(data, split))
        fault = f"no split {wanted}, but {listed(list(splits))}"
        raise DataError(f"{data.place}: {fault}; choose one by {key}")
    if not len(splits[name]):
        raise DataError(f"{data.place}/{name}: no images; choose another split by {key}")
    return name, splits[name]


def _labels(table: Any, column: str, place: str) -> np.ndarray:
    """Return the labels of a table: integers [n]. Raises DataError."""
    # Only numbers are read: a column of texts or images may be as large as the data set.
    labels = np.empty(0)
    dtype = str(getattr(table.features[column], "dtype", ""))
    if dtype.startswith(("int", "uint")):
        labels = np.asarray(table.select_columns([column]).with_format("numpy")[:][column])
    if labels.dtype.kind not in "iu":  # NumPy has floats where some are missing
        fault = f"column {column!r} holds no whole numbers"
        raise DataError(f"{place}: {fault}; name another by data.label_column")
    return labels


def _check_labels(
    labels: np.ndarray,
    names: Optional[Tuple[str, ...]],
    place: str,
    key: str,
) -> None:
    """Raise DataError for labels that are no classes: hidden ones of a contest are -1.

    Args:
        labels: integers [n].
        names: of the classes; None where they have none.
        place: what errors call the split.
        key: of the recipe, by which another split is chosen.
    """
    if labels.min() >= 0 and (names is None or labels.max() < len(names)):
        return
    fault = f"labels from {labels.min()} to {labels.max()}"
    if names is not None:
        fault += f", but {count(len(names), 'class', 'classes')}"
    raise DataError(f"{place}: {fault}; choose a split that has labels by {key}")


def _check_numbers(labels: np.ndarray, column: str, place: str) -> None:
    """Raise DataError for labels without names that number something else than classes.

    Args:
        labels: integers [n] from 0.
        column: that they are from.
        place: what errors call the split.
    """
    largest = int(labels.max())
    if largest >= max(_MOST_UNNAMED, len(labels)):
        fault = f"column {column!r} has a label {largest:,} among {count(len(labels), 'image')}"
        raise DataError(f"{place}: {fault}; name one that numbers classes by data.label_column")


def _package() -> Any:
    """Return the package datasets. Raises DataError."""
    try:
        import datasets
    except ImportError:
        fault = "data.source=huggingface: the package datasets is not installed"
        raise DataError(f"{fault}; pip install datasets") from None
    return datasets


def _load(datasets: Any, data: HuggingFace) -> Mapping[str, Any]:
    """Return all splits of the data set, by name. Raises DataError."""
    if data.root is None and data.dataset is None:
        raise DataError(
            "data.source=huggingface: no images are named; name a data set of the hub by "
            "data.dataset, or a folder of parquet files by data.root"
        )
    data.located("train")  # raises an error that names the key; the package's would not
    try:
        return datasets.load_dataset(data.root or data.dataset, data.subset)
    except Exception as error:  # of package, formats of files, network: nearly everything
        fault = f"{data.place}: cannot be loaded ({first_line(error)})"
        remedy = "correct data.dataset or data.subset, or log in where the data set asks for that"
        if data.root:
            remedy = "correct data.root"
        raise DataError(f"{fault}; {remedy}") from None


def _split(data: HuggingFace, split: str, splits: Mapping[str, Any]) -> Optional[str]:
    """Return the data set's own name of the "train" or "validation" split, if it has one."""
    return next((name for name in _wanted_splits(data, split) if name in splits), None)


def _wanted_splits(data: HuggingFace, split: str) -> Tuple[str, ...]:
    """Return the names under which the "train" or "validation" split is looked for."""
    named = data.train_split if split == "train" else data.validation_split
    return _VALIDATION if named is None else (named,)


def _holds_images(datasets: Any) -> Callable[[Any], bool]:
    """Return whether a feature is of images, described as such, or as files of any kind."""

    def holds(feature: Any) -> bool:
        """Look at a `feature`."""
        if isinstance(feature, Mapping):
            return "bytes" in feature
        if isinstance(feature, datasets.Image):
            return True
        return getattr(feature, "dtype", None) in ("binary", "large_binary")

    return holds


def _label_column(
    datasets: Any,
    named: Optional[str],
    features: Mapping[str, Any],
    place: str,
) -> str:
    """Return the column of the labels. Raises DataError."""

    def is_class(feature: Any) -> bool:
        """Return whether a `feature` is of class labels."""
        return isinstance(feature, datasets.ClassLabel)

    # Coarse and fine labels are both of classes; parquet files of others often have plain integers.
    fitting = sum(map(is_class, features.values()))
    if named is None and fitting != 1 and _LABEL in features:
        named = _LABEL
    return _column("label", named, features, is_class, place)


def _column(
    content: str,
    named: Optional[str],
    features: Mapping[str, Any],
    fits: Callable[[Any], bool],
    place: str,
) -> str:
    """Return the column that is named, else the only one that fits.

    Args:
        content: "image" or "label".
        named: by the recipe, or None.
        features: of all columns.
        fits: returns whether a column with this feature may be meant.
        place: what errors call the split.

    Raises:
        DataError: there is no such column, or the recipe must choose one.
    """
    if named is not None:
        if named in features:
            return named
        fault = f"no column {named!r}"
    else:
        fitting = [name for name, feature in features.items() if fits(feature)]
        if len(fitting) == 1:
            return fitting[0]
        fault = f"{count(len(fitting), 'column')} of {content}s"
    remedy = f"name one of {listed(list(features))} by data.{content}_column"
    raise DataError(f"{place}: {fault}; {remedy}")


def _lengths(table: _Table) -> np.ndarray:
    """Return the bytes of each image in the table's order: int64 [n].

    The images themselves are not read.
    """
    import pyarrow
    from pyarrow import compute

    # By Arrow, which knows lengths without copying a byte of the images.
    column = table.images.with_format("arrow")[:].column(table.column)
    if pyarrow.types.is_struct(column.type):
        column = compute.struct_field(column, "bytes")
    lengths = compute.fill_null(compute.binary_length(column), _NO_BYTES)
    return np.asarray(lengths).astype(np.int64)

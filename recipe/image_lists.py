"""CSV files that list images with their labels; imports no torch, so that plans read them, too."""

from __future__ import annotations

import csv
import io
import os
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

from common.errors import DataError
from common.files import read_regular
from common.text import count, listed, printable
from recipe.class_folders import is_image

_MOST_BYTES = 2**31
_COLUMNS = ("path", "label")


class Row(NamedTuple):
    """An image of a list.

    path: as the list has it. label: name of its class. line: of the file, from 1.
    """

    path: str
    label: str
    line: int


def read(file: str, folder: str = "") -> List[Row]:
    """Read a list of images.

    A row is a path and a label. If the first row has the words `path` and `label` it names the
    columns, which may then stand in any order among others. All rows have as many fields as the
    first. Bytes that are no UTF-8 are kept as `os.fsdecode` keeps them.

    Args:
        file: path of the CSV file.
        folder: to which paths in it are relative.

    Returns:
        The images in the order of class and path as bytes, as class folders of them are numbered.

    Raises:
        DataError: the file cannot be read, or a row is none of a path and a label, has more or
            fewer fields than the first, names no JPEG or PNG file, or gives an image another label
            than a row before.
    """
    labels: Dict[str, Row] = {}
    rows = []
    for row in _rows(file):
        # Of one image, however its path is written: train/a.png, ./train/a.png, /photos/train/a.png.
        image = os.path.normpath(os.path.join(folder, row.path))
        first = labels.setdefault(image, row)
        if first.label != row.label:
            again = "" if first.path == row.path else f" as {first.path}"
            fault = f"{row.path} is {row.label}, but {first.label} on line {first.line}{again}"
            raise DataError(printable(f"{file}: line {row.line}: {fault}; correct one of them"))
        rows.append(row)
    if not rows:
        raise DataError(f"{file}: lists no images; give each a line: path,label")
    return sorted(rows, key=lambda row: (os.fsencode(row.label), os.fsencode(row.path)))


def by_class(rows: Sequence[Row]) -> Dict[str, List[Row]]:
    """Return the rows of each class, in the order of `rows`."""
    classes: Dict[str, List[Row]] = {}
    for row in rows:
        classes.setdefault(row.label, []).append(row)
    return classes


def _rows(file: str) -> Iterator[Row]:
    """Yield the rows of a file as they stand there. Raises DataError."""
    places: Tuple[int, ...] = ()
    of_first = 0
    for line, fields in _lines(file):
        if not places:
            of_first = len(fields)
            named = [field.lower() for field in fields]
            if set(_COLUMNS).issubset(named):
                places = tuple(named.index(column) for column in _COLUMNS)
                continue
            places = (0, 1)
            _check_two(file, line, fields)
        if len(fields) != of_first:
            raise DataError(f"{file}: line {line}: {_other_count(len(fields), of_first)}")
        path, label = (fields[place] for place in places)
        _check(file, line, path, label)
        yield Row(path, label, line)


def _lines(file: str) -> Iterator[Tuple[int, List[str]]]:
    """Yield the number and the fields of each line that is not empty. Raises DataError."""
    try:
        content = read_regular(file, _MOST_BYTES)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; correct the name of the list") from None
    # Spreadsheets write a mark of the byte order in front.
    text = content.decode("utf-8-sig", errors="surrogateescape")
    reader = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        for fields in reader:
            stripped = [field.strip() for field in fields]
            if any(stripped):
                yield reader.line_num, stripped
    except csv.Error as error:
        raise DataError(f"{file}: line {reader.line_num}: {error}; correct the line") from None


def _check_two(file: str, line: int, fields: Sequence[str]) -> None:
    """Raise DataError for a first row that neither names the columns nor has two fields."""
    if len(fields) != len(_COLUMNS):
        fault = f"line {line}: neither the columns path and label nor a path and a label"
        raise DataError(printable(f"{file}: {fault}, but {listed(fields)}; name the columns"))


def _other_count(fields: int, of_first: int) -> str:
    """Return the fault of a row that has not as many fields as the first, and the remedy."""
    fault = f"{count(fields, 'field')}, where the first line has {of_first}"
    # What follows the comma would be dropped, and classes that begin alike become one.
    remedy = "put quotes around a label that has a comma"
    if fields < of_first:
        remedy = "correct the line"
    return f"{fault}; {remedy}"


def _check(file: str, line: int, path: str, label: str) -> None:
    """Raise DataError for a row without a label, or whose path is of no image that is read."""
    # No file has it in its name. Lists in UTF-16 are full of it.
    if "\0" in path:
        fault = f"line {line}: the character NUL in a path"
        raise DataError(f"{file}: {fault}; remove it, or save the list as UTF-8")
    if not label:
        raise DataError(printable(f"{file}: line {line}: {path} has no label; give it one"))
    if not is_image(os.fsencode(path)):
        fault = f"{path!r} is no .jpg, .jpeg or .png file"
        remedy = "correct the path, or name the columns path and label in the first line"
        raise DataError(printable(f"{file}: line {line}: {fault}; {remedy}"))

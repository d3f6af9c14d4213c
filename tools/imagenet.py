"""ImageNet's archives as sources: read by offset, never unpacked.

ILSVRC2012_img_train.tar holds a tar for each class, nXXXXXXXX.tar; ILSVRC2012_img_val.tar holds the images alone, and a
list gives their classes in the order of their names.
"""

from __future__ import annotations

import os
import re
import struct
import tarfile
import zlib
from collections import Counter
from typing import Any, BinaryIO, Iterator

import numpy as np

from data.base import Names, UnreadableImage
from data.encoded import EncodedSource
from data.local import LocalFolder, Range
from recipe.errors import DataError, first_line, printable
from tools.shard_tar import EXTENSIONS, members, open_archive, split

_CLASSES = 1000
_MAX_BYTES = 16 << 20  # of meta.mat, packed and unpacked: many times ImageNet's
_WNID = re.compile(r"n\d{8}")
# Of files of MATLAB 5: kinds of elements, classes of matrices, types of numbers and of texts.
_MATRIX, _COMPRESSED = 14, 15  # kinds of an element
_STRUCT, _CHAR, _NUMBERS = 2, 4, range(6, 16)  # classes of a matrix
_DTYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_TEXTS = {1: "ascii", 2: "ascii", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le"}


class ArchiveSource(EncodedSource):
    """Images in one tar file, each known by its offset."""

    def __init__(self, path: str, classes: tuple[str, ...], images: list[tuple[str, int, int]], labels: list[int]):
        """Args: images: name, offset and bytes of each. Raises DataError: there are none."""
        if not images:
            raise DataError(f"{path}: no images in this archive; give the right file")
        folder, self._file = os.path.split(path)
        self._folder = LocalFolder(folder)
        self.classes = classes
        self.labels = np.array(labels, np.int64)
        encoded = [os.fsencode(name) for name, _, _ in images]
        self._names = Names([b"".join(encoded)], [np.array([len(name) for name in encoded])])
        self._places = np.array([place for _, *place in images], np.int64)

    def name(self, index: int) -> str:
        return printable(f"{self._folder.path(self._file)}/{os.fsdecode(self._names[index])}")

    def encoded(self, index: int) -> bytes:
        (answer,) = self._folder.ranges([Range(self._file, *self._places[index].tolist())])
        if isinstance(answer, str):
            raise UnreadableImage(f"{self.name(index)}: {answer}")
        return answer


def training(path: str) -> ArchiveSource:
    """The training images of a tar of tars, ordered by the WordNet number of their class and by name.

    Raises:
        DataError: the archive is damaged, or not of this kind.
        OSError: it cannot be read.
    """
    found = []
    with open(path, "rb") as stream, open_archive(stream, path) as archive:
        for member in members(archive, path):
            wnid, extension = split(member.name)
            if extension != "tar" or not _WNID.fullmatch(wnid):
                raise DataError(f"{path}: {member.name!r} is no class's n01234567.tar; give the right file")
            images = _images(archive.extractfile(member), f"{path}/{member.name}")
            found += [(f"{wnid}/{name}", member.offset_data + at, length) for name, at, length in images]
    found.sort()
    _refuse_twice(path, [name for name, _, _ in found])
    wnids = [name.partition("/")[0] for name, _, _ in found]
    return _source(path, found, wnids, set(wnids))


def validation(path: str, ground_truth: str, devkit: str | None) -> ArchiveSource:
    """The validation images, and their classes from a list in the order of their names.

    Args:
        ground_truth: file with a line for each image: its WordNet number, or its number in the devkit.
        devkit: ILSVRC2012_devkit_t12.tar.gz, which maps its numbers to WordNet numbers.

    Raises:
        DataError: a file is damaged or does not fit the others.
        OSError: a file cannot be read.
    """
    try:
        with open(ground_truth, encoding="ascii") as file:
            lines = [line.strip() for line in file if line.strip()]
    except UnicodeDecodeError:
        raise DataError(f"{ground_truth}: no text; it must hold a line for each image") from None
    with open(path, "rb") as stream:
        images = _images(stream, path)
    if len(images) != len(lines):
        raise DataError(f"{ground_truth}: {len(lines)} lines, but {path} has {len(images)} images; give its list")
    if all(_WNID.fullmatch(line) for line in lines):
        return _source(path, images, lines, set(lines))
    for number, line in enumerate(lines, start=1):
        if not re.fullmatch(r"[0-9]{1,9}", line):
            kinds = "all lines must be WordNet numbers, such as n01440764, or all numbers of the devkit"
            raise DataError(f"{ground_truth}:{number}: {line!r} is neither; {kinds}")
    if devkit is None:
        raise DataError(f"{ground_truth}: numbers of the devkit; add --devkit ILSVRC2012_devkit_t12.tar.gz")
    meaning = _devkit(devkit)
    for number, line in enumerate(lines, start=1):
        if int(line) not in meaning:
            raise DataError(f"{ground_truth}:{number}: {devkit} has no class {line}; give the devkit of this list")
    return _source(path, images, [meaning[int(line)] for line in lines], set(meaning.values()))


def _source(path: str, images: list[tuple[str, int, int]], wnids: list[str], known: set[str]) -> ArchiveSource:
    """Args: wnids: of each image. known: of all classes."""
    classes = tuple(sorted(known))
    label = {wnid: number for number, wnid in enumerate(classes)}
    return ArchiveSource(path, classes, images, [label[wnid] for wnid in wnids])


def _devkit(path: str) -> dict[int, str]:
    """WordNet number of each class's number; without the groups of classes, which have larger numbers."""
    try:
        with tarfile.open(path) as archive:
            files = (member for member in archive if member.name.split("/")[-2:] == ["data", "meta.mat"])
            member = next(files, None)
            if member is None or not member.isreg() or member.size > _MAX_BYTES:
                raise DataError(f"{path}: no data/meta.mat in it; give ILSVRC2012_devkit_t12.tar.gz")
            content = archive.extractfile(member).read()
        numbered = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in _structs(content, "synsets")}
    except Exception as error:
        if isinstance(error, DataError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise DataError(f"{path}: damaged or no archive ({first_line(error)}); copy it again") from None
    meaning = {number: wnid for number, wnid in numbered.items() if number <= _CLASSES}
    if not all(_WNID.fullmatch(wnid) for wnid in meaning.values()):
        raise DataError(f"{path}: data/meta.mat is not ImageNet's; give ILSVRC2012_devkit_t12.tar.gz")
    return meaning


def _structs(content: bytes, name: str) -> list[dict[str, Any]]:
    """The array of structs of that name in a file of MATLAB 5: texts, numbers and lists of numbers; None for others.

    Damaged files raise nearly everything; they end scipy's reader (1.17) by SIGSEGV, or make it hang.
    """
    if content[126:128] != b"IM":
        raise ValueError("no file of MATLAB 5, or of a big-endian machine")
    left = _MAX_BYTES
    for kind, data in _elements(content[128:]):
        if kind == _COMPRESSED:
            data = zlib.decompressobj().decompress(data, left + 1)
            left -= len(data)
            if left < 0:
                raise ValueError(f"more than {_MAX_BYTES >> 20} MB when unpacked")
            ((kind, data),) = _elements(data)
        found, value = _matrix(data) if kind == _MATRIX else ("", None)
        if found == name:
            return [dict(row) for row in value]
    raise ValueError(f"no {name} in it")


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and data of each element. Raises ValueError where one ends beyond the content."""
    at = 0
    while at < len(content):
        kind, size = struct.unpack_from("<II", content, at)
        at += 8
        if kind >> 16:  # a small one: its data lie within the tag
            kind, size, at = kind & 0xFFFF, kind >> 16, at - 4
            end = at + 4
        else:
            end = at + size + (0 if kind == _COMPRESSED else -size % 8)
        if at + size > len(content):
            raise ValueError("it ends too early")
        yield kind, content[at : at + size]
        at = end


def _matrix(content: bytes) -> tuple[str, Any]:
    """Name and value of a matrix."""
    if not content:
        return "", None  # an empty one has not even flags
    (_, flags), _, (_, name), *rest = _elements(content)
    kind, value = flags[0], None
    if kind == _STRUCT:
        (_, length), (_, names), *rest = rest
        step = int.from_bytes(length, "little") or 1
        fields = [names[at : at + step].split(b"\0")[0].decode("ascii") for at in range(0, len(names), step)]
        values = [_matrix(data)[1] for _, data in rest]
        value = [dict(zip(fields, values[at : at + len(fields)])) for at in range(0, len(values), len(fields) or 1)]
    elif kind == _CHAR and rest:
        value = rest[0][1].decode(_TEXTS[rest[0][0]])
    elif kind in _NUMBERS and rest:
        numbers = np.frombuffer(rest[0][1], _DTYPES[rest[0][0]]).tolist()
        value = numbers[0] if len(numbers) == 1 else numbers
    return name.decode("ascii"), value


def _images(stream: BinaryIO, place: str) -> list[tuple[str, int, int]]:
    """Name, offset and bytes of each image in an archive, by name."""
    with open_archive(stream, place) as archive:
        files = [(member.name, member.offset_data, member.size) for member in members(archive, place)]
    found = sorted(file for file in files if split(file[0])[1] in EXTENSIONS)
    _refuse_twice(place, [name for name, _, _ in found])
    return found


def _refuse_twice(place: str, names: list[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(f"{place}: {name!r} is in it twice; copy the archive again")

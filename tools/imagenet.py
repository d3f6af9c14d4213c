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
from typing import BinaryIO, Iterator

import numpy as np

from data.base import Names, UnreadableImage
from data.encoded import EncodedSource
from data.local import LocalFolder, Range
from recipe.errors import DataError, first_line, printable
from tools.indexing import EXTENSIONS, LeftOut, kind_left_out, members, split

_CLASSES = 1000
_MAX_BYTES = 16 << 20  # of meta.mat, packed and unpacked: many times ImageNet's
_WNID = re.compile(r"n\d{8}")
# Of files of MATLAB 5: a kind of element, and types of numbers.
_COMPRESSED = 15
_DTYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}


class ArchiveSource(EncodedSource):
    """Images in one tar file, each known by its offset."""

    def __init__(
        self, path: str, images: list[tuple[str, int, int]], wnids: list[str], known: set[str], left_out: LeftOut
    ):
        """
        Args:
            path: the archive.
            images: name, offset and bytes of each.
            wnids: the class of each.
            known: all classes.
            left_out: members that are no images.

        Raises:
            DataError: there are no images.
        """
        if not images:
            raise DataError(f"{path}: no images in this archive; give the right file")
        self.notes = tuple(left_out.lines(path))
        folder, self._file = os.path.split(path)
        self._folder = LocalFolder(folder)
        self.classes = tuple(sorted(known))
        label = {wnid: number for number, wnid in enumerate(self.classes)}
        self.labels = np.array([label[wnid] for wnid in wnids], np.int64)
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

    Raises DataError: the archive is damaged, or not of this kind. Raises OSError.
    """
    found = []
    left_out = LeftOut()
    with open(path, "rb") as stream:
        for archive, member in members(stream, path, left_out=left_out):
            wnid, _, extension = member.name.partition(".")
            if extension != "tar" or not _WNID.fullmatch(wnid):
                raise DataError(f"{path}: {member.name!r} is no class's n01234567.tar; give the right file")
            images = _images(archive.extractfile(member), f"{path}/{member.name}", left_out)
            found += [(f"{wnid}/{name}", member.offset_data + at, length) for name, at, length in images]
    found.sort()
    wnids = [name.partition("/")[0] for name, _, _ in found]
    return ArchiveSource(path, found, wnids, known=set(wnids), left_out=left_out)


def validation(path: str, ground_truth: str, devkit: str | None) -> ArchiveSource:
    """The validation images, and their classes from a list in the order of their names.

    Args:
        ground_truth: file with a line for each image: its WordNet number, or its number in the devkit.
        devkit: ILSVRC2012_devkit_t12.tar.gz, which maps its numbers to WordNet numbers.

    Raises DataError: a file is damaged or does not fit the others. Raises OSError.
    """
    with open(ground_truth, encoding="ascii", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    left_out = LeftOut()
    with open(path, "rb") as stream:
        images = _images(stream, path, left_out)
    if len(images) != len(lines):
        raise DataError(f"{ground_truth}: {len(lines)} lines, but {path} has {len(images)} images; give its list")
    if all(_WNID.fullmatch(line) for line in lines):
        return ArchiveSource(path, images, lines, known=set(lines), left_out=left_out)
    if devkit is None:
        raise DataError(f"{ground_truth}: numbers of the devkit; add --devkit ILSVRC2012_devkit_t12.tar.gz")
    meaning = _devkit(devkit)
    for number, line in enumerate(lines, start=1):
        if line not in meaning:
            kinds = "all lines must be WordNet numbers, such as n01440764, or all numbers of this devkit"
            raise DataError(f"{ground_truth}:{number}: {devkit} has no class {line!r}; {kinds}")
    wnids = [meaning[line] for line in lines]
    return ArchiveSource(path, images, wnids, known=set(meaning.values()), left_out=left_out)


def _devkit(path: str) -> dict[str, str]:
    """WordNet number of each class's number; without the groups of classes, which have larger numbers."""
    try:
        with tarfile.open(path) as archive:
            files = (member for member in archive if member.name.split("/")[-2:] == ["data", "meta.mat"])
            member = next(files, None)
            if member is None or not member.isreg() or member.size > _MAX_BYTES:
                raise DataError(f"{path}: no data/meta.mat in it; give ILSVRC2012_devkit_t12.tar.gz")
            numbered = _numbered(archive.extractfile(member).read())
    except Exception as error:
        if isinstance(error, DataError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise DataError(f"{path}: damaged or no archive ({first_line(error)}); copy it again") from None
    meaning = {str(number): wnid for number, wnid in numbered.items() if number <= _CLASSES}
    if not all(_WNID.fullmatch(wnid) for wnid in meaning.values()):
        raise DataError(f"{path}: data/meta.mat is not ImageNet's; give ILSVRC2012_devkit_t12.tar.gz")
    return meaning


def _numbered(content: bytes) -> dict[int, str]:
    """WordNet numbers by ILSVRC2012_ID: two fields of the structs `synsets` in a file of MATLAB 5.

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
            ((_, data),) = _elements(data)
        _flags, _shape, (_, name), *rest = _elements(data)
        if name == b"synsets":
            (_, width), (_, names), *values = rest
            step = int.from_bytes(width, "little")
            fields = [names[at : at + step].split(b"\0")[0] for at in range(0, len(names), step)]
            numbers, wnids = (values[fields.index(field) :: len(fields)] for field in (b"ILSVRC2012_ID", b"WNID"))
            found = {}
            for (_, number), (_, wnid) in zip(numbers, wnids):
                kind, value = _data(number)
                text = _data(wnid)[1].replace(b"\0", b"")  # of one byte or two a character
                found[int(np.frombuffer(value, _DTYPES[kind]).item())] = text.decode("ascii")
            return found
    raise ValueError("no synsets in it")


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


def _data(matrix: bytes) -> tuple[int, bytes]:
    """Kind and data of a matrix's numbers or text."""
    _flags, _shape, _name, found = _elements(matrix)
    return found


def _images(stream: BinaryIO, place: str, left_out: LeftOut) -> list[tuple[str, int, int]]:
    """Name, offset and bytes of each image in an archive, by name. Args: left_out: counts the other members."""
    found = []
    for _, member in members(stream, place, left_out=left_out):
        part = split(member.name)
        if part is not None and part.kind in EXTENSIONS:
            found.append((member.name, member.offset_data, member.size))
        else:
            left_out.add(kind_left_out(member.name), f"{place}/{member.name}")
    return sorted(found)

"""ImageNet's archives as sources: read by offset, never unpacked.

ILSVRC2012_img_train.tar holds a tar for each class, nXXXXXXXX.tar. ILSVRC2012_img_val.tar holds the
images alone, and a list gives their classes in the order of their names.
"""

from __future__ import annotations

import os
import re
import struct
import tarfile
import zlib
from typing import IO, Iterator, NamedTuple, Sequence

import numpy as np

from common.errors import DataError, first_line
from common.text import printable
from data.base import Names, UnreadableImage
from data.encoded import EncodedSource
from data.local import LocalFolder, Range
from tools.indexing import EXTENSIONS, LeftOut, content_of, kind_left_out, members, split

_CLASSES = 1000
_MAX_BYTES = 16 << 20  # of meta.mat, packed and unpacked: many times ImageNet's
_WNID = re.compile(r"n\d{8}")
# Kinds of elements of a file of MATLAB 5: one that is compressed, and the types of numbers.
_COMPRESSED = 15
_DTYPES = {
    1: "i1",
    2: "u1",
    3: "<i2",
    4: "<u2",
    5: "<i4",
    6: "<u4",
    7: "<f4",
    9: "<f8",
    12: "<i8",
    13: "<u8",
}


class StoredImage(NamedTuple):
    """An image in an archive.

    name: of the member, behind its class where that is an archive of its own.
    offset: of its first byte in the file.
    length: bytes.
    """

    name: str
    offset: int
    length: int


class ArchiveSource(EncodedSource):
    """Images in one tar file, each known by its offset."""

    def __init__(
        self,
        path: str,
        images: Sequence[StoredImage],
        wnids: Sequence[str],
        known: set[str],
        left_out: LeftOut,
    ):
        """
        Args:
            path: the archive.
            images: in the order in which they are numbered.
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
        numbers = {wnid: number for number, wnid in enumerate(self.classes)}
        self.labels = np.array([numbers[wnid] for wnid in wnids], np.int64)
        # One array of bytes: a million strings would take many times the memory.
        names = [os.fsencode(image.name) for image in images]
        lengths = np.array([len(name) for name in names])
        self._names = Names([b"".join(names)], [lengths])
        # Offset and length, [images, 2].
        places = [(image.offset, image.length) for image in images]
        self._places = np.array(places, np.int64)

    def name(self, index: int) -> str:
        """Return the path of the archive and the name of the image at `index` in it."""
        member = os.fsdecode(self._names[index])
        return printable(f"{self._folder.path(self._file)}/{member}")

    def encoded(self, index: int) -> bytes:
        """Return the bytes of the image at `index`. Raises UnreadableImage."""
        offset, length = self._places[index].tolist()
        (answer,) = self._folder.ranges([Range(self._file, offset, length)])
        if isinstance(answer, str):
            raise UnreadableImage(f"{self.name(index)}: {answer}")
        return answer


def training(path: str) -> ArchiveSource:
    """Return the training images, ordered by the WordNet number of their class and by name.

    Args:
        path: of a tar of tars.

    Raises:
        DataError: the archive is damaged, or not of this kind.
        OSError: it cannot be opened.
    """
    images = []
    left_out = LeftOut()
    with open(path, "rb") as stream:
        for archive, member in members(stream, path, left_out=left_out):
            # A file that is something else shows that the archive is.
            wnid, _, extension = member.name.partition(".")
            if extension != "tar" or not _WNID.fullmatch(wnid):
                fault = f"{path}: {member.name!r} is no class's n01234567.tar"
                raise DataError(f"{fault}; give the right file")
            inner = content_of(archive, member)
            place = f"{path}/{member.name}"
            for image in _images(inner, place, left_out):
                # Offsets in the inner archive count from its own first byte.
                offset = member.offset_data + image.offset
                images.append(StoredImage(f"{wnid}/{image.name}", offset, image.length))
    # By class, with which a name begins, and by name.
    images.sort()
    wnids = [image.name.partition("/")[0] for image in images]
    return ArchiveSource(path, images, wnids, known=set(wnids), left_out=left_out)


def validation(path: str, ground_truth: str, devkit: str | None) -> ArchiveSource:
    """Return the validation images, with classes from a list in the order of their names.

    Args:
        path: of the archive.
        ground_truth: file with a line for each image: its WordNet number, or its number in the
            devkit.
        devkit: ILSVRC2012_devkit_t12.tar.gz, which maps its numbers to WordNet numbers.

    Raises:
        DataError: a file is damaged or does not fit the others.
        OSError: a file cannot be opened.
    """
    with open(ground_truth, encoding="ascii", errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    left_out = LeftOut()
    with open(path, "rb") as stream:
        images = _images(stream, path, left_out)
    if len(images) != len(lines):
        fault = f"{ground_truth}: {len(lines)} lines, but {path} has {len(images)} images"
        raise DataError(f"{fault}; give its list")
    # Either all lines are WordNet numbers, or all are numbers of the devkit.
    wnids = lines
    known = set(lines)
    if not all(_WNID.fullmatch(line) for line in lines):
        meaning = _meaning(ground_truth, lines, devkit)
        wnids = [meaning[line] for line in lines]
        # All classes of the devkit, though the list may lack some.
        known = set(meaning.values())
    return ArchiveSource(path, images, wnids, known=known, left_out=left_out)


def _meaning(ground_truth: str, lines: Sequence[str], devkit: str | None) -> dict[str, str]:
    """Return the WordNet number of each line of a list, and of other numbers of its devkit.

    Args:
        ground_truth: file with the list.
        lines: of that file.
        devkit: archive that has the numbers.

    Raises:
        DataError: there is no devkit, or it lacks a line.
    """
    if devkit is None:
        raise DataError(
            f"{ground_truth}: numbers of the devkit; add --devkit ILSVRC2012_devkit_t12.tar.gz"
        )
    meaning = _devkit(devkit)
    for number, line in enumerate(lines, start=1):
        if line not in meaning:
            raise DataError(
                f"{ground_truth}:{number}: {devkit} has no class {line!r}; all lines must be "
                "WordNet numbers, such as n01440764, or all numbers of this devkit"
            )
    return meaning


def _images(stream: IO[bytes], place: str, left_out: LeftOut) -> list[StoredImage]:
    """Return the images of an archive, by name.

    Args:
        stream: the archive.
        place: its name in errors.
        left_out: counts the other members.
    """
    images = []
    for _, member in members(stream, place, left_out=left_out):
        part = split(member.name)
        if part is not None and part.kind in EXTENSIONS:
            # Only places are kept: the bytes are read when an image is decoded.
            images.append(StoredImage(member.name, member.offset_data, member.size))
        else:
            left_out.add(kind_left_out(member.name), f"{place}/{member.name}")
    return sorted(images)


def _devkit(path: str) -> dict[str, str]:
    """Return the WordNet number of each class by its number in a devkit. Raises DataError.

    Groups of classes, which have larger numbers, are left out.
    """
    try:
        with tarfile.open(path) as archive:
            content = _meta_mat(archive, path)
        numbered = _numbered(content)
    except Exception as error:
        # Faults of the system have a number; nearly anything else may come of a damaged file.
        is_of_system = isinstance(error, OSError) and error.errno is not None
        if isinstance(error, DataError) or is_of_system:
            raise
        fault = f"{path}: damaged or no archive ({first_line(error)})"
        raise DataError(f"{fault}; copy it again") from None
    meaning = {str(number): wnid for number, wnid in numbered.items() if number <= _CLASSES}
    if not all(_WNID.fullmatch(wnid) for wnid in meaning.values()):
        fault = f"{path}: data/meta.mat is not ImageNet's"
        raise DataError(f"{fault}; give ILSVRC2012_devkit_t12.tar.gz")
    return meaning


def _meta_mat(archive: tarfile.TarFile, path: str) -> bytes:
    """Return the content of data/meta.mat in a devkit. Raises DataError where there is none."""
    for member in archive:
        if member.name.split("/")[-2:] == ["data", "meta.mat"]:
            # Whatever a damaged header says, no more than that is read into memory.
            if member.isreg() and member.size <= _MAX_BYTES:
                return content_of(archive, member).read()
            break
    raise DataError(f"{path}: no data/meta.mat in it; give ILSVRC2012_devkit_t12.tar.gz")


# A file of MATLAB 5 is a header of 128 bytes and elements, which may hold others. Source: MAT-File
# Format, The MathWorks.


def _numbered(content: bytes) -> dict[int, str]:
    """Return WordNet numbers by ILSVRC2012_ID: two fields of the structs `synsets`.

    Damaged files raise nearly everything; they end scipy's reader (1.17) by SIGSEGV, or make it
    hang.
    """
    if content[126:128] != b"IM":
        raise ValueError("no file of MATLAB 5, or of a big-endian machine")
    left = _MAX_BYTES
    for kind, data in _elements(content[128:]):
        if kind == _COMPRESSED:
            # No more than is left, plus one byte to notice it: a small file may swell to gigabytes.
            data = zlib.decompressobj().decompress(data, left + 1)
            left -= len(data)
            if left < 0:
                raise ValueError(f"more than {_MAX_BYTES >> 20} MB when unpacked")
            ((_, data),) = _elements(data)
        # An array: its name stands behind flags and shape, and its content behind that.
        _flags, _shape, (_, name), *rest = _elements(data)
        if name == b"synsets":
            return _wnids_of_synsets(rest)
    raise ValueError("no synsets in it")


def _wnids_of_synsets(elements: Sequence[tuple[int, bytes]]) -> dict[int, str]:
    """Return WordNet numbers by ILSVRC2012_ID from the elements of an array of structs.

    Args:
        elements: bytes of a field's name, the names of all fields, and the fields of each struct.
    """
    (_, width), (_, names), *values = elements
    step = int.from_bytes(width, "little")
    # All names are padded to the same width by zeros.
    padded = [names[at : at + step] for at in range(0, len(names), step)]
    fields = [name.split(b"\0")[0] for name in padded]
    # Fields of all structs follow each other, those of a struct in the order of their names.
    numbers = values[fields.index(b"ILSVRC2012_ID") :: len(fields)]
    wnids = values[fields.index(b"WNID") :: len(fields)]
    numbered = {}
    for (_, number), (_, wnid) in zip(numbers, wnids):
        # MATLAB stores a number by the shortest type that holds it.
        kind, value = _data(number)
        identifier = int(np.frombuffer(value, _DTYPES[kind]).item())
        _, text = _data(wnid)
        # A character has one byte or two.
        ascii_text = text.replace(b"\0", b"")
        numbered[identifier] = ascii_text.decode("ascii")
    return numbered


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield kind and data of each element. Raises ValueError where one ends beyond the content."""
    at = 0
    while at < len(content):
        kind, size = struct.unpack_from("<II", content, at)
        at += 8
        if kind >> 16:
            # A small one: its data lie within the tag, whose upper half of the kind is the size.
            size = kind >> 16
            kind &= 0xFFFF
            at -= 4
            end = at + 4
        else:
            # Elements end at multiples of 8 bytes, but for compressed ones.
            padding = 0 if kind == _COMPRESSED else -size % 8
            end = at + size + padding
        if at + size > len(content):
            raise ValueError("it ends too early")
        yield kind, content[at : at + size]
        at = end


def _data(matrix: bytes) -> tuple[int, bytes]:
    """Return kind and data of a matrix's numbers or text."""
    _flags, _shape, _name, data = _elements(matrix)
    return data

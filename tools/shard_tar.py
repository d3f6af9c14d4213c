"""Tar files of shards: how they are written, and how they are read from end to end."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import zlib
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, Iterator, Tuple

import numpy as np

from data.local import Folder, Range
from data.shard_index import Index
from recipe.errors import DataError

EXTENSIONS = ("jpg", "jpeg", "png")
_CHUNK = 1 << 23
_LABEL_BYTES = 32


class StrictInfo(tarfile.TarInfo):
    """A member of an archive; TarInfo would take a damaged header for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {archive.offset:,}") from None


def members(archive: tarfile.TarFile, place: str) -> Iterator[tarfile.TarInfo]:
    """The files in an archive, which may hold plain files and folders below its top only.

    Args:
        place: the archive's name in errors.

    Raises:
        DataError: it is damaged or cut short, or has a link, a device or a name that leads elsewhere.
    """
    try:
        for member in archive:
            if member.name.startswith("/") or ".." in member.name.split("/"):
                raise DataError(f"{place}: {member.name!r} leads out of the archive; make the archive without it")
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise DataError(f"{place}: {member.name!r} is no plain file; leave out links and devices")
            yield member
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DataError(f"{place}: damaged or cut short ({error}); copy it again") from None


def open_archive(stream: BinaryIO, place: str, mode: str = "r:") -> tarfile.TarFile:
    """Args: mode: "r:" for random access, "r|" from front to end. Raises DataError."""
    try:
        return tarfile.open(fileobj=stream, mode=mode, tarinfo=StrictInfo, bufsize=_CHUNK)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{place}: no tar archive ({error}); copy it again") from None


def write_shard(path: Path, images: Iterable[Tuple[str, bytes, int]]) -> None:
    """Write a shard: for each image the members KEY.EXTENSION and KEY.cls. The same images give the same bytes.

    Args: images: name (KEY.EXTENSION, at most 80 ASCII characters), bytes and label of each.
    """
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, encoded, label in images:
            for member, content in ((name, encoded), (f"{name.rpartition('.')[0]}.cls", str(label).encode())):
                info = tarfile.TarInfo(member)  # of the year 1970 and nobody's
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        end = archive.offset + 2 * tarfile.BLOCKSIZE
    os.truncate(path, end)  # tarfile fills up to a record of 20 blocks


def scan(folder: Folder, shard: str, size: int, look: Callable[[str, bytes], None] = lambda *_: None) -> Index:
    """The index of a shard, from reading all of it.

    Args:
        shard: name of a tar file in `folder`.
        size: its bytes.
        look: is called with the name and the bytes of each image.

    Raises:
        DataError: as `members`; or a key has no image, no label, two of them, or a label that is no whole number.
    """
    place = folder.path(shard)
    stream = _Stream(folder, shard, size)
    images: dict[str, tuple[str, int, int, int]] = {}
    labels: dict[str, int] = {}
    archive = open_archive(stream, place, "r|")
    for member in members(archive, place):
        key, extension = split(member.name)
        if extension != "cls" and extension not in EXTENSIONS:
            continue
        what, seen = ("label", labels) if extension == "cls" else ("image", images)
        if key in seen:
            raise DataError(f"{place}: {key!r} has a second {what}; keys must differ")
        content = b"" if what == "label" and member.size > _LABEL_BYTES else _content(archive, member, place)
        if what == "image":
            images[key] = (member.name, member.offset_data, member.size, zlib.crc32(content))
            look(member.name, content)
        elif re.fullmatch(rb"[0-9]{1,9}", content.strip()):
            labels[key] = int(content)
        else:
            raise DataError(f"{place}: {member.name!r} holds no label; it must be a whole number from 0 on, as text")
    for key in images.keys() ^ labels.keys():
        missing = f"{key}.cls, its label" if key in images else "image (.jpg, .jpeg, .png)"
        raise DataError(f"{place}: {key!r} has no {missing}; add it or leave the other out")
    if not images:
        raise DataError(f"{place}: no images; remove this shard")
    while stream.read():  # the rest, for the checksum
        pass
    names, offsets, lengths, checksums = zip(*images.values())
    encoded = [name.encode(errors="surrogateescape") for name in names]
    name_lengths = np.array([len(name) for name in encoded], np.int32)
    places = (np.array(offsets, np.int64), np.array(lengths, np.int64))
    contents = (np.array([labels[key] for key in images], np.int32), np.array(checksums, np.uint32))
    return Index(*places, *contents, name_lengths, b"".join(encoded), size, stream.sha256.hexdigest(), "")


def split(name: str) -> tuple[str, str]:
    """Key and extension (in lower case), before and after the first dot in the last part of a path.

    Source: the WebDataset convention.
    """
    folder, slash, last = name.rpartition("/")
    key, _, extension = last.partition(".")
    return folder + slash + key, extension.lower()


class _Stream(io.RawIOBase):
    """A file of a folder from front to end. sha256: of what was read."""

    def __init__(self, folder: Folder, name: str, size: int):
        self._folder, self._name, self._size = folder, name, size
        self._place = 0
        self.sha256 = hashlib.sha256()

    def read(self, size: int = _CHUNK) -> bytes:
        length = min(self._size - self._place, size)
        if length == 0:
            return b""
        (answer,) = self._folder.ranges([Range(self._name, self._place, length)])
        if isinstance(answer, str):
            raise DataError(f"{self._folder.path(self._name)}: {answer}")
        self._place += length
        self.sha256.update(answer)
        return answer


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, place: str) -> bytes:
    try:
        content = archive.extractfile(member).read()
    except tarfile.TarError:
        content = b""
    if len(content) != member.size:
        raise DataError(f"{place}: cut short within {member.name!r}; copy it again")
    return content

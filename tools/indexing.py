"""Tar shards and other archives, read from end to end: their members, and where their images and labels are."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import tarfile
import zlib
from collections import defaultdict
from typing import BinaryIO, Callable, Iterator, NamedTuple

import numpy as np

from data.local import Folder, Range
from data.shard_index import Index
from recipe.division import count
from recipe.errors import DataError, printable

EXTENSIONS = ("jpg", "jpeg", "png")
_LABEL = "cls"
_CHUNK = 1 << 23
_LABEL_BYTES = 32
_METADATA = re.compile(r"__[^/]*__($|/)")  # webdataset leaves these out
_SECOND_LABEL = "keys must differ, or each label needs its own image"
_MOST_KINDS = 20  # of extensions that are listed


class _StrictInfo(tarfile.TarInfo):
    """A member of an archive; TarInfo would take a damaged header for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {archive.offset:,}") from None


class LeftOut:
    """Members of archives that are not read, counted by their kind."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # the first of each kind
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, kind: str, name: str, number: int = 1) -> None:
        """Count a member, or several of which `name` is the first."""
        self._names.setdefault(kind, name)
        self._counts[kind] += number

    def merge(self, other: LeftOut) -> None:
        for kind, number in other._counts.items():
            self.add(kind, other._names[kind], number)

    def counts(self) -> dict[str, int]:
        """Members of each kind, most frequent first."""
        return dict(sorted(self._counts.items(), key=lambda item: (-item[1], item[0])))

    def lines(self, place: str) -> list[str]:
        """A line for each of the most frequent kinds, for users.

        Args:
            place: what they were left out of.
        """
        counts = self.counts()
        lines = [
            printable(f"{place}: left out {kind}: {number:,}; the first: {self._names[kind]}")
            for kind, number in list(counts.items())[:_MOST_KINDS]
        ]
        others = list(counts.values())[_MOST_KINDS:]
        if others:
            lines.append(f"{place}: left out files of {len(others):,} other kinds: {sum(others):,}")
        return lines


def members(
    stream: BinaryIO, place: str, mode: str = "r:", left_out: LeftOut | None = None
) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The archive in a stream, with each of its files. It may hold plain files and folders below its top only.

    Args:
        stream: the archive.
        place: its name in errors.
        mode: "r:" for random access, "r|" from front to end.
        left_out: counts the folders.

    Raises:
        DataError: it is no archive, damaged or cut short, or has a link, a device or a name that leads elsewhere.
    """
    try:
        with tarfile.open(fileobj=stream, mode=mode, tarinfo=_StrictInfo, bufsize=_CHUNK) as archive:
            for member in archive:
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise DataError(f"{place}: {member.name!r} leads out of the archive; make the archive without it")
                if member.isdir():
                    if left_out is not None:
                        left_out.add("folders, which hold nothing themselves", f"{place}/{member.name}")
                    continue
                if not member.isreg() or member.issparse():
                    raise DataError(f"{place}: {member.name!r} is no plain file; leave out links and devices")
                yield archive, member
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DataError(f"{place}: damaged or cut short ({error}); copy it again") from None


class Part(NamedTuple):
    """What a member of a shard is by its name."""

    key: str  # of the sample that it belongs to
    variant: str  # what is between the key and the kind: "v2" in img_1.v2.jpg
    kind: str  # "jpg", "cls" ...: in small letters

    def stem(self) -> str:
        """The name without its last extension."""
        return f"{self.key}.{self.variant}" if self.variant else self.key


def split(name: str) -> Part | None:
    """Split a name by the WebDataset convention: the key ends at the first dot of the last part of the path.

    Of several extensions the last says what the file is. Returns None for a name without an extension or without a
    key, which begins with a dot.

    Source: base_plus_ext and the decoders of webdataset 1.0.
    """
    folder, slash, last = name.rpartition("/")
    key, dot, extension = last.partition(".")
    if not key or not dot:
        return None
    variant, _, kind = extension.lower().rpartition(".")
    return Part(folder + slash + key, variant, kind)


class Scan(NamedTuple):
    index: Index
    left_out: LeftOut


class _Found(NamedTuple):
    """An image in a shard."""

    name: str
    offset: int
    length: int
    crc32: int


def scan(
    folder: Folder,
    shard: str,
    size: int,
    look: Callable[[str, bytes], None] = lambda *_: None,
    advance: Callable[[int], None] = lambda _: None,
) -> Scan:
    """Read all of a shard.

    Args:
        folder, shard: where it is.
        size: its bytes.
        look: gets the name and the bytes of each image.
        advance: gets the number of bytes of each piece that is read.

    Returns:
        Its index, and the members that are neither image nor label.

    Raises:
        DataError: as `members`; or an image has no label or several, a label no image or several, or is no whole
        number; or there is something behind the end of the archive.
    """
    place = folder.path(shard)
    stream = _Stream(folder, shard, size, advance)
    left_out = LeftOut()
    images: dict[Part, _Found] = {}
    labels: dict[Part, int] = {}
    for archive, member in members(stream, place, "r|", left_out):
        part = split(member.name)
        if part is None or part.kind not in (*EXTENSIONS, _LABEL) or _METADATA.match(member.name):
            left_out.add(kind_left_out(member.name), f"{place}/{member.name}")
            continue
        is_label = part.kind == _LABEL
        # Of the same name, or of the names of one label: a.jpg and a.png.
        alike = part._replace(kind="")
        if alike in (labels if is_label else images):
            second = "label" if is_label else "image"
            raise DataError(f"{place}: {part.stem()!r} has a second {second}; keys must differ")
        content = b""
        if not is_label or member.size <= _LABEL_BYTES:
            with contextlib.suppress(tarfile.TarError):
                content = archive.extractfile(member).read()
            if len(content) != member.size:
                raise DataError(f"{place}: cut short within {member.name!r}; copy it again")
        if not is_label:
            images[alike] = _Found(member.name, member.offset_data, member.size, zlib.crc32(content))
            look(member.name, content)
        elif re.fullmatch(rb"[0-9]{1,9}", content.strip()):
            labels[alike] = int(content)
        else:
            raise DataError(f"{place}: {member.name!r} holds no label; it must be a whole number from 0 on, as text")
    pairs = _paired(place, images, labels)
    if not images:
        raise DataError(f"{place}: no images; remove this shard")
    while stream.read():  # the rest, for the checksum
        pass
    _check_end(folder, shard, archive.offset, size)
    found = [images[part] for part in pairs]
    names = [each.name.encode(errors="surrogateescape") for each in found]
    index = Index(
        offsets=np.array([each.offset for each in found], np.int64),
        lengths=np.array([each.length for each in found], np.int64),
        labels=np.array([labels[label] for label in pairs.values()], np.int32),
        crc32=np.array([each.crc32 for each in found], np.uint32),
        name_lengths=np.array([len(name) for name in names], np.int32),
        names=b"".join(names),
        bytes=size,
        sha256=stream.sha256.hexdigest(),
        plan="",
    )
    return Scan(index, left_out)


def kind_left_out(name: str) -> str:
    """As what a member that is not read is counted."""
    if _METADATA.match(name):
        return "metadata (__NAME__)"
    part = split(name)
    if part is None:
        return "hidden files" if name.rpartition("/")[2].startswith(".") else "files without an extension"
    return f"files .{part.kind}"


def _paired(place: str, images: dict[Part, _Found], labels: dict[Part, int]) -> dict[Part, Part]:
    """The label of each image, in the order of the images.

    That of the same name but for its last extension; else that of the same key, if there is one of each.

    Raises:
        DataError: names the first image without a label or label without an image, and counts them.
    """
    pairs = {part: part for part in images if part in labels}
    left_images: dict[str, list[Part]] = defaultdict(list)
    left_labels: dict[str, list[Part]] = defaultdict(list)
    for parts, found in ((images, left_images), (labels, left_labels)):
        for part in parts:
            if part not in pairs:
                found[part.key].append(part)
    taken = {part.key for part in pairs}
    faults = []
    for key in dict.fromkeys([*left_images, *left_labels]):
        unlabelled = left_images.get(key, [])
        unused = left_labels.get(key, [])
        if len(unlabelled) == len(unused) == 1 and key not in taken:
            pairs[unlabelled[0]] = unused[0]
        elif len(unlabelled) == 1 and len(unused) > 1:
            faults.append(f"{key!r} has a second label; {_SECOND_LABEL}")
        elif unlabelled and (unused or key in taken):
            second = images[unlabelled[-1]].name
            remedy = "keys must differ, or each image needs its own label"
            faults.append(f"{key!r} has a second image, {second!r}, for one label; {remedy}")
        elif unlabelled:
            stem = unlabelled[0].stem()
            faults.append(f"{stem!r} has no {stem}.cls, its label; add it or leave the other out")
        elif key in taken:
            faults.append(f"{key!r} has a second label; {_SECOND_LABEL}")
        else:
            stem = unused[0].stem()
            faults.append(f"{stem!r} has no image (.jpg, .jpeg, .png); add it or leave the other out")
    if faults:
        more = f" ({count(len(faults) - 1, 'more such key')} in this shard)" if len(faults) > 1 else ""
        raise DataError(f"{place}: {faults[0]}{more}")
    return {part: pairs[part] for part in images}


def _check_end(folder: Folder, shard: str, end: int, size: int) -> None:
    """Check that only zeros follow the last member, which ends at `end`. Raises DataError."""
    for start in range(end, size, _CHUNK):
        (answer,) = folder.ranges([Range(shard, start, min(_CHUNK, size - start))])
        if isinstance(answer, str):
            raise DataError(f"{folder.path(shard)}: {answer}")
        if answer.strip(b"\0"):
            more = f"{size - end:,} bytes behind the end of the archive, which nobody reads"
            raise DataError(f"{folder.path(shard)}: {more}; it may be two archives in one file: make them one")


class _Stream(io.RawIOBase):
    """A file of a folder from front to end. sha256: of what was read."""

    def __init__(self, folder: Folder, name: str, size: int, advance: Callable[[int], None]):
        """Args: advance: gets the number of bytes of each piece."""
        self._folder = folder
        self._name = name
        self._size = size
        self._advance = advance
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
        self._advance(length)
        return answer

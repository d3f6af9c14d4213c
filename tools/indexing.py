"""Tar shards and other archives, read from end to end.

Their members, and where their images and labels are.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import tarfile
import zlib
from collections import defaultdict
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Callable, Iterator, Literal, NamedTuple, Sequence

import numpy as np

from common.errors import DataError
from common.text import count, printable
from data.local import Folder, Range
from data.shard_index import Index

if TYPE_CHECKING:
    from typing_extensions import Self

EXTENSIONS = ("jpg", "jpeg", "png")
_LABEL = "cls"
_CHUNK = 1 << 23  # bytes that are read at once
_LABEL_BYTES = 32  # of a label's file, at most
_METADATA = re.compile(r"__[^/]*__($|/)")  # webdataset leaves these out
_SECOND_LABEL = "keys must differ, or each label needs its own image"
_MOST_KINDS = 20  # of extensions that are listed


class _StrictInfo(tarfile.TarInfo):
    """A member of an archive; TarInfo would take a damaged header for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """Read the next member of an `archive`. Raises ReadError for a damaged header."""
        try:
            return super().fromtarfile(archive)
        # A block of zeros: the end of an archive.
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # typeshed does not have it
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} at byte {archive.offset:,}") from None


class LeftOut:
    """Members of archives that are not read, counted by their kind."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # the first of each kind
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, kind: str, name: str, number: int = 1) -> None:
        """Count members.

        Args:
            kind: of the members.
            name: of the first one.
            number: how many there are.
        """
        self._names.setdefault(kind, name)
        self._counts[kind] += number

    def merge(self, other: LeftOut) -> None:
        """Add the members that `other` has counted."""
        for kind, number in other._counts.items():
            self.add(kind, other._names[kind], number)

    def counts(self) -> dict[str, int]:
        """Return the members of each kind, most frequent first."""

        def order(kind: str) -> tuple[int, str]:
            """Return the key by which a `kind` is sorted: then by name, so that calls agree."""
            return -self._counts[kind], kind

        return {kind: self._counts[kind] for kind in sorted(self._counts, key=order)}

    def lines(self, place: str) -> list[str]:
        """Return a line for each of the most frequent kinds, for users.

        Args:
            place: what they were left out of.
        """
        counts = list(self.counts().items())
        lines = []
        for kind, number in counts[:_MOST_KINDS]:
            first = self._names[kind]
            lines.append(printable(f"{place}: left out {kind}: {number:,}; the first: {first}"))
        # A folder of anything may have hundreds of kinds: the rare ones are counted together.
        others = [number for _, number in counts[_MOST_KINDS:]]
        if others:
            kinds = f"files of {len(others):,} other kinds"
            lines.append(f"{place}: left out {kinds}: {sum(others):,}")
        return lines


def members(
    stream: IO[bytes] | ShardStream,
    place: str,
    mode: Literal["r:", "r|"] = "r:",
    left_out: LeftOut | None = None,
) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the archive in a stream with each of its files.

    It may hold plain files and folders below its top only.

    Args:
        stream: the archive.
        place: its name in errors.
        mode: "r:" for random access, "r|" from front to end.
        left_out: counts the folders.

    Raises:
        DataError: it is no archive, damaged or cut short, or has a link, a device or a name that
            leads elsewhere.
    """
    try:
        with tarfile.open(
            fileobj=stream,
            mode=mode,
            tarinfo=_StrictInfo,
            bufsize=_CHUNK,
        ) as archive:
            for member in archive:
                # Before its content is read.
                _check_member(member, place)
                if not member.isdir():
                    yield archive, member
                elif left_out is not None:
                    name = f"{place}/{member.name}"
                    left_out.add("folders, which hold nothing themselves", name)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DataError(f"{place}: damaged or cut short ({error}); copy it again") from None


def content_of(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    """Return the content of a plain file as a stream.

    Args:
        archive: that holds it.
        member: the file.
    """
    stream = archive.extractfile(member)
    # None stands for folders and devices alone.
    assert stream is not None
    return stream


def _check_member(member: tarfile.TarInfo, place: str) -> None:
    """Check that a member is a folder or a plain file within the archive. Raises DataError."""
    name = member.name
    # Others unpack such archives: these names and links could write anywhere.
    if name.startswith("/") or ".." in name.split("/"):
        raise DataError(f"{place}: {name!r} leads out of the archive; make the archive without it")
    if member.isdir():
        return
    if not member.isreg() or member.issparse():
        raise DataError(f"{place}: {name!r} is no plain file; leave out links and devices")


class Part(NamedTuple):
    """A member of a shard by its name.

    key: of the sample that it belongs to.
    variant: between the key and the kind: "v2" in img_1.v2.jpg.
    kind: "jpg", "cls" ...: in small letters.
    """

    key: str
    variant: str
    kind: str

    def stem(self) -> str:
        """Return the name without its last extension."""
        return f"{self.key}.{self.variant}" if self.variant else self.key


def split(name: str) -> Part | None:
    """Split a name by the WebDataset convention.

    The key ends at the first dot of the last part of the path. Of several extensions the last says
    what the file is. Source: base_plus_ext and the decoders of webdataset 1.0.

    Args:
        name: of a member.

    Returns:
        Its parts; None without an extension or without a key, where the name begins with a dot.
    """
    folder, slash, last = name.rpartition("/")
    key, dot, extension = last.partition(".")
    if not key or not dot:
        return None
    # Without another dot there is no variant.
    variant, _, kind = extension.lower().rpartition(".")
    return Part(folder + slash + key, variant, kind)


def kind_left_out(name: str) -> str:
    """Return the kind as which a member called `name` is counted if it is not read."""
    if _METADATA.match(name):
        return "metadata (__NAME__)"
    part = split(name)
    if part is not None:
        return f"files .{part.kind}"
    last = name.rpartition("/")[2]
    return "hidden files" if last.startswith(".") else "files without an extension"


@dataclass(frozen=True)
class Scan:
    """A shard that was read.

    left_out: members that are neither image nor label.
    """

    index: Index
    left_out: LeftOut


class _StoredImage(NamedTuple):
    """An image in a shard.

    name: of the member.
    offset: of its first byte in the shard.
    length: bytes.
    crc32: checksum of these.
    """

    name: str
    offset: int
    length: int
    crc32: int


def scan(
    folder: Folder,
    shard: str,
    size: int,
    look: Callable[[str, bytes], None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> Scan:
    """Read all of a shard.

    Args:
        folder: where it is.
        shard: its name there.
        size: its bytes.
        look: gets the name and the bytes of each image.
        advance: gets the number of bytes of each piece that is read.

    Returns:
        Its index, and the members that are neither image nor label.

    Raises:
        DataError: as `members`; or an image has no label or several, a label no image or several,
            or is no whole number; or there is something behind the end of the archive.
    """
    place = folder.path(shard)
    stream = ShardStream(folder, shard, size, advance)
    contents = _Contents(place, look)
    # From front to end, so that each byte is read once: the folder may be far away.
    for archive, member in members(stream, place, mode="r|", left_out=contents.left_out):
        contents.add(archive, member)
    labels = _paired_labels(place, contents.images, contents.labels)
    if not labels:
        raise DataError(f"{place}: no images; remove this shard")
    # The rest is read for the checksum.
    while stream.read():
        pass
    # There was an image, so `archive` is the archive after its last member.
    _check_end(folder, shard, archive.offset, size)
    images = list(contents.images.values())
    index = _index_of(images, labels, size, sha256=stream.sha256.hexdigest())
    return Scan(index, contents.left_out)


def _index_of(images: list[_StoredImage], labels: list[int], size: int, sha256: str) -> Index:
    """Return the index of a shard, of no plan.

    Args:
        images: in the order of its members.
        labels: of these.
        size: bytes of the shard.
        sha256: of all of them.
    """
    # Names may hold any bytes: surrogates stand for those that are no UTF-8.
    names = [image.name.encode(errors="surrogateescape") for image in images]
    return Index(
        offsets=np.array([image.offset for image in images], np.int64),
        lengths=np.array([image.length for image in images], np.int64),
        labels=np.array(labels, np.int32),
        crc32=np.array([image.crc32 for image in images], np.uint32),
        name_lengths=np.array([len(name) for name in names], np.int32),
        names=b"".join(names),
        bytes=size,
        sha256=sha256,
        plan="",
    )


class _Contents:
    """Images and labels of a shard, in the order of its members.

    images, labels: by the parts of their names, without the kind.
    left_out: the other members.
    """

    def __init__(self, place: str, look: Callable[[str, bytes], None] | None):
        """
        Args:
            place: name of the shard in errors.
            look: gets the name and the bytes of each image.
        """
        self.images: dict[Part, _StoredImage] = {}
        self.labels: dict[Part, int] = {}
        self.left_out = LeftOut()
        self._place = place
        self._look = look

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Read a `member` of the `archive`, or count it as left out. Raises DataError."""
        name = member.name
        part = split(name)
        if part is None or part.kind not in (*EXTENSIONS, _LABEL) or _METADATA.match(name):
            self.left_out.add(kind_left_out(name), f"{self._place}/{name}")
            return
        is_label = part.kind == _LABEL
        # The same name a second time, or two images for one label: a.jpg and a.png.
        alike = part._replace(kind="")
        if alike in (self.labels if is_label else self.images):
            second = "label" if is_label else "image"
            raise DataError(
                f"{self._place}: {part.stem()!r} has a second {second}; keys must differ"
            )
        if is_label:
            self.labels[alike] = self._read_label(archive, member)
        else:
            self.images[alike] = self._read_image(archive, member)

    def _read_image(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> _StoredImage:
        """Return the place and the checksum of the image that a member is. Raises DataError."""
        content = self._read(archive, member)
        if self._look is not None:
            self._look(member.name, content)
        return _StoredImage(
            name=member.name,
            offset=member.offset_data,
            length=member.size,
            crc32=zlib.crc32(content),
        )

    def _read_label(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> int:
        """Return the label that a member holds. Raises DataError."""
        content = b""
        # A longer file is not read: it holds something else.
        if member.size <= _LABEL_BYTES:
            content = self._read(archive, member)
        if not re.fullmatch(rb"[0-9]{1,9}", content.strip()):
            fault = f"{self._place}: {member.name!r} holds no label"
            raise DataError(f"{fault}; it must be a whole number from 0 on, as text")
        return int(content)

    def _read(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        """Return the bytes of a member. Raises DataError where there are fewer than it says."""
        content = b""
        # Where the file ends early tarfile raises, or returns less.
        with contextlib.suppress(tarfile.TarError):
            content = content_of(archive, member).read()
        if len(content) != member.size:
            raise DataError(f"{self._place}: cut short within {member.name!r}; copy it again")
        return content


def _paired_labels(
    place: str,
    images: dict[Part, _StoredImage],
    labels: dict[Part, int],
) -> list[int]:
    """Return the label of each image, in the order of the images.

    It is that of the same name but for its last extension; else that of the same key, if there is
    one of each.

    Raises:
        DataError: names the first image without a label or label without an image, and counts them.
    """
    pairs = {part: part for part in images if part in labels}
    paired_keys = {part.key for part in pairs}
    # The others by key, the images before the labels: in this order faults are named.
    left_images = _by_key(part for part in images if part not in pairs)
    left_labels = _by_key(part for part in labels if part not in pairs)
    faults = []
    for key in dict.fromkeys([*left_images, *left_labels]):
        unlabelled = left_images.get(key, [])
        unused = left_labels.get(key, [])
        is_paired = key in paired_keys
        # One of each is a pair, though their names differ: img.large.jpg and img.cls.
        if len(unlabelled) == len(unused) == 1 and not is_paired:
            pairs[unlabelled[0]] = unused[0]
            continue
        last_name = images[unlabelled[-1]].name if unlabelled else ""
        fault = _fault_of_key(key, unlabelled, unused, is_paired=is_paired, last_name=last_name)
        faults.append(fault)
    if faults:
        raise DataError(f"{place}: {_first_of(faults)}")
    return [labels[pairs[part]] for part in images]


def _first_of(faults: Sequence[str]) -> str:
    """Return the first fault and the number of others, which mostly have the same cause."""
    more = len(faults) - 1
    if not more:
        return faults[0]
    return f"{faults[0]} ({count(more, 'more such key')} in this shard)"


def _by_key(parts: Iterator[Part]) -> dict[str, list[Part]]:
    """Return the parts of each key, in their order."""
    by_key: dict[str, list[Part]] = defaultdict(list)
    for part in parts:
        by_key[part.key].append(part)
    return by_key


def _fault_of_key(
    key: str,
    unlabelled: list[Part],
    unused: list[Part],
    is_paired: bool,
    last_name: str,
) -> str:
    """Return why the images and labels of a key do not pair.

    Args:
        key: of the sample.
        unlabelled: its images without a label of the same name.
        unused: its labels without an image of the same name.
        is_paired: there are an image and a label of the same name besides these.
        last_name: of the last of these images.
    """
    # The fault that most likely explains the names, which decides about the remedy.
    if len(unlabelled) == 1 and len(unused) > 1:
        return f"{key!r} has a second label; {_SECOND_LABEL}"
    if unlabelled and (unused or is_paired):
        remedy = "keys must differ, or each image needs its own label"
        return f"{key!r} has a second image, {last_name!r}, for one label; {remedy}"
    if unlabelled:
        stem = unlabelled[0].stem()
        return f"{stem!r} has no {stem}.cls, its label; add it or leave the other out"
    if is_paired:
        return f"{key!r} has a second label; {_SECOND_LABEL}"
    stem = unused[0].stem()
    return f"{stem!r} has no image (.jpg, .jpeg, .png); add it or leave the other out"


def _check_end(folder: Folder, shard: str, end: int, size: int) -> None:
    """Check that only zeros follow the last member. Raises DataError.

    Args:
        folder: of the shard.
        shard: its name there.
        end: of the last member, in bytes.
        size: bytes of the shard.
    """
    # tarfile stops at the first block of zeros, whatever follows it.
    for start in range(end, size, _CHUNK):
        length = min(_CHUNK, size - start)
        (answer,) = folder.ranges([Range(shard, start, length)])
        if isinstance(answer, str):
            raise DataError(f"{folder.path(shard)}: {answer}")
        if answer.strip(b"\0"):
            more = f"{size - end:,} bytes behind the end of the archive, which nobody reads"
            remedy = "it may be two archives in one file: make them one"
            raise DataError(f"{folder.path(shard)}: {more}; {remedy}")


class ShardStream(io.RawIOBase):
    """A file of a folder from front to end.

    sha256: of what was read.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        size: int,
        advance: Callable[[int], None] | None,
    ):
        """
        Args:
            folder: where the file is.
            name: of the file.
            size: its bytes.
            advance: gets the number of bytes of each piece.
        """
        self._folder = folder
        self._name = name
        self._size = size
        self._advance = advance
        self._place = 0
        self.sha256 = hashlib.sha256()

    def read(self, size: int = _CHUNK) -> bytes:
        """Return the next `size` bytes, or as many as there are. Raises DataError."""
        # tarfile asks for more than there is.
        length = min(self._size - self._place, size)
        # A server refuses a range of no bytes.
        if length == 0:
            return b""
        (answer,) = self._folder.ranges([Range(self._name, self._place, length)])
        if isinstance(answer, str):
            raise DataError(f"{self._folder.path(self._name)}: {answer}")
        self._place += length
        self.sha256.update(answer)
        if self._advance is not None:
            self._advance(length)
        return answer

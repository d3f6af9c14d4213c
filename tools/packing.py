"""Tar shards: packing a source of files into them, what goes where, and reading them from end to end."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
import tarfile
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import BinaryIO, Callable, Iterator, NamedTuple

import numpy as np
from PIL import Image

from data import decode, shard_index
from data.base import UnreadableImage
from data.encoded import EncodedSource
from data.local import Folder, LocalFolder, MissingFile, Range
from data.shard_index import Index, Manifest, Shard
from parallel.parent_death import die_with_parent
from recipe.errors import DataError
from recipe.files import replacing, write
from recipe.randomness import bits32, key

EXTENSIONS = ("jpg", "jpeg", "png")
_CHUNK = 1 << 23
_LABEL_BYTES = 32
_KEY = 60  # characters of a name that a key keeps: a tar's plain header holds 100 in all


class Options(NamedTuple):
    """How shards are made. short_side: pixels; None leaves images as they are."""

    images_per_shard: int = 1000
    short_side: int | None = None
    quality: int = 92
    seed: int = 0
    skip_bad: bool = False


class _Task(NamedTuple):
    """Everything that a process needs to make any shard."""

    source: EncodedSource
    folder: Path
    options: Options
    plan: str


def pack(
    source: EncodedSource, folder: str, options: Options, workers: int, advance: Callable[[int, int], None]
) -> tuple[Manifest, int, int, list[str]]:
    """Pack all images of a source into shards, with indexes and manifest. Shards of an interrupted call are kept.

    Images are spread over the shards at random, a function of the seed. The same images and options give the same
    bytes, whatever the number of workers (processes). advance(done, all) is called as shards are finished.

    Returns the manifest, the numbers of shards that were kept and of images left out, and the reasons of this call.
    Raises DataError: `folder` holds other shards, or a shard would have no images; UnreadableImage unless
    options.skip_bad; OSError.
    """
    order = np.argsort(bits32(key("order of packing", options.seed), np.arange(len(source), dtype=np.int64)))
    size = options.images_per_shard
    count = -(-len(source) // size)
    names = (f"{number:0{max(6, len(str(count - 1)))}d}.tar" for number in range(count))
    shards = {name: order[first : first + size].tolist() for name, first in zip(names, range(0, count * size, size))}
    os.makedirs(folder, exist_ok=True)
    task = _Task(source, Path(folder), options, _digest(source, options))
    indexes = _finished(task, shards)
    kept = len(indexes)
    missing = {name: images for name, images in shards.items() if name not in indexes}
    advance(kept, count)
    reasons = []
    for name, (index, left_out) in _all_packed(task, missing, min(workers, len(missing))):
        indexes[name] = index
        reasons += left_out
        advance(len(indexes), count)
    manifest = make_manifest(source.classes, {name: indexes[name] for name in shards})
    write(Path(folder, shard_index.MANIFEST), shard_index.encode_manifest(manifest), durable=True)
    skipped = len(source) - sum(shard.images for shard in manifest.shards)
    return manifest, kept, skipped, reasons


def make_manifest(classes: tuple[str, ...], indexes: dict[str, Index]) -> Manifest:
    """The manifest of shards whose indexes are given by name, in their order."""
    shards = (Shard(name, index.bytes, len(index.labels), index.sha256) for name, index in indexes.items())
    return Manifest(classes, tuple(shards))


def _digest(source: EncodedSource, options: Options) -> str:
    """Digest of all that shards are a function of, except the bytes of the images, and skip_bad, which may change."""
    digest = hashlib.sha256(json.dumps([options._replace(skip_bad=False), source.classes]).encode())
    digest.update(source.labels.tobytes())
    for index in range(len(source)):
        digest.update(os.fsencode(os.path.basename(source.name(index))) + b"\0")
    return digest.hexdigest()


def _finished(task: _Task, shards: dict[str, list[int]]) -> dict[str, Index]:
    """Indexes of the shards that are complete. Raises DataError: there are other shards."""
    local = LocalFolder(str(task.folder))
    found = {}
    for name in sorted(os.listdir(task.folder)):
        if name.startswith(".") or not name.endswith(".tar"):
            continue
        file = shard_index.index_name(name)
        try:
            index = shard_index.decode_index(local.read(file, shard_index.MOST_OF_INDEX), local.path(file))
        except MissingFile:
            if name in shards:  # a process was killed between the two
                continue
            raise DataError(f"{local.path(name)}: not packed by this command; name an empty folder") from None
        if name not in shards or index.plan != task.plan:
            remedy = "name an empty folder, repeat those options, or remove these shards"
            raise DataError(f"{local.path(name)}: packed from other images or with other options; {remedy}")
        whole = task.options.skip_bad or len(index.labels) == len(shards[name])
        if whole and local.size(name) == index.bytes:
            found[name] = index
    return found


_task: _Task | None = None  # in a worker


def _all_packed(task: _Task, shards: dict[str, list[int]], workers: int) -> Iterator[tuple[str, tuple[Index, list]]]:
    if workers <= 1:
        yield from ((name, _pack_shard(task, name, images)) for name, images in shards.items())
        return
    # Not forked: the process that asks may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin, (task,)) as pool:
        yield from zip(shards, pool.map(_work, shards, shards.values()))


def _begin(task: _Task) -> None:
    global _task
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent
    _task = task


def _work(name: str, images: list[int]) -> tuple[Index, list[str]]:
    return _pack_shard(_task, name, images)


def _pack_shard(task: _Task, name: str, images: list[int]) -> tuple[Index, list[str]]:
    """Write a shard, for each image the members KEY.EXTENSION and KEY.cls, and its index."""
    source, path, reasons = task.source, task.folder / name, []
    with replacing(path, durable=True) as temporary:
        with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
            for image in images:
                called = source.name(image)
                try:
                    encoded, extension = _ready(source.encoded(image), called, task.options)
                except UnreadableImage as error:
                    if not task.options.skip_bad:
                        raise
                    reasons.append(str(error))
                    continue
                stem = re.sub("[^A-Za-z0-9_-]", "_", os.path.splitext(os.path.basename(called))[0])[:_KEY]
                for suffix, content in ((extension, encoded), ("cls", b"%d" % source.labels[image])):
                    info = tarfile.TarInfo(f"{image:08d}-{stem}.{suffix}")  # of the year 1970 and nobody's
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
            end = archive.offset + 2 * tarfile.BLOCKSIZE
        if len(reasons) == len(images):
            raise DataError(f"{path}: none of its images can be read; pack more images into each shard")
        os.truncate(temporary, end)  # tarfile fills up to a record of 20 blocks
        index = scan(LocalFolder(str(task.folder)), temporary.name, end)._replace(plan=task.plan)
    write(task.folder / shard_index.index_name(name), shard_index.encode_index(index), durable=True)
    return index, reasons


def _ready(encoded: bytes, name: str, options: Options) -> tuple[bytes, str]:
    """An image as it is packed, and its extension. Raises UnreadableImage."""
    # All of it is decoded: damage is cheaper to find now than in every epoch.
    pixels = decode.decode(encoded, name)
    height, width = pixels.shape[1:]
    if options.short_side is None or min(height, width) <= options.short_side:
        return encoded, "png" if encoded.startswith(b"\x89PNG") else "jpg"
    ratio = options.short_side / min(height, width)
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    image = image.resize((round(width * ratio), round(height * ratio)), Image.Resampling.BICUBIC)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=options.quality)
    return stream.getvalue(), "jpg"


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


def members(stream: BinaryIO, place: str, mode: str = "r:") -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The archive in a stream, with each of its files. It may hold plain files and folders below its top only.

    Args: place: the archive's name in errors. mode: "r:" for random access, "r|" from front to end.

    Raises DataError: it is no archive, damaged or cut short, or has a link, a device or a name that leads elsewhere.
    """
    try:
        with tarfile.open(fileobj=stream, mode=mode, tarinfo=_StrictInfo, bufsize=_CHUNK) as archive:
            for member in archive:
                if member.name.startswith("/") or ".." in member.name.split("/"):
                    raise DataError(f"{place}: {member.name!r} leads out of the archive; make the archive without it")
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise DataError(f"{place}: {member.name!r} is no plain file; leave out links and devices")
                yield archive, member
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DataError(f"{place}: damaged or cut short ({error}); copy it again") from None


def scan(folder: Folder, shard: str, size: int, look: Callable[[str, bytes], None] = lambda *_: None) -> Index:
    """The index of a shard of `size` bytes, from reading all of it; `look` gets the name and the bytes of each image.

    Raises DataError: as `members`; or a key has no image, no label, two of them, or a label that is no whole number.
    """
    place = folder.path(shard)
    stream = _Stream(folder, shard, size)
    images: dict[str, tuple[str, int, int, int]] = {}
    labels: dict[str, int] = {}
    for archive, member in members(stream, place, "r|"):
        key, extension = split(member.name)
        is_label = extension == "cls"
        if not is_label and extension not in EXTENSIONS:
            continue
        if key in (labels if is_label else images):
            raise DataError(f"{place}: {key!r} has a second {'label' if is_label else 'image'}; keys must differ")
        content = b""
        if not is_label or member.size <= _LABEL_BYTES:
            with contextlib.suppress(tarfile.TarError):
                content = archive.extractfile(member).read()
            if len(content) != member.size:
                raise DataError(f"{place}: cut short within {member.name!r}; copy it again")
        if not is_label:
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
    columns = (offsets, lengths, [labels[key] for key in images], checksums, list(map(len, encoded)))
    types = (np.int64, np.int64, np.int32, np.uint32, np.int32)
    arrays = (np.array(column, kind) for column, kind in zip(columns, types))
    return Index(*arrays, b"".join(encoded), size, stream.sha256.hexdigest(), "")


def split(name: str) -> tuple[str, str]:
    """Key and extension, before and after the first dot in the last part of a path (the WebDataset convention)."""
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

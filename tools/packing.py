"""Packs the images of a source into tar shards."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import tarfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Callable, Iterator, Mapping, NamedTuple

import numpy as np
import torch
from PIL import Image

from common import progress
from common.errors import DataError
from common.files import replacing, write
from data import base, shard_index
from data.base import Pixels, Source, UnreadableImage
from data.encoded import EncodedImage
from data.local import LocalFolder, MissingFile
from data.shard_index import Index, Manifest, Shard
from parallel import parent_death
from parallel.parent_death import die_with_parent
from recipe.randomness import bits32, key
from tools.indexing import scan

_MOST_OF_SIDE = 65_500  # pixels that libjpeg writes
_KEY = 60  # characters of a name that a key keeps: a tar's plain header holds 100 in all


class Options(NamedTuple):
    """How shards are made.

    images_per_shard: in all but the last.
    short_side: pixels; None leaves images as they are.
    quality: of JPEG files of images that were made smaller.
    seed: of the random order of the images.
    skip_bad: leave out images that cannot be read.
    keep_order: number images as the source does, instead of in a random order.
    """

    images_per_shard: int = 1000
    short_side: int | None = None
    quality: int = 92
    seed: int = 0
    skip_bad: bool = False
    keep_order: bool = False


class Result(NamedTuple):
    """The shards that a call has made or found.

    kept: shards that were there before.
    skipped: images that were left out of all shards.
    left_out: why images were, by this call, a message each.
    damaged: about images that this call packed in spite of a fault, a message each.
    """

    manifest: Manifest
    kept: int
    skipped: int
    left_out: list[str]
    damaged: list[str]


class _Task(NamedTuple):
    """Everything that a process needs to make any shard.

    source: of the images.
    folder: for the shards.
    options: of the shards.
    plan: digest of all that shards are a function of.
    images_done: of all shards; shared by the processes.
    """

    source: Source
    folder: Path
    options: Options
    plan: str
    images_done: Synchronized


@dataclass(frozen=True)
class _PackedShard:
    """A shard that was packed.

    left_out: why images were, a message each.
    damaged: about images that were packed in spite of a fault, a message each.
    """

    index: Index
    left_out: list[str]
    damaged: list[str]


def pack(
    source: Source,
    folder: str,
    options: Options,
    workers: int,
    advance: Callable[[int, int], None],
    classes_sorted: bool = False,
) -> Result:
    """Pack all images of a source into shards, with indexes and manifest.

    Shards of an interrupted call are kept. Images are spread over the shards at random, a function
    of the seed, or lie in the order of the source. Files keep their bytes; images that are none
    become PNG files of the same pixels. The same images and options give the same bytes, whatever
    the number of workers. A line each ten seconds says how many images are done.

    Args:
        source: of the images.
        folder: for the shards.
        options: of the shards.
        workers: processes.
        advance: called with the numbers of finished and of all shards.
        classes_sorted: whether the source numbers its classes by name: see `ClassNames`.

    Returns:
        The manifest, and what was kept, left out and damaged.

    Raises:
        DataError: `folder` holds other shards, or a shard would have no images.
        UnreadableImage: unless options.skip_bad.
        OSError: a file cannot be written.
    """
    shards = _images_by_shard(len(source), options)
    os.makedirs(folder, exist_ok=True)
    # Not forked: the process that asks may have threads.
    context = parent_death.context("spawn")
    task = _Task(
        source=source,
        folder=Path(folder),
        options=options,
        plan=_digest(source, options),
        images_done=context.Value("q", 0),
    )
    # Which shards are there, and which have to be made?
    indexes = _finished(task, shards)
    kept = len(indexes)
    missing = {name: images for name, images in shards.items() if name not in indexes}
    advance(kept, len(shards))
    # Messages about images come in the order of the shards, whichever worker is faster.
    left_out = []
    damaged = []
    # More workers than shards would only load the source.
    processes = min(workers, len(missing))
    total = sum(len(images) for images in missing.values())
    with progress.lines(
        lambda: f"packing: {task.images_done.value:,} of {total:,} images",
        lambda: task.images_done.value / max(total, 1),
    ):
        for name, packed in _pack_shards(task, missing, processes, context):
            indexes[name] = packed.index
            left_out += packed.left_out
            damaged += packed.damaged
            advance(len(indexes), len(shards))
    # Shards that were kept and new ones, by their numbers.
    in_order = {name: indexes[name] for name in shards}
    manifest = make_manifest(source.classes, in_order, are_sorted=classes_sorted)
    # It comes last: a folder with a manifest is complete.
    file = Path(folder, shard_index.MANIFEST)
    write(file, shard_index.encode_manifest(manifest), durable=True)
    packed_images = sum(shard.images for shard in manifest.shards)
    return Result(
        manifest=manifest,
        kept=kept,
        skipped=len(source) - packed_images,
        left_out=left_out,
        damaged=damaged,
    )


def make_manifest(
    classes: tuple[str, ...],
    indexes: Mapping[str, Index],
    are_sorted: bool | None = None,
) -> Manifest:
    """Return the manifest of a set of shards.

    Args:
        classes: their names, by label.
        indexes: of the shards, by name, in their order.
        are_sorted: whether these labels follow from the order of the names; None: not known.
    """
    shards = []
    for name, index in indexes.items():
        shards.append(Shard(name, index.bytes, len(index.labels), index.sha256))
    return Manifest(classes, tuple(shards), are_sorted)


def _images_by_shard(total: int, options: Options) -> dict[str, list[int]]:
    """Return the numbers of the images in each shard, by its name."""
    order = np.arange(total, dtype=np.int64)
    # Images in the order of their hashes: a mixture that is a function of the seed alone.
    if not options.keep_order:
        order = np.argsort(bits32(key("order of packing", options.seed), order))
    # The last shard has the rest.
    size = options.images_per_shard
    number_of_shards = -(-total // size)
    # As many digits in all names, so that these sort as their numbers do.
    digits = max(6, len(str(number_of_shards - 1)))
    shards = {}
    for number in range(number_of_shards):
        name = f"{number:0{digits}d}.tar"
        first = number * size
        shards[name] = order[first : first + size].tolist()
    return shards


def _digest(source: Source, options: Options) -> str:
    """Return a digest of all that shards are a function of, but for the bytes of files.

    Nor is `skip_bad` in it, which may change between calls.
    """
    values = list(options._replace(skip_bad=False))
    # Shards that were packed before there was a choice have the digest without it.
    if not options.keep_order:
        values.pop()
    digest = hashlib.sha256(json.dumps([values, source.classes]).encode())
    digest.update(source.labels.tobytes())
    # Names and not bytes of files, which would take as long to read as packing takes.
    for index in range(len(source)):
        # Without its folder, which may be moved between two calls.
        name = os.path.basename(source.name(index))
        digest.update(os.fsencode(name) + b"\0")
    # Sources without files: other pixels may have the same names and labels. The first image stands
    # for all of them, beside a digest that such a source has itself.
    (first,) = source.open_all([0])
    if isinstance(first, Pixels):
        pixels = first.pixels().contiguous().numpy()
        digest.update(source.digest.encode() + pixels.tobytes())
    return digest.hexdigest()


def _finished(task: _Task, shards: Mapping[str, list[int]]) -> dict[str, Index]:
    """Return the indexes of the shards that are complete.

    Raises DataError where there are others, or an index is damaged.
    """
    local = LocalFolder(str(task.folder))
    indexes = {}
    for name in sorted(os.listdir(task.folder)):
        # Hidden files, such as macOS's ._000000.tar, are no shards.
        if name.startswith(".") or not name.endswith(".tar"):
            continue
        try:
            index = shard_index.stored_index(local, name)
        except MissingFile:
            fault = f"{local.path(name)}: not packed by this command"
            raise DataError(f"{fault}; name an empty folder") from None
        if name not in shards or index.plan != task.plan:
            raise DataError(
                f"{local.path(name)}: packed from other images or with other options; "
                "name an empty folder, repeat those options, or remove these shards"
            )
        # Without skip_bad a shard that lacks images is made again, to fail.
        has_all_images = len(index.labels) == len(shards[name])
        if (task.options.skip_bad or has_all_images) and local.size(name) == index.bytes:
            indexes[name] = index
    return indexes


_task: _Task | None = None  # in a worker


def _pack_shards(
    task: _Task,
    shards: Mapping[str, list[int]],
    workers: int,
    context: BaseContext,
) -> Iterator[tuple[str, _PackedShard]]:
    """Make shards, and yield each with its name, in their order.

    Args:
        task: for all of them.
        shards: numbers of the images in each, by its name.
        workers: processes.
        context: by which these are started.
    """
    if workers <= 1:
        for name, images in shards.items():
            yield name, _pack_shard(task, name, images)
        return
    # The task travels to each worker once, as a source may be large.
    with ProcessPoolExecutor(workers, context, _begin, (task,)) as pool:
        yield from zip(shards, pool.map(_work, shards, shards.values()))


def _begin(task: _Task) -> None:
    """Prepare a worker."""
    global _task
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent
    _task = task


def _work(name: str, images: list[int]) -> _PackedShard:
    """Make a shard in a worker."""
    assert _task is not None  # `_begin` has run
    return _pack_shard(_task, name, images)


def _pack_shard(task: _Task, name: str, images: list[int]) -> _PackedShard:
    """Write a shard and its index. Raises DataError, UnreadableImage, OSError."""
    path = task.folder / name
    left_out: list[str] = []
    damaged: list[str] = []
    with replacing(path, durable=True) as temporary:
        # The format without extended headers, which every reader takes: names are short (_KEY).
        with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
            for image in images:
                _count(task)
                try:
                    members = _members(task.source, image, task.options, damaged)
                except UnreadableImage as error:
                    if not task.options.skip_bad:
                        raise
                    left_out.append(str(error))
                    continue
                _add_members(archive, members)
            end = archive.offset + 2 * tarfile.BLOCKSIZE
        if len(left_out) == len(images):
            raise DataError(
                f"{path}: none of its images can be read; pack more images into each shard"
            )
        # tarfile fills up to a record of 20 blocks; two empty ones end an archive.
        os.truncate(temporary, end)
        scanned = scan(LocalFolder(str(task.folder)), temporary.name, end)
        index = scanned.index._replace(plan=task.plan)
        # The index comes before the shard has its name: a shard without one is somebody else's. An
        # incomplete one of ours goes first, which the new index would call complete.
        path.unlink(missing_ok=True)
        file = task.folder / shard_index.index_name(name)
        write(file, shard_index.encode_index(index), durable=True)
    return _PackedShard(index, left_out, damaged)


def _count(task: _Task) -> None:
    """Count an image before it is read: one that cannot be read is done, too."""
    with task.images_done.get_lock():
        task.images_done.value += 1


def _members(
    source: Source,
    image: int,
    options: Options,
    damaged: list[str],
) -> dict[str, bytes]:
    """Return the members KEY.EXTENSION and KEY.cls of an image. Raises UnreadableImage.

    Args:
        source: of the image.
        image: its number.
        options: of the shards.
        damaged: gets a message if the image is.
    """
    name = source.name(image)
    encoded, extension = _encoded(source.open(image), name, options, damaged=damaged)
    stem = os.path.splitext(os.path.basename(name))[0]
    plain = re.sub("[^A-Za-z0-9_-]", "_", stem)
    # The number makes keys unique; the name tells people which file it was.
    sample = f"{image:08d}-{plain[:_KEY]}"
    label = b"%d" % source.labels[image]
    return {f"{sample}.{extension}": encoded, f"{sample}.cls": label}


def _add_members(archive: tarfile.TarFile, members: Mapping[str, bytes]) -> None:
    """Append files to an archive: of the year 1970 and nobody's, so that bytes are the same."""
    for name, content in members.items():
        info = tarfile.TarInfo(name)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))


def _encoded(
    stored: base.Image,
    name: str,
    options: Options,
    damaged: list[str],
) -> tuple[bytes, str]:
    """Return an image as it is packed, and its extension. Raises UnreadableImage.

    Args:
        stored: the image in its source.
        name: what errors call it.
        options: of the shards.
        damaged: gets a message if the image is.
    """
    # All of it is decoded: damage is cheaper to find now than in every epoch.
    pixels = stored.pixels()
    if stored.damage:
        damaged.append(stored.damage)
    smaller = _smaller(pixels, options.short_side)
    if smaller is not None:
        _check_sides(smaller, name)
        return _file(smaller, "JPEG", quality=options.quality), "jpg"
    # Files keep their bytes, so that training decodes the same pixels from shards.
    if isinstance(stored, EncodedImage):
        is_png = stored.encoded.startswith(b"\x89PNG")
        return stored.encoded, "png" if is_png else "jpg"
    # Three equal channels are stored as one, and read as three.
    is_grey = bool((pixels == pixels[:1]).all())
    return _file(_picture(pixels[:1] if is_grey else pixels), "PNG"), "png"


def _smaller(pixels: torch.Tensor, most: int | None) -> Image.Image | None:
    """Return an image whose short side is `most`; None if its is no longer, or may be any."""
    height, width = pixels.shape[1:]
    short_side = min(height, width)
    if most is None or short_side <= most:
        return None
    ratio = most / short_side
    size = (round(width * ratio), round(height * ratio))
    return _picture(pixels).resize(size, Image.Resampling.BICUBIC)


def _check_sides(image: Image.Image, name: str) -> None:
    """Raise UnreadableImage for an image that no JPEG can hold."""
    longer = max(image.size)
    if longer > _MOST_OF_SIDE:
        raise UnreadableImage(
            f"{name}: {longer:,} pixels long when made smaller, but a JPEG has at most "
            f"{_MOST_OF_SIDE:,}; give a smaller --short-side, or leave it out by --skip-bad"
        )


def _picture(pixels: torch.Tensor) -> Image.Image:
    """Return Pillow's image of `pixels`, uint8 [1 or 3, height, width], grey or RGB."""
    rows = pixels.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(rows[:, :, 0] if rows.shape[2] == 1 else rows)


def _file(image: Image.Image, kind: str, **options: int) -> bytes:
    """Return the bytes of a file of that kind."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()

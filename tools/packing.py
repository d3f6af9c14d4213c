"""Packing the images of a source into tar shards: what goes where."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import tarfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import numpy as np
import torch
from PIL import Image

from data import base, shard_index
from data.base import Pixels, Source, UnreadableImage
from data.encoded import EncodedImage
from data.local import LocalFolder, MissingFile
from data.shard_index import Index, Manifest, Shard
from parallel import parent_death
from parallel.parent_death import die_with_parent
from recipe.errors import DataError
from recipe.files import replacing, write
from recipe.randomness import bits32, key
from tools.indexing import scan
from training import progress

_KEY = 60  # characters of a name that a key keeps: a tar's plain header holds 100 in all


class Options(NamedTuple):
    """How shards are made. short_side: pixels; None leaves images as they are. keep_order: number images as the source
    does, instead of in a random order, for which `seed` is."""

    images_per_shard: int = 1000
    short_side: int | None = None
    quality: int = 92
    seed: int = 0
    skip_bad: bool = False
    keep_order: bool = False


class _Task(NamedTuple):
    """Everything that a process needs to make any shard."""

    source: Source
    folder: Path
    options: Options
    plan: str
    images_done: Synchronized  # of all shards; shared by the processes


class Packed(NamedTuple):
    """A shard that was packed."""

    index: Index
    left_out: list[str]  # why images were, one message each
    damaged: list[str]  # about images that were packed in spite of a fault, one message each


def pack(
    source: Source, folder: str, options: Options, workers: int, advance: Callable[[int, int], None]
) -> tuple[Manifest, int, int, list[str], list[str]]:
    """Pack all images of a source into shards, with indexes and manifest. Shards of an interrupted call are kept.

    Images are spread over the shards at random, a function of the seed, or lie in the order of the source. Files keep
    their bytes; images that are none become PNG files of the same pixels. The same images and options give the same
    bytes, whatever the number of workers (processes). advance(done, all) is called as shards are finished; a line each
    ten seconds says how many images are done.

    Returns the manifest, the numbers of shards that were kept and of images left out, and, of this call, the reasons
    for these and messages about damaged images that were packed.
    Raises DataError: `folder` holds other shards, or a shard would have no images; UnreadableImage unless
    options.skip_bad; OSError.
    """
    order = np.arange(len(source), dtype=np.int64)
    if not options.keep_order:
        order = np.argsort(bits32(key("order of packing", options.seed), order))
    size = options.images_per_shard
    count = -(-len(source) // size)
    names = (f"{number:0{max(6, len(str(count - 1)))}d}.tar" for number in range(count))
    shards = {name: order[first : first + size].tolist() for name, first in zip(names, range(0, count * size, size))}
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
    indexes = _finished(task, shards)
    kept = len(indexes)
    missing = {name: images for name, images in shards.items() if name not in indexes}
    advance(kept, count)
    reasons = []
    damaged = []
    images = sum(map(len, missing.values()))
    with progress.lines(lambda: f"packing: {task.images_done.value:,} of {images:,} images"):
        for name, packed in _all_packed(task, missing, min(workers, len(missing)), context):
            indexes[name] = packed.index
            reasons += packed.left_out
            damaged += packed.damaged
            advance(len(indexes), count)
    manifest = make_manifest(source.classes, {name: indexes[name] for name in shards})
    write(Path(folder, shard_index.MANIFEST), shard_index.encode_manifest(manifest), durable=True)
    skipped = len(source) - sum(shard.images for shard in manifest.shards)
    return manifest, kept, skipped, reasons, damaged


def make_manifest(classes: tuple[str, ...], indexes: dict[str, Index]) -> Manifest:
    """The manifest of shards whose indexes are given by name, in their order."""
    shards = (Shard(name, index.bytes, len(index.labels), index.sha256) for name, index in indexes.items())
    return Manifest(classes, tuple(shards))


def _digest(source: Source, options: Options) -> str:
    """Digest of all that shards are a function of, except the bytes of files, and skip_bad, which may change."""
    how = list(options._replace(skip_bad=False))
    if not options.keep_order:  # shards that were packed before there was a choice have this digest
        how.pop()
    digest = hashlib.sha256(json.dumps([how, source.classes]).encode())
    digest.update(source.labels.tobytes())
    for index in range(len(source)):
        digest.update(os.fsencode(os.path.basename(source.name(index))) + b"\0")
    (first,) = source.open_all([0])
    if isinstance(first, Pixels):  # sources without files: other pixels may have the same names and labels
        digest.update(source.digest.encode() + first.pixels().contiguous().numpy().tobytes())
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


def _all_packed(
    task: _Task, shards: dict[str, list[int]], workers: int, context: BaseContext
) -> Iterator[tuple[str, Packed]]:
    if workers <= 1:
        yield from ((name, _pack_shard(task, name, images)) for name, images in shards.items())
        return
    with ProcessPoolExecutor(workers, context, _begin, (task,)) as pool:
        yield from zip(shards, pool.map(_work, shards, shards.values()))


def _begin(task: _Task) -> None:
    global _task
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the parent
    _task = task


def _work(name: str, images: list[int]) -> Packed:
    return _pack_shard(_task, name, images)


def _pack_shard(task: _Task, name: str, images: list[int]) -> Packed:
    """Write a shard, for each image the members KEY.EXTENSION and KEY.cls, and its index."""
    source, path = task.source, task.folder / name
    reasons: list[str] = []
    damaged: list[str] = []
    with replacing(path, durable=True) as temporary:
        with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
            for image in images:
                with task.images_done.get_lock():
                    task.images_done.value += 1
                called = source.name(image)
                try:
                    encoded, extension = _ready(source.open(image), task.options, damaged)
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
        index = scan(LocalFolder(str(task.folder)), temporary.name, end).index._replace(plan=task.plan)
    write(task.folder / shard_index.index_name(name), shard_index.encode_index(index), durable=True)
    return Packed(index, reasons, damaged)


def _ready(stored: base.Image, options: Options, damaged: list[str]) -> tuple[bytes, str]:
    """An image as it is packed, and its extension. Raises UnreadableImage. Args: damaged: gets a message if it is."""
    # All of it is decoded: damage is cheaper to find now than in every epoch.
    pixels = stored.pixels()
    if stored.damage:
        damaged.append(stored.damage)
    height, width = pixels.shape[1:]
    if options.short_side is not None and min(height, width) > options.short_side:
        ratio = options.short_side / min(height, width)
        image = _picture(pixels).resize((round(width * ratio), round(height * ratio)), Image.Resampling.BICUBIC)
        return _file(image, "JPEG", quality=options.quality), "jpg"
    if isinstance(stored, EncodedImage):
        return stored.encoded, "png" if stored.encoded.startswith(b"\x89PNG") else "jpg"
    grey = bool((pixels == pixels[:1]).all())
    return _file(_picture(pixels[:1] if grey else pixels), "PNG"), "png"


def _picture(pixels: torch.Tensor) -> Image.Image:
    """Pillow's image of uint8 [1 or 3, height, width], grey or RGB."""
    rows = pixels.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(rows[:, :, 0] if rows.shape[2] == 1 else rows)


def _file(image: Image.Image, kind: str, **options: int) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()

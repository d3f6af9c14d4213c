"""Packing a source of files into shards: what goes where, and the processes that do it."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import re
import signal
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

import numpy as np
from PIL import Image

from data import decode, shard_index
from data.base import UnreadableImage
from data.encoded import EncodedSource
from data.local import LocalFolder, MissingFile
from data.shard_index import Index, Manifest, Shard
from parallel.parent_death import die_with_parent
from recipe.errors import DataError
from recipe.files import replacing, write
from recipe.randomness import bits32, key
from tools.shard_tar import scan, write_shard

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


_Shards = Dict[str, List[int]]  # numbers of the images, in their order, by the shard's name
_Made = Tuple[Index, List[str]]


def pack(
    source: EncodedSource, folder: str, options: Options, workers: int, advance: Callable[[int, int], None]
) -> tuple[Manifest, int, int, list[str]]:
    """Pack all images of a source into shards, with indexes and manifest. Shards of an interrupted call are kept.

    Images are spread over the shards at random, a function of the seed. The same images and options give the same
    bytes, whatever the number of workers (processes). advance(done, all) is called as shards are finished.

    Returns:
        The manifest, the number of shards that were kept, that of images left out, and the reasons found by this call.

    Raises:
        DataError: `folder` holds other shards; a shard would have no images.
        UnreadableImage: unless options.skip_bad.
        OSError: while writing.
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
    """The manifest of shards. Args: indexes: by the shard's name, in the order of the shards."""
    shards = (Shard(name, index.bytes, len(index.labels), index.sha256) for name, index in indexes.items())
    return Manifest(classes, tuple(shards))


def _digest(source: EncodedSource, options: Options) -> str:
    """Digest of all that shards are a function of, but for the images' bytes.

    Not of options.skip_bad: a user who learns of a bad image after an hour goes on with it.
    """
    digest = hashlib.sha256(json.dumps([options._replace(skip_bad=False), source.classes]).encode())
    digest.update(source.labels.tobytes())
    for index in range(len(source)):
        digest.update(os.fsencode(os.path.basename(source.name(index))) + b"\0")
    return digest.hexdigest()


def _finished(task: _Task, shards: _Shards) -> dict[str, Index]:
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


def _all_packed(task: _Task, shards: _Shards, workers: int) -> Iterator[tuple[str, _Made]]:
    """Each shard's name, index and reasons why images were left out, as they are finished."""
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


def _work(name: str, images: list[int]) -> _Made:
    return _pack_shard(_task, name, images)


def _pack_shard(task: _Task, name: str, images: list[int]) -> _Made:
    source, path, reasons = task.source, task.folder / name, []

    def packed() -> Iterator[Tuple[str, bytes, int]]:
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
            yield f"{image:08d}-{stem}.{extension}", encoded, int(source.labels[image])
        if len(reasons) == len(images):
            raise DataError(f"{path}: none of its images can be read; pack more images into each shard")

    with replacing(path, durable=True) as temporary:
        write_shard(temporary, packed())
        index = scan(LocalFolder(str(task.folder)), temporary.name, temporary.stat().st_size)._replace(plan=task.plan)
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

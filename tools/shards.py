"""Makes and checks tar shards: python -m tools.shards pack | index | verify ...

pack writes class folders, ImageNet's archives, or the images of a recipe into shards. index makes the indexes and
manifest of other shards.
verify reads a set of shards and compares it with its checksums. See docs/shards.md.
With --json the last line is one JSON object. Exit codes: 0 done, 1 failed, 2 the input is wrong.
"""

from __future__ import annotations

import os
import re
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import argparse
import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Callable, Iterator, Sequence

import numpy as np

from data import damage, shard_index
from data.base import Names, Source, UnreadableImage
from data.encoded import EncodedImage
from data.folder import FolderSource
from data.local import Folder, LocalFolder
from data.shard_index import MANIFEST, Manifest, Shard
from data.shards import open_folder
from data.sources import open_source
from recipe import cores, loading
from recipe.division import count
from recipe.errors import DONE, FAILED, WRONG_INPUT, DataError
from recipe.files import write
from recipe.json_text import json_text
from tools import imagenet
from tools.arguments import whole, within
from tools.indexing import LeftOut, scan
from tools.packing import Options, make_manifest, pack
from training import progress
from training.command import Parser, fail, one_line

_NAMED = 20  # faults that verify names, and images that pack names
_MAX_NUMBERED = 100_000  # classes without names


@one_line("rerun the same command: it goes on where it was")
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code, text, data = options.run(options)
    except BrokenProcessPool:
        return fail("a worker was killed, perhaps for want of memory; rerun the command with fewer --workers", FAILED)
    print(text)
    if options.json:
        print(json_text(data))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m tools.shards", description="Make and check tar shards.")
    commands = parser.add_subparsers(required=True, metavar="pack | index | verify")

    packing = commands.add_parser(
        "pack", help="write class folders, ImageNet's archives or a recipe's images into shards"
    )
    places = "class folders (not for archives and recipes); shards; keys of the recipe, section.key=value"
    packing.add_argument("places", nargs="+", metavar="FOLDER DEST", help=places)
    packing.add_argument("--imagenet-train", metavar="TAR", help="ILSVRC2012_img_train.tar, in the place of FOLDER")
    packing.add_argument("--imagenet-validation", metavar="TAR", help="ILSVRC2012_img_val.tar, in the place of FOLDER")
    packing.add_argument("--ground-truth", metavar="FILE", help="class of each validation image, a line each")
    packing.add_argument("--devkit", metavar="TAR", help="ILSVRC2012_devkit_t12.tar.gz, if the lines are its numbers")
    packing.add_argument("--config", metavar="FILE", help="a recipe, whose images are packed in the place of FOLDER")
    packing.add_argument("--split", choices=("train", "validation"), help="which of the recipe's images (train)")
    packing.add_argument("--images-per-shard", type=whole, default=1000, metavar="N", help="1000")
    packing.add_argument("--short-side", type=whole, metavar="PIXELS", help="make images with a longer one smaller")
    packing.add_argument("--quality", type=within(1, 95), default=92, metavar="Q", help="of those, as JPEG (92)")
    packing.add_argument("--workers", type=whole, default=cores.available(), metavar="N", help="processes")
    packing.add_argument("--seed", type=int, metavar="N", help="of the order of the images (0)")
    packing.add_argument("--keep-order", action="store_true", help="number images as the source does; not in a mixture")
    packing.add_argument("--skip-bad", action="store_true", help="leave out and count images that cannot be read")
    packing.set_defaults(run=_pack)

    indexing = commands.add_parser("index", help="make indexes and manifest of shards that are there")
    indexing.add_argument("folder", metavar="FOLDER")
    names = "names of the classes, a line each; else those of shards.json, or 0, 1, 2 ..."
    indexing.add_argument("--classes", metavar="FILE", help=names)
    indexing.set_defaults(run=_index)

    verifying = commands.add_parser("verify", help="compare all bytes with their checksums")
    verifying.add_argument("folder", metavar="FOLDER_OR_URL")
    verifying.add_argument("--decode", action="store_true", help="decode every image, too")
    verifying.set_defaults(run=_verify)
    for command in (packing, indexing, verifying):
        command.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    return parser


def _pack(options: argparse.Namespace) -> tuple[int, str, dict]:
    if options.keep_order and options.seed is not None:
        raise DataError("--seed mixes the images, and --keep-order leaves them in order; give one of them")
    try:
        with progress.lines(lambda: "listing the images"):
            source, folder = _source(options)
    except OSError as error:
        if error.filename is None:
            raise
        raise DataError(f"{error.filename}: {error.strerror}; name the files as they were downloaded") from None
    how = Options(
        images_per_shard=options.images_per_shard,
        short_side=options.short_side,
        quality=options.quality,
        seed=options.seed or 0,
        skip_bad=options.skip_bad,
        keep_order=options.keep_order,
    )
    for note in source.notes:
        print(note, flush=True)
    manifest, kept, skipped, reasons, damaged = pack(source, folder, how, options.workers, _advance)
    text, data = _summary(folder, manifest)
    data.update(kept=kept, skipped=skipped, named=reasons[:_NAMED])
    damage.report(damaged)
    for reason in data["named"]:
        print(f"left out: {reason}", file=sys.stderr)
    return DONE, f"{text}; {count(kept, 'shard')} there before, {count(skipped, 'unreadable image')} left out", data


def _source(options: argparse.Namespace) -> tuple[Source, str]:
    """The images to pack, and the folder for the shards. Raises ConfigError, DataError, OSError."""
    train, validation, truth = options.imagenet_train, options.imagenet_validation, options.ground_truth
    others = [given for given in (train, validation, options.config) if given]
    # Where there are no class folders the first place is the folder of the shards; keys of a recipe follow it.
    keys = options.places[1:] if options.config else []
    if len(others) > 1 or len(options.places) - len(keys) != (1 if others else 2):
        archives = "pack --imagenet-train TAR DEST, or pack --imagenet-validation TAR --ground-truth FILE DEST"
        raise DataError(
            f"pack FOLDER DEST, {archives}, or pack --config FILE [--split SPLIT] DEST [section.key=value ...]"
        )
    if bool(validation) != bool(truth) or (options.devkit and not validation):
        raise DataError("--imagenet-validation and --ground-truth go together, and --devkit with both; give all")
    if options.split and not options.config:
        raise DataError("--split chooses among the images of a recipe; give --config FILE, too")
    folder = options.places[0 if others else 1]
    if options.config and re.match(r"\w+\.\w+=", folder):
        raise DataError(f"{folder}: is no folder; name the folder of the shards before the keys of the recipe")
    if "://" in folder:
        raise DataError(f"{folder}: shards are packed on this machine; name a folder, and copy it there afterwards")
    if options.config:
        recipe = loading.load(options.config, keys)
        return open_source(recipe.data, recipe.model.classes, options.split or "train"), folder
    if train:
        return imagenet.training(train), folder
    if validation:
        return imagenet.validation(validation, truth, options.devkit), folder
    return FolderSource(options.places[0]), folder


def _index(options: argparse.Namespace) -> tuple[int, str, dict]:
    folder = LocalFolder(options.folder)
    try:
        listed = os.listdir(options.folder)
    except OSError as error:
        raise DataError(f"{options.folder}: {error.strerror}; name the folder that holds the shards") from None
    names = sorted(name for name in listed if name.endswith(".tar") and not name.startswith("."))
    if not names:
        raise DataError(f"{options.folder}: no .tar files; name the folder that holds the shards")

    sizes = {name: folder.size(name) for name in names}
    with _reading("indexing", sum(sizes.values())) as advance:
        scans = _by_threads(lambda name: scan(folder, name, sizes[name], advance=advance), names)
    indexes = {name: found.index for name, found in zip(names, scans)}
    left_out = LeftOut()
    for found in scans:
        left_out.merge(found.left_out)
    for line in left_out.lines(options.folder):
        print(line, flush=True)
    classes = _classes(options.classes, max(int(index.labels.max()) for index in indexes.values()), folder)
    files = {shard_index.index_name(name): shard_index.encode_index(index) for name, index in indexes.items()}
    manifest = make_manifest(classes, indexes)
    for name, content in {**files, MANIFEST: shard_index.encode_manifest(manifest)}.items():
        write(Path(folder.path(name)), content, durable=True)
    text, data = _summary(options.folder, manifest)
    data.update(left_out=left_out.counts())
    return DONE, text, data


def _classes(file: str | None, largest: int, folder: Folder) -> tuple[str, ...]:
    """Names of the classes: of the file, else those of an earlier manifest, else numbers up to the largest label."""
    if file is None:
        with contextlib.suppress(DataError):
            before = shard_index.read_manifest(folder).classes
            if largest < len(before):
                return before
        if largest >= _MAX_NUMBERED:
            most = f"without --classes FILE there are at most {_MAX_NUMBERED:,} classes"
            raise DataError(f"{folder.place}: label {largest}, but {most}; name them all, or mend the label")
        return tuple(map(str, range(largest + 1)))
    try:
        classes = tuple(line.strip() for line in Path(file).read_text("utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        fault = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        raise DataError(f"{file}: {fault}; give --classes a file with the name of a class in each line") from None
    if largest >= len(classes):
        raise DataError(f"{file}: {len(classes)} classes, but the shards have label {largest}; name all classes")
    return classes


def _verify(options: argparse.Namespace) -> tuple[int, str, dict]:
    folder = open_folder(options.folder)
    manifest = shard_index.read_manifest(folder)

    with _reading("verifying", sum(shard.bytes for shard in manifest.shards)) as advance:
        check = functools.partial(_faults, folder, len(manifest.classes), options.decode, advance)
        faults = [fault for found in _by_threads(check, manifest.shards) for fault in found]
    text, data = _summary(folder.place, manifest)
    counted = count(len(faults), "fault")
    for fault in faults[:_NAMED]:
        print(fault, file=sys.stderr)
    if faults:
        more = f", {_NAMED} of them named above" if len(faults) > _NAMED else ""
        print(f"{folder.place}: {counted}{more}; copy or make these shards again", file=sys.stderr)
    data.update(faults=len(faults), named=faults[:_NAMED])
    return (WRONG_INPUT if faults else DONE), f"{text}; {counted}", data


def _faults(folder: Folder, classes: int, decoded: bool, advance: Callable[[int], None], shard: Shard) -> list[str]:
    faults: list[str] = []
    place = folder.path(shard.name)

    def look(name: str, encoded: bytes) -> None:
        try:
            image = EncodedImage(encoded, f"{place}/{name}")
            image.pixels()
            damage.report([image.damage] if image.damage else [])
        except UnreadableImage as error:
            faults.append(str(error))

    try:
        index = shard_index.read_index(folder, shard, classes)
        look_at = look if decoded else lambda *_: None
        found = scan(folder, shard.name, shard.bytes, look_at, advance).index
    except DataError as error:
        return [*faults, str(error)]
    if any(not np.array_equal(*pair) for pair in zip(index[:2], found[:2])) or index.names != found.names:
        return [*faults, f"{place}: other images, or at other places, than in its index"]
    sound, names = len(faults), Names([index.names], [index.name_lengths])
    for number in np.flatnonzero(index.crc32 != found.crc32).tolist():
        faults.append(f"{place}/{os.fsdecode(names[number])}: not the bytes that the index has the checksum of")
    for number in np.flatnonzero(index.labels != found.labels).tolist():
        labels = f"label {found.labels[number]}, but its index says {index.labels[number]}"
        faults.append(f"{place}/{os.fsdecode(names[number])}: {labels}")
    if len(faults) == sound and index.sha256 != found.sha256:
        faults.append(f"{place}: not the bytes that {MANIFEST} has the checksum of, but no image is affected")
    return faults


def _summary(place: str, manifest: Manifest) -> tuple[str, dict]:
    """Size and place of a set of shards, for people and for programs."""
    data = {
        "folder": place,
        "shards": len(manifest.shards),
        "images": sum(shard.images for shard in manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "classes": len(manifest.classes),
    }
    images = count(data["images"], "image")
    classes = count(data["classes"], "class", "classes")
    shards = count(data["shards"], "shard")
    return f"{place}: {images} of {classes} in {shards}, {data['bytes']:,} bytes", data


@contextlib.contextmanager
def _reading(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Print how many of `total` bytes are read, a line each ten seconds. Yields what counts them, in any thread."""
    lock = threading.Lock()
    done = 0

    def advance(number: int) -> None:
        nonlocal done
        with lock:
            done += number

    with progress.lines(lambda: f"{what}: {done / 1e9:,.2f} of {total / 1e9:,.2f} GB are read"):
        yield advance


def _by_threads(work: Callable, tasks: Sequence) -> list:
    """The result of each task, in their order. Checksums and decoders let other threads run."""
    found = []
    with ThreadPoolExecutor(cores.available()) as pool:
        for result in pool.map(work, tasks):
            found.append(result)
            _advance(len(found), len(tasks))
    return found


def _advance(done: int, total: int) -> None:
    """Print progress, about twenty times."""
    if done and (done == total or done % max(1, total // 20) == 0):
        print(f"{done} of {total} shards", flush=True)

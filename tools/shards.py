"""Makes and checks tar shards: python -m tools.shards pack | index | verify ...

pack writes class folders, ImageNet's archives, or the images of a recipe into shards.
index makes the indexes and manifest of other shards.
verify reads a set of shards and compares it with its checksums.

See docs/shards.md.
With --json the last line is one JSON object. Exit codes: 0 done, 1 failed, 2 the input is wrong.
"""

from __future__ import annotations

import os
import re
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from common.command import run

    run(__file__)

import argparse
import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence, TypeVar

import numpy as np

from common import cores, progress
from common.command import Parser, SubcommandParser, fail, one_line
from common.errors import DONE, FAILED, WRONG_INPUT, DataError
from common.files import write
from common.json_io import json_text
from common.text import count
from data import damage, shard_index
from data.base import Names, Source, UnreadableImage
from data.encoded import EncodedImage
from data.folder import FolderSource
from data.local import Folder, LocalFolder, MissingFile
from data.shard_index import MANIFEST, Index, Manifest, Shard
from data.shards import open_folder
from data.sources import class_names, open_source
from recipe import loading
from tools import imagenet
from tools.arguments import whole, within
from tools.indexing import LeftOut, Scan, scan
from tools.packing import Options, make_manifest, pack

_NAMED = 20  # faults that verify names, and images that pack names
_MAX_NUMBERED = 100_000  # classes without names
_LINES = 20  # of progress, about
_ROUTES = (
    "pack FOLDER DEST, pack --imagenet-train TAR DEST, "
    "or pack --imagenet-validation TAR --ground-truth FILE DEST, "
    "or pack --config FILE [--split SPLIT] DEST [section.key=value ...]"
)

Task = TypeVar("Task")
Result = TypeVar("Result")


class _Report(NamedTuple):
    """How a command ended.

    code: of the exit.
    text: the last line for people.
    data: the same for programs.
    """

    code: int
    text: str
    data: dict[str, Any]


@one_line("rerun the same command: it goes on where it was")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None: those of the process.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    try:
        report = options.run(options)
    # Linux kills a process that takes too much memory without a word.
    except BrokenProcessPool:
        return fail(
            "a worker was killed, perhaps for want of memory; rerun the command with fewer --workers",
            FAILED,
        )
    print(report.text)
    if options.json:
        print(json_text(report.data))
    return report.code


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(prog="python -m tools.shards", description="Make and check tar shards.")
    commands = parser.add_subparsers(
        required=True,
        metavar="pack | index | verify",
        parser_class=SubcommandParser,
    )
    about = "write class folders, ImageNet's archives or a recipe's images into shards"
    packing = commands.add_parser("pack", help=about)
    _add_pack_arguments(packing)
    indexing = commands.add_parser(
        "index", help="make indexes and manifest of shards that are there"
    )
    _add_index_arguments(indexing)
    verifying = commands.add_parser("verify", help="compare all bytes with their checksums")
    _add_verify_arguments(verifying)
    # Behind the name of the command, where people write it.
    for command in (packing, indexing, verifying):
        command.add_argument(
            "--json", action="store_true", help="end with one JSON object in one line"
        )
    return parser


def _add_pack_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `pack`."""
    add = parser.add_argument
    places = "class folders (not for archives and recipes); shards; keys of the recipe, section.key=value"
    add("places", nargs="+", metavar="FOLDER DEST", help=places)
    # Where images come from, if not from class folders.
    add("--imagenet-train", metavar="TAR", help="ILSVRC2012_img_train.tar, in the place of FOLDER")
    validation = "ILSVRC2012_img_val.tar, in the place of FOLDER"
    add("--imagenet-validation", metavar="TAR", help=validation)
    add("--ground-truth", metavar="FILE", help="class of each validation image, a line each")
    devkit = "ILSVRC2012_devkit_t12.tar.gz, if the lines are its numbers"
    add("--devkit", metavar="TAR", help=devkit)
    add("--config", metavar="FILE", help="a recipe, whose images are packed in the place of FOLDER")
    split = "which of the recipe's images (train)"
    add("--split", choices=("train", "validation"), help=split)
    # How they are packed.
    quality = within(1, 95)
    processes = cores.available()
    add("--images-per-shard", type=whole, default=1000, metavar="N", help="1000")
    add("--short-side", type=whole, metavar="PIXELS", help="make images with a longer one smaller")
    add("--quality", type=quality, default=92, metavar="Q", help="of those, as JPEG (92)")
    add("--workers", type=whole, default=processes, metavar="N", help="processes")
    add("--seed", type=int, metavar="N", help="of the order of the images (0)")
    keep_order = "number images as the source does; not in a mixture"
    add("--keep-order", action="store_true", help=keep_order)
    skip_bad = "leave out and count images that cannot be read"
    add("--skip-bad", action="store_true", help=skip_bad)
    parser.set_defaults(run=_pack)


def _add_index_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `index`."""
    parser.add_argument("folder", metavar="FOLDER")
    names = "names of the classes, a line each; else those of shards.json, or 0, 1, 2 ..."
    parser.add_argument("--classes", metavar="FILE", help=names)
    parser.set_defaults(run=_index)


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `verify`."""
    parser.add_argument("folder", metavar="FOLDER_OR_URL")
    parser.add_argument("--decode", action="store_true", help="decode every image, too")
    parser.set_defaults(run=_verify)


def _pack(options: argparse.Namespace) -> _Report:
    """Pack images into shards."""
    if options.keep_order and options.seed is not None:
        raise DataError(
            "--seed mixes the images, and --keep-order leaves them in order; give one of them"
        )
    folder = _destination(options)
    try:
        with progress.lines(lambda: "listing the images"):
            source, classes_sorted = _source(options)
    except OSError as error:
        # A fault without a file is not one of the input.
        if error.filename is None:
            raise
        fault = f"{error.filename}: {error.strerror}"
        raise DataError(f"{fault}; name the files as they were downloaded") from None
    # Before packing, which may take hours: what is left out may be a mistake.
    for note in source.notes:
        print(note, flush=True)
    packed = pack(
        source,
        folder,
        _packing_options(options),
        workers=options.workers,
        advance=_print_progress,
        classes_sorted=classes_sorted,
    )
    # A damaged disk leaves out thousands: the first ones are named, all are counted.
    named = packed.left_out[:_NAMED]
    damage.report(packed.damaged)
    for reason in named:
        print(f"left out: {reason}", file=sys.stderr)
    data = _summary(folder, packed.manifest)
    data.update(kept=packed.kept, skipped=packed.skipped, named=named)
    kept = f"{count(packed.kept, 'shard')} there before"
    skipped = f"{count(packed.skipped, 'unreadable image')} left out"
    text = f"{_in_words(data)}; {kept}, {skipped}"
    return _Report(DONE, text, data)


def _packing_options(options: argparse.Namespace) -> Options:
    """Return how shards are made, from the options of the command line."""
    return Options(
        images_per_shard=options.images_per_shard,
        short_side=options.short_side,
        quality=options.quality,
        seed=options.seed or 0,
        skip_bad=options.skip_bad,
        keep_order=options.keep_order,
    )


def _destination(options: argparse.Namespace) -> str:
    """Return the folder for the shards, if options and places go together. Raises DataError."""
    train = options.imagenet_train
    validation = options.imagenet_validation
    sources = [given for given in (train, validation, options.config) if given]
    # Without class folders the first place is the folder of the shards; keys of a recipe follow it.
    places = options.places[:1] if options.config else options.places
    expected = 1 if sources else 2
    if len(sources) > 1 or len(places) != expected:
        raise DataError(_ROUTES)
    _check_together(options)
    folder = places[-1]
    # Keys of a recipe alone: their first one would become the folder.
    if options.config and re.match(r"\w+\.\w+=", folder):
        raise DataError(
            f"{folder}: is no folder; name the folder of the shards before the keys of the recipe"
        )
    if "://" in folder:
        raise DataError(
            f"{folder}: shards are packed on this machine; name a folder, and copy it there afterwards"
        )
    return folder


def _check_together(options: argparse.Namespace) -> None:
    """Refuse options without those that they go with. Raises DataError."""
    validation = bool(options.imagenet_validation)
    if validation != bool(options.ground_truth) or (options.devkit and not validation):
        raise DataError(
            "--imagenet-validation and --ground-truth go together, and --devkit with both; give all"
        )
    if options.split and not options.config:
        raise DataError("--split chooses among the images of a recipe; give --config FILE, too")


def _source(options: argparse.Namespace) -> tuple[Source, bool]:
    """Return the images to pack, and whether their classes are numbered in the order of their names.

    Raises ConfigError, DataError, OSError.
    """
    if options.config:
        recipe = loading.load(options.config, options.places[1:])
        split = options.split or "train"
        source = open_source(recipe.data, recipe.model.classes, split)
        # Validation images have the labels of the training images, where there are any.
        named = class_names(recipe.data, "train") or class_names(recipe.data, split)
        return source, named is not None and named.sorted
    if options.imagenet_train:
        return imagenet.training(options.imagenet_train), True
    if options.imagenet_validation:
        archive = options.imagenet_validation
        return imagenet.validation(archive, options.ground_truth, options.devkit), True
    return FolderSource(options.places[0]), True


def _index(options: argparse.Namespace) -> _Report:
    """Make indexes and manifest of the shards in a folder."""
    place = options.folder
    folder = LocalFolder(place)
    try:
        listed = os.listdir(place)
    except OSError as error:
        fault = f"{place}: {error.strerror}"
        raise DataError(f"{fault}; name the folder that holds the shards") from None
    # In the order of their names, in which images are numbered.
    names = sorted(name for name in listed if name.endswith(".tar") and not name.startswith("."))
    if not names:
        raise DataError(f"{place}: no .tar files; name the folder that holds the shards")
    # Before the shards, which may take hours to read.
    before = _earlier_manifest(folder, has_names=options.classes is not None)
    # All of them are read before anything is written.
    scans = _scanned(folder, names)
    indexes = {}
    left_out = LeftOut()
    for name, scanned in zip(names, scans):
        indexes[name] = scanned.index
        left_out.merge(scanned.left_out)
    for line in left_out.lines(place):
        print(line, flush=True)
    indexes = _with_plans(folder, indexes, before)
    manifest = _manifest(folder, indexes, before, file=options.classes)
    _write_indexes(folder, indexes, manifest)
    data = _summary(place, manifest)
    data.update(left_out=left_out.counts())
    return _Report(DONE, _in_words(data), data)


def _scanned(folder: LocalFolder, names: Sequence[str]) -> list[Scan]:
    """Read shards, and print how far that is."""
    sizes = {name: folder.size(name) for name in names}
    with _reading("indexing", sum(sizes.values())) as advance:
        return _by_threads(
            lambda name: scan(folder, name, sizes[name], advance=advance),
            names,
            folder.most_streams,
        )


def _write_indexes(folder: LocalFolder, indexes: Mapping[str, Index], manifest: Manifest) -> None:
    """Write the indexes of shards, by their names, and the manifest."""
    for name, index in indexes.items():
        file = folder.path(shard_index.index_name(name))
        write(Path(file), shard_index.encode_index(index), durable=True)
    # The manifest comes last: it lists indexes that are there.
    write(Path(folder.path(MANIFEST)), shard_index.encode_manifest(manifest), durable=True)


def _with_plans(
    folder: Folder,
    indexes: Mapping[str, Index],
    manifest: Manifest | None,
) -> dict[str, Index]:
    """Return indexes of shards, by their names, with what earlier ones say that pack made them from.

    A shard that is another by now has no plan. One whose index is gone or damaged has that of the
    others, where it is the same in all of them and the earlier manifest lists these bytes.

    Args:
        folder: of the shards.
        indexes: made anew, without plans.
        manifest: the earlier one, if any.
    """
    plans = {}
    for name, index in indexes.items():
        with contextlib.suppress(DataError):
            before = shard_index.stored_index(folder, name)
            plans[name] = before.plan if before.sha256 == index.sha256 else ""
    different = set(plans.values())
    common = different.pop() if len(different) == 1 else ""
    # Without an index a tar may be anybody's: the manifest knows those of pack.
    listed = set()
    if manifest is not None:
        listed = {(shard.name, shard.sha256) for shard in manifest.shards}
    planned = {}
    for name, index in indexes.items():
        plan = plans.get(name)
        if plan is None:
            plan = common if (name, index.sha256) in listed else ""
        planned[name] = index._replace(plan=plan)
    return planned


def _earlier_manifest(folder: Folder, has_names: bool) -> Manifest | None:
    """Return the manifest of an earlier call, if any.

    Args:
        folder: of the shards.
        has_names: whether the names of the classes are given, so that a damaged one is not needed.

    Raises:
        DataError: it is damaged, and needed.
    """
    try:
        return shard_index.read_manifest(folder)
    except MissingFile:
        return None
    except DataError:
        if has_names:
            return None
        # Numbers in the place of its names would be other classes.
        raise DataError(
            f"{folder.path(MANIFEST)}: damaged, and the names of the classes with it; "
            "give --classes FILE, or remove this file if they are called 0, 1, 2"
        ) from None


def _manifest(
    folder: Folder,
    indexes: Mapping[str, Index],
    before: Manifest | None,
    file: str | None,
) -> Manifest:
    """Return the manifest of shards, which keeps what is true of an earlier one. Raises DataError.

    Args:
        folder: of the shards.
        indexes: of the shards, by name, in their order.
        before: the earlier manifest, if any.
        file: holds the names of the classes; None: see `_classes`.
    """
    largest = max(int(index.labels.max()) for index in indexes.values())
    if file is not None:
        classes = _named_classes(file, largest)
    else:
        classes = _classes(folder, before, largest)
    manifest = make_manifest(classes, indexes)
    # Of the same shards under the same names what pack knew of their numbers stays true.
    if before is not None and before.classes == classes and {*manifest.shards} <= {*before.shards}:
        return manifest._replace(sorted=before.sorted)
    return manifest


def _classes(folder: Folder, before: Manifest | None, largest: int) -> tuple[str, ...]:
    """Return the names of the classes in an earlier manifest, else numbers. Raises DataError.

    Args:
        folder: of the shards.
        before: the earlier manifest, if any.
        largest: label of all shards.
    """
    names = before.classes if before is not None else ()
    if largest < len(names):
        return names
    # Numbers as names: one damaged label would make millions of them.
    if largest >= _MAX_NUMBERED:
        most = f"without --classes FILE there are at most {_MAX_NUMBERED:,} classes"
        raise DataError(
            f"{folder.place}: label {largest}, but {most}; name them all, or mend the label"
        )
    numbers = tuple(str(number) for number in range(largest + 1))
    # Numbers go on. The classes that have names would lose them.
    if names != numbers[: len(names)]:
        raise DataError(
            f"{folder.path(MANIFEST)}: names {count(len(names), 'class', 'classes')}, but the shards "
            f"have label {largest}; give --classes FILE with the names of all"
        )
    return numbers


def _named_classes(file: str, largest: int) -> tuple[str, ...]:
    """Return the names of the classes in a file, up to the `largest` label. Raises DataError."""
    try:
        # Editors of Windows write a mark of the byte order in front.
        lines = Path(file).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fault = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        remedy = "give --classes a file with the name of a class in each line"
        raise DataError(f"{file}: {fault}; {remedy}") from None
    classes = [line.strip() for line in lines]
    while classes and not classes[-1]:
        classes.pop()
    # Without it all later names would belong to other labels.
    if "" in classes:
        line = classes.index("") + 1
        raise DataError(f"{file}: line {line} is blank; name the class with label {line - 1} there")
    # Fewer labels than classes are no fault: a subset of a data set may lack some.
    if largest >= len(classes):
        fault = f"{file}: {len(classes)} classes, but the shards have label {largest}"
        raise DataError(f"{fault}; name all classes")
    return tuple(classes)


def _verify(options: argparse.Namespace) -> _Report:
    """Compare a set of shards with its checksums."""
    folder = open_folder(options.folder)
    manifest = shard_index.read_manifest(folder)
    data = _summary(folder.place, manifest)
    with _reading("verifying", data["bytes"]) as advance:
        examiner = _Examiner(folder, len(manifest.classes), options.decode, advance)
        by_shard = _by_threads(examiner.faults, manifest.shards, folder.most_streams)
    faults = list(itertools.chain.from_iterable(by_shard))
    # A damaged disk has thousands: the first ones are named, all are counted.
    named = faults[:_NAMED]
    for fault in named:
        print(fault, file=sys.stderr)
    counted = count(len(faults), "fault")
    if faults:
        more = f", {_NAMED} of them named above" if len(faults) > _NAMED else ""
        remedy = "copy or make these shards again"
        print(f"{folder.place}: {counted}{more}; {remedy}", file=sys.stderr)
    data.update(faults=len(faults), named=named)
    # Shards are an input: a damaged one is wrong, though the command has done its work.
    code = WRONG_INPUT if faults else DONE
    return _Report(code, f"{_in_words(data)}; {counted}", data)


class _Examiner:
    """Compares shards with their indexes."""

    def __init__(
        self,
        folder: Folder,
        classes: int,
        decodes: bool,
        advance: Callable[[int], None],
    ):
        """
        Args:
            folder: of the shards.
            classes: how many there are.
            decodes: every image is decoded, too.
            advance: gets the number of bytes of each piece that is read; called in any thread.
        """
        self._folder = folder
        self._classes = classes
        self._decodes = decodes
        self._advance = advance

    def faults(self, shard: Shard) -> list[str]:
        """Read a `shard`, and return its faults, a line each."""
        faults: list[str] = []
        place = self._folder.path(shard.name)

        def decode(name: str, encoded: bytes) -> None:
            """Note an image called `name` that cannot be decoded."""
            try:
                image = EncodedImage(encoded, f"{place}/{name}")
                image.pixels()
                damage.report([image.damage] if image.damage else [])
            except UnreadableImage as error:
                faults.append(str(error))

        look = decode if self._decodes else None
        try:
            index = shard_index.read_index(self._folder, shard, self._classes)
            scanned = scan(self._folder, shard.name, shard.bytes, look=look, advance=self._advance)
        except DataError as error:
            # Images that could not be decoded before the scan ended are named, too.
            return [*faults, str(error)]
        return faults + _differences(place, index, scanned.index)


def _differences(place: str, index: Index, scanned: Index) -> list[str]:
    """Return how a shard differs from its index, a line for each image.

    Args:
        place: of the shard.
        index: that it has.
        scanned: made of the shard itself.
    """
    has_same_offsets = np.array_equal(index.offsets, scanned.offsets)
    has_same_lengths = np.array_equal(index.lengths, scanned.lengths)
    if not has_same_offsets or not has_same_lengths or index.names != scanned.names:
        return [f"{place}: other images, or at other places, than in its index"]
    # The images are the same: only now do their numbers mean the same in both.
    faults = _image_differences(place, index, scanned)
    # Bytes between the images, such as times in headers, may differ by themselves.
    if not faults and index.sha256 != scanned.sha256:
        fault = f"not the bytes that {MANIFEST} has the checksum of"
        faults.append(f"{place}: {fault}, but no image is affected")
    return faults


def _image_differences(place: str, index: Index, scanned: Index) -> list[str]:
    """Return how images differ whose names and places are the same: checksums, then labels."""
    faults = []
    names = Names([index.names], [index.name_lengths])
    for number in np.flatnonzero(index.crc32 != scanned.crc32).tolist():
        image = f"{place}/{os.fsdecode(names[number])}"
        faults.append(f"{image}: not the bytes that the index has the checksum of")
    for number in np.flatnonzero(index.labels != scanned.labels).tolist():
        image = f"{place}/{os.fsdecode(names[number])}"
        label = scanned.labels[number]
        indexed = index.labels[number]
        faults.append(f"{image}: label {label}, but its index says {indexed}")
    return faults


def _summary(place: str, manifest: Manifest) -> dict[str, Any]:
    """Return the size and place of a set of shards, for programs."""
    return {
        "folder": place,
        "shards": len(manifest.shards),
        "images": sum(shard.images for shard in manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "classes": len(manifest.classes),
    }


def _in_words(summary: dict[str, Any]) -> str:
    """Return the size and place of a set of shards, for people."""
    images = count(summary["images"], "image")
    classes = count(summary["classes"], "class", "classes")
    shards = count(summary["shards"], "shard")
    size = f"{summary['bytes']:,} bytes"
    return f"{summary['folder']}: {images} of {classes} in {shards}, {size}"


@contextlib.contextmanager
def _reading(activity: str, total: int) -> Iterator[Callable[[int], None]]:
    """Print how many of `total` bytes are read, a line each ten seconds.

    Yields a function that counts them, in any thread.
    """
    lock = threading.Lock()
    done = 0

    def advance(number: int) -> None:
        """Count a `number` of bytes."""
        nonlocal done
        # Threads of several shards add to the same number.
        with lock:
            done += number

    def line() -> str:
        """Return how far it is."""
        return f"{activity}: {done / 1e9:,.2f} of {total / 1e9:,.2f} GB are read"

    with progress.lines(line, lambda: done / max(total, 1)):
        yield advance


def _by_threads(
    work: Callable[[Task], Result],
    tasks: Sequence[Task],
    most: int | None,
) -> list[Result]:
    """Return the result of each task, in their order, by a thread for each core.

    Args:
        work: makes a result. Checksums and decoders let other threads run.
        tasks: for it.
        most: threads; None for any number.
    """
    results = []
    threads = cores.available()
    if most is not None:
        threads = min(threads, most)
    with ThreadPoolExecutor(threads) as pool:
        # In order, so that the fault which is named first is always the same.
        for result in pool.map(work, tasks):
            results.append(result)
            _print_progress(len(results), len(tasks))
    return results


def _print_progress(done: int, total: int) -> None:
    """Print how many shards are done, about twenty times."""
    every = max(1, total // _LINES)
    if done and (done == total or done % every == 0):
        print(f"{done} of {total} shards", flush=True)

"""Our loader before 1.28 million images and over many epochs: seconds to the first micro batch, and memory.

    python -m benchmarks.loader_at_scale folder|shards|epochs

Run by benchmarks/loader.py, each in a process of its own; prints one JSON object. The images are real but few: 1,000
class folders are links to one, and 1,282 shards are links to one. So they are in the page cache, and what is measured
is not the disk.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import json
import multiprocessing
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Dict, List

from benchmarks import CACHE
from benchmarks.photographs import CLASSES, photographs, small_photographs
from benchmarks.processes import kilobytes
from data.base import Source
from data.loader import training_batches
from data.local import LocalFolder
from data.shard_index import Manifest, Shard, encode_manifest, index_name, read_manifest
from data.sources import open_source
from parallel.parent_death import bound_to_parent
from recipe.config import Data
from training.command import Parser

SHARDS = CACHE / "photographs_shards"
IMAGES_PER_SHARD = 1000
IMAGENET_CLASSES, IMAGENET_IMAGES = 1000, 1_281_167
WORKERS, EPOCHS, COUNTED_FROM = 8, 10, 3
MICRO, SIZE = 64, 224


def measure(what: str) -> Dict:
    """The output of this file, run as a process."""
    command = [sys.executable, "-m", "benchmarks.loader_at_scale", what]
    return json.loads(subprocess.run(bound_to_parent(command), check=True, stdout=subprocess.PIPE).stdout)


def packed() -> Path:
    """The photographs in shards, in the folder returned; made where they are older than the photographs."""
    paths = photographs()
    manifest = SHARDS / "shards.json"
    if not manifest.exists() or manifest.stat().st_mtime < paths[-1].stat().st_mtime:
        shutil.rmtree(SHARDS, ignore_errors=True)
        command = [sys.executable, "-m", "tools.shards", "pack", str(paths[0].parent.parent), str(SHARDS)]
        command += ["--images-per-shard", str(IMAGES_PER_SHARD)]
        subprocess.run(bound_to_parent(command), check=True, stdout=subprocess.DEVNULL)
    return SHARDS


def _of_imagenet(data: Data, classes: int) -> Dict:
    before = _resident()
    start = time.perf_counter()
    source = open_source(data, classes, "train")
    index = _resident() - before
    batches = _batches(source, data.model_copy(update={"workers": 2}), MICRO, SIZE)
    next(batches)
    seconds = time.perf_counter() - start
    batches.close()
    return {"images": len(source), "first_batch_seconds": seconds, "index_megabytes": index / 1e6}


def _folder(root: Path) -> Dict:
    """1,000 class folders with 1,281 files each, and 167 of them with one more, named as ImageNet's."""
    paths = photographs()
    longer = IMAGENET_IMAGES % IMAGENET_CLASSES
    for name, files in (
        ("long", IMAGENET_IMAGES // IMAGENET_CLASSES + 1),
        ("short", IMAGENET_IMAGES // IMAGENET_CLASSES),
    ):
        (root / name).mkdir()
        for number in range(files):
            (root / name / f"n01440764_{10_000 + number}.JPEG").symlink_to(paths[number % len(paths)])
    (root / "train").mkdir()
    for number in range(IMAGENET_CLASSES):
        (root / "train" / f"n{1_440_764 + 7919 * number:08d}").symlink_to(
            root / ("long" if number < longer else "short")
        )
    return _of_imagenet(Data(root=str(root)), IMAGENET_CLASSES)


def _shards(root: Path) -> Dict:
    """1,282 shards of 1,000 images."""
    (first, *_) = read_manifest(LocalFolder(str(packed()))).shards
    index = (SHARDS / index_name(first.name)).read_bytes()
    names = [f"train-{number:05d}.tar" for number in range(-(-IMAGENET_IMAGES // IMAGES_PER_SHARD))]
    (root / "train").mkdir()
    for name in names:
        (root / "train" / name).symlink_to(SHARDS / first.name)
        (root / "train" / index_name(name)).write_bytes(index)
    manifest = Manifest(CLASSES, tuple(Shard(name, first.bytes, first.images, first.sha256) for name in names))
    (root / "train" / "shards.json").write_bytes(encode_manifest(manifest))
    return _of_imagenet(Data(source="shards", root=str(root)), len(CLASSES))


def _epochs(_: Path) -> Dict:
    """Memory of the process and its workers at the end of each epoch, and by how much it grows an epoch."""
    paths = small_photographs()
    data = Data(root=str(paths[0].parents[2]), train_folder=paths[0].parents[1].name, workers=WORKERS)
    micro = 50
    batches = _batches(open_source(data, len(CLASSES), "train"), data, micro, 64)
    megabytes: List[float] = []
    for _ in range(EPOCHS):
        for _ in range(len(paths) // micro):
            next(batches)
        megabytes.append(_proportional() / 1e6)
    batches.close()
    counted = megabytes[COUNTED_FROM - 1 :]
    slope = statistics.linear_regression(range(len(counted)), counted).slope
    return {"megabytes": megabytes, "growth": slope}


def _batches(source: Source, data: Data, micro: int, size: int):
    return training_batches(
        source, data=data, image_size=size, global_batch=micro, micro=micro, seed=0, first_step=0, last_step=10**6
    )


def _resident() -> int:
    """Bytes of memory of this process."""
    return kilobytes("self", "status")["VmRSS"] * 1024


def _proportional() -> int:
    """Bytes of memory of this process and its workers; what several share counts once.

    Without files: of a library's pages they have the less, the more other programs use it.
    """
    processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    assert len(processes) == 1 + WORKERS, processes
    rollups = [kilobytes(process, "smaps_rollup") for process in processes]
    return 1024 * sum(rollup["Pss_Anon"] + rollup["Pss_Shmem"] for rollup in rollups)


def main() -> None:
    measured = {"folder": _folder, "shards": _shards, "epochs": _epochs}
    parser = Parser(description="a part of benchmarks.loader, which has --quick and --json")
    parser.add_argument("what", choices=measured)
    what = parser.parse_args().what
    with tempfile.TemporaryDirectory() as root:
        print(json.dumps(measured[what](Path(root))))

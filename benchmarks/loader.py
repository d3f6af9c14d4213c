"""Is our loader faster than others, and close to what decoding alone takes?

    python -m benchmarks.loader [--quick] [--json]

One process on one core, without workers; 1,200 JPEG files like ImageNet's (benchmarks/photographs.py), which are in the
page cache; random crops (area 0.05 to 1, aspect 3/4 to 4/3) and flips, at 380 and at 160 px, micro batches of 64.
Times are CPU seconds of the whole process, with all its threads. All sides take turns in an order that moves on from
turn to turn; a ratio is between neighbours, that is of one turn.

- `loader`: ours (by torch from files and from shards, by DALI) to uint8 micro batches, timm's and torchvision's to
  normalised float32 ones. timm has its own defaults (interpolation "random", a prefetcher) and is
  given bilinear, which is ours, and no prefetcher; it is compared as it is fastest.
- `decode only`: whole images decoded from memory. The fastest is the limit for loaders that decode whole images.
- `part`: what our torch reader does, one by one. `way`: from memory to boxes made that size, decoded in five ways.

Before that, with workers and all cores: the first micro batch and memory of 1.28 million images, memory over epochs
(benchmarks/loader_at_scale.py).
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import functools
import random
import statistics
import time
from typing import Any, Dict, Iterator, List, Tuple

import torch

from benchmarks import claims, loader_at_scale, loader_peers
from benchmarks.loader_parts import Side, decoders, parts, shown, ways
from benchmarks.photographs import CLASSES, FOLDER, photographs
from data.loader import training_batches
from data.sources import open_source
from recipe.config import Data

SIZES = (380, 160)
MICRO = 64
TURNS = 15  # of one micro batch each: the shorter they are, the less the machine changes from one side to the next
REPETITIONS = 3  # of what runs in processes of its own
READERS = ("ours, torch", "ours, torch, shards", "ours, DALI")
_STILL = 0.01  # seconds without work by which threads are known to be idle

Key = Tuple[str, str]


def our_data(reader: str) -> Data:
    """The data section of a recipe for one of READERS."""
    root = {"root": str(FOLDER.parent), "crop_area": loader_peers.AREA, "crop_aspect": loader_peers.ASPECT}
    if reader == "ours, DALI":
        return Data(**root, train_folder=FOLDER.name, reader="dali", workers=1)
    if reader == "ours, torch, shards":
        return Data(**root, source="shards", train_folder=loader_at_scale.packed().name, workers=0)
    return Data(**root, train_folder=FOLDER.name, workers=0)


def our_batches(reader: str, size: int) -> Iterator[Any]:
    data = our_data(reader)
    return training_batches(
        open_source(data, len(CLASSES), "train"),
        data=data,
        image_size=size,
        global_batch=MICRO,
        micro=MICRO,
        seed=0,
        first_step=0,
        last_step=10**6,
    )


def loaders(size: int) -> List[Side]:
    part = f"loader {size} px"
    timm = functools.partial(loader_peers.timm_batches, FOLDER, size, MICRO)
    sources: Dict[str, Iterator[Any]] = {
        **{name: our_batches(name, size) for name in READERS},
        "timm": timm("random", prefetcher=True),
        "timm, bilinear": timm("bilinear", prefetcher=True),
        "timm, bilinear, no prefetcher": timm("bilinear", prefetcher=False),
        "torchvision, Pillow": loader_peers.torchvision_batches(FOLDER, size, MICRO, "pil"),
        "torchvision, tensors": loader_peers.torchvision_batches(FOLDER, size, MICRO, "tensor"),
    }
    return [Side(part, name, functools.partial(_take, batches)) for name, batches in sources.items()]


def _take(batches: Iterator[Any], turn: int) -> None:
    next(batches)


def sides() -> List[Side]:
    """All that takes turns, those that claims compare beside each other."""
    data = our_data("ours, torch")
    source = open_source(data, len(CLASSES), "train")
    large, small = (functools.partial(shown, source, data, MICRO, size) for size in SIZES)
    found = [*loaders(SIZES[0]), *decoders(large), *loaders(SIZES[1])]
    for size, prepare in zip(SIZES, (large, small)):
        found += ways(f"way {size} px", size, prepare)
        found += parts(f"part {size} px", size, source, data, prepare)
    return found


def in_turn(all_sides: List[Side]) -> Dict[Key, List[float]]:
    """Seconds an image, turn by turn. The first turn, which does not count, starts what must be started."""
    times: Dict[Key, List[float]] = {(side.part, side.name): [] for side in all_sides}
    number = 1 + _turns()
    for turn in claims.progress(range(number), "turn"):
        first = turn * len(all_sides) // number
        for side in [*all_sides[first:], *all_sides[:first]]:
            seconds = _seconds_an_image(side, turn)
            if turn:
                times[side.part, side.name].append(seconds)
    return times


def _turns() -> int:
    return claims.less(TURNS, 2)


def _seconds_an_image(side: Side, turn: int) -> float:
    prepared = side.prepare(turn)
    start = time.process_time()
    side.run(prepared)
    # Threads that load ahead make up for what was taken from them, in this turn and not in the next side's.
    now = time.process_time()
    while True:
        time.sleep(_STILL)  # at least once: they may not have noticed yet
        before, now = now, time.process_time()
        if now - before < _STILL / 4:
            break
    return (now - start) / (MICRO if side.images is None else side.images(prepared))


def fastest(times: Dict[Key, List[float]], part: str, start: str = "") -> List[float]:
    """Times of the fastest side of a part among those whose names start so."""
    found = [values for (of, name), values in times.items() if of == part and name.startswith(start)]
    return min(found, key=statistics.median)


def row(key: Key, values: List[float], bare: List[float]) -> dict:
    return {
        "part": key[0],
        "side": key[1],
        **claims.milliseconds(values, "_per_image"),
        "images_per_second": 1 / statistics.median(values),
        "of_bare_decode": statistics.median(claims.ratios(bare, values)),
    }


def speed_claims(times: Dict[Key, List[float]]) -> List[dict]:
    bare = fastest(times, "decode only")
    torch_reader = times["loader 380 px", "ours, torch"]
    best, best_small = (fastest(times, f"loader {size} px", "ours") for size in SIZES)
    of_timm = claims.ratios(fastest(times, "loader 380 px", "timm"), torch_reader)
    small_ratios = claims.ratios(bare, best_small)
    return [
        claims.claim("speedup_over_timm_per_core", of_timm, "times", ">= 2.2"),
        claims.claim("fraction_of_bare_decode", claims.ratios(bare, torch_reader), "of its rate", ">= 0.6"),
        claims.claim("best_reader_fraction_of_bare_decode", claims.ratios(bare, best), "of its rate", ">= 0.75"),
        claims.claim("best_reader_fraction_of_bare_decode_160px", small_ratios, "of its rate", ">= 1.15"),
    ]


def claims_at_scale() -> List[dict]:
    measured = {
        what: [
            loader_at_scale.measure(what) for _ in claims.turns(REPETITIONS, f"1.28 million images, {what}", at_most=1)
        ]
        for what in ("folder", "shards", "epochs")
    }

    def values(what: str, name: str) -> List[float]:
        return [each[name] for each in measured[what]]

    return [
        claims.claim("first_batch_seconds", values("folder", "first_batch_seconds"), "s", "<= 2"),
        claims.claim("first_batch_seconds_shards", values("shards", "first_batch_seconds"), "s", "<= 2"),
        claims.claim("index_megabytes", values("folder", "index_megabytes"), "MB", "<= 300"),
        claims.claim("index_megabytes_shards", values("shards", "index_megabytes"), "MB", "<= 300"),
        claims.claim("memory_growth_per_epoch_megabytes", values("epochs", "growth"), "MB", "<= 1"),
    ]


def bytes_per_value() -> List[float]:
    """Bytes of a channel value on its way to the device, for each size."""
    batches = (next(our_batches("ours, torch", size)).images for size in SIZES)
    return [images.untyped_storage().nbytes() / images.numel() for images in batches]


def main() -> None:
    as_json = claims.begin(__doc__, takes="10 minutes", quick="3 minutes").json
    paths = photographs()
    size = statistics.mean(path.stat().st_size for path in paths)
    at_scale = claims_at_scale()
    # Before anything makes a thread: those of DALI are to share this core.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    random.seed(0)  # what timm draws from; torchvision draws from torch
    torch.manual_seed(0)
    times = in_turn(sides())
    bare = fastest(times, "decode only")
    rows = [row(key, values, bare) for key, values in times.items()]
    made = [
        *speed_claims(times),
        claims.claim("bytes_per_channel_value", bytes_per_value(), "bytes", "<= 1"),
        *at_scale,
    ]
    print(f"{len(paths)} JPEG files of {size / 1000:.1f} kB; {_turns()} turns of {MICRO} images")
    claims.report("loader", rows, made, as_json)

"""Is our loader faster than others, and close to what decoding alone takes?

    python -m benchmarks.loader [--quick] [--json]

One process on one core, without workers; 1,200 JPEG files like ImageNet's
(benchmarks/drawn_photographs.py) in the page cache; random crops and flips, at 380 and at 160 px,
micro batches of 64. Times are CPU seconds of all threads.
- `loader`: ours to uint8 micro batches, timm's and torchvision's to normalised float32 ones. timm,
  whose default draws the interpolation and has a prefetcher, is compared as it is fastest.
- `decode only`: whole images decoded from memory. The fastest is the limit for loaders that decode
  whole images.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import functools
import io
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import numpy as np
import simplejpeg
import torch
import torchvision
from PIL import Image
from timm.data import create_dataset, create_loader
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from benchmarks import CACHE, claims
from benchmarks.drawn_photographs import CLASSES, FOLDER, photographs
from data.batches import MicroBatch
from data.encoded import EncodedSource
from data.epochs import RunOrder
from data.loader import TrainingBatches
from data.sources import open_source
from parallel.parent_death import bound_to_parent
from recipe.batch import steps_per_epoch
from recipe.config import Data

LARGE = 380
SMALL = 160
SIZES = (LARGE, SMALL)
MICRO = 64
# Of one micro batch each: the shorter they are, the less the machine changes from one side to the
# next.
TURNS = 15
DECODING = "decode only"
OURS = "ours, torch"
_STILL = 0.01  # seconds without work by which threads are known to be idle
SHARDS = CACHE / "photographs_shards"
# Of random crops and flips, as our recipes have them.
AREA = (0.05, 1.0)
ASPECT = (3 / 4, 4 / 3)
FLIP = 0.5
_MEAN = (0.485, 0.456, 0.406)
_DEVIATION = (0.229, 0.224, 0.225)
READERS: Dict[str, dict] = {
    OURS: {"workers": 0},
    "ours, torch, shards": {"workers": 0, "source": "shards", "train_folder": SHARDS.name},
    "ours, DALI": {"workers": 1, "reader": "dali"},
}


class Key(NamedTuple):
    """A side among all.

    part: of the table: a loader's size, or decoding.
    name: of the side within it.
    """

    part: str
    name: str


class Side(NamedTuple):
    """Something whose time is taken.

    run: takes what was prepared.
    prepare: makes that from the number of a turn; its time does not count.
    """

    run: Callable[[Any], object]
    prepare: Callable[[int], Any] = lambda turn: turn


def sides() -> Dict[Key, Side]:
    """Return all that takes turns; the decoders come between the loaders of the two sizes."""
    large = _loader_sides(LARGE)
    small = _loader_sides(SMALL)
    decoding = _decoder_sides()
    return {**large, **decoding, **small}


def _part(size: int) -> str:
    """Return the name of the loaders' part of a size."""
    return f"loader {size} px"


def _loader_sides(size: int) -> Dict[Key, Side]:
    """Return the sides that load micro batches."""
    made = {}
    for name, batches in loaders(size).items():
        made[Key(_part(size), name)] = Side(functools.partial(_load, batches))
    return made


def _load(batches: Iterator[Any], _: int) -> object:
    """Load the next micro batch, whatever the turn."""
    return next(batches)


def _decoder_sides() -> Dict[Key, Side]:
    """Return the sides that decode files, which are read before."""
    source = open_source(our_data(OURS), len(CLASSES), "train")
    assert isinstance(source, EncodedSource), "photographs are files"
    files = functools.partial(encoded, source)
    made = {}
    for name, decode in decoders().items():
        made[Key(DECODING, name)] = Side(functools.partial(_decode_all, decode), files)
    return made


def _decode_all(decode: Callable[[bytes], object], files: List[bytes]) -> object:
    """Decode files; the images are kept to the end, as those of a micro batch."""
    return list(map(decode, files))


def seconds_an_image(side: Side, turn: int) -> float:
    """Measure the CPU seconds of all threads for an image.

    Args:
        side: runs once, for a micro batch.
        turn: its number.
    """
    prepared = side.prepare(turn)
    start = time.process_time()
    now = start
    side.run(prepared)
    # Threads that load ahead make up for what was taken from them, in this turn and not in the next
    # side's.
    before = -1.0
    while now - before >= _STILL / 4:
        before = time.process_time()
        time.sleep(_STILL)  # at least once: they may not have noticed yet
        now = time.process_time()
    return (now - start) / MICRO


def fastest(times: Dict[Key, List[float]], part: str, start: str = "") -> List[float]:
    """Return the times of the fastest side of a part, by the median.

    Args:
        times: seconds an image, by side and turn.
        part: of the table.
        start: with which the names of the sides begin that are looked at.
    """
    candidates = []
    for key, values in times.items():
        if key.part == part and key.name.startswith(start):
            candidates.append(values)
    return min(candidates, key=statistics.median)


def speed_claims(times: Dict[Key, List[float]]) -> List[dict]:
    """Return the claims on our torch reader at the larger size.

    Args:
        times: seconds an image, by side and turn.
    """
    part = _part(LARGE)
    ours = times[Key(part, OURS)]
    timm = fastest(times, part, "timm")
    bare = fastest(times, DECODING)
    return [
        claims.claim(
            "speedup_over_timm_per_core",
            claims.ratios(timm, ours),
            "times",
            goal=">= 2.7",
        ),
        claims.claim(
            "fraction_of_bare_decode",
            claims.ratios(bare, ours),
            "of its rate",
            goal=">= 0.6",
        ),
    ]


# Loaders ------------------------------------------------------------------------------------------


def our_batches(data: Data, size: int, micro: int, batch: int) -> Iterator[MicroBatch]:
    """Return our micro batches of the photographs, without end for our purposes.

    Args:
        data: section of a recipe.
        size: pixels a side.
        micro: images of a micro batch.
        batch: images of an update.
    """
    source = open_source(data, len(CLASSES), "train")
    order = RunOrder(source, data, 0, batch)
    return TrainingBatches(order, range(10**6), image_size=size, micro=micro)


def our_data(reader: str) -> Data:
    """Return the section of a recipe by which one of our readers reads the photographs.

    Args:
        reader: one of READERS.
    """
    settings: Dict[str, Any] = {
        "root": str(CACHE),
        "train_folder": FOLDER.name,
        "crop_area": AREA,
        "crop_aspect": ASPECT,
    }
    settings.update(READERS[reader])
    return Data(**settings)


def pack() -> None:
    """Pack the photographs into SHARDS, unless that is done and they have not changed since."""
    newest = photographs()[-1]
    manifest = SHARDS / "shards.json"
    if manifest.exists() and manifest.stat().st_mtime >= newest.stat().st_mtime:
        return
    shutil.rmtree(SHARDS, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "tools.shards",
        "pack",
        str(FOLDER),
        str(SHARDS),
        "--images-per-shard",
        "1000",
    ]
    subprocess.run(bound_to_parent(command), check=True, stdout=subprocess.DEVNULL)


def loaders(size: int) -> Dict[str, Iterator[Any]]:
    """Return loaders of the photographs, one process each, without end; they crop and flip only.

    Args:
        size: pixels a side.
    """
    made: Dict[str, Iterator[Any]] = {}
    for reader in READERS:
        made[reader] = our_batches(our_data(reader), size, MICRO, batch=MICRO)
    made["timm"] = timm_batches(size, MICRO, interpolation="random")
    made["timm, bilinear"] = timm_batches(size, MICRO)
    made["timm, bilinear, no prefetcher"] = timm_batches(size, MICRO, use_prefetcher=False)
    made["torchvision, Pillow"] = _torchvision_batches(size, tensors=False)
    made["torchvision, tensors"] = _torchvision_batches(size, tensors=True)
    return made


def timm_batches(
    size: int,
    micro: int,
    workers: int = 0,
    **options: Any,
) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    """Return timm's micro batches of the photographs, without end.

    Args:
        size: pixels a side.
        micro: images of a micro batch.
        workers: processes that load.
        **options: of timm's loader; by default it does not draw the interpolation.

    Returns:
        Pairs of images, float32 [micro, 3, size, size], and labels, int64 [micro].
    """
    options.setdefault("interpolation", "bilinear")
    loader = create_loader(
        create_dataset("", root=str(FOLDER), is_training=True),
        (3, size, size),
        micro,
        is_training=True,
        scale=AREA,
        ratio=ASPECT,
        hflip=FLIP,
        color_jitter=0.0,
        num_workers=workers,
        persistent_workers=workers > 0,
        device=torch.device("cpu"),
        **options,
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


def _torchvision_batches(size: int, tensors: bool) -> Iterator[Any]:
    """Return micro batches by the pipeline of torchvision's references/classification.

    Args:
        size: pixels a side.
        tensors: these are decoded and cropped, not Pillow's images.
    """
    steps = [
        v2.RandomResizedCrop(size, scale=AREA, ratio=ASPECT, antialias=True),
        v2.RandomHorizontalFlip(FLIP),
    ]
    options = {}
    if tensors:
        options["loader"] = _read_by_torchvision
    else:
        steps.append(v2.PILToTensor())
    steps.append(v2.ToDtype(torch.float32, scale=True))
    steps.append(v2.Normalize(_MEAN, _DEVIATION))
    images = torchvision.datasets.ImageFolder(str(FOLDER), v2.Compose(steps), **options)
    loader = DataLoader(images, MICRO, shuffle=True, drop_last=True, num_workers=0)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def _read_by_torchvision(path: str) -> torch.Tensor:
    """Read and decode a file into uint8 [3, height, width]."""
    return _by_torchvision(Path(path).read_bytes())


# Decoders -----------------------------------------------------------------------------------------


def encoded(source: EncodedSource, step: int) -> List[bytes]:
    """Return the files that a run with seed 0 shows in a step of one micro batch.

    Args:
        source: of the files.
        step: its number, counted from the start of the run.
    """
    epoch, within = divmod(step, steps_per_epoch(len(source), MICRO))
    start = within * MICRO
    indices = source.order(0, epoch)[start : start + MICRO]
    return [source.encoded(index) for index in indices.tolist()]


def decoders() -> Dict[str, Callable[[bytes], object]]:
    """Return functions that decode a whole image, by the library's name."""
    return {
        "torchvision": _by_torchvision,
        "simplejpeg": simplejpeg.decode_jpeg,
        "nvimgcodec": _nvimgcodec(),
        "Pillow": _by_pillow,
    }


def _by_torchvision(data: bytes) -> torch.Tensor:
    """Decode a file into uint8 [3, height, width]."""
    # The operator, because torchvision.io.decode_jpeg warns at every call; a bytearray, because
    # torch warns of bytes.
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return torch.ops.image.decode_jpeg(buffer, torchvision.io.ImageReadMode.RGB.value)


def _by_pillow(data: bytes) -> object:
    """Decode a file."""
    return Image.open(io.BytesIO(data)).load()


def _nvimgcodec() -> Callable[[bytes], np.ndarray]:
    """Return nvimgcodec's decoder on one thread of the CPU."""
    from nvidia import nvimgcodec as codec

    decoder = codec.Decoder(
        device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[codec.Backend(codec.BackendKind.CPU_ONLY)],
    )
    parameters = codec.DecodeParams(apply_exif_orientation=False)

    def decode(data: bytes) -> np.ndarray:
        """Decode the `data` of a file."""
        image = decoder.decode(codec.CodeStream(data), params=parameters)
        return np.asarray(image)

    return decode


# The command --------------------------------------------------------------------------------------


def main() -> None:
    """Measure all sides in turn, and print times and claims."""
    options = claims.begin(__doc__, takes="6 minutes", quick="2 minutes")
    paths = photographs()
    pack()
    # Before anything makes a thread: those of DALI are to share this core.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    random.seed(0)  # what timm draws from; torchvision draws from torch
    torch.manual_seed(0)
    times = claims.in_turn(sides(), TURNS, seconds_an_image)
    bytes_per_value = [_bytes_per_value(size) for size in SIZES]
    memory = claims.claim("bytes_per_channel_value", bytes_per_value, "bytes", goal="<= 1")
    bytes_of_file = statistics.mean(path.stat().st_size for path in paths)
    print(f"{len(paths)} JPEG files of {bytes_of_file / 1000:.1f} kB; turns of {MICRO} images")
    claims.report("loader", _rows(times), [*speed_claims(times), memory], as_json=options.json)


def _rows(times: Dict[Key, List[float]]) -> List[dict]:
    """Return the rows of the table, a side each."""
    bare = fastest(times, DECODING)
    rows = []
    for key, values in times.items():
        row = {
            "part": key.part,
            "side": key.name,
            **claims.milliseconds(values, "_per_image"),
            "images_per_second": 1 / statistics.median(values),
            "of_bare_decode": claims.median_ratio(bare, values),
        }
        rows.append(row)
    return rows


def _bytes_per_value(size: int) -> float:
    """Return the bytes in memory for each value of our torch reader's images."""
    batches = our_batches(our_data(OURS), size, MICRO, batch=MICRO)
    images = next(batches).images
    return images.untyped_storage().nbytes() / images.numel()

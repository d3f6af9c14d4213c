"""Is our loader faster than others, and close to what decoding alone takes?

    python -m benchmarks.loader [--quick] [--json]

One process on one core, without workers; 1,200 JPEG files like ImageNet's (benchmarks/drawn_photographs.py) in the page
cache; random crops and flips, at 380 and at 160 px, micro batches of 64. Times are CPU seconds of all threads.
- `loader`: ours to uint8 micro batches, timm's and torchvision's to normalised float32 ones. timm, whose default draws
  the interpolation and has a prefetcher, is compared as it is fastest.
- `decode only`: whole images decoded from memory. The fastest is the limit for loaders that decode whole images.
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

SIZES = (380, 160)
MICRO = 64
TURNS = 15  # of one micro batch each: the shorter they are, the less the machine changes from one side to the next
_STILL = 0.01  # seconds without work by which threads are known to be idle
SHARDS = CACHE / "photographs_shards"
AREA, ASPECT, FLIP = (0.05, 1.0), (3 / 4, 4 / 3), 0.5  # of random crops, as our recipes have them
READERS: Dict[str, dict] = {
    "ours, torch": {"workers": 0},
    "ours, torch, shards": {"workers": 0, "source": "shards", "train_folder": SHARDS.name},
    "ours, DALI": {"workers": 1, "reader": "dali"},
}

Key = Tuple[str, str]


class Side(NamedTuple):
    """Something whose time is taken. prepare: makes its input from the number of a turn; does not count."""

    run: Callable[[Any], object]
    prepare: Callable[[int], Any] = int


def sides() -> Dict[Key, Side]:
    """All that takes turns, by part and name; the decoders between the loaders of the two sizes."""
    large, small = (
        {(f"loader {size} px", name): Side(lambda _, each=each: next(each)) for name, each in loaders(size).items()}
        for size in SIZES
    )
    files = functools.partial(encoded, open_source(our_data("ours, torch"), len(CLASSES), "train"))
    bare = {
        ("decode only", name): Side(lambda given, each=each: list(map(each, given)), files)
        for name, each in decoders().items()
    }
    return {**large, **bare, **small}


def seconds_an_image(side: Side, turn: int) -> float:
    """CPU seconds of all threads for an image of one turn."""
    prepared = side.prepare(turn)
    start = now = time.process_time()
    side.run(prepared)
    # Threads that load ahead make up for what was taken from them, in this turn and not in the next side's.
    before = -1.0
    while now - before >= _STILL / 4:
        before = time.process_time()
        time.sleep(_STILL)  # at least once: they may not have noticed yet
        now = time.process_time()
    return (now - start) / MICRO


def fastest(times: Dict[Key, List[float]], part: str, start: str = "") -> List[float]:
    """Times of the fastest side of a part among those whose names start so."""
    found = [values for (of, name), values in times.items() if of == part and name.startswith(start)]
    return min(found, key=statistics.median)


def speed_claims(times: Dict[Key, List[float]]) -> List[dict]:
    bare = fastest(times, "decode only")
    torch_reader = times["loader 380 px", "ours, torch"]
    of_timm = claims.ratios(fastest(times, "loader 380 px", "timm"), torch_reader)
    return [
        claims.claim("speedup_over_timm_per_core", of_timm, "times", ">= 2.7"),
        claims.claim("fraction_of_bare_decode", claims.ratios(bare, torch_reader), "of its rate", ">= 0.6"),
    ]


def our_batches(data: Data, size: int, micro: int, batch: int) -> Iterator[MicroBatch]:
    """Micro batches of the photographs, without end for our purposes. Args: batch: images of an update."""
    order = RunOrder(open_source(data, len(CLASSES), "train"), data, 0, batch)
    return TrainingBatches(order, range(10**6), image_size=size, micro=micro)


def our_data(reader: str) -> Data:
    fixed = {"root": str(CACHE), "train_folder": FOLDER.name, "crop_area": AREA, "crop_aspect": ASPECT}
    return Data(**{**fixed, **READERS[reader]})


def pack() -> None:
    """The photographs in shards in SHARDS; made where they are older than the photographs."""
    newest, manifest = photographs()[-1], SHARDS / "shards.json"
    if not manifest.exists() or manifest.stat().st_mtime < newest.stat().st_mtime:
        shutil.rmtree(SHARDS, ignore_errors=True)
        command = [sys.executable, "-m", "tools.shards", "pack", str(FOLDER), str(SHARDS), "--images-per-shard", "1000"]
        subprocess.run(bound_to_parent(command), check=True, stdout=subprocess.DEVNULL)


def loaders(size: int) -> Dict[str, Iterator[Any]]:
    """Loaders of the photographs, one process each, without end. Crop and flip only."""
    return {
        **{name: our_batches(our_data(name), size, MICRO, MICRO) for name in READERS},
        "timm": timm_batches(size, MICRO, interpolation="random"),
        "timm, bilinear": timm_batches(size, MICRO),
        "timm, bilinear, no prefetcher": timm_batches(size, MICRO, use_prefetcher=False),
        "torchvision, Pillow": _torchvision_batches(size, tensors=False),
        "torchvision, tensors": _torchvision_batches(size, tensors=True),
    }


def timm_batches(
    size: int, micro: int, workers: int = 0, **options: Any
) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    """The same by timm. Args: options: of its loader."""
    loader = create_loader(
        create_dataset("", root=str(FOLDER), is_training=True), (3, size, size), micro, is_training=True, scale=AREA,
        ratio=ASPECT, hflip=FLIP, color_jitter=0.0, num_workers=workers, persistent_workers=workers > 0,
        device=torch.device("cpu"), **{"interpolation": "bilinear", **options},
    )  # fmt: skip
    return itertools.chain.from_iterable(itertools.repeat(loader))


def _torchvision_batches(size: int, tensors: bool) -> Iterator[Any]:
    """The pipeline of torchvision's references/classification; `tensors`: what is decoded and cropped, or Pillow's."""
    crop = [v2.RandomResizedCrop(size, scale=AREA, ratio=ASPECT, antialias=True), v2.RandomHorizontalFlip(FLIP)]
    normalise = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    to_tensor = [] if tensors else [v2.PILToTensor()]
    transform = v2.Compose([*crop, *to_tensor, v2.ToDtype(torch.float32, scale=True), normalise])
    opened = {"loader": lambda path: _by_torchvision(Path(path).read_bytes())} if tensors else {}
    images = torchvision.datasets.ImageFolder(str(FOLDER), transform, **opened)
    loader = DataLoader(images, MICRO, shuffle=True, drop_last=True, num_workers=0)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def encoded(source: EncodedSource, step: int) -> List[bytes]:
    """The files that a run with seed 0 shows in a step of one micro batch."""
    epoch, within = divmod(step, steps_per_epoch(len(source), MICRO))
    indices = source.order(0, epoch)[within * MICRO : (within + 1) * MICRO]
    return [source.encoded(index) for index in indices.tolist()]


def decoders() -> Dict[str, Callable[[bytes], object]]:
    """Functions that decode a whole image."""
    return {
        "torchvision": _by_torchvision,
        "simplejpeg": simplejpeg.decode_jpeg,
        "nvimgcodec": _nvimgcodec(),
        "Pillow": lambda data: Image.open(io.BytesIO(data)).load(),
    }


def _by_torchvision(data: bytes) -> torch.Tensor:
    """uint8 [3, height, width]."""
    # The operator, because torchvision.io.decode_jpeg warns at every call; a bytearray, because torch warns of bytes.
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return torch.ops.image.decode_jpeg(buffer, torchvision.io.ImageReadMode.RGB.value)


def _nvimgcodec() -> Callable[[bytes], np.ndarray]:
    from nvidia import nvimgcodec as codec

    backends, device = [codec.Backend(codec.BackendKind.CPU_ONLY)], codec.NVIMGCODEC_DEVICE_CPU_ONLY
    decoder = codec.Decoder(device_id=device, max_num_cpu_threads=1, backends=backends)
    parameters = codec.DecodeParams(apply_exif_orientation=False)
    return lambda data: np.asarray(decoder.decode(codec.CodeStream(data), params=parameters))


def main() -> None:
    as_json = claims.begin(__doc__, takes="6 minutes", quick="2 minutes").json
    paths = photographs()
    pack()
    # Before anything makes a thread: those of DALI are to share this core.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    random.seed(0)  # what timm draws from; torchvision draws from torch
    torch.manual_seed(0)
    times = claims.in_turn(sides(), TURNS, seconds_an_image)
    bare = fastest(times, "decode only")
    rows = [
        {
            "part": part,
            "side": side,
            **claims.milliseconds(values, "_per_image"),
            "images_per_second": 1 / statistics.median(values),
            "of_bare_decode": claims.median_ratio(bare, values),
        }
        for (part, side), values in times.items()
    ]
    images = [next(our_batches(our_data("ours, torch"), size, MICRO, MICRO)).images for size in SIZES]
    bytes_per_value = [each.untyped_storage().nbytes() / each.numel() for each in images]
    made = [*speed_claims(times), claims.claim("bytes_per_channel_value", bytes_per_value, "bytes", "<= 1")]
    size = statistics.mean(path.stat().st_size for path in paths)
    print(f"{len(paths)} JPEG files of {size / 1000:.1f} kB; turns of {MICRO} images")
    claims.report("loader", rows, made, as_json)

"""JPEG files like ImageNet's, made from the photographs in scikit-image's wheel: what loaders are measured with.

1,200 baseline files with 4:2:0 chroma in three class folders, 500 x 375 pixels or (one in four) 375 x 500, of 98 kB:
parts of eight photographs, at most 1.25 times enlarged, mirrored or not, brighter or darker. The quality, 88 to 97, is
the highest at which a file does not exceed a size drawn for it; half of the files have 97. No noise is added to make
them larger, because how long decoding takes depends on what the bits say. Grey photographs are tinted.
"""

import importlib.util
import io
import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import List, Tuple

from PIL import Image, ImageEnhance, ImageOps

from benchmarks import CACHE
from recipe.randomness import Stream, key

FOLDER = CACHE / "photographs"
CLASSES = ("class0", "class1", "class2")
COUNT = 1200
QUALITIES = (88, 97)
_SIZES = (75_000, 145_000)  # bytes
_SMALLEST_PART = 0.8  # of the pixels a side that the file has: what is enlarged more than 1.25 times is blurred
_SOURCES = ("astronaut.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png",
            "motorcycle_right.png", "grass.png", "gravel.png")  # fmt: skip
_TINTS = {"grass.png": ("#0c1408", "#e6f5be"), "gravel.png": ("#14100c", "#f5ebdc")}  # what black and white become
_VERSION = 1  # of this file's choices: others make other files


def photographs() -> List[Path]:
    """Their paths, in order; made first unless they are there from the same versions, and read into the page cache."""
    paths = [FOLDER / CLASSES[number % len(CLASSES)] / f"{number:04d}.jpg" for number in range(COUNT)]
    manifest = FOLDER.with_suffix(".json")
    made_by = {"version": _VERSION, **{name: metadata.version(name) for name in ("pillow", "scikit-image")}}
    if not (manifest.exists() and json.loads(manifest.read_text()) == made_by):
        shutil.rmtree(FOLDER, ignore_errors=True)
        make(paths)
        manifest.write_text(json.dumps(made_by))
    for path in paths:
        path.read_bytes()
    return paths


def make(paths: List[Path]) -> None:
    sources = [_opened(name) for name in _SOURCES]
    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Sources change more slowly than classes, so that each class has parts of all.
        path.write_bytes(_photograph(sources[number // len(CLASSES) % len(sources)], number))


def _opened(name: str) -> Image.Image:
    package = importlib.util.find_spec("skimage")  # not imported: a wheel alone, without what it depends on, will do
    assert package is not None and package.origin is not None, "scikit-image is not installed"
    image = Image.open(Path(package.origin).parent / "data" / name)
    return ImageOps.colorize(image.convert("L"), *_TINTS[name]) if name in _TINTS else image.convert("RGB")


def _photograph(source: Image.Image, number: int) -> bytes:
    stream = Stream(key("photograph", number))
    size = (375, 500) if stream.uniform() < 0.25 else (500, 375)
    part = source.resize(size, Image.Resampling.LANCZOS, box=_part(source, size, stream))
    if stream.uniform() < 0.5:
        part = ImageOps.mirror(part)
    part = ImageEnhance.Brightness(part).enhance(stream.uniform(0.85, 1.15))
    return _encoded(part, round(stream.uniform(*_SIZES)))


def _part(source: Image.Image, size: Tuple[int, int], stream: Stream) -> Tuple[float, float, float, float]:
    """A box (left, top, right, bottom) of the source, of the shape of `size`."""
    largest = min(source.width / size[0], source.height / size[1])
    scale = stream.uniform(min(_SMALLEST_PART, largest), largest)
    width, height = size[0] * scale, size[1] * scale
    left, top = stream.uniform(0, source.width - width), stream.uniform(0, source.height - height)
    return left, top, left + width, top + height


def _encoded(image: Image.Image, target: int) -> bytes:
    """The file at the highest quality at which it has at most `target` bytes; at the lowest if there is none."""
    low, high = QUALITIES
    best = _jpeg(image, low)
    while low < high:
        middle = (low + high + 1) // 2
        trial = _jpeg(image, middle)
        if len(trial) <= target:
            low, best = middle, trial
        else:
            high = middle - 1
    return best


def _jpeg(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()

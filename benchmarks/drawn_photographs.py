"""JPEG files like ImageNet's, made from the photographs in scikit-image's wheel: what loaders are
measured with.

1,200 baseline files with 4:2:0 chroma in three class folders, 500 x 375 pixels or (one in four)
375 x 500, of 98 kB: parts of eight photographs, at most 1.25 times enlarged, mirrored or not,
brighter or darker. The quality, 88 to 97, is the highest at which a file does not exceed a size
drawn for it; half of the files have 97. No noise is added to make them larger, because how long
decoding takes depends on what the bits say. Grey photographs are tinted.
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
# Of the pixels a side that the file has: what is enlarged more than 1.25 times is blurred.
_SMALLEST_PART = 0.8
_SOURCES = (
    "astronaut.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "motorcycle_right.png",
    "grass.png",
    "gravel.png",
)
# The colours that black and white become in grey photographs.
_TINTS = {"grass.png": ("#0c1408", "#e6f5be"), "gravel.png": ("#14100c", "#f5ebdc")}
_VERSION = 1  # of this file's choices: others make other files


def photographs() -> List[Path]:
    """Return the paths of the files, in order, once all are in the page cache.

    Files are made unless they are there from the same versions of this file and of the libraries.
    """
    paths = []
    for number in range(COUNT):
        name = CLASSES[number % len(CLASSES)]
        paths.append(FOLDER / name / f"{number:04d}.jpg")
    manifest = FOLDER.with_suffix(".json")
    versions = {
        "version": _VERSION,
        "pillow": metadata.version("pillow"),
        "scikit-image": metadata.version("scikit-image"),
    }
    are_made = manifest.exists() and json.loads(manifest.read_text()) == versions
    # Somebody may have deleted some since.
    if not are_made or not all(path.exists() for path in paths):
        shutil.rmtree(FOLDER, ignore_errors=True)
        make(paths)
        # Written last, so that files of an interrupted call are made again.
        manifest.write_text(json.dumps(versions))
    for path in paths:
        path.read_bytes()
    return paths


def make(paths: List[Path]) -> None:
    """Write the photographs.

    Args:
        paths: of the files; a file's content depends on its place in the list.
    """
    sources = [_opened(name) for name in _SOURCES]
    for number, path in enumerate(paths):
        # Sources change more slowly than classes, so that each class has parts of all.
        rounds = number // len(CLASSES)
        source = sources[rounds % len(sources)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_photograph(source, number))


def _opened(name: str) -> Image.Image:
    """Return one of scikit-image's photographs in RGB."""
    # The package is not imported: a wheel alone, without what it depends on, will do.
    package = importlib.util.find_spec("skimage")
    assert package is not None and package.origin is not None, "scikit-image is not installed"
    image = Image.open(Path(package.origin).parent / "data" / name)
    if name not in _TINTS:
        return image.convert("RGB")
    black, white = _TINTS[name]
    return ImageOps.colorize(image.convert("L"), black, white)


def _photograph(source: Image.Image, number: int) -> bytes:
    """Return file `number`, a random part of a source."""
    stream = Stream(key("photograph", number))
    size = (375, 500) if stream.uniform() < 0.25 else (500, 375)
    box = _part(source, size, stream)
    image = source.resize(size, Image.Resampling.LANCZOS, box=box)
    if stream.uniform() < 0.5:
        image = ImageOps.mirror(image)
    brightness = stream.uniform(0.85, 1.15)
    image = ImageEnhance.Brightness(image).enhance(brightness)
    target = round(stream.uniform(*_SIZES))
    return _encoded(image, target)


def _part(
    source: Image.Image,
    size: Tuple[int, int],
    stream: Stream,
) -> Tuple[float, float, float, float]:
    """Return a box (left, top, right, bottom) of the source, of the shape of `size`."""
    # Scales are pixels of the source for one of the file, at most as many as fit.
    columns, rows = size
    largest = min(source.width / columns, source.height / rows)
    smallest = min(_SMALLEST_PART, largest)
    scale = stream.uniform(smallest, largest)
    width = columns * scale
    height = rows * scale
    left = stream.uniform(0, source.width - width)
    top = stream.uniform(0, source.height - height)
    return left, top, left + width, top + height


def _encoded(image: Image.Image, target: int) -> bytes:
    """Return the file of the highest quality that has at most `target` bytes.

    Where none is so small, that of the lowest quality.
    """
    # The answer is from `low` to `high`, and `best` is the file of `low`.
    low, high = QUALITIES
    best = _jpeg(image, low)
    while low < high:
        middle = (low + high + 1) // 2
        trial = _jpeg(image, middle)
        if len(trial) <= target:
            low = middle
            best = trial
        else:
            high = middle - 1
    return best


def _jpeg(image: Image.Image, quality: int) -> bytes:
    """Return the image as a baseline JPEG file."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()

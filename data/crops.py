"""Crops of images that are in memory, those of a micro batch in one call of a C++ function.

Their plans are rows of numbers: int64 [images, 11], `Frame` of crops.cpp.

Every pixel is that of torch's `interpolate` (bilinear or bicubic, antialiased, uint8), which takes
several calls an image: for small ones these calls take longer than the training step of a small
model.
"""

import ctypes
import functools
import math
from pathlib import Path
from typing import Optional, Sequence

import numpy as np
import torch

from common.cpp_compiler import CompilerError, library
from data.transforms import Frame, bicubic_is_pillows
from recipe.config import Data

_SOURCE = Path(__file__).parent / "crops.cpp"
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-shared",
    "-fPIC",
    # Weights are rounded to 16 bits: a fused product could round another way than torch's.
    "-ffp-contract=off",
)

_NUMBERS = 11  # of a row


class _Images(ctypes.Structure):
    """`Images` of crops.cpp."""

    _fields_ = [
        ("pixels", ctypes.c_void_p),
        ("image_stride", ctypes.c_int64),
        ("channel_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
    ]


class _Drawing(ctypes.Structure):
    """`Drawing` of crops.cpp."""

    _fields_ = [
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("cubic", ctypes.c_int64),
        ("flip", ctypes.c_double),
        ("smallest_area", ctypes.c_double),
        ("largest_area", ctypes.c_double),
        ("narrowest", ctypes.c_double),
        ("widest", ctypes.c_double),
        ("log_narrowest", ctypes.c_double),
        ("log_widest", ctypes.c_double),
    ]


def available(interpolation: str = "bilinear") -> bool:
    """Return whether this machine has the function, which may be compiled first, and it makes the
    pixels of data/transforms.py.

    Args:
        interpolation: data.interpolation.
    """
    # With a torch whose filter is another one, transforms.py takes Pillow's.
    if interpolation == "bicubic" and not bicubic_is_pillows():
        return False
    return _library() is not None


@functools.lru_cache(maxsize=None)
def _library() -> Optional[ctypes.CDLL]:
    """Return the compiled library; None where there is no compiler, or it fails."""
    try:
        return library(_SOURCE, ("crop", "draw"), _FLAGS)
    except (OSError, CompilerError):
        return None  # torch's function makes the same pixels


def rows_of(indices: Sequence[int], frames: Sequence[Frame]) -> np.ndarray:
    """Write plans as rows of numbers.

    Args:
        indices: of the images.
        frames: one for each index.
    """
    rows = np.empty((len(indices), _NUMBERS), np.int64)
    for row, index, frame in zip(rows, indices, frames):
        sizes = (frame.height, frame.width)
        cubic = frame.interpolation == "bicubic"
        row[:] = (index, *frame.box, *sizes, *frame.corner, frame.flip, cubic)
    return rows


def draw(
    indices: Sequence[int],
    keys: Sequence[int],
    data: Data,
    *,
    height: int,
    width: int,
    size: int,
) -> np.ndarray:
    """Draw the plans of `Training.frame` as rows, with the same bits.

    Args:
        indices: of the images.
        keys: of their draws, 64 bits each.
        data: how images are cropped and mirrored.
        height: of every image, in pixels.
        width: of every image, in pixels.
        size: pixels a side of a result.
    """
    narrowest, widest = data.crop_aspect
    smallest, largest = data.crop_area
    drawing = _Drawing(
        height=height,
        width=width,
        size=size,
        cubic=data.interpolation == "bicubic",
        flip=data.flip,
        smallest_area=smallest,
        largest_area=largest,
        narrowest=narrowest,
        widest=widest,
        log_narrowest=math.log(narrowest),
        log_widest=math.log(widest),
    )
    images = np.array(indices, np.int64)
    draws = np.array(keys, np.uint64)
    assert images.shape == draws.shape
    rows = np.empty((len(images), _NUMBERS), np.int64)
    loaded = _library()
    assert loaded is not None
    loaded.draw(
        ctypes.byref(drawing),
        ctypes.c_int64(len(rows)),
        ctypes.c_void_p(images.ctypes.data),
        ctypes.c_void_p(draws.ctypes.data),
        ctypes.c_void_p(rows.ctypes.data),
    )
    return rows


def crop(pixels: torch.Tensor, rows: np.ndarray, out: torch.Tensor) -> None:
    """Cut a box out of each of several images, resize it, and mirror it if its plan says so.

    Args:
        pixels: uint8 [images, 3, height, width], with any strides.
        rows: plans, with boxes inside the image, and all of one size.
        out: uint8 [results, 3, size, size], channels last in memory; the first len(rows) are
            written.
    """
    # The function trusts its arguments: what does not hold here would write anywhere in memory.
    size = out.shape[2]
    loaded = _library()
    assert loaded is not None
    assert pixels.dtype == out.dtype == torch.uint8
    assert pixels.shape[1] == 3
    assert len(rows) <= len(out)
    assert rows.dtype == np.int64 and rows.flags.c_contiguous
    assert out.stride() == (3 * size * size, 1, 3 * size, 3), out.stride()
    images = _Images(pixels.data_ptr(), *pixels.stride(), size)
    loaded.crop(
        ctypes.byref(images),
        ctypes.c_int64(len(rows)),
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_void_p(out.data_ptr()),
    )

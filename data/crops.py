"""Crops of images that are in memory, those of a micro batch in one call of a C++ function.

Every pixel is that of torch's `interpolate` (bilinear or bicubic, antialiased, uint8), which takes
several calls an image: for small ones these calls take longer than the training step of a small
model.
"""

import ctypes
import functools
from pathlib import Path
from typing import Optional, Sequence

import numpy as np
import torch

from common.cpp_compiler import CompilerError, library
from data.transforms import Frame, bicubic_is_pillows

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
        return library(_SOURCE, ("crop",), _FLAGS)
    except (OSError, CompilerError):
        return None  # torch's function makes the same pixels


def crop(
    pixels: torch.Tensor,
    indices: Sequence[int],
    frames: Sequence[Frame],
    out: torch.Tensor,
) -> None:
    """Cut a frame out of each of several images, resize it, and mirror it if it says so.

    Args:
        pixels: uint8 [images, 3, height, width], with any strides.
        indices: of the images.
        frames: one for each index, with boxes inside the image, and all of one size.
        out: uint8 [results, 3, size, size], channels last in memory; the first len(indices) are
            written.
    """
    # The function trusts its arguments: what does not hold here would write anywhere in memory.
    size = out.shape[2]
    loaded = _library()
    assert loaded is not None
    assert pixels.dtype == out.dtype == torch.uint8
    assert pixels.shape[1] == 3
    assert len(indices) <= len(out)
    assert out.stride() == (3 * size * size, 1, 3 * size, 3), out.stride()
    rows = np.empty((len(indices), 11), np.int64)  # `Frame` of crops.cpp
    for row, index, frame in zip(rows, indices, frames):
        sizes = (frame.height, frame.width)
        cubic = frame.interpolation == "bicubic"
        row[:] = (index, *frame.box, *sizes, *frame.corner, frame.flip, cubic)
    images = _Images(pixels.data_ptr(), *pixels.stride(), size)
    loaded.crop(
        ctypes.byref(images),
        ctypes.c_int64(len(rows)),
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_void_p(out.data_ptr()),
    )

"""JPEGs: boxes of them by nvimgcodec, which comes with DALI; whole or smaller by simplejpeg."""

import functools
import os
import threading
from typing import Callable, Optional, Tuple

import numpy as np
import simplejpeg
import torch

from data.base import Box

# For others libjpeg-turbo has no vector instructions, and takes longer than for all pixels.
_FACTORS = (8, 4, 2)
_CPU = -99999  # nvimgcodec's number for no device


class FatalDamage(Exception):
    """A JPEG is damaged so that libjpeg cannot make all of its pixels. The text is its complaint."""


def largest_factor(side: int, enough: Optional[int]) -> int:
    """Return by how much a side can be divided so that enough pixels remain: 8, 4, 2 or 1.

    Args:
        side: pixels.
        enough: pixels that must remain; None for all.
    """
    if enough is None:
        return 1
    return next((factor for factor in _FACTORS if side >= factor * enough), 1)


def whole(encoded: bytes) -> Tuple[Optional[torch.Tensor], str]:
    """Decode all of a JPEG.

    Args:
        encoded: the file's content.

    Returns:
        Its stored pixels, uint8 [3, height, width], or None if the decoder refuses it; and what
        libjpeg complains of, or "". With a complaint, pixels are made up where they are missing.

    Raises:
        FatalDamage: libjpeg gave up before it had made all pixels.
    """
    pixels, complaint = _decode(encoded)
    if pixels is None:
        return None, complaint
    return torch.from_numpy(pixels).permute(2, 0, 1), complaint


def scaled(
    encoded: bytes,
    box: Box,
    factor: int,
    stored_size: Tuple[int, int],
    complain: Callable[[str], None],
) -> Optional[torch.Tensor]:
    """Decode a box of a complete JPEG at 1 / factor of its size.

    Args:
        encoded: the file's content.
        box: of stored pixels.
        factor: 2, 4 or 8.
        stored_size: height and width of the stored image.
        complain: called with what libjpeg complains of, if it can go on.

    Returns:
        uint8 [3, height, width] of the box, or None if the decoder refuses the file or cannot make
        all of it.
    """
    # libjpeg rounds up the sides of what it scales; asking for less would give the next factor.
    height, width = stored_size
    try:
        pixels, complaint = _decode(
            encoded,
            min_height=-(-height // factor),
            min_width=-(-width // factor),
            min_factor=factor,
        )
    except FatalDamage:
        return None
    if pixels is None:
        return None
    if complaint:
        complain(complaint)
    # Outwards, so that no requested pixel is missing.
    rows = slice(box.top // factor, -(-(box.top + box.height) // factor))
    columns = slice(box.left // factor, -(-(box.left + box.width) // factor))
    return torch.from_numpy(pixels[rows, columns]).permute(2, 0, 1)


def _decode(encoded: bytes, **size: int) -> Tuple[Optional[np.ndarray], str]:
    """Return pixels [height, width, 3] or None, and the complaint of a decoder that goes on.

    Raises FatalDamage where it did not go on to the last pixel.
    """
    # Strict first: libjpeg's warnings are dropped otherwise, and a damaged file would pass unnoticed.
    try:
        return simplejpeg.decode_jpeg(encoded, strict=True, **size), ""
    except ValueError as error:
        complaint = str(error)
    try:
        pixels = simplejpeg.decode_jpeg(encoded, strict=False, **size)
        # After a warning simplejpeg takes a fatal error for another warning, and returns memory that
        # nobody has written to. Over the opposite of its bytes such memory is told from pixels.
        again = ~pixels
        simplejpeg.decode_jpeg(encoded, strict=False, buffer=again, **size)
    except ValueError:
        return None, complaint
    if not np.array_equal(pixels, again):
        raise FatalDamage(complaint)
    return pixels, complaint


def region(encoded: bytes, box: Box) -> Optional[torch.Tensor]:
    """Decode a box of a complete JPEG, with the bits of the whole image.

    Args:
        encoded: the file's content.
        box: of stored pixels.

    Returns:
        uint8 [3, height, width] of the box, or None if the decoder cannot make it.
    """
    # One for each process and thread: nothing promises that these may share a decoder.
    tools = _nvimgcodec(os.getpid(), threading.get_ident())
    if tools is None:
        return None
    # None for whatever is unusual: the caller then decodes the whole image, and names the fault.
    library, decoder, parameters = tools
    bottom = box.top + box.height
    right = box.left + box.width
    try:
        wanted = library.Region(box.top, box.left, bottom, right)
        part = library.CodeStream(encoded).get_sub_code_stream(region=wanted)
        image = decoder.decode(part, params=parameters)
    except RuntimeError:
        return None
    if image is None or image.shape != (box.height, box.width, 3):
        return None
    return torch.from_numpy(np.asarray(image)).permute(2, 0, 1)


@functools.lru_cache(maxsize=64)
def _nvimgcodec(process: int, thread: int) -> Optional[tuple]:
    """Return the library, a decoder of this thread and process, and its parameters, if any."""
    # It prints the files that it refuses; our errors name them.
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    try:
        import nvidia.nvimgcodec as nvimgcodec
    except ImportError:  # it is made for Linux on x86-64
        return None
    backends = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
    decoder = nvimgcodec.Decoder(device_id=_CPU, max_num_cpu_threads=1, backends=backends)
    parameters = nvimgcodec.DecodeParams(apply_exif_orientation=False)
    return nvimgcodec, decoder, parameters

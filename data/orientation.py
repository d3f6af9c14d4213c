"""Orientation of JPEG and PNG files, as Pillow's ImageOps.exif_transpose finds it.

Pillow itself parses EXIF and XMP, so no rule of it is written down twice: which of two tags counts, types of numbers,
damaged directories. What is here only finds the parts of a file that it needs. Files without such parts cost nothing.
"""

import io
import re
import struct
import warnings
import zlib
from typing import Callable, List, Optional, Sequence, Tuple

from PIL import Image

UPRIGHT = 1
_TAG = 0x0112  # Orientation: TIFF 6.0; CIPA DC-008, 4.6.4
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_ANIMATION = b"acTL"
_PIXELS = b"IDAT"
# The names under which Pillow keeps EXIF and XMP; each can be the keyword of a text.
_KEYWORDS = (b"exif", b"Raw profile type exif", b"XML:com.adobe.xmp", b"xmp")
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_CHUNK_NAME = re.compile(rb"\w\w\w\w", re.ASCII)


def jpeg_orientation(application_segments: Sequence[bytes]) -> int:
    """Orientation of a JPEG file.

    Args:
        application_segments: contents of its APP1 segments, in their order.

    Returns:
        1 to 8; 1 where there is none, or where Pillow fails on it.
    """
    exif = [segment for segment in application_segments if segment.startswith(_EXIF)]
    xmp = [segment for segment in application_segments if segment.startswith(_XMP)]
    if not exif and not xmp:
        return UPRIGHT
    image = Image.Image()
    # As Pillow's reader of JPEGs joins them: one EXIF block can be longer than a segment; the last XMP counts.
    if exif:
        image.info["exif"] = exif[0] + b"".join(segment[len(_EXIF) :] for segment in exif[1:])
    if xmp:
        image.info["xmp"] = xmp[-1][len(_XMP) :]
    return _found(lambda: image)


def png_orientation(encoded: bytes) -> int:
    """Orientation of a PNG file: 1 to 8; 1 where there is none, or where Pillow fails on it."""
    chunks = _chunks(encoded)
    if not any(_may_orient(name, content) for name, content in chunks):
        return UPRIGHT
    if any(name == _ANIMATION for name, _ in chunks):
        # Of an animation Pillow reads no further than the first picture.
        return _found(lambda: _loaded(encoded))
    # A copy of one pixel: Pillow also takes what comes after the pixels, and would decode all of them for it.
    kept = [_chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))]
    has_pixels = False
    for name, content in chunks:
        if name == _PIXELS and not has_pixels:
            kept.append(_chunk(_PIXELS, zlib.compress(b"\0\0")))
            has_pixels = True
        elif _may_orient(name, content):
            kept.append(_chunk(name, content))
    small = encoded[:8] + b"".join(kept) + _chunk(b"IEND", b"")
    return _found(lambda: _loaded(small))


def _found(open_image: Callable[[], Image.Image]) -> int:
    """Orientation that Pillow finds in an image; 1 where it fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged EXIF data
        try:
            value = open_image().getexif().get(_TAG, UPRIGHT)
            # By comparison, as Pillow's does: the tag may be a fraction, or a text, which equals none of them.
            return next((number for number in range(2, 9) if value == number), UPRIGHT)
        except Exception:  # damaged data raise nearly everything
            return UPRIGHT


def _loaded(encoded: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(encoded), formats=("PNG",))
    image.load()
    return image


def _chunks(encoded: bytes) -> List[Tuple[bytes, bytes]]:
    """Name and content of a PNG's chunks, up to the first that is damaged; contents of pixels are left out."""
    found = []
    position: Optional[int] = 8
    while position is not None and position + 8 <= len(encoded):
        (length,) = struct.unpack_from(">I", encoded, position)
        name = encoded[position + 4 : position + 8]
        if name == b"IEND" or not _CHUNK_NAME.fullmatch(name):
            break
        start = position + 8
        found.append((name, b"" if name in (_PIXELS, b"fdAT") else encoded[start : start + length]))
        position = start + length + 4  # behind the checksum
    return found


def _may_orient(name: bytes, content: bytes) -> bool:
    if name in _TEXTS:
        return content.partition(b"\0")[0] in _KEYWORDS
    return name == b"eXIf"


def _chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)

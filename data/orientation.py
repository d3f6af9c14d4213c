"""Orientation of JPEG and PNG files, as Pillow's ImageOps.exif_transpose finds it.

Pillow itself parses EXIF and XMP, so no rule of it is written down twice: which of two tags counts,
types of numbers, damaged directories. What is here only finds the parts of a file that it needs.
Files without such parts cost nothing.
"""

import io
import re
import struct
import warnings
import zlib
from typing import Callable, List, NamedTuple, Sequence

from PIL import Image

UPRIGHT = 1
_TAG = 0x0112  # Orientation: TIFF 6.0; CIPA DC-008, 4.6.4
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"

# A PNG's signature and the names of its chunks: W3C PNG, chapters 5 and 11.
_SIGNATURE_LENGTH = 8
_HEADER = b"IHDR"
_PIXELS = b"IDAT"
_PIXELS_OF_FRAME = b"fdAT"
_ANIMATION = b"acTL"
_EXIF_CHUNK = b"eXIf"
_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_END = b"IEND"
_CHUNK_NAME = re.compile(rb"\w\w\w\w", re.ASCII)
# The names under which Pillow keeps EXIF and XMP; each can be the keyword of a text.
_KEYWORDS = (b"exif", b"Raw profile type exif", b"XML:com.adobe.xmp", b"xmp")

_GREY_PIXEL = struct.pack(">IIB4x", 1, 1, 8)  # a header: 1 x 1 pixels of 8 bits, all else 0: grey


class _Chunk(NamedTuple):
    """A part of a PNG file."""

    name: bytes
    content: bytes

    @property
    def may_orient(self) -> bool:
        """Return whether Pillow may find an orientation in it."""
        if self.name in _TEXTS:
            return self.content.partition(b"\0")[0] in _KEYWORDS
        return self.name == _EXIF_CHUNK

    def encoded(self) -> bytes:
        """Return the chunk as it is in a file: length, name, content, checksum."""
        length = struct.pack(">I", len(self.content))
        checksum = struct.pack(">I", zlib.crc32(self.name + self.content))
        return length + self.name + self.content + checksum


def jpeg_orientation(application_segments: Sequence[bytes]) -> int:
    """Return the orientation of a JPEG file.

    Args:
        application_segments: contents of its APP1 segments, in their order.

    Returns:
        1 to 8; 1 where there is none, or where Pillow fails on it.
    """
    # Most files have neither: Pillow is not asked about them.
    exif = [segment for segment in application_segments if segment.startswith(_EXIF)]
    xmp = [segment for segment in application_segments if segment.startswith(_XMP)]
    if not exif and not xmp:
        return UPRIGHT
    image = Image.Image()
    # As Pillow's reader of JPEGs joins them: one EXIF block can be longer than a segment; the last
    # XMP counts.
    if exif:
        continued = [segment[len(_EXIF) :] for segment in exif[1:]]
        image.info["exif"] = exif[0] + b"".join(continued)
    if xmp:
        image.info["xmp"] = xmp[-1][len(_XMP) :]
    return _orientation(lambda: image)


def png_orientation(encoded: bytes) -> int:
    """Return the orientation of a PNG file.

    Args:
        encoded: the file's content.

    Returns:
        1 to 8; 1 where there is none, or where Pillow fails on it.
    """
    chunks = _chunks(encoded)
    if not any(chunk.may_orient for chunk in chunks):
        return UPRIGHT
    if any(chunk.name == _ANIMATION for chunk in chunks):
        # Of an animation Pillow reads no further than the first picture.
        return _orientation(lambda: _load(encoded))
    # A copy of one pixel: Pillow also takes what comes after the pixels, and would decode all of
    # them for it.
    kept = [_Chunk(_HEADER, _GREY_PIXEL)]
    has_pixels = False
    for chunk in chunks:
        if chunk.name == _PIXELS and not has_pixels:
            kept.append(_Chunk(_PIXELS, zlib.compress(b"\0\0")))
            has_pixels = True
        elif chunk.may_orient:
            kept.append(chunk)
    kept.append(_Chunk(_END, b""))
    small = encoded[:_SIGNATURE_LENGTH] + b"".join(chunk.encoded() for chunk in kept)
    return _orientation(lambda: _load(small))


def _orientation(open_image: Callable[[], Image.Image]) -> int:
    """Return the orientation that Pillow finds in an image; 1 where it fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged EXIF data
        try:
            value = open_image().getexif().get(_TAG, UPRIGHT)
            # By comparison, as Pillow's does: the tag may be a fraction, or a text, which equals
            # none of them.
            return next((known for known in range(2, 9) if value == known), UPRIGHT)
        except Exception:  # damaged data raise nearly everything
            return UPRIGHT


def _load(encoded: bytes) -> Image.Image:
    """Decode a PNG by Pillow, which reads what comes after the pixels only then."""
    image = Image.open(io.BytesIO(encoded), formats=("PNG",))
    image.load()
    return image


def _chunks(encoded: bytes) -> List[_Chunk]:
    """Return a PNG's chunks, up to the first that is damaged; contents of pixels are left out."""
    chunks = []
    position = _SIGNATURE_LENGTH
    while position + 8 <= len(encoded):
        (length,) = struct.unpack_from(">I", encoded, position)
        name = encoded[position + 4 : position + 8]
        if name == _END or not _CHUNK_NAME.fullmatch(name):
            break
        start = position + 8
        content = b""
        if name not in (_PIXELS, _PIXELS_OF_FRAME):
            content = encoded[start : start + length]
        chunks.append(_Chunk(name, content))
        position = start + length + 4  # behind the checksum
    return chunks

"""JPEG and PNG files to pixels. libjpeg-turbo decodes nearly all JPEGs, Pillow the rest and PNGs.

torchvision's PNG decoder (seen in 0.29.2) ends the process on damaged data, and its versions differ
on 16 bits.
"""

import io
import re
import struct
import warnings
from typing import Callable, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
import torchvision.io  # noqa: F401  (registers torch.ops.image)
from PIL import Image, UnidentifiedImageError

from data import jpeg
from data.base import UnreadableImage
from data.formats import described
from data.orientation import jpeg_orientation, png_orientation

MAX_PIXELS = 178_956_970  # where Pillow refuses, too: half a gigabyte of RGB
MAX_MEMORY = 2**31  # bytes that decoding one image may take; also of one encoded file
# Each scan of a JPEG is a pass over the whole image, however few bytes it takes; libjpeg and
# mozjpeg write about ten.
MAX_SCANS = 64
MAX_SCANNED_PIXELS = 16 * MAX_PIXELS  # of all scans: two or three seconds

# Codes of a JPEG's markers, ITU-T T.81, table B.1.
_JPEG_SIGNATURE = b"\xff\xd8"
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)  # Huffman-coded: baseline, extended and progressive
_JPEG_WITHOUT_LENGTH = frozenset(range(0xD0, 0xD9)) | {0x00, 0x01}
_JPEG_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
_JPEG_SCAN = 0xDA
_JPEG_END = 0xD9
_JPEG_START = 0xD8
_JPEG_APPLICATION = 0xE1  # EXIF and XMP
# A marker among coded pixels, in which 0xFF is followed by zero or by the number of a restart.
_JPEG_MARKER = re.compile(rb"\xff+[^\x00\x01\xd0-\xd7\xff]")

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER_END = 33  # bytes of the signature and the first chunk
_PNG_ONE_CHANNEL = (0, 3)  # kinds of colours: grey, palette
_CUT = "truncated or damaged"
_RGB = 3  # torchvision.io.ImageReadMode.RGB


class Header(NamedTuple):
    """Size, kind and orientation of a file, and what it takes to decode it."""

    width: int
    height: int
    plain: bool  # a JPEG that libjpeg-turbo decodes rightly
    orientation: int  # of EXIF, 1 to 8; 1 is upright
    end: int  # bytes of the file up to the pixels' description
    memory: int  # bytes that decoding all of it takes at most
    scans: int = 1  # passes over all pixels; counted where there may be many


def _ignore(complaint: str) -> None:
    """Do nothing about a decoder's complaint."""


def decode(
    encoded: bytes,
    name: str,
    complain: Callable[[str], None] = _ignore,
) -> torch.Tensor:
    """Decode a JPEG or PNG file to RGB.

    Grey, palette and CMYK images become RGB as by Pillow's `convert("RGB")`; alpha is dropped; of
    16 bits the high 8 are kept; the orientation by EXIF or XMP is applied.

    Args:
        encoded: the file's content.
        name: what errors call the file.
        complain: called with libjpeg's message if the file is damaged, but can be decoded.

    Returns:
        uint8 [3, height, width], maybe not contiguous.

    Raises:
        UnreadableImage: the file is damaged. Files that are too large (`MAX_PIXELS`, `MAX_MEMORY`)
            or take too long (`MAX_SCANS`) are refused before they are decoded.
    """
    header = read_header(encoded, name)
    try:
        if header.plain:
            image = _decode_jpeg(encoded, name, header, complain)
        else:
            image = _decode_pillow(encoded)
    except UnreadableImage:
        raise
    except MemoryError:  # Pillow's answer to sides that are too long, too
        raise UnreadableImage(f"{name}: not enough memory") from None
    except UnidentifiedImageError:
        raise UnreadableImage(f"{name}: damaged or of an unsupported kind") from None
    except Exception as error:  # decoders of damaged files raise nearly everything
        lines = str(error).splitlines() or [type(error).__name__]
        # torchvision puts the place in its source before it: "decode_jpeg, FILE:LINE, reason".
        reason = lines[0].rpartition(", ")[2]
        raise UnreadableImage(f"{name}: {reason}") from None
    return upright(image, header.orientation)


def read_header(encoded: bytes, name: str) -> Header:
    """Read size, kind and orientation of a file.

    Args:
        encoded: the file's content.
        name: what errors call the file.

    Raises:
        UnreadableImage: see `decode`, as far as the header shows.
    """
    # By content: names of files are often wrong, and the decoders do not read them either.
    if not encoded:
        raise UnreadableImage(f"{name}: the file is empty")
    if encoded.startswith(_JPEG_SIGNATURE):
        header = _jpeg_header(encoded)
    elif encoded.startswith(_PNG_SIGNATURE):
        header = _png_header(encoded)
    else:
        raise UnreadableImage(f"{name}: neither JPEG nor PNG{described(encoded, name)}")
    if header is None:
        raise UnreadableImage(f"{name}: {_CUT}")
    _check_limits(header, name)
    return header


def _check_limits(header: Header, name: str) -> None:
    """Raise UnreadableImage for a file that would take too much memory or time to decode."""
    # Before anything is decoded: a file of a kilobyte can promise gigabytes, or hours.
    pixels = header.width * header.height
    size = f"{header.width} x {header.height} pixels"
    if not pixels:
        raise UnreadableImage(f"{name}: {size}")
    if pixels > MAX_PIXELS:
        raise UnreadableImage(f"{name}: {size} exceed the limit of {MAX_PIXELS:,} pixels")
    if header.memory > MAX_MEMORY:
        fault = f"{header.memory:,} bytes, above the limit of {MAX_MEMORY:,}"
        raise UnreadableImage(f"{name}: {size} of this kind take {fault}")
    if _takes_too_long(header.scans, pixels):
        raise UnreadableImage(
            f"{name}: {header.scans:,} scans of {size}, which take too long (the limits are "
            f"{MAX_SCANS} scans and {MAX_SCANNED_PIXELS:,} pixels in all of them); save it anew"
        )


def _takes_too_long(scans: int, pixels: int) -> bool:
    """Return whether an image of so many pixels has too many scans."""
    return scans > MAX_SCANS or scans * pixels > MAX_SCANNED_PIXELS


def _jpeg_header(encoded: bytes) -> Optional[Header]:
    """Read up to the first scan's header; None if the data end before it."""
    # Segments are skipped by their length, so that the thumbnail in an EXIF segment is not taken
    # for the image.
    application_segments: List[bytes] = []
    frame: Optional[int] = None  # where its header is
    position = _next_marker(encoded, len(_JPEG_SIGNATURE))
    while position is not None:
        marker = encoded[position + 1]
        if marker in _JPEG_WITHOUT_LENGTH:
            position = _next_marker(encoded, position + 2)
            continue
        (length,) = struct.unpack_from(">H", encoded, position + 2)
        if marker == _JPEG_SCAN:
            if frame is None:
                return None
            orientation = jpeg_orientation(application_segments)
            return _jpeg_frame(encoded, frame, scan=position, orientation=orientation)
        if marker == _JPEG_APPLICATION:
            application_segments.append(encoded[position + 4 : position + 2 + length])
        elif marker in _JPEG_FRAMES and frame is None:
            frame = position
        position = _next_marker(encoded, position + 2 + length)
    return None


def jpeg_ends(encoded: bytes, header: Header) -> bool:
    """Return whether a JPEG's mark of the end is in the file, behind its header.

    Decoders of parts, which do not see the end, and that of the whole ask the same, so that whether
    a damaged file is read does not depend on the part. Markers are not followed up to the end: a
    damaged one could lead past it.

    Args:
        encoded: the file's content.
        header: of the file.
    """
    return encoded.rfind(bytes((0xFF, _JPEG_END))) >= header.end


def _next_marker(encoded: bytes, position: int) -> Optional[int]:
    """Return where a JPEG's next marker begins; None if too few bytes follow for any header.

    Like libjpeg it skips stray bytes up to a marker, and the fill bytes that may precede its code.
    """
    position = encoded.find(0xFF, position)
    while position >= 0 and encoded[position + 1 : position + 2] == b"\xff":
        position += 1
    if position < 0 or position + 10 > len(encoded):
        return None
    return position


def _jpeg_frame(encoded: bytes, frame: int, scan: int, orientation: int) -> Header:
    """Describe a JPEG by the headers of its frame and of its first scan, at these positions."""
    marker = encoded[frame + 1]
    bits, height, width, components = struct.unpack_from(">BHHB", encoded, frame + 4)
    plain = marker in _JPEG_PLAIN_FRAMES and bits == 8 and components in (1, 3)
    if plain:
        # libjpeg-turbo: RGB, of damaged files twice, and all coefficients, which files of several
        # scans need at once.
        memory = width * height * (3 + 3 + 2 * components)
    else:
        memory = _pillow_memory(width, height, components)
    scans = 1
    # The bytes are counted first: that is quick, and nearly never too many. They may also be part
    # of other data.
    if marker in _JPEG_PROGRESSIVE or encoded[scan + 4] < components:
        scans = encoded.count(bytes((0xFF, _JPEG_SCAN)), scan)
    if _takes_too_long(scans, width * height):
        scans = sum(code == _JPEG_SCAN for code in _jpeg_markers(encoded, scan))
    return Header(
        width=width,
        height=height,
        plain=plain,
        orientation=orientation,
        end=frame,
        memory=memory,
        scans=scans,
    )


def _jpeg_markers(encoded: bytes, position: int) -> Iterator[int]:
    """Yield codes of a JPEG's markers from a position on, in libjpeg's order, up to the end's."""
    # Segments are skipped by their length, as what they contain may look like a marker.
    match = _JPEG_MARKER.search(encoded, position)
    while match is not None:
        position = match.end()
        code = encoded[position - 1]
        yield code
        if code == _JPEG_END:
            return
        if code != _JPEG_START:
            position += int.from_bytes(encoded[position : position + 2], "big")
        match = _JPEG_MARKER.search(encoded, position)


def _png_header(encoded: bytes) -> Optional[Header]:
    """Read the first chunk; None if it or the last is missing, which Pillow may not notice."""
    if encoded[12:16] != b"IHDR" or encoded.rfind(b"IEND") < _PNG_HEADER_END:
        return None
    width, height = struct.unpack_from(">II", encoded, 16)
    channels = 1 if encoded[25] in _PNG_ONE_CHANNEL else 4
    return Header(
        width=width,
        height=height,
        plain=False,
        orientation=png_orientation(encoded),
        end=_PNG_HEADER_END,
        memory=_pillow_memory(width, height, channels),
    )


def _pillow_memory(width: int, height: int, channels: int) -> int:
    """Return the bytes that Pillow takes at the peak, as measured.

    The image as it is stored, its RGB in 4 bytes, two copies of that in 3, pointers to the rows.
    """
    stored = 1 if channels == 1 else 4
    return height * (width * (stored + 4 + 3 + 3) + 2 * 8)


def upright(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """Undo an EXIF orientation: of its three independent parts, first swap axes, then mirror each.

    Args:
        image: [3, height, width] as it is stored.
        orientation: 1 to 8.
    """
    if swaps_axes(orientation):
        image = image.transpose(1, 2)
    vertical, horizontal = mirrored(orientation)
    axes = []
    if vertical:
        axes.append(1)
    if horizontal:
        axes.append(2)
    return image.flip(axes) if axes else image


def swaps_axes(orientation: int) -> bool:
    """Return whether the stored rows of an `orientation` are columns of the upright image."""
    return orientation >= 5


def mirrored(orientation: int) -> Tuple[bool, bool]:
    """Return whether mirroring top and bottom, and left and right, undoes an `orientation`."""
    vertical = orientation in (3, 4, 7, 8)
    horizontal = orientation in (2, 3, 6, 7)
    return vertical, horizontal


def _decode_jpeg(
    encoded: bytes,
    name: str,
    header: Header,
    complain: Callable[[str], None],
) -> torch.Tensor:
    """Decode a JPEG by simplejpeg.

    It gives the bits of torchvision's decoder, which prints complaints without a name.
    """
    try:
        pixels, complaint = jpeg.whole(encoded)
    except jpeg.FatalDamage as error:
        # Of a file that has been cut libjpeg complains of the data that it makes up.
        fault = str(error) if jpeg_ends(encoded, header) else _CUT
        raise UnreadableImage(f"{name}: {fault}") from None
    if pixels is None:  # simplejpeg refuses unusual sampling of colours, too
        return _decode_torchvision(encoded)
    if complaint:
        # libjpeg makes up what is missing of a file that has been cut; its first complaint may be
        # another.
        if not jpeg_ends(encoded, header):
            raise UnreadableImage(f"{name}: {_CUT}")
        complain(complaint)
    return pixels


def _decode_torchvision(encoded: bytes) -> torch.Tensor:
    """Decode a JPEG by torchvision."""
    # A copy: torch warns of tensors over memory that cannot be written.
    file = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    # The operator: torchvision.io.decode_jpeg warns at every call (since 0.29).
    return torch.ops.image.decode_jpeg(file, _RGB)


def _decode_pillow(encoded: bytes) -> torch.Tensor:
    """Decode a JPEG or PNG by Pillow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of palettes with transparency and damaged EXIF data
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG")) as image:
            # 16-bit grey, which convert("RGB") would clip at 255.
            if image.mode.startswith("I"):
                high_bits = np.asarray(image) >> 8
                grey = torch.from_numpy(high_bits.astype(np.uint8))
                return grey.expand(3, -1, -1)
            pixels = np.array(image.convert("RGB"))
            return torch.from_numpy(pixels).permute(2, 0, 1)

"""JPEG and PNG files to pixels. torchvision decodes nearly all JPEGs, Pillow the rest and all PNGs.

torchvision's PNG decoder (seen in 0.29.2) ends the process on damaged data, and its versions differ on 16 bits.
"""

import io
import struct
import warnings
from typing import NamedTuple, Optional, Tuple

import numpy as np
import torch
import torchvision.io  # noqa: F401  (registers torch.ops.image)
from PIL import Image, UnidentifiedImageError

from data.base import UnreadableImage

MAX_PIXELS = 178_956_970  # where Pillow refuses, too: half a gigabyte of RGB
MAX_MEMORY = 2**31  # bytes that decoding one image may take; also of one encoded file

_JPEG_SIGNATURE = b"\xff\xd8"
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)  # Huffman-coded: baseline, extended and progressive
_JPEG_WITHOUT_LENGTH = frozenset(range(0xD0, 0xD9)) | {0x00, 0x01}
_RGB = 3  # torchvision.io.ImageReadMode.RGB


class Header(NamedTuple):
    width: int
    height: int
    plain: bool  # a JPEG that torchvision decodes rightly
    orientation: int  # of EXIF, 1 to 8; 1 is upright
    end: int  # bytes of the file up to the pixels' description
    memory: int  # bytes that decoding all of it takes at most


def decode(encoded: bytes, name: str) -> torch.Tensor:
    """Decode a JPEG or PNG file, which errors call `name`, to RGB: uint8 [3, height, width], maybe not contiguous.

    Grey, palette and CMYK images become RGB as by Pillow's `convert("RGB")`; alpha is dropped; of 16 bits the high 8
    are kept; EXIF orientation is applied.

    Raises UnreadableImage; files that are too large (`MAX_PIXELS`, `MAX_MEMORY`) are refused before they are decoded.
    """
    header = read_header(encoded, name)
    try:
        image = _decode_torchvision(encoded) if header.plain else _decode_pillow(encoded)
    except MemoryError:  # Pillow's answer to sides that are too long, too
        raise UnreadableImage(f"{name}: not enough memory") from None
    except UnidentifiedImageError:
        raise UnreadableImage(f"{name}: damaged or of an unsupported kind") from None
    except Exception as error:  # decoders of damaged files raise nearly everything
        # torchvision puts the place in its source before the reason: "decode_jpeg, FILE:LINE, reason".
        reason = (str(error).splitlines() or [type(error).__name__])[0].rpartition(", ")[2]
        raise UnreadableImage(f"{name}: {reason}") from None
    return upright(image, header.orientation)


def read_header(encoded: bytes, name: str) -> Header:
    """Size, kind and orientation of a file. Raises UnreadableImage as `decode`, as far as the header shows."""
    if not encoded:
        raise UnreadableImage(f"{name}: the file is empty")
    if not encoded.startswith((_JPEG_SIGNATURE, _PNG_SIGNATURE)):
        raise UnreadableImage(f"{name}: neither JPEG nor PNG")
    header = (_jpeg_header if encoded.startswith(_JPEG_SIGNATURE) else _png_header)(encoded)
    if header is None:
        raise UnreadableImage(f"{name}: truncated or damaged")
    size = f"{header.width} x {header.height} pixels"
    if not header.width * header.height:
        raise UnreadableImage(f"{name}: {size}")
    if header.width * header.height > MAX_PIXELS:
        raise UnreadableImage(f"{name}: {size} exceed the limit of {MAX_PIXELS:,} pixels")
    if header.memory > MAX_MEMORY:
        raise UnreadableImage(
            f"{name}: {size} of this kind take {header.memory:,} bytes, above the limit of {MAX_MEMORY:,}"
        )
    return header


def _jpeg_header(encoded: bytes) -> Optional[Header]:
    """Read up to the frame header; None if the data end before it."""
    orientation, position = 1, 2
    while True:
        # Like libjpeg: skip stray bytes up to a marker, and the fill bytes that may precede its code.
        position = encoded.find(0xFF, position)
        while position >= 0 and encoded[position + 1 : position + 2] == b"\xff":
            position += 1
        if position < 0 or position + 10 > len(encoded):
            return None
        marker = encoded[position + 1]
        if marker in _JPEG_WITHOUT_LENGTH:
            position += 2
            continue
        (length,) = struct.unpack_from(">H", encoded, position + 2)
        if marker in _JPEG_FRAMES:
            bits, height, width, components = struct.unpack_from(">BHHB", encoded, position + 4)
            plain = marker in _JPEG_PLAIN_FRAMES and bits == 8 and components in (1, 3)
            # torchvision: RGB beside all coefficients, which files of several scans need at once.
            memory = width * height * (3 + 2 * components) if plain else _pillow_memory(width, height, components)
            return Header(width, height, plain, orientation, position, memory)
        segment = position + 4, position + 2 + length
        if marker == 0xE1 and encoded.startswith(b"Exif\0\0", *segment):
            orientation = _orientation(encoded[segment[0] + 6 : segment[1]])
        position += 2 + length


def _png_header(encoded: bytes) -> Optional[Header]:
    """Read the first chunk; None if it or the last one is missing, which Pillow does not always notice."""
    if encoded[12:16] != b"IHDR" or encoded.rfind(b"IEND") < 33:
        return None
    width, height = struct.unpack_from(">II", encoded, 16)
    # The chunk may come before or after the pixels, which may contain its name: what follows is checked.
    position = encoded.find(b"eXIf")
    orientation = 1 if position < 0 else _orientation(encoded[position + 4 :])
    memory = _pillow_memory(width, height, 1 if encoded[25] in (0, 3) else 4)  # grey, palette
    return Header(width, height, False, orientation, 33, memory)


def _pillow_memory(width: int, height: int, channels: int) -> int:
    """Bytes at the peak, as measured: the image as it is stored, its RGB, two copies of that, pointers to the rows."""
    return height * (width * ((1 if channels == 1 else 4) + 4 + 3 + 3) + 2 * 8)


def _orientation(exif: bytes) -> int:
    """Orientation in EXIF data (CIPA DC-008, 4.5.2 and 4.6.4); 1 where there is none or the data are damaged."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, directory)
        for entry in range(entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", exif, directory + 2 + 12 * entry)
            if tag == 0x0112:
                return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def upright(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """Undo an EXIF orientation: of its three independent parts, first swap the axes, then mirror each."""
    if orientation >= 5:
        image = image.transpose(1, 2)
    axes = [axis for axis, is_mirrored in zip((1, 2), mirrored(orientation)) if is_mirrored]
    return image.flip(axes) if axes else image


def mirrored(orientation: int) -> Tuple[bool, bool]:
    """Whether an EXIF orientation is undone by mirroring top and bottom, and left and right."""
    return orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)


def _decode_torchvision(encoded: bytes) -> torch.Tensor:
    # The operator: torchvision.io.decode_jpeg warns at every call (since 0.29). A copy: torch warns of tensors over
    # memory that cannot be written.
    return torch.ops.image.decode_jpeg(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), _RGB)


def _decode_pillow(encoded: bytes) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of palettes with transparency and damaged EXIF data
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG")) as image:
            if image.mode.startswith("I"):  # 16-bit grey, which convert("RGB") would clip at 255
                grey = (np.asarray(image) >> 8).astype(np.uint8)
                return torch.from_numpy(grey).expand(3, -1, -1)
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)

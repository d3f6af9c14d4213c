"""Files of random EXIF, XMP and text, whole or damaged, whose orientation must be the one that Pillow finds.

A file is made of parts that each exist in many forms: types and byte orders of tags, several blocks, texts of PNGs.
"""

import io
import random
import struct
import warnings
import zlib
from pathlib import Path
from typing import List

from PIL import Image, ImageOps

from data import decode
from data.base import UnreadableImage

_WIDTH = 5
_HEIGHT = 3  # no square: half of the orientations are seen by the shape alone
_TAG = 0x0112
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_FORMS = ('tiff:Orientation="{}"', "<tiff:Orientation>{}</tiff:Orientation>")
_XMP_OTHER_FORMS = (
    "tiff:Orientation='{}'", 'exif:Orientation="{}"', 'tiff:Orientation = "{}"', 'TIFF:ORIENTATION="{}"',
)  # fmt: skip
# Types of TIFF 6.0 by their numbers, as struct has them, with some that do not exist.
_TYPES = {
    1: "B", 2: "s", 3: "H", 4: "I", 5: "II", 6: "b", 7: "B", 8: "h", 9: "i", 10: "ii", 11: "f", 12: "d", 13: "I",
    16: "Q", 0: "H", 99: "H",
}  # fmt: skip


def random_file(draws: random.Random) -> bytes:
    """Return a JPEG or PNG file with up to three places that may give an orientation."""
    return _jpeg(draws) if draws.random() < 0.6 else _png(draws)


def seeds(folder: Path) -> List[bytes]:
    """Return whole files that Pillow reads."""
    files = (random_file(random.Random(number)) for number in range(200))
    return [data for data in files if pillows(data)]


def read(data: bytes, folder: Path) -> None:
    """Raise AssertionError where the orientation that is read differs from the one that Pillow undoes.

    Files that either refuses are refused.
    """
    orientation = decode.read_header(data, "damaged").orientation
    expected = pillows(data)
    if not expected:
        raise UnreadableImage("damaged: Pillow refuses it")
    assert orientation in expected, f"orientation {orientation}, but Pillow has {expected}"


def pillows(data: bytes) -> List[int]:
    """Return the orientations of a file that Pillow's exif_transpose may have undone; none if Pillow refuses the file.

    One, unless damage has made the pixels look the same from several sides. Some EXIF data can be read, but not be
    written anew, which exif_transpose does at last: then the tag counts. Data that cannot be read have no tag.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
                image.load()
                stored = image.copy()
                try:
                    upright = ImageOps.exif_transpose(image)
                except Exception:
                    return [_tag(image)]
        except Exception:
            return []
    methods = (None, 0, 3, 1, 5, 4, 6, 2)  # of Image.Transpose, by orientation less one
    found = []
    for orientation, method in enumerate(methods, start=1):
        turned = stored if method is None else stored.transpose(Image.Transpose(method))
        if turned.size == upright.size and turned.tobytes() == upright.tobytes():
            found.append(orientation)
    assert found, "exif_transpose made something else"
    return found


def _tag(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_TAG)
    except Exception:
        return 1
    return int(value) if value in range(1, 9) else 1


def _pixels(kind: str, **options: object) -> bytes:
    """A file of the kind whose pixels are not the same after any turn."""
    stream = io.BytesIO()
    image = Image.new("L", (_WIDTH, _HEIGHT), 40)
    image.paste(250, (0, 0, 2, 1))
    image.putpixel((_WIDTH - 1, 0), 120)
    image.save(stream, kind, **options)
    return stream.getvalue()


def _entry(draws: random.Random, order: str, tag: int, extra: bytearray, start: int) -> bytes:
    """One entry of a directory; values longer than four bytes are put into `extra`, which begins at `start`."""
    kind = draws.choice((3, *_TYPES) if draws.random() < 0.3 else (3, 4))
    count = draws.choice((1, 0, 2, 3)) if draws.random() < 0.3 else 1
    values = [draws.choice((1, 2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 5, 6, 7, 8, 0, 9, 42)) for _ in range(count)]
    form = _TYPES[kind]
    packed = b""
    for value in values:
        if form == "s":
            packed += b"%d" % (value % 10)
        elif len(form) == 2:  # a fraction
            packed += struct.pack(order + form, value * draws.choice((1, 1, 2)), draws.choice((1, 1, 2, 0)))
        else:
            packed += struct.pack(order + form, value)
    place = packed.ljust(4, b"\0")
    if len(packed) > 4:
        place = struct.pack(order + "I", draws.choice((start + len(extra), start + len(extra), 10**6, 2**32 - 1)))
        extra += packed
    return struct.pack(order + "HHI", tag, kind, count) + place


def exif(draws: random.Random) -> bytes:
    """EXIF data without their prefix: a directory with the tag, mostly, among others; sometimes a second directory."""
    order = draws.choice("<>")
    magic = {"<": b"II*\0", ">": b"MM\0*"}[order]
    if draws.random() < 0.06:
        magic = draws.choice((b"II\0*", b"MM*\0", b"II+\0", b"MM\0+", b"XX*\0", b"IIU\0"))
    tags = draws.choices((_TAG, 0x0110, 0x011A, 0x0128, 0x8769), k=draws.randrange(4))
    if draws.random() < 0.85:
        tags.insert(draws.randrange(len(tags) + 1), _TAG)
    directory = draws.choice((8, 14, 4)) if draws.random() < 0.2 else 8
    start = max(directory, 8) + 2 + 12 * len(tags) + 4
    extra = bytearray()
    entries = b"".join(_entry(draws, order, tag, extra, start) for tag in tags)
    number = draws.choice((len(tags) + 1, 900)) if draws.random() < 0.2 else len(tags)
    body = bytes(max(directory, 8) - 8) + struct.pack(order + "H", number) + entries + bytes(4) + bytes(extra)
    data = magic + struct.pack(order + "I", directory) + body
    if draws.random() < 0.1:
        data = data[: draws.randrange(len(data) + 1)]
    return data


def xmp(draws: random.Random) -> bytes:
    """XMP with an orientation as attribute or element, mostly; single quotes and other prefixes are not read."""
    value = draws.choice(("1", "2", "3", "4", "5", "6", "7", "8", "2", "3", "4", "5", "9", "0", "12", "x", ""))
    form = draws.choice(_XMP_FORMS)
    if draws.random() < 0.2:
        form = draws.choice(_XMP_OTHER_FORMS)
    return f"<x:xmpmeta><rdf:Description {form.format(value)}/></x:xmpmeta>".encode()


def _prefix(draws: random.Random) -> bytes:
    return draws.choice((_EXIF + _EXIF, b"Exif\0", b"exif\0\0")) if draws.random() < 0.2 else _EXIF


def _jpeg(draws: random.Random) -> bytes:
    plain = _pixels("JPEG", progressive=draws.random() < 0.3, quality=95)
    segments = []
    for _ in range(draws.choice((1, 1, 1, 2, 2, 3))):
        kind = draws.random()
        if kind < 0.55:
            data = _prefix(draws) + exif(draws)
            cut = draws.randrange(1, len(data)) if draws.random() < 0.25 else len(data)
            segments.append(data[:cut])
            if cut < len(data):  # goes on in another segment
                segments.append(_EXIF + data[cut:])
        elif kind < 0.9:
            segments.append(draws.choice((_XMP, _XMP, _XMP[:-1] + b"1\0")) + xmp(draws))
        else:
            segments.append(draws.choice((b"Exif\0\0", b"", b"ICC_PROFILE\0", b"MPF\0II*\0")))
    marker = b"\xff\xe1" if draws.random() < 0.95 else b"\xff\xe2"
    made = [marker + struct.pack(">H", len(each) + 2) + each for each in segments]
    start = 2 if draws.random() < 0.4 else 2 + 2 + struct.unpack_from(">H", plain, 4)[0]  # before or behind JFIF
    if draws.random() < 0.1:
        start = plain.index(b"\xff\xda")  # behind the frame's header
    if draws.random() < 0.1:
        made.insert(1, b"\x12\xff\xff")  # stray bytes and a fill byte
    return plain[:start] + b"".join(made) + plain[start:]


def _png(draws: random.Random) -> bytes:
    plain = _pixels("PNG")
    chunks = [_png_chunk(*_png_content(draws)) for _ in range(draws.choice((1, 1, 2, 2, 3)))]
    places = (33, 33, 33, plain.index(b"IEND") - 4)
    for chunk in chunks:
        place = draws.choice(places)
        plain = plain[:place] + chunk + plain[place:]
    return plain


def _png_content(draws: random.Random) -> "tuple[bytes, bytes]":
    """Name and content of a chunk that may give an orientation."""
    kind = draws.random()
    prefixed = draws.choice((b"", b"", b"", _EXIF, _EXIF + _EXIF)) + exif(draws)
    if kind < 0.4:
        return b"eXIf", prefixed
    if kind < 0.5:
        return b"tEXt", b"Comment\0the chunk eXIf holds " + b"eXIf" + exif(draws)
    profile = draws.choice(("exif", "exif", "exif", "APP1", "xmp"))
    raw = f"\n{profile}\n{len(prefixed):8}\n{prefixed.hex()}\n".encode()
    texts = [
        (f"Raw profile type {profile}".encode(), raw),
        (b"XML:com.adobe.xmp", xmp(draws)),
        (b"xmp", xmp(draws)),
        (b"exif", prefixed),
        (b"Raw profile type exif", raw[: draws.randrange(len(raw))]),
    ]
    key, text = draws.choice(texts)
    form = draws.choice((b"tEXt", b"zTXt", b"iTXt", b"iTXt"))
    if form == b"tEXt":
        return form, key + b"\0" + text
    if form == b"zTXt":
        return form, key + b"\0\0" + zlib.compress(text)
    compressed = draws.random() < 0.5
    return form, key + bytes((0, compressed, 0)) + b"en\0key\0" + (zlib.compress(text) if compressed else text)


def _png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

"""Files of random EXIF, XMP and text, whole or damaged.

Their orientation must be the one that Pillow finds. A file is made of parts that each exist in many
forms: types and byte orders of tags, several blocks, texts of PNGs.
"""

import io
import random
import struct
import warnings
import zlib
from pathlib import Path
from typing import List, NamedTuple, Optional

from PIL import Image, ImageOps

from data import decode
from data.base import UnreadableImage

_WHOLE_FILES = 200  # random ones, of which those that Pillow reads are damaged
_WIDTH = 5
_HEIGHT = 3  # no square: half of the orientations are seen by the shape alone
# How Pillow turns an image of each orientation upright; the first one is upright.
_TURNS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# What stands twice in a choice is drawn twice as often.
_TAG = 0x0112
_ALL_TAGS = (_TAG, 0x0110, 0x011A, 0x0128, 0x8769)
_TAG_VALUES = (*range(1, 9), *range(2, 9), 0, 9, 42)
# By the number of a type in TIFF 6.0, its form as struct has it; some of the types do not exist.
_TYPES = {
    1: "B",
    2: "s",
    3: "H",
    4: "I",
    5: "II",
    6: "b",
    7: "B",
    8: "h",
    9: "i",
    10: "ii",
    11: "f",
    12: "d",
    13: "I",
    16: "Q",
    0: "H",
    99: "H",
}
_SHORT = 3
_LONG = 4
_FIELD = 4  # bytes of an entry's value; longer ones stand elsewhere
_ENTRY = 12  # bytes
_MAGIC = {"<": b"II*\0", ">": b"MM\0*"}  # by byte order, as struct has it
_OTHER_MAGIC = (b"II\0*", b"MM*\0", b"II+\0", b"MM\0+", b"XX*\0", b"IIU\0")
_DIRECTORY = 8  # where the first directory begins, mostly

_EXIF = b"Exif\0\0"
_OTHER_PREFIXES = (_EXIF + _EXIF, b"Exif\0", b"exif\0\0")
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_XMP_PREFIXES = (_XMP, _XMP, _XMP[:-1] + b"1\0")
_XMP_VALUES = ("1", "2", "3", "4", "5", "6", "7", "8", "2", "3", "4", "5", "9", "0", "12", "x", "")
_XMP_FORMS = ('tiff:Orientation="{}"', "<tiff:Orientation>{}</tiff:Orientation>")
_XMP_OTHER_FORMS = (
    "tiff:Orientation='{}'",
    'exif:Orientation="{}"',
    'tiff:Orientation = "{}"',
    'TIFF:ORIENTATION="{}"',
)

_OTHER_SEGMENTS = (b"Exif\0\0", b"", b"ICC_PROFILE\0", b"MPF\0II*\0")
_APP1 = b"\xff\xe1"
_APP2 = b"\xff\xe2"
_START_OF_SCAN = b"\xff\xda"
_BEHIND_HEADER = 33  # bytes of a PNG's signature and its first chunk


class _Chunk(NamedTuple):
    """A chunk of a PNG.

    name: its type, four letters.
    content: without length and checksum.
    """

    name: bytes
    content: bytes

    def packed(self) -> bytes:
        """Return the chunk as it stands in a file."""
        length = struct.pack(">I", len(self.content))
        checksum = struct.pack(">I", zlib.crc32(self.name + self.content))
        return length + self.name + self.content + checksum


def random_file(draws: random.Random) -> bytes:
    """Return a JPEG or PNG file with up to three places that may give an orientation.

    Args:
        draws: for all that is random.
    """
    return _jpeg(draws) if draws.random() < 0.6 else _png(draws)


def seeds(folder: Path) -> List[bytes]:
    """Return whole files that Pillow reads.

    Args:
        folder: to work in, which is not needed.
    """
    files = (random_file(random.Random(number)) for number in range(_WHOLE_FILES))
    return [data for data in files if pillows(data)]


def read(data: bytes, folder: Path) -> None:
    """Compare the orientation that is read with the one that Pillow undoes.

    Args:
        data: a file, which may be damaged.
        folder: to work in, which is not needed.

    Raises:
        AssertionError: they differ.
        UnreadableImage: the file is refused, by Pillow or here.
    """
    orientation = decode.read_header(data, "damaged").orientation
    expected = pillows(data)
    if not expected:
        raise UnreadableImage("damaged: Pillow refuses it")
    assert orientation in expected, f"orientation {orientation}, but Pillow has {expected}"


def pillows(data: bytes) -> List[int]:
    """Return the orientations that Pillow's exif_transpose may have undone.

    There is one, unless damage has made the pixels look the same from several sides. Some EXIF data
    can be read, but not be written anew, which exif_transpose does at last: then the tag counts.
    Data that cannot be read have no tag.

    Args:
        data: a file.

    Returns:
        The orientations, 1 to 8; none if Pillow refuses the file.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
                image.load()
                stored = image.copy()
                upright = _upright(image)
                if upright is None:
                    return [_tag(image)]
        except Exception:
            return []
    orientations = []
    for orientation, turn in _TURNS.items():
        turned = stored if turn is None else stored.transpose(turn)
        if turned.size == upright.size and turned.tobytes() == upright.tobytes():
            orientations.append(orientation)
    assert orientations, "exif_transpose made something else"
    return orientations


def _upright(image: Image.Image) -> Optional[Image.Image]:
    """Return an image as Pillow turns it; None where Pillow cannot write its EXIF data anew."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return None


def _tag(image: Image.Image) -> int:
    """Return the orientation that an image's EXIF data name, 1 if they name none."""
    try:
        value = image.getexif().get(_TAG)
    except Exception:
        return 1
    # The value may be of any type: a fraction can be equal to an orientation, too.
    for orientation in _TURNS:
        if value == orientation:
            return orientation
    return 1


def _pixels(kind: str, **options: object) -> bytes:
    """Return a file of the kind whose pixels are not the same after any turn."""
    stream = io.BytesIO()
    image = Image.new("L", (_WIDTH, _HEIGHT), 40)
    image.paste(250, (0, 0, 2, 1))
    image.putpixel((_WIDTH - 1, 0), 120)
    image.save(stream, kind, **options)
    return stream.getvalue()


def exif(draws: random.Random) -> bytes:
    """Return EXIF data without their prefix.

    They are a directory with the tag, mostly, among others.

    Args:
        draws: for all that is random.
    """
    order = draws.choice("<>")
    magic = _MAGIC[order]
    if draws.random() < 0.06:
        magic = draws.choice(_OTHER_MAGIC)

    # Values that are too long for their entries follow the directory.
    tags = _tags(draws)
    directory = draws.choice((8, 14, 4)) if draws.random() < 0.2 else _DIRECTORY
    gap = max(directory, _DIRECTORY) - _DIRECTORY
    start = _DIRECTORY + gap + 2 + _ENTRY * len(tags) + 4
    extra = bytearray()
    entries = b"".join(_entry(draws, order, tag, extra, start) for tag in tags)

    # One that is too large makes bytes behind the directory look like entries.
    number = draws.choice((len(tags) + 1, 900)) if draws.random() < 0.2 else len(tags)
    head = magic + struct.pack(order + "I", directory) + bytes(gap)
    next_directory = bytes(4)
    data = head + struct.pack(order + "H", number) + entries + next_directory + bytes(extra)
    if draws.random() < 0.1:
        data = data[: draws.randrange(len(data) + 1)]
    return data


def _tags(draws: random.Random) -> List[int]:
    """Return the tags of a directory, most often with that of the orientation."""
    tags = draws.choices(_ALL_TAGS, k=draws.randrange(4))
    # It may be there already: then it stands there twice.
    if draws.random() < 0.85:
        place = draws.randrange(len(tags) + 1)
        tags.insert(place, _TAG)
    return tags


def _entry(draws: random.Random, order: str, tag: int, extra: bytearray, start: int) -> bytes:
    """Return one entry of a directory.

    Values that are longer than its field are put into `extra`, which begins at `start`.
    """
    kind = draws.choice((_SHORT, *_TYPES) if draws.random() < 0.3 else (_SHORT, _LONG))
    count = draws.choice((1, 0, 2, 3)) if draws.random() < 0.3 else 1
    values = [draws.choice(_TAG_VALUES) for _ in range(count)]
    packed = b"".join(_packed(draws, order + _TYPES[kind], value) for value in values)
    field = packed.ljust(_FIELD, b"\0")
    if len(packed) > _FIELD:
        place = start + len(extra)
        field = struct.pack(order + "I", draws.choice((place, place, 10**6, 2**32 - 1)))
        extra += packed
    return struct.pack(order + "HHI", tag, kind, count) + field


def _packed(draws: random.Random, form: str, value: int) -> bytes:
    """Return a value as bytes of a form, which is a byte order and a type of struct."""
    kind = form[1:]
    if kind == "s":
        return b"%d" % (value % 10)
    if len(kind) == 1:
        return struct.pack(form, value)
    # A fraction, which may be another value than meant, or none at all.
    numerator = value * draws.choice((1, 1, 2))
    denominator = draws.choice((1, 1, 2, 0))
    return struct.pack(form, numerator, denominator)


def xmp(draws: random.Random) -> bytes:
    """Return XMP with an orientation as attribute or element, mostly.

    Single quotes and other prefixes are not read.

    Args:
        draws: for all that is random.
    """
    value = draws.choice(_XMP_VALUES)
    form = draws.choice(_XMP_FORMS)
    if draws.random() < 0.2:
        form = draws.choice(_XMP_OTHER_FORMS)
    return f"<x:xmpmeta><rdf:Description {form.format(value)}/></x:xmpmeta>".encode()


def _jpeg(draws: random.Random) -> bytes:
    """Return a JPEG with up to three segments that may give an orientation."""
    plain = _pixels("JPEG", progressive=draws.random() < 0.3, quality=95)
    contents: List[bytes] = []
    for _ in range(draws.choice((1, 1, 1, 2, 2, 3))):
        contents += _segment_contents(draws)
    marker = _APP1 if draws.random() < 0.95 else _APP2
    segments = [marker + struct.pack(">H", len(content) + 2) + content for content in contents]

    # They stand before the segment of JFIF, behind it, or behind the frame's header.
    start = 2
    if draws.random() >= 0.4:
        start += 2 + struct.unpack_from(">H", plain, 4)[0]
    if draws.random() < 0.1:
        start = plain.index(_START_OF_SCAN)
    if draws.random() < 0.1:
        segments.insert(1, b"\x12\xff\xff")  # stray bytes and a fill byte
    return plain[:start] + b"".join(segments) + plain[start:]


def _segment_contents(draws: random.Random) -> List[bytes]:
    """Return the contents of a segment, or of two over which EXIF data are divided."""
    kind = draws.random()
    if kind < 0.55:
        prefix = draws.choice(_OTHER_PREFIXES) if draws.random() < 0.2 else _EXIF
        data = prefix + exif(draws)
        if draws.random() < 0.25:
            cut = draws.randrange(1, len(data))
            return [data[:cut], _EXIF + data[cut:]]
        return [data]
    if kind < 0.9:
        return [draws.choice(_XMP_PREFIXES) + xmp(draws)]
    return [draws.choice(_OTHER_SEGMENTS)]


def _png(draws: random.Random) -> bytes:
    """Return a PNG with up to three chunks that may give an orientation, most before the pixels."""
    plain = _pixels("PNG")
    chunks = [_chunk(draws) for _ in range(draws.choice((1, 1, 2, 2, 3)))]
    behind_pixels = plain.index(b"IEND") - 4
    places = (_BEHIND_HEADER, _BEHIND_HEADER, _BEHIND_HEADER, behind_pixels)
    for chunk in chunks:
        place = draws.choice(places)
        plain = plain[:place] + chunk.packed() + plain[place:]
    return plain


def _chunk(draws: random.Random) -> _Chunk:
    """Return a chunk that may give an orientation."""
    kind = draws.random()
    prefixed = draws.choice((b"", b"", b"", _EXIF, _EXIF + _EXIF)) + exif(draws)
    if kind < 0.4:
        return _Chunk(b"eXIf", prefixed)
    if kind < 0.5:
        # No orientation, though it looks like a chunk that has one.
        comment = b"the chunk eXIf holds " + b"eXIf" + exif(draws)
        return _Chunk(b"tEXt", b"Comment\0" + comment)
    return _text_chunk(draws, prefixed)


def _text_chunk(draws: random.Random, prefixed: bytes) -> _Chunk:
    """Return a text with XMP or with EXIF data, which stand in `prefixed` behind their prefix."""
    # ImageMagick writes profiles in hexadecimal digits.
    profile = draws.choice(("exif", "exif", "exif", "APP1", "xmp"))
    raw = f"\n{profile}\n{len(prefixed):8}\n{prefixed.hex()}\n".encode()
    texts = [
        (f"Raw profile type {profile}".encode(), raw),
        (b"XML:com.adobe.xmp", xmp(draws)),
        (b"xmp", xmp(draws)),
        (b"exif", prefixed),
        (b"Raw profile type exif", raw[: draws.randrange(len(raw))]),
    ]
    keyword, text = draws.choice(texts)

    # PNG has three kinds of text, one of which is always compressed and one at will.
    form = draws.choice((b"tEXt", b"zTXt", b"iTXt", b"iTXt"))
    if form == b"tEXt":
        return _Chunk(form, keyword + b"\0" + text)
    if form == b"zTXt":
        return _Chunk(form, keyword + b"\0\0" + zlib.compress(text))
    is_compressed = draws.random() < 0.5
    flags = bytes((0, is_compressed, 0))
    content = zlib.compress(text) if is_compressed else text
    return _Chunk(form, keyword + flags + b"en\0key\0" + content)

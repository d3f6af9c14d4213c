"""Orientation by EXIF and XMP: the one that Pillow's exif_transpose undoes, in every form in which
files hold it."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from benchmarks.fuzz import orientations
from data import decode
from data.base import UnreadableImage
from data.encoded import EncodedImage
from tests.data.test_decode import encoded, file_of, picture

# Pillow's, of damaged EXIF data, where a test calls it itself
pytestmark = pytest.mark.filterwarnings("ignore")

SHORT = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)


def tiff(*entries, order="<"):
    """EXIF data of one directory."""
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "I", 8)
    return head + struct.pack(order + "H", len(entries)) + b"".join(entries) + bytes(4)


def jpeg(*segments):
    """A JPEG with these APP1 segments."""
    plain = encoded(picture())
    made = b"".join(b"\xff\xe1" + struct.pack(">H", len(each) + 2) + each for each in segments)
    return plain[:2] + made + plain[2:]


def png(*chunks, behind=()):
    """A PNG with these chunks (name, content) before and behind its pixels."""
    plain = encoded(picture(), "PNG")
    end = plain.index(b"IEND") - 4

    def packed(pairs):
        return b"".join(
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
            for name, content in pairs
        )

    return plain[:33] + packed(chunks) + plain[33:end] + packed(behind) + plain[end:]


def entry(kind, count, value, order="<", tag=0x0112):
    return struct.pack(order + "HHI", tag, kind, count) + value


def animated():
    """A PNG of two frames, with EXIF behind the pixels of the first."""
    stream = io.BytesIO()
    frames = [picture(), picture(number=1)]
    frames[0].save(stream, "PNG", save_all=True, append_images=frames[1:])
    data = stream.getvalue()
    place = data.rindex(b"fcTL") - 4
    content = b"eXIf" + tiff(SHORT)
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return data[:place] + chunk + data[place:]


EXIF = b"Exif\0\0"
XMP = b"http://ns.adobe.com/xap/1.0/\0"
LONG = struct.pack("<HHII", 0x0112, 4, 1, 6)
WIDE = entry(7, 70_000, struct.pack("<I", 38), tag=0x927C)  # a maker's note that needs two segments
LONG_EXIF = tiff(WIDE, SHORT) + bytes(70_000)
RAW = f"\nexif\n{len(tiff(SHORT)):8}\n{tiff(SHORT).hex()}\n".encode()
ATTRIBUTE = b'<rdf:Description tiff:Orientation="6"/>'
ELEMENT = b"<tiff:Orientation>6</tiff:Orientation>"
XML = b"XML:com.adobe.xmp"
CASES = {
    "little-endian": jpeg(EXIF + tiff(SHORT)),
    "big-endian": jpeg(EXIF + tiff(entry(3, 1, struct.pack(">HH", 6, 0), ">"), order=">")),
    "LONG": jpeg(EXIF + tiff(LONG)),
    "two values": jpeg(EXIF + tiff(entry(3, 2, struct.pack("<HH", 6, 3)))),
    "BYTE": jpeg(EXIF + tiff(entry(1, 1, b"\6\0\0\0"))),
    "SBYTE": jpeg(EXIF + tiff(entry(6, 1, b"\6\0\0\0"))),
    "ASCII": jpeg(EXIF + tiff(entry(2, 1, b"6\0\0\0"))),
    "RATIONAL": jpeg(EXIF + tiff(entry(5, 1, struct.pack("<I", 26))) + struct.pack("<II", 12, 2)),
    "FLOAT": jpeg(EXIF + tiff(entry(11, 1, struct.pack("<f", 6)))),
    "no such type": jpeg(EXIF + tiff(entry(99, 1, b"\6\0\0\0"))),
    "no value": jpeg(EXIF + tiff(entry(3, 0, b"\6\0\0\0"))),
    **{
        f"value {value}": jpeg(EXIF + tiff(entry(3, 1, struct.pack("<HH", value, 0))))
        for value in (0, 1, 8, 9, 600)
    },
    "the tag twice": jpeg(EXIF + tiff(SHORT, entry(3, 1, b"\3\0\0\0"))),
    "a broken tag before": jpeg(EXIF + tiff(entry(2, 900, b"\xff\xff\0\0", tag=0x010F), SHORT)),
    "in another directory": jpeg(
        EXIF + tiff(entry(4, 1, struct.pack("<I", 26), tag=0x8769)) + tiff(SHORT)[8:]
    ),
    "one block over two segments": jpeg(EXIF + LONG_EXIF[:60_000], EXIF + LONG_EXIF[60_000:]),
    "two blocks": jpeg(EXIF + tiff(entry(3, 1, b"\3\0\0\0")), EXIF + tiff(SHORT)),
    "two prefixes": jpeg(EXIF + EXIF + tiff(SHORT)),
    "empty EXIF": jpeg(EXIF),
    "cut EXIF": jpeg(EXIF + b"MM\0*"),
    "no directory": jpeg(EXIF + b"II*\0\xff\xff\xff\xff"),
    "few entries": jpeg(EXIF + b"II*\0" + struct.pack("<IHHHII", 8, 900, 0x0110, 3, 1, 6)),
    "XMP attribute": jpeg(XMP + ATTRIBUTE),
    "XMP element": jpeg(XMP + ELEMENT),
    "two XMP": jpeg(XMP + ATTRIBUTE.replace(b"6", b"3"), XMP + ATTRIBUTE),
    "XMP beside EXIF": jpeg(XMP + ATTRIBUTE, EXIF + tiff(entry(3, 1, b"\3\0\0\0"))),
    "XMP beside EXIF without the tag": jpeg(
        EXIF + tiff(entry(3, 1, b"\3\0\0\0", tag=0x0110)), XMP + ATTRIBUTE
    ),
    "XMP beside EXIF that is no EXIF": jpeg(EXIF + b"what", XMP + ATTRIBUTE),
    "eXIf": png((b"eXIf", tiff(SHORT))),
    "eXIf LONG": png((b"eXIf", tiff(LONG))),
    "eXIf with a prefix": png((b"eXIf", EXIF + tiff(SHORT))),
    "eXIf behind the pixels": png(behind=[(b"eXIf", tiff(SHORT))]),
    "eXIf before and behind": png(
        (b"eXIf", tiff(entry(3, 1, b"\3\0\0\0"))), behind=[(b"eXIf", tiff(SHORT))]
    ),
    "a comment that names eXIf": png((b"tEXt", b"Comment\0eXIf" + tiff(SHORT))),
    "raw profile in tEXt": png((b"tEXt", b"Raw profile type exif\0" + RAW)),
    "raw profile in zTXt": png((b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(RAW))),
    "raw profile in iTXt": png((b"iTXt", b"Raw profile type exif\0\0\0\0\0" + RAW)),
    "raw profile APP1": png((b"tEXt", b"Raw profile type APP1\0" + RAW)),
    "raw profile that is cut": png((b"tEXt", b"Raw profile type exif\0" + RAW[:-3])),
    "XMP in iTXt": png((b"iTXt", XML + b"\0\0\0\0\0" + ATTRIBUTE)),
    "XMP in compressed iTXt": png((b"iTXt", XML + b"\0\1\0\0\0" + zlib.compress(ELEMENT))),
    "animated": animated(),
}


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in CASES.items()])
def test_a_file_is_turned_as_pillow_turns_it(data):
    try:
        turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    except Exception:  # EXIF data that Pillow cannot read: the image stays as it is
        turned = Image.open(io.BytesIO(data))
    expected = np.asarray(turned.convert("RGB")).astype(int)
    pixels = decode.decode(data, "a file").permute(1, 2, 0).numpy()
    assert pixels.shape == expected.shape
    # another build of libjpeg-turbo may round differently by one
    assert np.abs(pixels - expected).max() <= 1
    image = EncodedImage(data, "a file")
    assert (image.height, image.width) == expected.shape[:2]


def test_hundreds_of_random_headers_are_read_as_pillow_reads_them():
    """Also that of those that are turned there are many: the comparison would say nothing of
    upright files."""
    turned = 0
    for number in range(500):
        data = orientations.random_file(random.Random(number))
        with_pillow = orientations.pillows(data)
        if not with_pillow:
            continue
        header = decode.read_header(data, "random")
        assert header.orientation in with_pillow, number
        turned += header.orientation != 1
    assert turned > 100


def test_a_file_without_exif_and_xmp_is_not_given_to_pillow(monkeypatch):
    """So nearly all files cost nothing; texts of other kinds are not read either."""

    def fail(*arguments, **keywords):
        raise AssertionError("Pillow was called")

    text = PngImagePlugin.PngInfo()
    text.add_text("Software", "a program")
    files = [encoded(picture()), encoded(picture(), "PNG"), encoded(picture(), "PNG", pnginfo=text)]
    monkeypatch.setattr(Image, "open", fail)
    monkeypatch.setattr(Image.Image, "getexif", fail)
    assert [decode.read_header(data, "plain").orientation for data in files] == [1, 1, 1]


def test_a_png_with_exif_is_not_decoded_to_find_its_orientation(monkeypatch):
    """Pillow decodes the pixels to look behind them; here it gets a copy that has one pixel."""
    sizes = []
    original = PngImagePlugin.PngImageFile.load

    def load(image):
        sizes.append(image.size)
        return original(image)

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", load)
    assert decode.read_header(file_of(picture(), "PNG", 6), "turned").orientation == 6
    assert set(sizes) == {(1, 1)}


def test_damage_to_such_files_is_refused_or_read_as_by_pillow():
    """Each file cut at many places, also behind its pixels, where Pillow reads what is left."""
    read = 0
    for name, data in CASES.items():
        ends = set(range(0, len(data), max(1, len(data) // 25)))
        if data.startswith(b"\x89PNG"):
            ends.update(range(data.rindex(b"IDAT"), len(data) + 1))
        for end in sorted(ends):
            try:
                orientations.read(data[:end], None)
                read += 1
            except UnreadableImage:
                pass
            except AssertionError as error:
                raise AssertionError(f"{name} cut at {end}") from error
    assert read > len(CASES) / 2

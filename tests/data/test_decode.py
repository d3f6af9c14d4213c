"""Decoding: pixels against Pillow and against values known by hand; damaged files against a clean error."""

import io
import os
import random
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from data.decode import MAX_PIXELS, UnreadableImage, decode
from tests.conftest import ROOT


def picture(height=37, width=52):
    """RGB noise, smooth enough that JPEG keeps its colours; no symmetry."""
    noise = np.random.RandomState(0).randint(0, 256, (5, 7, 3)).astype(np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.BICUBIC)


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pillow(data):
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def decoded(data):
    image = decode(data, "an image")
    assert image.dtype == torch.uint8
    assert image.shape[0] == 3
    return image.permute(1, 2, 0).numpy()


def difference(actual, expected):
    assert actual.shape == expected.shape
    return np.abs(actual.astype(int) - expected.astype(int)).max()


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width, height, bits, colour, rows):
    """A PNG from raw rows, for kinds that Pillow cannot write. colour: 0 grey, 2 RGB, 4 grey + alpha."""
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(
    "options",
    [{"quality": 95, "subsampling": 0}, {"quality": 75, "subsampling": 2}, {"progressive": True}],
    ids=["full colour", "halved colour", "progressive"],
)
def test_a_jpeg_has_the_pixels_that_pillow_gives(mode, options):
    """Both use libjpeg-turbo's exact integer transform, so equality was seen; another build of the library
    may round its colour conversion differently, by one level."""
    data = encoded(picture().convert(mode), "JPEG", **options)
    assert difference(decoded(data), pillow(data)) <= 1


@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_a_png_gives_back_what_was_put_in(mode):
    """PNG is lossless."""
    image = picture().convert(mode)
    np.testing.assert_array_equal(decoded(encoded(image, "PNG")), np.array(image.convert("RGB")))


def test_a_cmyk_jpeg_has_the_colour_of_its_inks():
    """A uniform image has only constant terms; two levels for their quantisation at quality 95."""
    cyan, magenta, yellow, black = 20, 180, 90, 40
    data = encoded(Image.new("CMYK", (32, 32), (cyan, magenta, yellow, black)), "JPEG", quality=95)
    expected = [(255 - ink) * (255 - black) / 255 for ink in (cyan, magenta, yellow)]
    assert difference(decoded(data), np.full((32, 32, 3), np.round(expected))) <= 2


def test_a_palette_becomes_its_colours_with_or_without_transparency():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    for options in ({}, {"transparency": 0}, {"transparency": bytes([0, 128])}):
        data = encoded(image, "PNG", **options)
        np.testing.assert_array_equal(decoded(data), [[[10, 20, 30], [200, 100, 50]]])


def test_alpha_is_dropped_and_the_colour_below_kept():
    colour = encoded(Image.new("RGBA", (1, 1), (10, 20, 30, 0)), "PNG")
    grey = encoded(Image.new("LA", (1, 1), (70, 128)), "PNG")
    keyed = encoded(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG", transparency=(1, 2, 3))
    np.testing.assert_array_equal(decoded(colour), [[[10, 20, 30]]])
    np.testing.assert_array_equal(decoded(grey), [[[70, 70, 70]]])
    np.testing.assert_array_equal(decoded(keyed), [[[1, 2, 3]]])


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2)], ids=["grey", "RGB", "grey + alpha"])
def test_of_sixteen_bits_the_high_eight_are_kept(colour, channels):
    high = np.arange(0, 256, 5)
    row = b"".join(struct.pack(">H", value << 8 | 0xC3) * channels for value in high)
    data = png(len(high), 1, 16, colour, [row])
    np.testing.assert_array_equal(decoded(data), np.repeat(high[None, :, None], 3, axis=2))


@pytest.mark.parametrize(("kind", "mode"), [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGB")])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_as_pillow_applies_it(kind, mode, orientation):
    exif = Image.Exif()
    exif[0x010F] = "maker"
    exif[0x0112] = orientation
    data = encoded(picture().convert(mode), kind, exif=exif)
    expected = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert difference(decoded(data), expected) <= 1  # as for any JPEG


def with_segment(content):
    """A JPEG with an EXIF segment of this content before its others."""
    plain = encoded(picture(), "JPEG")
    return plain[:2] + b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content + plain[2:]


def test_both_byte_orders_of_exif_are_understood():
    little = b"II*\0" + struct.pack("<IHHHII", 8, 1, 0x0112, 3, 1, 6)
    big = b"MM\0*" + struct.pack(">IHHHIHH", 8, 1, 0x0112, 3, 1, 6, 0)
    for tiff in (little, big):
        assert decoded(with_segment(b"Exif\0\0" + tiff)).shape == (52, 37, 3)


@pytest.mark.parametrize(
    "tiff",
    [
        b"",
        b"MM\0*",
        b"II*\0\xff\xff\xff\xff",
        b"II*\0" + struct.pack("<IHHHII", 8, 900, 0x0110, 3, 1, 6),
        b"II*\0" + struct.pack("<IHHHII", 8, 1, 0x0112, 3, 1, 9),
        b"II*\0" + struct.pack("<IHHHII", 8, 1, 0x0112, 4, 1, 6),
    ],
    ids=["empty", "cut", "directory beyond the end", "entries beyond the end", "no such value", "no short"],
)
def test_damaged_exif_data_leave_the_image_upright(tiff):
    assert decoded(with_segment(b"Exif\0\0" + tiff)).shape == (37, 52, 3)


def test_stray_bytes_between_the_segments_of_a_jpeg_are_skipped():
    """Some writers leave them, and libjpeg skips them."""
    plain = encoded(picture(), "JPEG")
    data = plain[:2] + b"\x12\0\x34\xff\xff" + plain[2:]
    np.testing.assert_array_equal(decoded(data), decoded(plain))


@pytest.mark.parametrize(
    "data",
    [encoded(picture(), "JPEG"), encoded(picture(), "JPEG", progressive=True), encoded(picture(), "PNG")],
    ids=["JPEG", "progressive", "PNG"],
)
def test_a_truncated_file_is_unreadable_wherever_it_ends(data):
    """PNG ends in a checksum of four bytes that nobody reads; without those it is whole."""
    whole = len(data) - 4 if data.startswith(b"\x89PNG") else len(data)
    for end in [*range(0, whole, 37), *range(whole - 20, whole)]:
        with pytest.raises(UnreadableImage, match=r"^cut\.jpg: [^:/]+$"):
            decode(data[:end], "cut.jpg")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_damaged_bytes_give_an_image_or_a_clean_error(kind):
    """Such PNGs ended the process with torchvision's decoder. Which of the two it is depends on the damage."""
    data = encoded(picture(), kind)
    generator = random.Random(0)
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(generator.randint(1, 8)):
            damaged[generator.randrange(8, len(data))] = generator.randrange(256)
        try:
            decoded(bytes(damaged))
            outcomes.add("image")
        except UnreadableImage as error:
            assert str(error).startswith("an image: ") and "\n" not in str(error) and "object at" not in str(error)
            outcomes.add("error")
    assert "error" in outcomes


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"These are words.", "neither JPEG nor PNG"),
        (encoded(picture(), "GIF"), "neither JPEG nor PNG"),
        (b"\xff\xd8", "truncated or damaged"),
        (b"\xff\xd8\xff\xd9", "truncated or damaged"),
        (b"\x89PNG\r\n\x1a\n", "truncated or damaged"),
    ],
    ids=["empty", "text", "GIF", "JPEG of two bytes", "JPEG without image", "PNG of eight bytes"],
)
def test_what_is_no_image_is_named_with_the_reason(data, reason):
    with pytest.raises(UnreadableImage) as caught:
        decode(data, "folder/file.jpg")
    assert str(caught.value) == f"folder/file.jpg: {reason}"


def test_a_decompression_bomb_is_refused_before_it_is_decoded():
    """Both files are whole but for the size that they claim, so only the size can be the reason."""
    side = int(MAX_PIXELS**0.5) + 1
    small = bytearray(encoded(picture(), "JPEG"))
    struct.pack_into(">HH", small, small.index(b"\xff\xc0") + 5, side, side)
    for data in (png(side, side, 8, 2, [b"\0" * 9]), bytes(small)):
        with pytest.raises(UnreadableImage, match="exceed the limit of 178,956,970 pixels"):
            decode(data, "bomb")


@pytest.mark.parametrize(("width", "height", "colour"), [(178_956_970, 1, 2), (1, 178_956_970, 0), (13_377, 13_377, 6)])
def test_an_image_that_takes_gigabytes_to_decode_is_refused_before(width, height, colour):
    """Within the limit of pixels; measured without this: 2.5, 4.8 and 2.5 GB."""
    with pytest.raises(UnreadableImage, match=r"bytes of memory to decode, above the limit of 2,147,483,648$"):
        decode(png(width, height, 8, colour, [b"\0" * 9]), "bomb")


def test_an_image_that_pillow_has_no_memory_for_is_unreadable():
    """Pillow refuses long sides by a MemoryError."""
    with pytest.raises(UnreadableImage, match=r"^long: not enough memory for its 150000000 x 1 pixels$"):
        decode(png(150_000_000, 1, 8, 2, [b"\0" * 9]), "long")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_decoding_takes_no_more_memory_than_was_foreseen():
    """At the peak, of a process of its own; 4 MB for what does not grow with the image."""
    code = """
import io
from PIL import Image
from data.decode import decode, read_header
def encoded(mode, kind, size, **options):
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()
def memory(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
for mode, kind, options in (
    ("RGB", "PNG", {}), ("RGBA", "PNG", {}), ("L", "PNG", {}), ("P", "PNG", {}), ("RGB", "thin", {}),
    ("CMYK", "JPEG", {}), ("RGB", "JPEG", {"progressive": True, "subsampling": 0}),
):
    size, kind = ((1, 2_000_000), "PNG") if kind == "thin" else ((2000, 1000), kind)
    decode(encoded(mode, kind, (8, 8), **options), "small")
    data = encoded(mode, kind, size, **options)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = memory("VmRSS")
    decode(data, "large")
    print(memory("VmHWM") - before, read_header(data, "large").memory)
"""
    # What is freed goes back at once, or else it would be there before the next image.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = [tuple(map(int, line.split())) for line in ended.stdout.splitlines()]
    assert len(found) == 7
    for taken, foreseen in found:
        assert 0.7 * foreseen - 4e6 < taken < foreseen + 4e6


def test_pillow_does_not_warn_of_large_images_that_are_within_the_limit(monkeypatch):
    """Pillow warns at half of what it refuses; a warning is an error in these tests."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1500)
    assert decoded(encoded(picture(), "PNG")).shape == (37, 52, 3)

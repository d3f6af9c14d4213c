"""Decoding: pixels against Pillow and values known by hand, parts against the whole, damaged files against an error."""

import io
import itertools
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from data import jpeg
from data.base import Box, Pixels, UnreadableImage
from data.decode import MAX_PIXELS, decode
from data.encoded import EncodedImage
from tests.conftest import ROOT


def picture(height=37, width=52):
    """RGB noise, smooth enough that JPEG keeps its colours; no symmetry."""
    noise = np.random.RandomState(0).randint(0, 256, (5, 7, 3)).astype(np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.BICUBIC)


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


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
    assert difference(decoded(data), np.array(Image.open(io.BytesIO(data)).convert("RGB"))) <= 1


@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_a_png_gives_back_what_was_put_in(mode, monkeypatch):
    """And without a warning of Pillow's about large images, which comes at half of the size that it refuses."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1500)
    image = picture().convert(mode)
    np.testing.assert_array_equal(decoded(encoded(image, "PNG")), np.array(image.convert("RGB")))


def test_a_cmyk_jpeg_has_the_colour_of_its_inks():
    """A uniform image has only constant terms; two levels for their quantisation at quality 95."""
    cyan, magenta, yellow, black = 20, 180, 90, 40
    data = encoded(Image.new("CMYK", (32, 32), (cyan, magenta, yellow, black)), "JPEG", quality=95)
    expected = [(255 - ink) * (255 - black) / 255 for ink in (cyan, magenta, yellow)]
    assert difference(decoded(data), np.full((32, 32, 3), np.round(expected))) <= 2


def test_transparency_is_dropped_and_the_colour_below_kept():
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putpixel((1, 0), 1)
    for options in ({}, {"transparency": 0}, {"transparency": bytes([0, 128])}):
        np.testing.assert_array_equal(decoded(encoded(palette, "PNG", **options)), [[[10, 20, 30], [200, 100, 50]]])
    for mode, colour, options, expected in (
        ("RGBA", (10, 20, 30, 0), {}, [10, 20, 30]),
        ("LA", (70, 128), {}, [70, 70, 70]),
        ("RGB", (1, 2, 3), {"transparency": (1, 2, 3)}, [1, 2, 3]),
    ):
        data = encoded(Image.new(mode, (1, 1), colour), "PNG", **options)
        np.testing.assert_array_equal(decoded(data), [[expected]])


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


EXIF = {
    "little-endian": b"II*\0" + struct.pack("<IHHHII", 8, 1, 0x0112, 3, 1, 6),
    "big-endian": b"MM\0*" + struct.pack(">IHHHIHH", 8, 1, 0x0112, 3, 1, 6, 0),
    "empty": b"",
    "cut": b"MM\0*",
    "directory beyond the end": b"II*\0\xff\xff\xff\xff",
    "entries beyond the end": b"II*\0" + struct.pack("<IHHHII", 8, 900, 0x0110, 3, 1, 6),
    "no such value": b"II*\0" + struct.pack("<IHHHII", 8, 1, 0x0112, 3, 1, 9),
    "no short": b"II*\0" + struct.pack("<IHHHII", 8, 1, 0x0112, 4, 1, 6),
}


@pytest.mark.parametrize("kind", EXIF)
def test_exif_of_both_byte_orders_is_read_and_damaged_exif_leaves_the_image_upright(kind):
    content, plain = b"Exif\0\0" + EXIF[kind], encoded(picture(), "JPEG")
    data = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content + plain[2:]
    assert decoded(data).shape == ((52, 37, 3) if "endian" in kind else (37, 52, 3))


def test_stray_bytes_between_the_segments_of_a_jpeg_are_skipped():
    """Some writers leave them, and libjpeg skips them."""
    plain = encoded(picture(), "JPEG")
    data = plain[:2] + b"\x12\0\x34\xff\xff" + plain[2:]
    np.testing.assert_array_equal(decoded(data), decoded(plain))


@pytest.mark.parametrize(("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {})], ids=str)
def test_a_truncated_file_is_unreadable_wherever_it_ends(kind, options):
    """PNG ends in a checksum of four bytes that nobody reads; without those it is whole."""
    data = encoded(picture(), kind, **options)
    whole = len(data) - 4 if kind == "PNG" else len(data)
    for end in [*range(0, whole, 37), *range(whole - 20, whole)]:
        with pytest.raises(UnreadableImage, match=r"^cut\.jpg: [^:/]+$"):
            decode(data[:end], "cut.jpg")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"These are words.", "neither JPEG nor PNG"),
        (encoded(picture(), "GIF"), "neither JPEG nor PNG"),
        (b"\xff\xd8", "truncated or damaged"),
        (b"\xff\xd8\xff\xd9", "truncated or damaged"),
        (b"\x89PNG\r\n\x1a\n", "truncated or damaged"),
        # Pillow refuses long sides by a MemoryError.
        (png(150_000_000, 1, 8, 2, [b"\0" * 9]), "not enough memory for its 150000000 x 1 pixels"),
    ],
    ids=["empty", "text", "GIF", "JPEG of two bytes", "JPEG without image", "PNG of eight bytes", "long"],
)
def test_what_is_no_image_is_named_with_the_reason(data, reason):
    with pytest.raises(UnreadableImage) as caught:
        decode(data, "folder/file.jpg")
    assert str(caught.value) == f"folder/file.jpg: {reason}"


def bombs():
    """Files that are whole but for the size that they claim, so only the size can be the reason."""
    side = int(MAX_PIXELS**0.5) + 1
    jpeg = bytearray(encoded(picture(), "JPEG"))
    struct.pack_into(">HH", jpeg, jpeg.index(b"\xff\xc0") + 5, side, side)
    pixels = "exceed the limit of 178,956,970 pixels"
    yield pytest.param(bytes(jpeg), pixels, id="JPEG")
    yield pytest.param(png(side, side, 8, 2, [b"\0" * 9]), pixels, id="PNG")
    # Within the limit of pixels; measured without this limit: 2.5, 4.8 and 2.5 GB.
    for width, height, colour in ((178_956_970, 1, 2), (1, 178_956_970, 0), (13_377, 13_377, 6)):
        data = png(width, height, 8, colour, [b"\0" * 9])
        yield pytest.param(data, "of memory to decode, above the limit of 2,147,483,648", id=f"{width} x {height}")


@pytest.mark.parametrize(("data", "reason"), list(bombs()))
def test_a_decompression_bomb_is_refused_before_it_is_decoded(data, reason):
    with pytest.raises(UnreadableImage, match=rf"^bomb: .*{reason}$"):
        decode(data, "bomb")


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
    # Memory that is freed goes back at once, or else it would be there before the next image.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = [tuple(map(int, line.split())) for line in ended.stdout.splitlines()]
    assert len(found) == 7
    for taken, foreseen in found:
        assert 0.7 * foreseen - 4e6 < taken < foreseen + 4e6


def photograph(height=150, width=211):
    """Blobs in colour with a little noise. The sides are no multiple of the 8 or 16 pixels in which JPEGs are coded."""
    noise = np.random.RandomState(0).randint(-9, 10, (height, width, 3))
    return Image.fromarray((np.asarray(picture(height, width)).astype(int) + noise).clip(0, 255).astype(np.uint8))


def file_of(image, kind="JPEG", orientation=1, **options):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif, **options)


@pytest.fixture(params=["by the region decoder", "without one"])
def regions(request, monkeypatch):
    """With nvimgcodec, where it is installed, and as it is where it is not."""
    if request.param == "without one":
        monkeypatch.setattr(jpeg, "_nvimgcodec", lambda: None)
    elif jpeg._nvimgcodec() is None:
        pytest.skip("nvimgcodec is not installed")


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        *((mode, "JPEG", {"subsampling": 2, "quality": 90}) for mode in ("RGB", "L")),
        *((mode, "JPEG", {"progressive": True}) for mode in ("RGB", "L")),
        *((mode, "JPEG", {"restart_marker_blocks": 3}) for mode in ("RGB", "L")),
        ("RGB", "JPEG", {"subsampling": 1}),
        ("RGB", "JPEG", {"subsampling": 0, "quality": 95}),
        ("RGB", "JPEG", {"keep_rgb": True}),
        *(("RGB", "JPEG", {"orientation": orientation}) for orientation in range(1, 9)),
        *(("RGB", "PNG", {"orientation": orientation}) for orientation in (1, 3, 6)),
    ],
    ids=str,
)
def test_a_box_has_the_pixels_of_the_whole_upright_image_to_the_bit(mode, kind, options, regions):
    """So a machine without a decoder of regions trains on the same images."""
    file = file_of(photograph().convert(mode), kind, **options)
    whole, image = decode(file, "whole"), EncodedImage(file, "part")
    assert image.plain == (kind == "JPEG")
    assert (image.height, image.width) == tuple(whole.shape[1:])
    assert torch.equal(image.pixels(), whole)
    random, height, width = np.random.RandomState(1), image.height, image.width
    boxes = [Box(0, 0, height, width), Box(height - 1, width - 1, 1, 1)]
    for _ in range(12):
        top, left = random.randint(0, height), random.randint(0, width)
        boxes.append(Box(top, left, random.randint(1, height - top + 1), random.randint(1, width - left + 1)))
    for box in boxes:
        assert torch.equal(image.pixels(box), whole[:, box.top :, box.left :][:, : box.height, : box.width])


@pytest.mark.parametrize(
    ("factor", "orientation"), [*((2, orientation) for orientation in range(1, 9)), (4, 1), (4, 7), (8, 3), (8, 6)]
)
def test_where_less_will_do_a_box_comes_at_a_half_a_quarter_or_an_eighth(factor, orientation):
    """Against the mean of each square of factor x factor pixels, to which a cosine transform of the smaller size comes
    near: 2 levels on average for these images. The box ends up to one small pixel outside; a box that lies a
    small pixel off is told from the right one."""
    file = file_of(photograph(8 * 47, 8 * 61), orientation=orientation, subsampling=0, quality=95)
    whole, image = decode(file, "whole").float(), EncodedImage(file, "part")
    means = torch.nn.functional.avg_pool2d(whole[None], factor)[0]
    for box in (Box(8 * 3, 8 * 5, 8 * 30, 8 * 34), Box(8, 0, 8 * 40, 8 * 45)):
        part = image.pixels(box, min(box.height, box.width) // factor).float()
        top, left, height, width = (number // factor for number in box)
        assert part.shape[1:] == (height, width)
        errors = {}
        for down, right in itertools.product((0, 1), repeat=2):
            beside = means[:, top + down :, left + right :][:, :height, :width]
            errors[down, right] = (beside - part).abs().mean()
        assert errors[0, 0] < 2
        assert min(errors, key=errors.get) == (0, 0)


def test_a_box_is_never_made_smaller_than_asked_for():
    image = EncodedImage(file_of(photograph(420, 500)), "part")
    for side, height in ((100, 399), (200, 399), (199, 399), (400, 400)):
        box = Box(1, 3, height, 421)
        part = image.pixels(box, side)
        assert min(part.shape[1:]) >= side
        assert (part.shape[1] < box.height) == (2 * side <= height)
        assert image.pixels(box).shape == (3, *box[2:])


@pytest.mark.parametrize("ending", [-2, -200, 400])
def test_a_truncated_jpeg_is_unreadable_whatever_part_is_asked_for(ending, regions):
    """A decoder of parts stops before it sees the end."""
    image = EncodedImage(file_of(photograph())[:ending], "cut.jpg")
    for box, enough in ((Box(0, 0, 9, 9), None), (Box(0, 0, 100, 100), 10), (None, None)):
        with pytest.raises(UnreadableImage, match=r"^cut\.jpg: [^:/]+$"):
            image.pixels(box, enough)


def test_images_that_the_decoders_of_parts_refuse_are_left_to_the_whole_one(monkeypatch, capfd):
    """Such as a CMYK JPEG, which they are not asked for; and nothing is printed."""
    monkeypatch.setattr(jpeg, "region", lambda *_: None)
    monkeypatch.setattr(jpeg, "scaled", lambda *_: None)
    file = file_of(photograph())
    whole, box = decode(file, "whole"), Box(4, 5, 60, 70)
    for enough in (None, 20):
        assert torch.equal(EncodedImage(file, "part").pixels(box, enough), Pixels(whole).pixels(box))
    cmyk = EncodedImage(file_of(photograph().convert("CMYK")), "cmyk")
    assert not cmyk.plain
    assert cmyk.pixels(box, 20).shape == (3, 60, 70)
    assert capfd.readouterr() == ("", "")

"""Decoding: pixels against Pillow and values known by hand, parts against the whole, damaged files
against an error."""

import ctypes
import functools
import io
import itertools
import re
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from data import jpeg
from data.base import Box, Pixels, UnreadableImage
from data.decode import MAX_PIXELS, decode, read_header
from data.encoded import EncodedImage
from tests.world import fork_server


def picture(height=37, width=52, mode="RGB", number=0):
    """RGB noise, smooth enough that JPEG keeps its colours; no symmetry."""
    noise = np.random.RandomState(number).randint(0, 256, (5, 7, 3)).astype(np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.BICUBIC).convert(mode)


def photograph(height=150, width=211, mode="RGB", number=0):
    """Blobs in colour with a little noise.

    The sides are no multiple of the 8 or 16 pixels in which JPEGs are coded.
    """
    noise = np.random.RandomState(0).randint(-9, 10, (height, width, 3))
    levels = (np.asarray(picture(height, width, number=number)).astype(int) + noise).clip(0, 255)
    return Image.fromarray(levels.astype(np.uint8)).convert(mode)


def encoded(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def file_of(image, kind="JPEG", orientation=1, **options):
    exif = Image.Exif()
    exif[0x010F] = "maker"
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif, **options)


def png(width, height, bits, colour, rows):
    """A PNG from raw rows, for kinds that Pillow cannot write. colour: 0 grey, 2 RGB, 4 grey +
    alpha."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))]
    chunks += [(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows))), (b"IEND", b"")]
    packed = (
        struct.pack(">I", len(each)) + kind + each + struct.pack(">I", zlib.crc32(kind + each))
        for kind, each in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def images():
    """Name, file, pixels [height, width, 3] and the tolerance.

    Another build of libjpeg-turbo may round its colour conversion by one level. A uniform CMYK
    image has only constant terms: two levels for their quantisation.
    """

    def of_pillow(data):
        return np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))

    for mode in ("L", "RGB"):
        for options in (
            {"quality": 95, "subsampling": 0},
            {"quality": 75, "subsampling": 2},
            {"progressive": True},
        ):
            data = encoded(picture(mode=mode), **options)
            yield f"JPEG {mode} {options}", data, of_pillow(data), 1
    inks = np.array([20, 180, 90])
    black = 40
    expected = np.broadcast_to(np.round((255 - inks) * (255 - black) / 255), (32, 32, 3))
    yield "CMYK", encoded(Image.new("CMYK", (32, 32), (*inks, black)), quality=95), expected, 2
    plain = encoded(picture())
    stray = plain[:2] + b"\x12\0\x34\xff\xff" + plain[2:]  # libjpeg skips such bytes
    yield "JPEG with stray bytes", stray, of_pillow(plain), 1
    for mode in ("1", "L", "RGB"):
        yield (
            f"PNG {mode}",
            encoded(picture(mode=mode), "PNG"),
            np.array(picture(mode=mode).convert("RGB")),
            0,
        )
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putpixel((1, 0), 1)
    for options in ({}, {"transparency": 0}, {"transparency": bytes([0, 128])}):
        yield (
            f"palette {options}",
            encoded(palette, "PNG", **options),
            [[[10, 20, 30], [200, 100, 50]]],
            0,
        )
    for mode, colour, options, expected in (
        ("RGBA", (10, 20, 30, 0), {}, [10, 20, 30]),
        ("LA", (70, 128), {}, [70, 70, 70]),
        ("RGB", (1, 2, 3), {"transparency": (1, 2, 3)}, [1, 2, 3]),
    ):
        yield (
            f"{mode} {options}",
            encoded(Image.new(mode, (1, 1), colour), "PNG", **options),
            [[expected]],
            0,
        )
    high = np.arange(0, 256, 5)
    for colour, channels in ((0, 1), (2, 3), (4, 2)):  # of 16 bits the high 8 are kept
        row = b"".join(struct.pack(">H", value << 8 | 0xC3) * channels for value in high)
        expected = np.repeat(high[None, :, None], 3, axis=2)
        yield f"16 bits, colour {colour}", png(len(high), 1, 16, colour, [row]), expected, 0
    for kind, mode in (("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGB")):
        for orientation in range(1, 9):
            data = file_of(picture(mode=mode), kind, orientation)
            yield f"{kind} {mode}, orientation {orientation}", data, of_pillow(data), 1


@pytest.mark.parametrize(
    ("data", "expected", "tolerance"), [pytest.param(*each, id=name) for name, *each in images()]
)
def test_images_have_the_pixels_that_pillow_gives(data, expected, tolerance, monkeypatch):
    """Without its warning of large images, which comes at half of the size that it refuses."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1500)
    image = decode(data, "an image")
    assert (image.dtype, image.shape[1:]) == (torch.uint8, np.shape(expected)[:2])
    assert np.abs(image.permute(1, 2, 0).numpy().astype(int) - expected).max() <= tolerance


def many_scans(size, repeated):
    """A progressive JPEG whose last scan, of few bytes, comes again and again."""
    data = encoded(Image.new("L", size, 130), progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * repeated + data[-2:]


def refused():
    """Some are whole but for the size that they claim, and are refused before they are decoded."""
    yield b"", "the file is empty"
    yield encoded(picture(), "GIF"), "neither JPEG nor PNG, but a GIF file named .jpg"
    yield (
        many_scans((20, 20), 60),
        "66 scans of 20 x 20 pixels, which take too long (the limits are 64 scans",
    )
    yield (
        functools.partial(many_scans, (9000, 9000), 40),
        "46 scans of 9000 x 9000 pixels, which take too long",
    )
    for short in (b"\xff\xd8", b"\xff\xd8\xff\xd9", b"\x89PNG\r\n\x1a\n"):
        yield short, "truncated or damaged"
    yield png(150_000_000, 1, 8, 2, [b"\0" * 9]), "not enough memory"
    side = int(MAX_PIXELS**0.5) + 1
    bomb = bytearray(encoded(picture()))
    struct.pack_into(">HH", bomb, bomb.index(b"\xff\xc0") + 5, side, side)
    for data in (bytes(bomb), png(side, side, 8, 2, [b"\0" * 9])):
        yield data, f"{side} x {side} pixels exceed the limit of 178,956,970 pixels"
    # Within the limit of pixels; measured without this limit: 2.5, 4.8 and 2.5 GB.
    for width, height, colour in ((178_956_970, 1, 2), (1, 178_956_970, 0), (13_377, 13_377, 6)):
        memory = height * (width * (14 if colour else 11) + 16)
        data = png(width, height, 8, colour, [b"\0" * 9])
        yield data, f"{width} x {height} pixels of this kind take {memory:,} bytes"


@pytest.mark.parametrize(
    ("data", "reason"), [pytest.param(*each, id=each[1]) for each in refused()]
)
def test_what_cannot_be_decoded_is_named_with_the_reason(data, reason):
    """Args: data: the file, or a function that makes a large one."""
    data = data() if callable(data) else data
    with pytest.raises(UnreadableImage) as caught:
        decode(data, "folder/file.jpg")
    assert str(caught.value).startswith(f"folder/file.jpg: {reason}")


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"RIFF\x10\0\0\0WEBPVP8 ", "a WebP file"),
        (b"GIF89a\1\0", "a GIF file"),
        (b"BM\x10\0\0\0\0\0\0\0\x36", "a BMP file"),
        (b"II*\0\x08\0", "a TIFF file"),
        (b"MM\0*\0\0", "a TIFF file"),
        (b"\0\0\0\x1cftypavif\0", "an AVIF file"),
        (b"\0\0\0\x18ftypheic\0", "a HEIC file"),
        (b"\0\0\0\x18ftypmp42\0", "a video"),
        (b"\0\0\0\x0cJXL \r\n", "a JPEG XL file"),
        (b"%PDF-1.4", "a PDF file"),
        (b"PK\3\4rest", "an archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"),
        (b"\n <!DOCTYPE HTML>", "a web page"),
        (b"<?xml version='1.0'?><svg", "SVG or other XML"),
        (bytes(9000), "zeros only"),
    ],
)
def test_a_file_of_another_kind_that_is_named_jpg_is_called_what_it_is(start, kind):
    with pytest.raises(
        UnreadableImage, match=rf"^a/b\.JPG: neither JPEG nor PNG, but {kind}.*named \.JPG$"
    ):
        decode(start, "a/b.JPG")
    with pytest.raises(UnreadableImage, match=rf"^x: neither JPEG nor PNG, but {kind}"):
        decode(start, "x")


def test_other_kinds_that_pillow_writes_are_known_and_unknown_ones_are_not_guessed():
    for kind, name in (
        ("WEBP", "WebP"),
        ("BMP", "BMP"),
        ("TIFF", "TIFF"),
        ("AVIF", "AVIF"),
        ("PPM", "PNM"),
    ):
        if kind not in Image.SAVE:  # by Pillow's version and libraries
            continue
        with pytest.raises(UnreadableImage, match=f"but an? {name} file"):
            decode(encoded(picture(), kind), "x")
    with pytest.raises(UnreadableImage, match=r"neither JPEG nor PNG$"):
        decode(b"\x07what", "x.jpg")


def test_a_png_named_jpg_is_read():
    data = encoded(picture(), "PNG")
    assert torch.equal(decode(data, "a.jpg"), decode(data, "a.png"))


@pytest.mark.parametrize(("options", "scans"), [({"progressive": True}, 10), ({}, 1)])
def test_the_scans_of_usual_files_are_far_below_the_limit(options, scans):
    """libjpeg's script has ten for colours.

    Data behind the end, as of a second picture, are no scans.
    """
    data = encoded(photograph(), **options)
    assert read_header(data, "").scans == scans
    assert read_header(data + many_scans((20, 20), 90), "").scans == scans
    decode(data + many_scans((20, 20), 90), "two pictures")


def test_a_scan_whose_marker_is_hidden_by_a_false_end_is_counted():
    """In a comment between two scans, a marker of the end is none."""
    data = many_scans((20, 20), 80)
    place = data.rindex(b"\xff\xda", 0, len(data) // 4)
    comment = b"\xff\xfe\0\4\xff\xd9"
    with pytest.raises(UnreadableImage, match="86 scans"):
        read_header(data[:place] + comment + data[place:], "")


def test_damage_that_the_decoder_goes_over_is_told_with_the_files_name_and_changes_no_pixel(capfd):
    """libjpeg prints such a line, without a name, when torchvision decodes the file.

    The number of stray bytes depends on the version of libjpeg, of which both packages bring one.
    """
    complaint = r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9"
    whole = encoded(photograph(), quality=90)
    stray = whole[:-2] + b"\x12" * 20 + whole[-2:]
    told = []
    pixels = decode(stray, "a.jpg", told.append)
    decode(whole, "b.jpg", told.append)
    assert len(told) == 1
    assert re.fullmatch(complaint, told[0])
    assert capfd.readouterr().err == ""
    by_torchvision = torch.ops.image.decode_jpeg(
        torch.frombuffer(bytearray(stray), dtype=torch.uint8), 3
    )
    assert torch.equal(pixels, by_torchvision)
    assert re.fullmatch(f"{complaint}\n", capfd.readouterr().err)
    image = EncodedImage(stray, "folder/a.jpg")
    for box, enough in ((None, None), (Box(0, 0, 120, 160), 30)):
        image.damage = ""
        image.pixels(box, enough)
        assert image.damage == f"folder/a.jpg: damaged, but can be decoded ({told[0]})"


def test_a_damaged_file_without_its_end_is_unreadable_whatever_is_complained_of_first():
    """libjpeg's first complaint is of other damage, and it would make up the rest."""
    data = bytearray(encoded(photograph(), quality=90, restart_marker_blocks=3))
    marker = data.index(b"\xff\xd1", 700)
    data[marker + 1] = 0xD5
    told = []
    decode(bytes(data), "whole", told.append)
    assert len(told) == 1
    with pytest.raises(UnreadableImage, match=r"^cut: truncated or damaged$"):
        decode(bytes(data[:-400]), "cut", told.append)


@pytest.fixture(params=["by the region decoder", "without one"])
def regions(request, monkeypatch):
    """With nvimgcodec, where it is installed, and as it is where it is not."""
    if request.param == "without one":
        monkeypatch.setattr(jpeg, "_nvimgcodec", lambda *_: None)
    elif jpeg._nvimgcodec(0, 0) is None:
        pytest.skip("nvimgcodec is not installed")


def given_up():
    """A progressive JPEG at which libjpeg warns first and gives up then: an unknown marker within
    its first scan."""
    data = bytearray(encoded(photograph(), quality=90, progressive=True))
    place = data.index(b"\xff\0", data.index(b"\xff\xda"))
    data[place + 1 : place + 4] = b"\x18\0\2"
    return bytes(data)


@pytest.mark.parametrize(
    ("box", "enough"), [(None, None), (Box(10, 20, 60, 80), None), (Box(0, 0, 120, 160), 30)]
)
def test_a_file_at_which_the_decoder_gives_up_is_unreadable_whatever_part_is_asked_for(
    box, enough, regions
):
    """simplejpeg returns it after the warning as if it were whole: memory to which nobody has
    written."""
    image = EncodedImage(given_up(), "folder/a.jpg")
    with pytest.raises(UnreadableImage, match=r"^folder/a\.jpg: Unsupported marker type 0x18$"):
        image.pixels(box, enough)
    assert image.damage == ""


@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 3}], ids=str)
def test_a_damaged_file_with_its_end_is_read_whatever_part_is_asked_for(options, regions):
    """A false marker among the pixels whose length leads beyond the end of the file."""
    data = bytearray(encoded(photograph(), quality=90, **options))
    place = len(data) * 2 // 3
    data[place : place + 4] = b"\xff\x6b\xff\xff"
    for box, enough in ((None, None), (Box(10, 20, 60, 80), None), (Box(0, 0, 120, 160), 30)):
        EncodedImage(bytes(data), "a.jpg").pixels(box, enough)
        with pytest.raises(UnreadableImage, match=r"^a\.jpg: truncated or damaged$"):
            EncodedImage(bytes(data[:-2]), "a.jpg").pixels(box, enough)


def _memory(answers):
    """(measured, foreseen) bytes at the peak of decoding images of several kinds."""
    # Memory that is freed goes back at once, or else it would be there before the next image.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD

    def memory(name):
        return (
            int(re.search(rf"{name}:\s*(\d+)", Path("/proc/self/status").read_text()).group(1))
            * 1024
        )

    kinds = [(mode, "PNG", {}, (2000, 1000)) for mode in ("RGB", "RGBA", "L", "P")]
    kinds += [("RGB", "PNG", {}, (1, 2_000_000)), ("CMYK", "JPEG", {}, (2000, 1000))]
    kinds += [("RGB", "JPEG", {"progressive": True, "subsampling": 0}, (2000, 1000))]
    found = []
    for mode, kind, options, size in kinds:
        decode(encoded(Image.new(mode, (8, 8)), kind, **options), "small")
        data = encoded(Image.new(mode, size), kind, **options)
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        decode(data, "large")
        found.append((memory("VmHWM") - before, read_header(data, "large").memory))
    answers.put(found)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_decoding_takes_no_more_memory_than_was_foreseen():
    """At the peak, of a process of its own; 4 MB for what does not grow with the image."""
    context = fork_server()  # a fork of this process would reuse what earlier tests have freed
    answers = context.Queue()
    process = context.Process(target=_memory, args=(answers,))
    process.start()
    found = answers.get(timeout=200)
    process.join()
    assert all(0.7 * foreseen - 4e6 < taken < foreseen + 4e6 for taken, foreseen in found), found


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {})], ids=str
)
def test_a_truncated_file_is_unreadable_wherever_it_ends_and_whatever_part_is_asked_for(
    kind, options, regions
):
    """A decoder of parts stops before it sees the end.

    A PNG ends in a checksum of four bytes that nobody reads.
    """
    data = encoded(picture(), kind, **options)
    whole = len(data) - 4 if kind == "PNG" else len(data)
    for end in [*range(0, whole, 37), *range(whole - 20, whole)]:
        for box, enough in ((None, None), (Box(0, 0, 9, 9), None), (Box(0, 0, 30, 40), 10)):
            with pytest.raises(UnreadableImage, match=r"^cut\.jpg: [^:/]+$"):
                EncodedImage(data[:end], "cut.jpg").pixels(box, enough)


@pytest.mark.parametrize(
    ("mode", "kind", "options"),
    [
        *(
            (mode, "JPEG", {"progressive": progressive})
            for mode in ("L", "RGB")
            for progressive in (False, True)
        ),
        *(("RGB", "JPEG", {"subsampling": subsampling, "quality": 95}) for subsampling in (0, 1)),
        ("RGB", "JPEG", {"restart_marker_blocks": 3}),
        ("RGB", "JPEG", {"keep_rgb": True}),
        *(("RGB", "JPEG", {"orientation": orientation}) for orientation in range(1, 9)),
        ("RGB", "PNG", {"orientation": 6}),
    ],
    ids=str,
)
def test_a_box_has_the_pixels_of_the_whole_upright_image_to_the_bit(mode, kind, options, regions):
    """So a machine without a decoder of regions trains on the same images."""
    file = file_of(photograph(mode=mode), kind, **options)
    whole = decode(file, "whole")
    image = EncodedImage(file, "part")
    assert image.plain == (kind == "JPEG")
    assert (image.height, image.width) == tuple(whole.shape[1:])
    random = np.random.RandomState(1)
    height = image.height
    width = image.width
    boxes = [None, Box(0, 0, height, width), Box(height - 1, width - 1, 1, 1)]
    for _ in range(12):
        top = random.randint(0, height)
        left = random.randint(0, width)
        boxes.append(
            Box(top, left, random.randint(1, height - top + 1), random.randint(1, width - left + 1))
        )
    for box in boxes:
        assert torch.equal(image.pixels(box), Pixels(whole).pixels(box))


@pytest.mark.parametrize(
    ("factor", "orientation"), [*((2, orientation) for orientation in range(1, 9)), (4, 7), (8, 3)]
)
def test_where_less_will_do_a_box_comes_at_a_half_a_quarter_or_an_eighth(factor, orientation):
    """Against the mean of each square of factor x factor pixels, to which a smaller cosine
    transform comes near: 2 levels on average for these images. A box that lies a small pixel off is
    told from the right one."""
    file = file_of(photograph(8 * 47, 8 * 61), orientation=orientation, subsampling=0, quality=95)
    whole = decode(file, "whole").float()
    image = EncodedImage(file, "part")
    means = torch.nn.functional.avg_pool2d(whole[None], factor)[0]
    for box in (Box(8 * 3, 8 * 5, 8 * 30, 8 * 34), Box(8, 0, 8 * 40, 8 * 45)):
        part = image.pixels(box, min(box.height, box.width) // factor).float()
        top, left, height, width = (number // factor for number in box)
        assert part.shape[1:] == (height, width)
        moved = [
            means[:, top + down :, left + right :]
            for down, right in itertools.product((0, 1), repeat=2)
        ]
        errors = [(beside[:, :height, :width] - part).abs().mean() for beside in moved]
        assert errors[0] < 2 and errors[0] == min(errors)


def test_a_box_is_never_made_smaller_than_asked_for():
    image = EncodedImage(file_of(photograph(420, 500)), "part")
    for side, height in ((200, 399), (199, 399), (400, 400)):
        part = image.pixels(Box(1, 3, height, 421), side)
        assert min(part.shape[1:]) >= side
        assert (part.shape[1] < height) == (2 * side <= height)


def test_images_that_the_decoders_of_parts_refuse_are_left_to_the_whole_one(monkeypatch, capfd):
    """And nothing is printed. A CMYK JPEG is not offered to them."""
    assert EncodedImage(file_of(photograph(mode="CMYK")), "cmyk").pixels(
        Box(4, 5, 60, 70), 20
    ).shape == (3, 60, 70)
    monkeypatch.setattr(jpeg, "region", lambda *_: None)
    monkeypatch.setattr(jpeg, "scaled", lambda *_: None)
    file = file_of(photograph())
    box = Box(4, 5, 60, 70)
    for enough in (None, 20):
        assert torch.equal(
            EncodedImage(file, "part").pixels(box, enough), decode(file, "")[:, 4:64, 5:75]
        )
    assert capfd.readouterr() == ("", "")

"""Parts of files against the whole files that torchvision and Pillow decode."""

import io
import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from data import jpeg
from data.base import Box, Pixels, UnreadableImage
from data.decode import decode
from data.encoded import EncodedImage

HEIGHT, WIDTH = 150, 211  # no multiple of the 8 or 16 pixels in which JPEGs are coded


def photograph(height=HEIGHT, width=WIDTH):
    """Blobs in colour with a little noise: edges in every direction, and no symmetry."""
    random = np.random.RandomState(0)
    coarse = Image.fromarray(random.randint(0, 256, (9, 13, 3)).astype(np.uint8)).resize((width, height), Image.BICUBIC)
    noisy = np.asarray(coarse).astype(int) + random.randint(-9, 10, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def file_of(image, kind="JPEG", orientation=1, **options):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif, **options)
    return file.getvalue()


def boxes(height, width, count=25):
    random = np.random.RandomState(1)
    for _ in range(count):
        top, left = random.randint(0, height), random.randint(0, width)
        yield Box(top, left, random.randint(1, height - top + 1), random.randint(1, width - left + 1))
    yield Box(0, 0, height, width)
    yield Box(height - 1, width - 1, 1, 1)


KINDS = {
    "halved colour": {"subsampling": 2, "quality": 90},
    "colour halved across": {"subsampling": 1},
    "full colour": {"subsampling": 0, "quality": 95},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 3},
    "RGB inside": {"keep_rgb": True},
}


@pytest.fixture(params=["by the region decoder", "without one"])
def regions(request, monkeypatch):
    """With nvimgcodec, where it is installed, and as it is where it is not."""
    if request.param == "without one":
        monkeypatch.setattr(jpeg, "_nvimgcodec", lambda: None)
    elif jpeg._nvimgcodec() is None:
        pytest.skip("nvimgcodec is not installed")


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_box_has_the_pixels_of_the_whole_image_to_the_bit(kind, mode, regions):
    """So a machine without a decoder of regions trains on the same images."""
    if mode == "L" and kind == "RGB inside":
        pytest.skip("grey has no colours to keep")
    encoded = file_of(photograph().convert(mode), **KINDS[kind])
    whole, image = decode(encoded, "whole"), EncodedImage(encoded, "part")
    assert image.plain
    for box in boxes(HEIGHT, WIDTH):
        assert torch.equal(image.pixels(box), whole[:, box.top :, box.left :][:, : box.height, : box.width])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_boxes_are_those_of_the_upright_image(kind, orientation, regions):
    encoded = file_of(photograph(), kind, orientation)
    whole, image = decode(encoded, "whole"), EncodedImage(encoded, "part")
    assert (image.height, image.width) == tuple(whole.shape[1:])
    assert torch.equal(image.pixels(), whole)
    for box in boxes(image.height, image.width):
        assert torch.equal(image.pixels(box), Pixels(whole).pixels(box))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_where_less_will_do_a_box_comes_at_a_half_a_quarter_or_an_eighth(factor, orientation):
    """Against the mean of each square of factor x factor pixels, to which a cosine transform of the smaller size comes
    near: 2 levels on average for these images. The box ends up to one small pixel outside; a box that lies a
    small pixel off is told from the right one."""
    encoded = file_of(photograph(8 * 47, 8 * 61), orientation=orientation, subsampling=0, quality=95)
    whole, image = decode(encoded, "whole").float(), EncodedImage(encoded, "part")
    means = torch.nn.functional.avg_pool2d(whole[None], factor)[0]
    for box in (Box(8 * 3, 8 * 5, 8 * 30, 8 * 34), Box(8, 0, 8 * 40, 8 * 45)):
        side = min(box.height, box.width) // factor
        part = image.pixels(box, side).float()
        small = [number // factor for number in box]
        assert part.shape[1:] == (small[2], small[3])
        errors = {
            (down, right): (means[:, small[0] + down :, small[1] + right :][:, : small[2], : small[3]] - part)
            .abs()
            .mean()
            for down, right in itertools.product((0, 1), repeat=2)
        }
        assert errors[0, 0] < 2
        assert min(errors, key=errors.get) == (0, 0)


def test_a_box_is_never_made_smaller_than_asked_for():
    encoded = file_of(photograph(420, 500))
    image = EncodedImage(encoded, "part")
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


def test_what_the_decoders_of_parts_refuse_is_left_to_the_whole_one(monkeypatch, capfd):
    """Such as a CMYK JPEG, which they are not asked for; and nothing is printed."""
    monkeypatch.setattr(jpeg, "region", lambda *_: None)
    monkeypatch.setattr(jpeg, "scaled", lambda *_: None)
    encoded = file_of(photograph())
    whole, box = decode(encoded, "whole"), Box(4, 5, 60, 70)
    for enough in (None, 20):
        assert torch.equal(EncodedImage(encoded, "part").pixels(box, enough), Pixels(whole).pixels(box))
    cmyk = EncodedImage(file_of(photograph().convert("CMYK")), "cmyk")
    assert not cmyk.plain
    assert cmyk.pixels(box, 20).shape == (3, 60, 70)
    assert capfd.readouterr() == ("", "")


def test_damaged_bytes_give_an_image_or_a_clean_error(regions):
    """Which of the two it is depends on the damage."""
    encoded, random = file_of(photograph(), quality=85), np.random.RandomState(0)
    outcomes, box = set(), Box(20, 30, 100, 90)
    for _ in range(200):
        damaged = bytearray(encoded)
        for _ in range(random.randint(1, 6)):
            damaged[random.randint(2, len(encoded))] = random.randint(256)
        try:
            part = EncodedImage(bytes(damaged), "image").pixels(box)
            assert part.dtype == torch.uint8 and part.shape == (3, 100, 90)
            outcomes.add("image")
        except UnreadableImage as error:
            assert str(error).startswith("image: ") and "\n" not in str(error)
            outcomes.add("error")
    assert outcomes == {"image", "error"}

"""Glyphs: a fixed list of distinct shapes, drawn the same everywhere, harder with the difficulty."""

import multiprocessing
import os
import pickle
import sys
import zlib
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

import data.glyphs
from data.glyphs import FONTS, GLYPHS, GlyphsSource
from data.sources import open_source
from recipe.config import Data
from recipe.errors import DataError
from recipe.randomness import Stream

FOLDER = os.path.join(matplotlib.get_data_path(), "fonts", "ttf")


@pytest.fixture(autouse=True)
def _nothing_drawn_before():
    data.glyphs._kept.cache_clear()


def source(difficulty, classes=10, images=400, split="train", size=32):
    return GlyphsSource(classes, images, split, size, difficulty)


def pixels(source, count=None):
    """float64 [count, 3, size, size], levels from 0 to 255."""
    return np.stack([source.read(index).numpy() for index in range(count or len(source))]).astype(np.float64)


def silhouettes(glyphs, degrees):
    """Every glyph in every font, turned, its box fitted to 20 of 24 pixels: float32 [glyphs, fonts, 576], norm 1."""
    fonts = [ImageFont.truetype(os.path.join(FOLDER, f"{font}.ttf"), 64, layout_engine=0) for font in FONTS]
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    images = np.empty((len(glyphs), len(fonts), 24, 24), np.float32)
    for i, glyph in enumerate(glyphs):
        for j, font in enumerate(fonts):
            plain = Image.new("L", (192, 192))
            ImageDraw.Draw(plain).text((96, 96), glyph, fill=255, font=font, anchor="mm")
            left, top, right, bottom = plain.getbbox()
            scale = max(right - left, bottom - top) / 40  # of 48 pixels, twice as fine
            x, y = (left + right) / 2, (top + bottom) / 2
            a, b = scale * cos, scale * sin
            rows = (a, b, x - 24 * (a + b), -b, a, y - 24 * (a - b))
            fitted = plain.transform((48, 48), Image.Transform.AFFINE, rows, Image.Resampling.BILINEAR)
            images[i, j] = fitted.reduce(2)
    for axis in (2, 3):
        images = (np.roll(images, 1, axis) + 2 * images + np.roll(images, -1, axis)) / 4
    images = images.reshape(len(glyphs), len(fonts), -1)
    return images / np.linalg.norm(images, axis=-1, keepdims=True)


def likeness(glyphs):
    """Cosine of two glyphs' blurred images, the highest over fonts and over 0 and 10 degrees: [glyphs, glyphs]."""
    upright, turned = silhouettes(glyphs, 0), silhouettes(glyphs, 10)
    highest = np.zeros((len(glyphs), len(glyphs)), np.float32)
    for others in (upright, turned):
        others = others.reshape(-1, others.shape[-1]).T
        for first in range(0, len(glyphs), 50):
            some = upright[first : first + 50]
            cosines = some.reshape(-1, some.shape[-1]) @ others
            cosines = cosines.reshape(len(some), len(FONTS), len(glyphs), len(FONTS)).max((1, 3))
            highest[first : first + 50] = np.maximum(highest[first : first + 50], cosines)
    highest = np.maximum(highest, highest.T)  # turned the other way
    np.fill_diagonal(highest, 0)
    return highest


def digest(source, index):
    """Usable by another process, which sends back no tensor."""
    return source.read(index).numpy().tobytes()


def test_there_are_a_thousand_classes_of_which_a_recipe_takes_the_first():
    assert len(GLYPHS) == len(set(GLYPHS)) == 1000
    assert GLYPHS.startswith("0123456789ABC")
    assert zlib.crc32(GLYPHS.encode()) == 0xE28BCFC3  # labels of old checkpoints are positions in it
    names = source(0, classes=1000).classes
    assert names[0] == "U+0030 DIGIT ZERO"
    assert len(set(names)) == 1000
    assert all(name.isascii() and name.isprintable() for name in names)
    assert source(0, classes=17).classes == names[:17]


def test_every_font_has_every_glyph():
    for font in FONTS:
        known = FT2Font(os.path.join(FOLDER, f"{font}.ttf")).get_charmap()
        assert [glyph for glyph in GLYPHS if ord(glyph) not in known] == [], font


def test_no_glyph_looks_like_another():
    """Chosen at 0.966, the first after the Latin letters at 0.92; FreeType's releases may differ by the rest."""
    alike = likeness(GLYPHS)
    first, second = np.unravel_index(alike.argmax(), alike.shape)
    assert alike.max() < 0.97, f"{GLYPHS[first]} looks like {GLYPHS[second]}"
    assert alike[51:599, :599].max() < 0.925


@pytest.mark.parametrize("images", [5, 1003])
def test_classes_are_balanced(images):
    labels = source(0, images=images).labels
    assert labels.dtype == np.int64
    assert labels.shape == (images,)
    counts = np.bincount(labels, minlength=10)
    assert counts.max() - counts.min() <= 1
    assert len(counts) == 10


@pytest.mark.parametrize("size", [8, 33])
@pytest.mark.parametrize("difficulty", [0, 0.01, 1.0])
def test_an_image_is_rgb_planes(size, difficulty):
    glyphs = source(difficulty, classes=1000, images=1000, size=size)
    for index in range(0, 1000, 7):
        image = glyphs.read(index)
        assert image.shape == (3, size, size)
        assert image.dtype == torch.uint8
        assert image.is_contiguous()
        assert image.float().std() > 5  # something is drawn


def test_an_image_is_a_function_of_its_number():
    first, second = source(1), source(1, images=3)
    for index in (2, 0, 1):
        expected = first.read(index)
        assert torch.equal(second.read(index), expected)
        assert torch.equal(second.read(np.int64(index)), expected)


def test_another_process_draws_the_same_image():
    glyphs = source(1)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(digest, glyphs, 7).result() == digest(glyphs, 7)


def test_little_is_sent_to_workers():
    """Labels and names, but no masks, which would be megabytes, nor fonts, which cannot be."""
    glyphs = source(1, classes=1000, images=1000)
    assert len(pickle.dumps(glyphs)) < glyphs.labels.nbytes + 100_000


@pytest.mark.parametrize("difficulty", [0, 0.5])
def test_no_two_images_are_the_same(difficulty):
    train, validation = (pixels(source(difficulty, split=split)) for split in ("train", "validation"))
    assert len(np.unique(np.concatenate((train, validation)).reshape(800, -1), axis=0)) == 800


def test_names_say_split_and_number():
    assert source(0).name(17) == "glyphs/train/17"
    assert source(0, split="validation").name(0) == "glyphs/validation/0"


def test_difficulty_0_is_black_on_white_upright_and_centred():
    """Compared with a large drawing made small. The tolerances are the jitter, of 2 % of 64 pixels, and a pixel."""
    glyphs = source(0, classes=60, images=180, size=64)
    drawn = pixels(glyphs)
    assert (drawn == drawn[:, :1]).all()  # grey
    ink = 1 - drawn[:, 0] / 255
    assert ink.max((1, 2)).min() > 0.95
    assert not ink[:, [0, -1]].any()
    assert not ink[..., [0, -1]].any()
    font = ImageFont.truetype(os.path.join(FOLDER, "DejaVuSans.ttf"), 200)
    cosines = []
    for image, label in zip(ink, glyphs.labels):
        plain = Image.new("L", (400, 400))
        ImageDraw.Draw(plain).text((200, 200), GLYPHS[label], fill=255, font=font, anchor="mm")
        left, top, right, bottom = plain.getbbox()
        longer = max(right - left, bottom - top) / 0.7 / 2
        x, y = (left + right) / 2, (top + bottom) / 2
        box = (x - longer, y - longer, x + longer, y + longer)
        plain = np.asarray(plain.resize((64, 64), Image.Resampling.BOX, box=box)) / 255
        rows, columns = np.nonzero(image > 0.5)
        box = np.array([rows.min(), rows.max() + 1, columns.min(), columns.max() + 1])
        height, width = box[1] - box[0], box[3] - box[2]
        assert abs(max(height, width) - 0.7 * 64) < 0.02 * 64 + 2
        assert abs(box[:2].mean() - 32) < 0.02 * 64 + 1
        assert abs(box[2:].mean() - 32) < 0.02 * 64 + 1
        image = np.roll(image, np.round(32 - box.reshape(2, 2).mean(1)).astype(int), (0, 1))
        cosines.append((image * plain).sum() / np.sqrt((image**2).sum() * (plain**2).sum()))
    assert np.median(cosines) > 0.94  # it is 0.97, and 0.88 at a slant of 5 degrees
    assert np.min(cosines) > 0.75  # thin strokes, half a pixel off


def features(glyphs):
    """How much each pixel differs from the background, alike for light on dark: float64 [n, pixels], norm 1."""
    grey = pixels(glyphs).mean(1).reshape(len(glyphs), -1)
    grey = np.abs(grey - np.median(grey, axis=1, keepdims=True))
    return grey / np.linalg.norm(grey, axis=1, keepdims=True)


def test_difficulty_spreads_the_images_of_a_class():
    """As a share of the variance of all images: 1, nearly, for images that have nothing to do with their class."""
    shares = []
    for difficulty in (0, 0.25, 0.5, 0.75, 1):
        images = features(source(difficulty)).reshape(40, 10, -1)
        shares.append(images.var(0).mean() / images.var((0, 1)).mean())
    assert shares == sorted(shares)
    assert shares[0] < 0.2
    assert shares[-1] > 0.8


def nearest_centroid_accuracy(difficulty):
    train, validation = source(difficulty, images=600), source(difficulty, images=300, split="validation")
    images = features(train)
    centroids = np.stack([images[train.labels == label].mean(0) for label in range(10)])
    distances = np.square(features(validation)[:, None] - centroids).sum(2)
    return (distances.argmin(1) == validation.labels).mean()


def test_classes_can_be_learned_and_less_easily_at_a_higher_difficulty():
    """By the simplest of classifiers; chance is 0.1, with a standard deviation of 0.02."""
    easy, hard = nearest_centroid_accuracy(0.3), nearest_centroid_accuracy(1)
    assert easy > 0.85
    assert 0.2 < hard < easy - 0.3


WITHOUT = {
    "_gradient": lambda original, ramp, size, angle: Image.new("L", (size, size)),
    "_add_scrap": lambda original, image, *others: original(image.copy(), *others),
    "_add_line": lambda original, draw, *others: original(ImageDraw.Draw(Image.new("RGB", (1, 1))), *others),
    "_noisy": lambda original, pixels, *others: np.array(pixels, order="C"),
    "ImageFilter.BoxBlur": lambda original, radius: original(0),
}


@pytest.mark.parametrize("part", WITHOUT)
def test_every_part_is_seen_except_at_difficulty_0(part, monkeypatch):
    """Each is left out in turn, with the same draws. Some images have no lines or no other glyphs anyway."""
    before = [pixels(source(difficulty), 20) for difficulty in (0, 1)]
    place = data.glyphs.ImageFilter if "." in part else data.glyphs
    name = part.split(".")[-1]
    monkeypatch.setattr(place, name, partial(WITHOUT[part], getattr(place, name)))
    data.glyphs._kept.cache_clear()
    after = [pixels(source(difficulty), 20) for difficulty in (0, 1)]
    different = [(first != second).any((1, 2, 3)).sum() for first, second in zip(before, after)]
    assert different[0] == 0
    assert different[1] >= 12


def test_a_pose_keeps_the_area():
    """Rotation, shear and stretch all do, which leaves the square of the scale; 5 % is what the border may cut."""
    font = ImageFont.truetype(os.path.join(FOLDER, "DejaVuSans-Bold.ttf"), 200)
    plain = np.asarray(data.glyphs._upright("o", font), dtype=np.float64)
    rows, columns = np.nonzero(plain)
    plain = plain.sum() / max(np.ptp(rows) + 1, np.ptp(columns) + 1) ** 2
    ratios, aspects = [], []
    for seed in range(50):
        mask = np.asarray(data.glyphs._posed("o", font, 200, 1.0, Stream(seed)))
        share = Stream(seed).uniform(0.48, 0.82)  # the first that is drawn
        ratios.append(mask.sum() / (200 * share) ** 2 / plain)
        rows, columns = np.nonzero(mask > 127)
        aspects.append(np.ptp(columns) / np.ptp(rows))
    np.testing.assert_allclose(ratios, 1, atol=0.05)
    assert max(aspects) / min(aspects) > 1.5  # they differ in shape, not in place alone


@pytest.mark.parametrize("difficulty, share", [(0, 0), (0.5, 0.25), (1, 0.5)])
def test_some_glyphs_are_lighter_than_their_background(difficulty, share):
    """Backgrounds are lighter than 145 or darker than 110; of 400 images, 0.1 is four standard deviations."""
    dark = np.median(pixels(source(difficulty)).reshape(400, -1), axis=1) < 128
    assert abs(dark.mean() - share) <= (0.1 if difficulty else 0)


@pytest.mark.parametrize("light", [False, True])
def test_colours_contrast(light):
    stream = Stream(1)
    colours = np.array([data.glyphs._colour(stream, light, 1) for _ in range(1000)])
    assert colours.shape == (1000, 3)
    assert colours.min() == (145 if light else 0)
    assert colours.max() == (255 if light else 110)


def test_noise_stays_within_its_strength_and_the_levels():
    middle, dark, light = (np.full((3, 50, 50), level, np.uint8) for level in (128, 0, 255))
    noise = np.resize(np.arange(-128, 128, dtype=np.int16), middle.size)
    levels = data.glyphs._noisy(middle, 80, noise)
    assert (levels.min(), levels.max()) == (88, 167)
    assert (data.glyphs._noisy(dark, 80, noise).min(), data.glyphs._noisy(dark, 80, noise).max()) == (0, 39)
    assert (data.glyphs._noisy(light, 80, noise).min(), data.glyphs._noisy(light, 80, noise).max()) == (215, 255)


def test_a_recipe_opens_them():
    options = Data(source="glyphs", glyph_size=24, glyph_difficulty=1.0, validation_images=30)
    train, validation = (open_source(options, 40, split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (10_000, 30)
    assert train.name(3) == "glyphs/train/3"
    expected = GlyphsSource(40, 30, "validation", 24, 1.0)
    assert validation.classes == expected.classes
    assert torch.equal(validation.read(29), expected.read(29))


def test_more_classes_than_glyphs_are_refused():
    message = (
        "data.source=glyphs: model.classes is 1001, but there are glyphs for 1000; set model.classes=1000 or lower"
    )
    with pytest.raises(DataError) as caught:
        open_source(Data(source="glyphs"), 1001, "train")
    assert str(caught.value) == message


def test_missing_fonts_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    with pytest.raises(DataError, match=r"DejaVuSans\.ttf: No such file or directory; it comes with matplotlib"):
        source(0)


def test_without_matplotlib_its_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DataError, match="pip install matplotlib"):
        source(0)


def test_small_sets_are_drawn_once_a_process(monkeypatch):
    """A second source of the same set has the first one's pixels; another split, or difficulty, has its own."""
    first = source(0.5, images=20)
    pixels_of = [first.read(index).clone() for index in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(GlyphsSource, "_drawn", None)
        again = source(0.5, images=20)
        assert all(torch.equal(again.read(index), expected) for index, expected in enumerate(pixels_of))
        with pytest.raises(TypeError):
            again.read(5)
        for other in (source(0.5, images=20, split="validation"), source(0.6, images=20)):
            with pytest.raises(TypeError):
                other.read(0)


def test_sets_are_drawn_ahead_for_what_is_forked(monkeypatch):
    ahead = source(0.5, images=20)
    expected = [ahead._drawn(index) for index in range(20)]
    ahead.draw_ahead()
    monkeypatch.setattr(GlyphsSource, "_drawn", None)
    assert all(torch.equal(ahead.read(index), pixels) for index, pixels in enumerate(expected))


def test_large_sets_are_drawn_as_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(data.glyphs, "_KEPT_BYTES", 20 * 3 * 32 * 32 - 1)
    large, drawn = source(0.5, images=20), []
    monkeypatch.setattr(GlyphsSource, "_drawn", lambda self, index: drawn.append(index) or torch.zeros(3, 32, 32))
    large.draw_ahead()
    assert drawn == []
    large.read(1), large.read(1)
    assert drawn == [1, 1]

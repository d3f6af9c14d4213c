"""Glyphs: a fixed list of shapes, drawn the same everywhere, harder with the difficulty."""

import os
import pickle
import sys
import zlib
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
    data.glyphs._cached.cache_clear()


def source(difficulty, classes=10, images=400, split="train", size=32):
    return GlyphsSource(classes, images, split, size, difficulty)


def pixels(source, count=None):
    """float64 [count, 3, size, size], levels from 0 to 255."""
    return np.stack([source.read(index).numpy() for index in range(count or len(source))]).astype(np.float64)


def box_of(mask):
    rows, columns = np.nonzero(mask)
    return rows.min(), rows.max() + 1, columns.min(), columns.max() + 1


def test_there_are_a_thousand_classes_of_which_a_recipe_takes_the_first():
    assert len(GLYPHS) == len(set(GLYPHS)) == 1000
    assert zlib.crc32(GLYPHS.encode()) == 0xE28BCFC3  # labels of old checkpoints are positions in it
    names = source(0, classes=1000).classes
    assert names[0] == "U+0030 DIGIT ZERO"
    assert len(set(names)) == 1000
    assert all(name.isascii() and name.isprintable() for name in names)
    assert source(0, classes=17).classes == names[:17]
    for font in FONTS:
        known = FT2Font(os.path.join(FOLDER, f"{font}.ttf")).get_charmap()
        assert [glyph for glyph in GLYPHS if ord(glyph) not in known] == [], font
    for images in (5, 1003):
        labels = source(0, images=images).labels
        assert (labels.dtype, labels.shape) == (np.int64, (images,))
        counts = np.bincount(labels, minlength=10)
        assert len(counts) == 10 and np.ptp(counts) <= 1


@pytest.mark.parametrize(("size", "difficulty"), [(8, 1.0), (33, 0), (33, 0.01)])
def test_an_image_is_rgb_planes_and_a_function_of_its_number(size, difficulty):
    glyphs, other = (source(difficulty, classes=1000, images=count, size=size) for count in (1000, 904))
    sent = pickle.dumps(other)
    assert len(sent) < other.labels.nbytes + 100_000, "labels and names, but neither masks nor fonts"
    other = pickle.loads(sent)
    for index in (903, 0, 511):
        image = glyphs.read(index)
        assert (image.shape, image.dtype, image.is_contiguous()) == ((3, size, size), torch.uint8, True)
        assert image.float().std() > 5  # something is drawn
        assert torch.equal(other.read(np.int64(index)), image)


def test_no_two_images_are_the_same():
    splits = [source(0, images=100, split=split) for split in ("train", "validation")]
    assert len(np.unique(np.concatenate([pixels(split) for split in splits]).reshape(200, -1), axis=0)) == 200
    assert [split.name(17) for split in splits] == ["glyphs/train/17", "glyphs/validation/17"]


def test_difficulty_0_is_black_on_white_upright_and_centred():
    """Compared with a large drawing made small. The tolerances are the jitter, of 2 % of 64 pixels, and a pixel."""
    glyphs = source(0, classes=60, images=60, size=64)
    drawn = pixels(glyphs)
    assert (drawn == drawn[:, :1]).all()  # grey
    ink = 1 - drawn[:, 0] / 255
    assert ink.max((1, 2)).min() > 0.95
    assert not ink[:, [0, -1]].any() and not ink[..., [0, -1]].any()
    font = ImageFont.truetype(os.path.join(FOLDER, "DejaVuSans.ttf"), 200)
    cosines = []
    for image, label in zip(ink, glyphs.labels):
        plain = Image.new("L", (400, 400))
        ImageDraw.Draw(plain).text((200, 200), GLYPHS[label], fill=255, font=font, anchor="mm")
        left, top, right, bottom = plain.getbbox()
        longer = max(right - left, bottom - top) / 0.7 / 2
        x, y = (left + right) / 2, (top + bottom) / 2
        expected = plain.resize((64, 64), Image.Resampling.BOX, (x - longer, y - longer, x + longer, y + longer))
        box = np.array(box_of(image > 0.5)).reshape(2, 2)
        assert abs(np.ptp(box, axis=1).max() - 0.7 * 64) < 0.02 * 64 + 2
        assert (abs(box.mean(1) - 32) < 0.02 * 64 + 1).all()
        image = np.roll(image, np.round(32 - box.mean(1)).astype(int), (0, 1))
        cosines.append((image * expected).sum() / np.linalg.norm(image) / np.linalg.norm(expected))
    assert np.median(cosines) > 0.94  # it is 0.97, and 0.88 at a slant of 5 degrees
    assert np.min(cosines) > 0.75  # thin strokes, half a pixel off


def features(glyphs):
    """How much each pixel differs from the background, alike for light on dark: float64 [n, pixels], norm 1."""
    grey = pixels(glyphs).mean(1).reshape(len(glyphs), -1)
    grey = np.abs(grey - np.median(grey, axis=1, keepdims=True))
    return grey / np.linalg.norm(grey, axis=1, keepdims=True)


def test_classes_can_be_learned_and_less_easily_at_a_higher_difficulty():
    """By their nearest mean image; chance is 0.1, with a standard deviation of 0.02."""
    accuracies = []
    for difficulty in (0.3, 1):
        train, validation = source(difficulty, images=600), source(difficulty, images=300, split="validation")
        images = features(train)
        centroids = np.stack([images[train.labels == label].mean(0) for label in range(10)])
        distances = np.square(features(validation)[:, None] - centroids).sum(2)
        accuracies.append((distances.argmin(1) == validation.labels).mean())
    easy, hard = accuracies
    assert easy > 0.85
    assert 0.2 < hard < easy - 0.3


WITHOUT = {
    "_gradient": lambda original, ramp, size, angle: Image.new("L", (size, size)),
    "_add_scrap": lambda original, image, *others: original(image.copy(), *others),
    "_add_line": lambda original, draw, *others: original(ImageDraw.Draw(Image.new("RGB", (1, 1))), *others),
    "_noisy": lambda original, pixels, *others: np.array(pixels, order="C"),
    "ImageFilter.BoxBlur": lambda original, radius: original(0),
}


def test_every_part_is_seen_except_at_difficulty_0(monkeypatch):
    """Each is left out in turn, with the same draws. Some images have no lines or no other glyphs anyway."""
    before = [pixels(source(difficulty), 20) for difficulty in (0, 1)]
    for part, replacement in WITHOUT.items():
        data.glyphs._cached.cache_clear()
        with monkeypatch.context() as patch:
            place, name = data.glyphs.ImageFilter if "." in part else data.glyphs, part.split(".")[-1]
            patch.setattr(place, name, partial(replacement, getattr(place, name)))
            after = [pixels(source(difficulty), 20) for difficulty in (0, 1)]
        different = [(first != second).any((1, 2, 3)).sum() for first, second in zip(before, after)]
        assert different[0] == 0 and different[1] >= 12, part


def test_colours_contrast_and_noise_stays_within_its_strength_and_the_levels():
    stream = Stream(1)
    for light, lowest, highest in ((False, 0, 110), (True, 145, 255)):
        colours = np.array([data.glyphs._colour(stream, light, 1) for _ in range(1000)])
        assert (colours.shape, colours.min(), colours.max()) == ((1000, 3), lowest, highest)
    noise = np.resize(np.arange(-128, 128, dtype=np.int16), 3 * 50 * 50)
    for level, lowest, highest in ((128, 88, 167), (0, 0, 39), (255, 215, 255)):
        levels = data.glyphs._noisy(np.full((3, 50, 50), level, np.uint8), 80, noise)
        assert (levels.min(), levels.max()) == (lowest, highest)


def test_a_recipe_opens_them():
    options = Data(source="glyphs", glyph_size=24, glyph_difficulty=1.0, validation_images=30)
    train, validation = (open_source(options, 40, split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (10_000, 30)
    assert train.name(3) == "glyphs/train/3"
    expected = GlyphsSource(40, 30, "validation", 24, 1.0)
    assert validation.classes == expected.classes
    assert torch.equal(validation.read(29), expected.read(29))
    with pytest.raises(DataError, match=r"^data\.source=glyphs: .*1001.*; set model\.classes=1000 or lower$"):
        open_source(options, 1001, "train")


def test_missing_fonts_and_a_missing_matplotlib_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(matplotlib, "get_data_path", lambda: str(tmp_path))
    with pytest.raises(DataError, match=r"DejaVuSans\.ttf: No such file or directory; .*matplotlib"):
        source(0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DataError, match="pip install matplotlib"):
        source(0)


def test_small_sets_are_drawn_once_a_process_ahead_if_asked(monkeypatch):
    """A second source of the same set has the first one's pixels; another split, or difficulty, has its own."""
    first = source(0.5, images=20)
    expected = [first.read(index).clone() for index in range(5)] + [first._drawn(index) for index in range(5, 20)]
    with monkeypatch.context() as patch:
        patch.setattr(GlyphsSource, "_drawn", None)
        assert all(torch.equal(source(0.5, images=20).read(index), expected[index]) for index in range(5))
        for other in (source(0.5, images=20, split="validation"), source(0.6, images=20)):
            with pytest.raises(TypeError):
                other.read(0)
    first.draw_ahead()
    monkeypatch.setattr(GlyphsSource, "_drawn", None)
    assert all(torch.equal(first.read(index), expected[index]) for index in range(20))


def test_large_sets_are_drawn_as_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(data.glyphs, "_CACHED_BYTES", 20 * 3 * 32 * 32 - 1)
    large, drawn = source(0.5, images=20), []
    monkeypatch.setattr(GlyphsSource, "_drawn", lambda self, index: drawn.append(index) or torch.zeros(3, 32, 32))
    large.draw_ahead()
    assert drawn == []
    large.read(1), large.read(1)
    assert drawn == [1, 1]

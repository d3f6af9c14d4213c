"""Glyphs: a fixed list of shapes, drawn the same everywhere, harder with the difficulty."""

import functools
import os
import pickle
import sys
import zlib

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.ft2font import FT2Font
from PIL import ImageFont

import data.glyphs
from common.errors import DataError
from data.glyphs import FONTS, GLYPHS, GlyphsSource
from data.sources import open_source
from recipe.config import Data

FOLDER = os.path.join(matplotlib.get_data_path(), "fonts", "ttf")


@pytest.fixture(autouse=True)
def _own_cache_of(monkeypatch):
    monkeypatch.setattr(
        data.glyphs, "_cache_of", functools.lru_cache(data.glyphs._cache_of.__wrapped__)
    )


def source(difficulty, classes=10, images=400, split="train", size=32):
    return GlyphsSource(classes, images, split, size, difficulty)


def pixels(source, count=None):
    """float64 [count, 3, size, size], levels from 0 to 255."""
    return np.stack([source.read(index).numpy() for index in range(count or len(source))]).astype(
        np.float64
    )


def test_there_are_a_thousand_classes_of_which_a_recipe_takes_the_first():
    assert len(GLYPHS) == len(set(GLYPHS)) == 1000
    # labels of old checkpoints are positions in it
    assert zlib.crc32(GLYPHS.encode()) == 0xE28BCFC3
    assert source(0, classes=17).classes == source(0, classes=1000).classes[:17]
    assert source(0).classes[0] == "U+0030 DIGIT ZERO"
    for font in FONTS:
        known = FT2Font(os.path.join(FOLDER, f"{font}.ttf")).get_charmap()
        assert [glyph for glyph in GLYPHS if ord(glyph) not in known] == [], font
    labels = source(0, images=1003).labels
    assert labels.dtype == np.int64 and sorted(np.bincount(labels)) == [100] * 7 + [101] * 3


@pytest.mark.parametrize(("size", "difficulty"), [(8, 1.0), (33, 0), (33, 0.01)])
def test_an_image_is_rgb_planes_and_a_function_of_its_number(size, difficulty):
    glyphs, other = (
        source(difficulty, classes=1000, images=count, size=size) for count in (1000, 904)
    )
    sent = pickle.dumps(other)
    assert len(sent) < other.labels.nbytes + 100_000, (
        "labels and names, but neither masks nor fonts"
    )
    other = pickle.loads(sent)
    for index in (903, 0, 511):
        image = glyphs.read(index)
        assert (image.shape, image.dtype, image.is_contiguous()) == (
            (3, size, size),
            torch.uint8,
            True,
        )
        assert image.float().std() > 5  # something is drawn
        assert torch.equal(other.read(np.int64(index)), image)


def test_difficulty_0_is_black_on_white_upright_and_centred():
    """Compared with a large drawing.

    The tolerances are the jitter, of 2 % of 64 pixels, and a pixel.
    """
    glyphs = source(0, classes=60, images=60, size=64)
    drawn = pixels(glyphs)
    assert (drawn == drawn[:, :1]).all()  # grey
    ink = 1 - drawn[:, 0] / 255
    assert ink.max((1, 2)).min() > 0.95
    font = ImageFont.truetype(os.path.join(FOLDER, "DejaVuSans.ttf"), 200)
    for image, label in zip(ink, glyphs.labels):
        left, top, right, bottom = font.getmask(GLYPHS[label]).getbbox()
        longer = max(right - left, bottom - top)
        box = np.array([(each.min(), each.max() + 1) for each in np.nonzero(image > 0.5)])
        expected = np.array([bottom - top, right - left]) * 0.7 * 64 / longer
        assert (abs(np.ptp(box, axis=1) - expected) < 0.02 * 64 + 2).all()
        assert (abs(box.mean(1) - 32) < 0.02 * 64 + 1).all()


def test_the_higher_the_difficulty_the_more_there_is_around_the_glyph():
    """Spread of the levels in a corner: of colours, lines, other glyphs and noise."""
    spreads = [
        pixels(source(difficulty), 100)[..., :6, :6].std((2, 3)).mean()
        for difficulty in (0, 0.3, 1)
    ]
    assert spreads[0] == 0 < 1.5 * spreads[1] < spreads[2]


def test_a_recipe_opens_them():
    options = Data(source="glyphs", glyph_size=24, glyph_difficulty=1.0, validation_images=30)
    train, validation = (open_source(options, 40, split) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (10_000, 30)
    assert train.name(3) == "glyphs/train/3" and not torch.equal(
        train.read(29), validation.read(29)
    )
    assert torch.equal(validation.read(29), GlyphsSource(40, 30, "validation", 24, 1.0).read(29))
    with pytest.raises(
        DataError, match=r"^data\.source=glyphs: .*1001.*; set model\.classes=1000$"
    ):
        open_source(options, 1001, "train")


def test_a_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DataError, match="pip install matplotlib"):
        source(0, size=57)


def test_small_sets_are_drawn_once_a_process_and_ahead_if_asked(monkeypatch):
    """A second source of the same set has the first one's pixels; another split its own.

    Large sets are not kept.
    """
    first = source(0.5, images=20)
    drawn = []
    expected = first._draw(19)
    first.draw_ahead()
    monkeypatch.setattr(
        GlyphsSource, "_draw", lambda self, index: drawn.append(index) or torch.zeros(3, 32, 32)
    )
    assert torch.equal(source(0.5, images=20).read(19), expected) and drawn == []
    source(0.5, images=20, split="validation").read(7)
    monkeypatch.setattr(data.glyphs, "_CACHED_BYTES", 30 * 3 * 32 * 32 - 1)
    large = source(0.5, images=30)
    large.draw_ahead()
    large.read(1), large.read(1)
    assert drawn == [7, 1, 1]

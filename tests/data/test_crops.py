"""Crops of images in memory against torch's function, which is called image by image."""

import random

import numpy as np
import pytest
import torch

from common.cpp_compiler import CompilerError
from data import crops
from data.base import Pixels
from data.batches import Request
from data.digits import DigitsSource
from data.reader import Reader
from data.transforms import Evaluation, Training
from recipe.config import Data

COUNT = 4

pytestmark = pytest.mark.skipif(not crops.available(), reason="needs a C++ compiler")


def pictures(height, width, layout):
    """Uint8 [COUNT, 3, height, width]: channels first or last in memory, a part of larger images,
    or grey."""
    numbers = np.random.RandomState(height * 1000 + width)
    if layout == "grey":
        grey = torch.from_numpy(numbers.randint(0, 256, (COUNT, 1, height, width), np.uint8))
        return grey.expand(COUNT, 3, height, width)
    if layout == "part":
        larger = torch.from_numpy(
            numbers.randint(0, 256, (COUNT, 3, height + 3, width + 5), np.uint8)
        )
        return larger[:, :, 1 : height + 1, 2 : width + 2]
    images = torch.from_numpy(numbers.randint(0, 256, (COUNT, 3, height, width), np.uint8))
    return images.contiguous(memory_format=torch.channels_last) if layout == "last" else images


def cropped(images, transform, size):
    """Uint8 [COUNT, 3, size, size], by the C++ function."""
    indices = list(reversed(range(COUNT)))
    frames = [transform.frame(Pixels(images[index]), size, 5, index) for index in indices]
    out = torch.zeros(COUNT + 1, 3, size, size, dtype=torch.uint8).contiguous(
        memory_format=torch.channels_last
    )
    crops.crop(images, crops.rows_of(indices, frames), out)
    assert not out[COUNT:].any()
    return out[:COUNT].flip(0)


# Layouts differ in where rows are read, filters in what is made of them: each layout with one
# filter is fast.
@pytest.mark.parametrize(
    ("layout", "interpolation"),
    [
        ("first", "bilinear"),
        ("last", "bicubic"),
        ("part", "bilinear"),
        ("grey", "bicubic"),
        pytest.param("first", "bicubic", marks=pytest.mark.slow),
        pytest.param("last", "bilinear", marks=pytest.mark.slow),
        pytest.param("part", "bicubic", marks=pytest.mark.slow),
        pytest.param("grey", "bilinear", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("kind", ["training", "evaluation"])
def test_every_pixel_is_torchs(kind, layout, interpolation):
    """Larger and smaller than before, by whole and by broken factors, mirrored or not."""
    if not crops.available(interpolation):
        pytest.skip("this torch has another bicubic filter than Pillow, and is not asked")
    draws = random.Random(f"{kind} {layout}")
    keys = {"source": "digits", "interpolation": interpolation}
    data = Data(**keys, crop_area=(0.08, 1.0), crop_aspect=(0.5, 2.0))
    sizes = [(28, 28, 16), (28, 28, 28), (8, 8, 32), (32, 32, 32), (200, 160, 2), (2, 3, 64)]
    sizes += [tuple(draws.randint(2, most) for most in (150, 150, 100)) for _ in range(40)]
    mirrored = 0
    for height, width, size in sizes:
        images = pictures(height, width, layout)
        transform = Training(data, seed=size)
        if kind == "evaluation":
            transform = Evaluation(Data(**keys, crop_fraction=draws.uniform(0.3, 1)))
        theirs = torch.stack(
            [transform(Pixels(image), size, 5, index) for index, image in enumerate(images)]
        )
        assert torch.equal(cropped(images, transform, size), theirs), (height, width, size)
        mirrored += sum(
            transform.frame(Pixels(images[0]), size, 5, index).flip for index in range(COUNT)
        )
    assert (kind == "training") == (mirrored > 0)


# The filter has no part in them.
@pytest.mark.parametrize(
    "interpolation", ["bilinear", pytest.param("bicubic", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("area", [(0.05, 1.0), (0.7, 1.0), (1.0, 1.0), (0.001, 0.002)])
@pytest.mark.parametrize("aspect", [(0.75, 4 / 3), (1.0, 1.0), (0.1, 10.0), (3.0, 4.0)])
def test_boxes_and_flips_are_those_of_single_images(aspect, area, interpolation):
    """Of every kind: boxes that fit at once, after some tries, and never, on both sides of the
    aspect."""
    draws = random.Random(f"{aspect} {area}")
    data = Data(
        source="digits", crop_aspect=aspect, crop_area=area, flip=0.3, interpolation=interpolation
    )
    transform = Training(data, seed=11)
    sizes = [(28, 28), (1, 1), (1, 60), (60, 1)] + [
        (draws.randint(1, 300), draws.randint(1, 300)) for _ in range(40)
    ]
    for height, width in sizes:
        image = Pixels(torch.zeros(3, height, width, dtype=torch.uint8))
        indices = [draws.randrange(2**40) for _ in range(50)]
        frames = [transform.frame(image, 16, 3, index) for index in indices]
        keys = [transform.draw_key(3, index) for index in indices]
        drawn = crops.draw(indices, keys, data, height=height, width=width, size=16)
        assert drawn.tolist() == crops.rows_of(indices, frames).tolist(), (height, width)


@pytest.mark.parametrize("augment", ["none", "randaugment"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_reader_gives_the_same_micro_batch_with_and_without_the_function(
    monkeypatch, training, augment
):
    data = Data(source="digits", augment=augment)
    transform = Training(data, seed=3) if training else Evaluation(data)
    source = DigitsSource("train")
    request = Request(step=2, epoch=1, number=5, image_size=20, indices=[700, 3, 5])
    at_once = Reader(source, 4, transform)[request]
    monkeypatch.setattr(crops, "available", lambda interpolation: False)
    one_by_one = Reader(source, 4, transform)[request]
    assert torch.equal(at_once.images, one_by_one.images)
    assert at_once.images[:3].any() and not at_once.images[3].any()
    for name in ("labels", "indices"):
        assert getattr(at_once, name).tolist() == getattr(one_by_one, name).tolist()
    for name in ("valid", "number", "step", "unreadable", "damaged"):
        assert getattr(at_once, name) == getattr(one_by_one, name)


@pytest.mark.parametrize("error", [FileNotFoundError("c++"), CompilerError("fails")])
def test_without_a_compiler_torch_makes_the_crops(monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(crops, "library", fail)
    crops._library.cache_clear()
    try:
        assert not crops.available()
    finally:
        crops._library.cache_clear()

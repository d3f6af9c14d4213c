"""Crops and operations against torchvision's, resizing against Pillow's, and what the draws depend
on."""

import importlib
import math

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as reference

from data import transforms
from data.base import Pixels
from data.transforms import Evaluation, Training, crop_box
from recipe.config import Data
from recipe.randomness import Stream, key


def picture(height, width, interleaved=False):
    image = torch.from_numpy(
        np.random.RandomState(0).randint(0, 256, (3, height, width)).astype(np.uint8)
    )
    return image.permute(1, 2, 0).contiguous().permute(2, 0, 1) if interleaved else image


def framed(data, seed, epoch, index, height=375, width=500):
    """Box and flip."""
    frame = Training(data, seed).frame(Pixels(torch.empty(3, height, width)), 64, epoch, index)
    return frame.box, frame.flip


@pytest.mark.parametrize(
    ("height", "width", "area", "aspect"),
    [
        (500, 333, (0.08, 1.0), (0.5, 2.0)),
        (100, 400, (0.5, 1.0), (0.75, 4 / 3)),
        pytest.param(8, 8, (0.6, 1.0), (0.9, 1.1), marks=pytest.mark.slow),
    ],
    ids=["tall", "mostly fallback", "digit"],
)
def test_crop_boxes_are_distributed_as_torchvisions(height, width, area, aspect):
    """Means and variances of two samples of 4000: five standard errors are passed by chance once in
    10^5 comparisons, of which there are 18; an aspect drawn uniformly would be seven away."""
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = [RandomResizedCrop.get_params(image, list(area), list(aspect)) for _ in range(4000)]
    ours = [crop_box(Stream(key("test", n)), height, width, area, aspect) for n in range(4000)]

    def statistics(sample):
        top, left, h, w = np.array(sample, dtype=float).T
        assert (
            min(top.min(), left.min()) >= 0
            and (top + h <= height).all()
            and (left + w <= width).all()
        )
        return np.stack([top, left, h, w, h * w, np.log(w / h)], axis=1)

    a = statistics(ours)
    b = statistics(theirs)
    for moment in (1, 2):
        first = (a - b.mean(0)) ** moment
        second = (b - b.mean(0)) ** moment
        error = np.sqrt((first.var(0) + second.var(0)) / len(a))
        assert (np.abs(first.mean(0) - second.mean(0)) <= 5 * error + 1e-9).all()


@pytest.mark.parametrize(
    ("height", "width", "area", "aspect", "expected"),
    [
        (300, 10, (1.0, 1.0), (0.75, 4 / 3), (143, 0, 13, 10)),
        (10, 300, (1.0, 1.0), (0.75, 4 / 3), (0, 143, 10, 13)),
        (1, 1, (1.0, 1.0), (0.75, 4 / 3), (0, 0, 1, 1)),
        (1, 3, (1.0, 1.0), (0.01, 0.01), (0, 1, 1, 1)),
        (3, 1, (1.0, 1.0), (100.0, 100.0), (1, 0, 1, 1)),
    ],
)
def test_where_no_box_fits_the_largest_central_one_is_taken(height, width, area, aspect, expected):
    """By hand: an aspect of 3/4 or 4/3 on the 10 pixels of the short side is 13 pixels."""
    assert crop_box(Stream(1), height, width, area, aspect) == expected


def test_draws_depend_on_seed_epoch_and_sample_alone_and_never_change():
    """Runs must be repeatable with later versions: the values are recorded from the first
    version."""
    assert framed(Data(), 0, 0, 0) == ((265, 87, 110, 122), True)
    names = ((1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (2, 1, 3))
    assert len({framed(Data(), *name) for name in names}) == 5


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_flips_come_at_their_rate(rate):
    """5000 draws: five standard errors of a rate of 0.3 are 0.032.

    Never and always show in a tenth of them.
    """
    draws = 5000 if rate == 0.3 else 500
    flips = [
        framed(Data(flip=rate), 0, 0, index=index, height=9, width=9)[1] for index in range(draws)
    ]
    assert abs(np.mean(flips) - rate) <= (0.032 if rate == 0.3 else 0)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["planes", "interleaved"])
@pytest.mark.parametrize(("size", "height", "width"), [(32, 8, 8), (64, 150, 200), (380, 333, 500)])
def test_training_pixels_are_pillows_crop_resized_and_mirrored(
    size, height, width, interleaved, interpolation
):
    """Both compute in 8-bit steps, horizontally and then vertically, with weights of their own
    rounding: one level for each pass at most, and hardly any on average. Decoded JPEGs are
    interleaved."""
    image = picture(height, width, interleaved)
    flips = set()
    data = Data(crop_area=(0.3, 0.9), interpolation=interpolation)
    theirs = Image.Resampling[interpolation.upper()]
    for index in range(6):
        box, flip = framed(data, 0, 5, index=index, height=height, width=width)
        crop = Pixels(image).pixels(box).permute(1, 2, 0).numpy().copy()
        expected = np.array(Image.fromarray(crop).resize((size, size), theirs))
        actual = Training(data, 0)(Pixels(image), size, 5, index)
        assert (actual.dtype, actual.shape) == (torch.uint8, (3, size, size))
        difference = np.abs(
            actual.permute(1, 2, 0).numpy().astype(int) - (expected[:, ::-1] if flip else expected)
        )
        assert difference.max() <= 2
        assert difference.mean() < 0.1
        flips.add(flip)
    assert flips == {True, False}


@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [
        ("randaugment", "RandAugment", {"num_ops": 3, "magnitude": 30}),
        pytest.param("randaugment", "RandAugment", {}, marks=pytest.mark.slow),
        ("autoaugment", "AutoAugment", {}),
        ("trivialaugment", "TrivialAugmentWide", {}),
        ("augmix", "AugMix", {"severity": 5}),
    ],
    ids=str,
)
def test_operations_are_torchvisions_under_a_seed_of_the_sample(name, theirs, options):
    """Applied to the crop that is shown without them, which is mirrored already. 80 samples, so
    that each of RandAugment's 14 operations is there (missing one has a chance of 0.3 % at
    most)."""
    ours = {
        "num_ops": "randaugment_operations",
        "magnitude": "randaugment_magnitude",
        "severity": "augmix_severity",
    }
    section = Data(augment=name, **{ours[option]: value for option, value in options.items()})
    torchvision.disable_beta_transforms_warning()
    transform = getattr(importlib.import_module("torchvision.transforms.v2"), theirs)(
        fill=128, **options
    )
    image = Pixels(picture(60, 80, interleaved=True))
    changed = 0
    for index in range(80):
        plain = Training(Data(), 3)(image, 48, 1, index)
        actual = Training(section, 3)(image, 48, 1, index)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(section.augment, 3, 1, index))
            expected = transform(plain.contiguous())
        assert torch.equal(actual, expected)
        changed += not torch.equal(actual, plain)
    assert changed > 40


class OnDevice:
    """Stands for pixels on a GPU, as DALI makes them; what comes back to their device is without
    content."""

    device = torch.device("meta")

    def cpu(self):
        return picture(16, 16)


def test_augmix_draws_on_the_cpu_also_for_pixels_on_a_gpu(monkeypatch):
    """torchvision draws its weights by the generator of the pixels' device, which is not seeded."""
    taken = []

    def operations(pixels):
        taken.append(pixels)
        return pixels

    monkeypatch.setattr(transforms, "_operations", lambda *_, **__: operations)
    changed = Training(Data(augment="augmix"), 3).finish(OnDevice(), 1, 0)
    assert torch.equal(taken[0], picture(16, 16)) and changed.device == OnDevice.device


@pytest.mark.parametrize(
    ("height", "width"), [(375, 500), (500, 333), (33, 32), (434, 434), (9, 100)]
)
def test_evaluation_crops_what_torchvision_crops(height, width):
    """The short side becomes 434 pixels for 380. torchvision resizes in float32 and rounds once, we
    in 8-bit steps: one level per pass."""
    image = picture(height, width)
    expected = reference.center_crop(reference.resize(image, [434], antialias=True), [380, 380])
    actual = Evaluation(Data())(Pixels(image), 380, showing=0, index=0)
    assert (actual.dtype, actual.shape) == (torch.uint8, (3, 380, 380))
    difference = (actual.int() - expected.int()).abs()
    assert difference.max() <= 2
    assert difference.float().mean() < 0.3


@pytest.mark.parametrize("shape", [(1, 65535), (65535, 1)])
def test_a_line_of_pixels_is_not_resized_to_gigabytes(shape):
    """At 434 pixels for its one row it would have 28 million columns."""
    frame = Evaluation(Data()).frame(Pixels(picture(*shape)), 380)
    assert math.prod((frame.height, frame.width)) < 434 * 434 * 20
    assert Evaluation(Data())(Pixels(picture(*shape)), 380, 0, 0).shape == (3, 380, 380)

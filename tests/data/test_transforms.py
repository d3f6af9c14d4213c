"""Crops and operations against torchvision's, resizing against Pillow's, and what the draws depend on."""

import math
import random

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as reference

from data.base import Pixels
from data.transforms import Evaluation, Training, augmentation, crop_box, operated
from recipe.config import Data
from recipe.randomness import Stream, key


def picture(height, width, interleaved=False):
    image = torch.from_numpy(np.random.RandomState(0).randint(0, 256, (3, height, width)).astype(np.uint8))
    return image.permute(1, 2, 0).contiguous().permute(2, 0, 1) if interleaved else image


def trained(image, size, data, seed, epoch, index):
    return Training(data, seed)(Pixels(image), size, epoch, index)


def evaluated(image, size, crop_fraction):
    return Evaluation(crop_fraction)(Pixels(image), size, epoch=0, index=0)


def boxes(height, width, area, aspect, count=4000):
    return np.array([crop_box(Stream(key("test", n)), height, width, area, aspect) for n in range(count)], dtype=float)


@pytest.mark.parametrize(
    ("height", "width", "area", "aspect"),
    [
        (500, 333, (0.08, 1.0), (0.5, 2.0)),
        (100, 400, (0.5, 1.0), (0.75, 4 / 3)),
        (8, 8, (0.6, 1.0), (0.9, 1.1)),
    ],
    ids=["tall", "mostly fallback", "digit"],
)
def test_crop_boxes_are_distributed_as_torchvisions(height, width, area, aspect):
    """Means and variances of two samples of 4000: five standard errors are passed by chance once in
    10^5 comparisons, of which there are 18; an aspect drawn uniformly would be seven away."""
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, list(area), list(aspect)) for _ in range(4000)], dtype=float)
    ours = boxes(height, width, area, aspect)

    def statistics(sample):
        top, left, h, w = sample.T
        return np.stack([top, left, h, w, h * w, np.log(w / h)], axis=1)

    a, b = statistics(ours), statistics(theirs)
    for moment in (1, 2):
        first, second = (a - b.mean(0)) ** moment, (b - b.mean(0)) ** moment
        error = np.sqrt((first.var(0) + second.var(0)) / len(a))
        assert (np.abs(first.mean(0) - second.mean(0)) <= 5 * error + 1e-9).all()


def test_crop_boxes_stay_inside_the_image_and_the_limits():
    """Sides are rounded to pixels: half a pixel more or less of each side."""
    height, width = 60, 80
    top, left, h, w = boxes(height, width, (0.3, 0.6), (0.8, 1.25)).T
    assert ((h + 0.5) * (w + 0.5) >= 0.3 * height * width).all()
    assert ((h - 0.5) * (w - 0.5) <= 0.6 * height * width).all()
    assert ((w + 0.5) / (h - 0.5) >= 0.8).all() and ((w - 0.5) / (h + 0.5) <= 1.25).all()
    for positions, room in ((top, height - h), (left, width - w)):
        assert positions.min() == 0
        assert (positions <= room).all() and (positions == room).any(), "boxes must be able to touch the far edge"


@pytest.mark.parametrize(
    ("height", "width", "area", "aspect", "expected"),
    [
        (300, 10, (1.0, 1.0), (0.75, 4 / 3), (143, 0, 13, 10)),
        (10, 300, (1.0, 1.0), (0.75, 4 / 3), (0, 143, 10, 13)),
        (1, 1, (1.0, 1.0), (0.75, 4 / 3), (0, 0, 1, 1)),
        (1, 3, (1.0, 1.0), (0.01, 0.01), (0, 1, 1, 1)),
        (3, 1, (1.0, 1.0), (100.0, 100.0), (1, 0, 1, 1)),
    ],
    ids=["narrow", "flat", "one pixel", "thin limits", "flat limits"],
)
def test_where_no_box_fits_the_largest_central_one_is_taken(height, width, area, aspect, expected):
    """By hand: an aspect of 3/4 or 4/3 on the 10 pixels of the short side is 13 pixels; a hundredth of a pixel is
    rounded up to the middle one of three."""
    assert crop_box(Stream(1), height, width, area, aspect) == expected


def test_draws_depend_on_seed_epoch_and_sample_alone_and_never_change():
    """Runs must be repeatable with later versions: the values are recorded from the first version."""
    global_state = torch.random.get_rng_state()
    assert augmentation(0, 0, 0, 375, 500, Data()) == ((265, 87, 110, 122), True)
    names = ((1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (2, 1, 3))
    drawn = [augmentation(*name, 375, 500, Data()) for name in names]
    assert len(set(drawn)) == 5
    assert drawn == [augmentation(*name, 375, 500, Data()) for name in names]
    assert torch.equal(torch.random.get_rng_state(), global_state)


def test_flips_come_at_their_rate_and_independently_of_the_size():
    """5000 draws: five standard errors of a rate of 0.3 are 0.032."""
    data = Data(flip=0.3)
    flips = [augmentation(0, 0, index, 375, 500, data)[1] for index in range(5000)]
    assert abs(np.mean(flips) - 0.3) < 0.032
    assert flips[:500] == [augmentation(0, 0, index, 20, 900, data)[1] for index in range(500)]
    assert not any(augmentation(0, 0, index, 9, 9, Data(flip=0.0))[1] for index in range(500))
    assert all(augmentation(0, 0, index, 9, 9, Data(flip=1.0))[1] for index in range(500))


@pytest.mark.parametrize("interleaved", [False, True], ids=["planes", "interleaved"])
@pytest.mark.parametrize(("size", "height", "width"), [(32, 8, 8), (64, 150, 200), (380, 333, 500)])
def test_training_pixels_are_pillows_crop_resized_and_mirrored(size, height, width, interleaved):
    """Both compute in 8-bit steps, horizontally and then vertically, with weights of their own rounding: one
    level for each pass at most, and hardly any on average. Decoded JPEGs are interleaved."""
    image, flips = picture(height, width, interleaved), set()
    data = Data(crop_area=(0.3, 0.9))
    for index in range(6):
        box, flip = augmentation(0, 5, index, height, width, data)
        crop = image[:, box.top : box.top + box.height, box.left : box.left + box.width]
        expected = Image.fromarray(crop.permute(1, 2, 0).numpy().copy()).resize((size, size), Image.BILINEAR)
        expected = np.array(expected)[:, ::-1] if flip else np.array(expected)
        actual = trained(image, size, data, 0, 5, index)
        assert (actual.dtype, actual.shape) == (torch.uint8, (3, size, size))
        difference = np.abs(actual.permute(1, 2, 0).numpy().astype(int) - expected.astype(int))
        assert difference.max() <= 2
        assert difference.mean() < 0.1
        flips.add(flip)
    assert flips == {True, False}


@pytest.fixture(
    params=[
        {"augment": "randaugment"},
        {"augment": "randaugment", "randaugment_operations": 3, "randaugment_magnitude": 30},
        {"augment": "autoaugment"},
        {"augment": "trivialaugment"},
    ],
    ids=["randaugment", "three strong", "autoaugment", "trivialaugment"],
)
def section(request):
    return Data(**request.param)


def torchvisions(data):
    """The transform that a user of torchvision would write."""
    torchvision.disable_beta_transforms_warning()
    from torchvision.transforms import v2

    if data.augment == "randaugment":
        return v2.RandAugment(data.randaugment_operations, data.randaugment_magnitude, fill=128)
    return {"autoaugment": v2.AutoAugment, "trivialaugment": v2.TrivialAugmentWide}[data.augment](fill=128)


@pytest.mark.parametrize("interleaved", [False, True], ids=["planes", "interleaved"])
def test_operations_are_torchvisions_under_a_seed_of_the_sample(section, interleaved):
    """Applied to the crop that is shown without them, which is mirrored already. 80 samples, so that each of
    RandAugment's 14 operations is there (missing one has a chance of 0.3 % at most)."""
    image = picture(60, 80, interleaved)
    transform, changed = torchvisions(section), 0
    for index in range(80):
        plain = trained(image, 48, Data(), 3, 1, index)
        actual = trained(image, 48, section, 3, 1, index)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(section.augment, 3, 1, index))
            expected = transform(plain.contiguous())
        assert torch.equal(actual, expected)
        assert (actual.dtype, actual.shape) == (torch.uint8, (3, 48, 48))
        changed += not torch.equal(actual, plain)
    assert changed > 40
    assert operated(image, Data(), 0, 0, 0) is image


def test_operations_depend_on_seed_epoch_and_sample_alone(section, monkeypatch):
    """Not on what came before, nor on any global generator, which they leave alone also when they fail."""

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()

    image = picture(32, 32)
    names = [(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in range(12)]
    first = [operated(image, section, *name) for name in names]
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = states()
    again = [operated(image, section, *name) for name in reversed(names)]
    assert states() == before
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again)))
    for other in (first[12:24], first[24:36]):
        assert sum(torch.equal(a, b) for a, b in zip(first[:12], other)) < 6, "epochs and seeds draw anew"
    assert len({image.numpy().tobytes() for image in first}) > 12

    def failing(*_):
        torch.rand(1)
        raise ZeroDivisionError

    monkeypatch.setattr("data.transforms._operations", lambda *_: failing)
    with pytest.raises(ZeroDivisionError):
        operated(image, section, 0, 0, 0)
    assert states() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="reads a CUDA device's generator")
def test_operations_leave_the_generator_of_a_gpu_alone(section):
    torch.rand(1, device="cuda")
    before = torch.cuda.get_rng_state()
    operated(picture(32, 32), section, 0, 0, 0)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (33, 32), (434, 434), (9, 100)])
def test_evaluation_crops_what_torchvision_crops(height, width):
    """The short side becomes 434 pixels for 380. torchvision resizes in float32 and rounds once, we in 8-bit steps:
    one level per pass."""
    image = picture(height, width)
    expected = reference.resize(image, [434], antialias=True)
    expected = reference.center_crop(expected, [380, 380])
    actual = evaluated(image, 380, 0.875)
    assert (actual.dtype, actual.shape) == (torch.uint8, (3, 380, 380))
    difference = (actual.int() - expected.int()).abs()
    assert difference.max() <= 2
    assert difference.float().mean() < 0.3


def test_a_line_of_pixels_is_not_resized_to_gigabytes(monkeypatch):
    """At 434 pixels for its one row it would have 28 million columns."""
    largest = []
    resize = torch.nn.functional.interpolate
    monkeypatch.setattr(
        "data.transforms.interpolate",
        lambda *args, **options: largest.append(math.prod(args[1])) or resize(*args, **options),
    )
    for shape in ((1, 65535), (65535, 1)):
        assert evaluated(picture(*shape), 380, 0.875).shape == (3, 380, 380)
    assert max(largest) < 434 * 434 * 20

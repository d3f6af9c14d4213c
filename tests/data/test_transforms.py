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


def picture(height, width):
    return torch.from_numpy(np.random.RandomState(0).randint(0, 256, (3, height, width)).astype(np.uint8))


def trained(image, size, data, seed, epoch, index):
    return Training(data, seed)(Pixels(image), size, epoch, index)


def evaluated(image, size, crop_fraction):
    return Evaluation(crop_fraction)(Pixels(image), size, epoch=0, index=0)


def boxes(height, width, area, aspect, count=4000):
    return np.array([crop_box(Stream(key("test", n)), height, width, area, aspect) for n in range(count)], dtype=float)


@pytest.mark.parametrize(
    ("height", "width", "area", "aspect"),
    [
        (375, 500, (0.05, 1.0), (0.75, 4 / 3)),
        (500, 333, (0.08, 1.0), (0.5, 2.0)),
        (100, 400, (0.5, 1.0), (0.75, 4 / 3)),
        (8, 8, (0.6, 1.0), (0.9, 1.1)),
    ],
    ids=["photo", "tall", "mostly fallback", "digit"],
)
def test_crop_boxes_are_distributed_as_torchvisions(height, width, area, aspect):
    """Means and variances of two samples of 4000: five standard errors are passed by chance once in
    10^5 comparisons, of which there are 24; an aspect drawn uniformly would be seven away."""
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
    assert (top >= 0).all() and (left >= 0).all()
    assert (top + h <= height).all() and (left + w <= width).all()
    assert ((h + 0.5) * (w + 0.5) >= 0.3 * height * width).all()
    assert ((h - 0.5) * (w - 0.5) <= 0.6 * height * width).all()
    assert ((w + 0.5) / (h - 0.5) >= 0.8).all() and ((w - 0.5) / (h + 0.5) <= 1.25).all()
    for positions, room in ((top, height - h), (left, width - w)):
        assert positions.min() == 0
        assert (positions == room).any(), "boxes must be able to touch the far edge"


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(300, 10, (143, 0, 13, 10)), (10, 300, (0, 143, 10, 13)), (1, 1, (0, 0, 1, 1))],
    ids=["narrow", "flat", "one pixel"],
)
def test_where_no_box_fits_the_largest_central_one_is_taken(height, width, expected):
    """By hand: an aspect of 3/4 or 4/3 on the 10 pixels of the short side is 13 pixels."""
    assert crop_box(Stream(1), height, width, (1.0, 1.0), (0.75, 4 / 3)) == expected


def test_a_crop_has_a_pixel_however_odd_the_limits():
    """By hand: a hundredth of a pixel is rounded up to the middle one of three."""
    assert crop_box(Stream(1), 1, 3, (1.0, 1.0), (0.01, 0.01)) == (0, 1, 1, 1)
    assert crop_box(Stream(1), 3, 1, (1.0, 1.0), (100.0, 100.0)) == (1, 0, 1, 1)


def test_draws_depend_on_seed_epoch_and_sample_alone():
    data = Data()
    first = augmentation(1, 2, 3, 375, 500, data)
    assert first == augmentation(1, 2, 3, 375, 500, data)
    others = [augmentation(*name, 375, 500, data) for name in ((0, 2, 3), (1, 0, 3), (1, 2, 0), (2, 1, 3))]
    assert first not in others
    assert len(set(others)) == 4
    global_state = torch.random.get_rng_state()
    augmentation(1, 2, 3, 375, 500, data)
    assert torch.equal(torch.random.get_rng_state(), global_state)


def test_draws_never_change():
    """Runs must be repeatable with later versions. Recorded from the first version."""
    assert augmentation(0, 0, 0, 375, 500, Data()) == (265, 87, 110, 122, True)


def test_flips_come_at_their_rate_and_independently_of_the_size():
    """5000 draws: five standard errors of a rate of 0.3 are 0.032."""
    data = Data(flip=0.3)
    flips = [augmentation(0, 0, index, 375, 500, data).flip for index in range(5000)]
    assert abs(np.mean(flips) - 0.3) < 0.032
    assert flips[:500] == [augmentation(0, 0, index, 20, 900, data).flip for index in range(500)]
    assert not any(augmentation(0, 0, index, 9, 9, Data(flip=0.0)).flip for index in range(500))
    assert all(augmentation(0, 0, index, 9, 9, Data(flip=1.0)).flip for index in range(500))


@pytest.mark.parametrize("planes", [True, False], ids=["planes", "interleaved"])
@pytest.mark.parametrize(("size", "height", "width"), [(32, 8, 8), (64, 150, 200), (380, 333, 500)])
def test_training_pixels_are_pillows_crop_resized_and_mirrored(size, height, width, planes):
    """Both compute in 8-bit steps, horizontally and then vertically, with weights of their own rounding: one
    level for each pass at most, and hardly any on average."""
    image = picture(height, width)
    if not planes:  # the layout of decoded JPEGs
        image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    data = Data(crop_area=(0.3, 0.9))
    flips = set()
    for index in range(12):
        box = augmentation(0, 5, index, height, width, data)
        crop = image[:, box.top : box.top + box.height, box.left : box.left + box.width]
        expected = Image.fromarray(crop.permute(1, 2, 0).numpy().copy()).resize((size, size), Image.BILINEAR)
        expected = np.array(expected)[:, ::-1] if box.flip else np.array(expected)
        actual = trained(image, size, data, 0, 5, index)
        assert actual.dtype == torch.uint8
        assert actual.shape == (3, size, size)
        difference = np.abs(actual.permute(1, 2, 0).numpy().astype(int) - expected.astype(int))
        assert difference.max() <= 2
        assert difference.mean() < 0.1
        flips.add(box.flip)
    assert flips == {True, False}


SECTIONS = {
    "randaugment": Data(augment="randaugment"),
    "three strong": Data(augment="randaugment", randaugment_operations=3, randaugment_magnitude=30),
    "autoaugment": Data(augment="autoaugment"),
    "trivialaugment": Data(augment="trivialaugment"),
}


@pytest.fixture(params=list(SECTIONS))
def section(request):
    return SECTIONS[request.param]


def torchvisions(data):
    """What a user of torchvision would write."""
    torchvision.disable_beta_transforms_warning()
    from torchvision.transforms import v2

    if data.augment == "randaugment":
        return v2.RandAugment(data.randaugment_operations, data.randaugment_magnitude, fill=128)
    return {"autoaugment": v2.AutoAugment, "trivialaugment": v2.TrivialAugmentWide}[data.augment](fill=128)


@pytest.mark.parametrize("planes", [True, False], ids=["planes", "interleaved"])
def test_operations_are_torchvisions_under_a_seed_of_the_sample(section, planes):
    """Applied to the crop that is shown without them, which is mirrored already. 80 samples, so that each of
    RandAugment's 14 operations is there (missing one has a chance of 0.3 % at most)."""
    image = picture(60, 80)
    if not planes:  # the layout of decoded JPEGs
        image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    transform, changed = torchvisions(section), 0
    for index in range(80):
        plain = trained(image, 48, Data(), 3, 1, index)
        actual = trained(image, 48, section, 3, 1, index)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(section.augment, 3, 1, index))
            expected = transform(plain.contiguous())
        assert torch.equal(actual, expected)
        assert actual.dtype == torch.uint8
        assert actual.shape == (3, 48, 48)
        changed += not torch.equal(actual, plain)
    assert changed > 40


def test_without_operations_pixels_are_the_crop_and_the_flip_to_the_bit():
    image, flips = picture(60, 80), set()
    for index in range(20):
        box = augmentation(0, 0, index, 60, 80, Data())
        crop = image[:, box.top : box.top + box.height, box.left : box.left + box.width]
        expected = torch.nn.functional.interpolate(crop[None].contiguous(), (32, 32), mode="bilinear", antialias=True)
        expected = expected[0].flip(2) if box.flip else expected[0]
        assert torch.equal(trained(image, 32, Data(), 0, 0, index), expected)
        assert operated(image, Data(), 0, 0, index) is image
        flips.add(box.flip)
    assert flips == {True, False}


def test_operations_leave_grey_behind():
    """A white image stays white but for what moves in, where it is moved or turned; 128 is no other operation's."""
    white = torch.full((3, 32, 32), 255, dtype=torch.uint8)
    data = Data(augment="randaugment", randaugment_operations=1, randaugment_magnitude=20)
    moved = [operated(white, data, 0, 0, index) for index in range(60)]
    assert sum((image == 128).any().item() for image in moved) > 12


def test_operations_depend_on_seed_epoch_and_sample_alone(section):
    """Not on what came before, nor on any global generator."""
    image = picture(32, 32)
    names = [(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in range(12)]
    first = [operated(image, section, *name) for name in names]
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    again = [operated(image, section, *name) for name in reversed(names)]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again)))
    for other in (first[12:24], first[24:36]):
        assert sum(torch.equal(a, b) for a, b in zip(first[:12], other)) < 6, "epochs and seeds draw anew"
    assert len({image.numpy().tobytes() for image in first}) > 12


def test_operations_leave_the_global_generators_alone(section, monkeypatch):
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()

    before = states()
    for index in range(10):
        operated(picture(32, 32), section, 0, 0, index)
    assert states() == before

    def failing(*_):
        torch.rand(1)
        raise ZeroDivisionError

    monkeypatch.setattr("data.transforms._operations", lambda *_: failing)
    with pytest.raises(ZeroDivisionError):
        operated(picture(32, 32), section, 0, 0, 0)
    assert states() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="reads a CUDA device's generator")
def test_operations_leave_the_generator_of_a_gpu_alone(section):
    torch.cuda.manual_seed(3)
    torch.rand(1, device="cuda")
    before = torch.cuda.get_rng_state()
    operated(picture(32, 32), section, 0, 0, 0)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_evaluation_resizes_the_short_side_to_434_for_380_pixels():
    """A ramp over the width: the crop is the middle 380 of 868 columns, so its mean is the ramp's, and its
    ends lie at 244 and 624 of 868. A level for the rounding."""
    ramp = torch.linspace(0, 255, 1736).round().to(torch.uint8).expand(3, 868, -1)
    image = evaluated(ramp, 380, 0.875)
    assert image.shape == (3, 380, 380)
    assert abs(image.float().mean().item() - 127.5) < 1
    assert abs(image[0, 0, 0].item() - 255 * 244 / 868) < 1
    assert abs(image[0, 0, -1].item() - 255 * 624 / 868) < 1


@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (33, 32), (434, 434), (9, 100)])
def test_evaluation_crops_what_torchvision_crops(height, width):
    """torchvision resizes in float32 and rounds once, we in 8-bit steps: one level per pass."""
    image = picture(height, width)
    expected = reference.resize(image, [434], antialias=True)
    expected = reference.center_crop(expected, [380, 380])
    actual = evaluated(image, 380, 0.875)
    assert actual.dtype == torch.uint8
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

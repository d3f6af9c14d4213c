"""Augmentation of crops: against timm's and torchvision's own, by distribution where draws are
others."""

import math
import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from timm.data.auto_augment import rand_augment_transform
from timm.data.random_erasing import RandomErasing
from torchvision.transforms import ColorJitter, functional

from data import augmentation
from data.augmentation import IMAGENET, Colours, erase, jitter, three_augment, timm_randaugment
from data.base import Pixels
from data.transforms import Training
from recipe.config import Data
from recipe.randomness import MASK32, Stream, key

EVERYTHING = {
    "color_jitter": 0.4,
    "random_erasing": 0.7,
    "random_erasing_mode": "pixel",
    "random_erasing_count": 3,
}
POLICIES = ("augmix", "three_augment", "timm_randaugment")


def picture(size=48, seed=0):
    """Smooth colours with noise, uint8 [3, size, size], channels last in memory."""
    draws = np.random.RandomState(seed)
    coarse = draws.randint(0, 256, (6, 6, 3)).astype(np.uint8)
    pixels = np.array(Image.fromarray(coarse).resize((size, size), Image.BICUBIC)).astype(int)
    noisy = np.clip(pixels + draws.randint(-20, 21, pixels.shape), 0, 255).astype(np.uint8)
    return torch.from_numpy(noisy).permute(2, 0, 1)


@pytest.mark.parametrize("policy", ["rand-m9-mstd0.1-inc1", "rand-m7-n3-p0.9"])
def test_timms_randaugment_is_timms_to_the_bit(policy):
    """The same seeds given to timm by hand. 60 draws change most images, and leave both generators
    as they were."""
    random.seed(1), np.random.seed(1)
    expected_next = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    colours = Colours((0.5, 0.25, 0.75), IMAGENET.std)
    changed = 0
    found = [timm_randaugment(picture(), policy, colours, key("test", n)) for n in range(60)]
    assert (random.random(), np.random.rand()) == expected_next
    theirs = rand_augment_transform(
        policy, {"translate_const": int(48 * 0.45), "img_mean": (128, 64, 191)}
    )
    for number, pixels in enumerate(found):
        draw = key("test", number)
        random.seed(draw), np.random.seed([draw & MASK32, draw >> 32])
        expected = np.array(theirs(Image.fromarray(picture().permute(1, 2, 0).numpy())))
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), expected)
        changed += not torch.equal(pixels, picture())
    assert changed > 30


def test_zero_bits_are_black_whatever_pillow_does():
    """timm's PosterizeIncreasing keeps 0 bits at magnitude 10, of which `m9-mstd0.5` draws some."""
    black = 0
    for number in range(100):
        found = timm_randaugment(picture(), "rand-m10-n1-p1-inc1", IMAGENET, key("test", number))
        (
            random.seed(key("test", number)),
            np.random.seed([key("test", number) & MASK32, key("test", number) >> 32]),
        )
        theirs = rand_augment_transform(
            "rand-m10-n1-p1-inc1", {"translate_const": int(48 * 0.45), "img_mean": IMAGENET.grey}
        )
        if np.random.choice(theirs.ops, 1)[0].name == "PosterizeIncreasing":
            assert not found.any()
            black += 1
    assert black > 0


def test_jitter_is_torchvisions_with_the_drawn_factors():
    """The factors that torchvision's ColorJitter would be given, and every order of the three."""
    orders = set()
    for number in range(40):
        stream = Stream(key("test", number))
        names = ["brightness", "contrast", "saturation"]
        expected = picture()
        order = []
        while names:
            name = names.pop(stream.integer(len(names)))
            expected = getattr(functional, f"adjust_{name}")(expected, stream.uniform(0.6, 1.4))
            order.append(name)
        assert torch.equal(jitter(picture(), 0.4, Stream(key("test", number))), expected)
        orders.add(tuple(order))
    assert len(orders) == 6


def test_jitter_is_distributed_as_torchvisions():
    """Means of 1,500 images under each: five standard errors."""
    torch.manual_seed(0)
    theirs = ColorJitter(0.4, 0.4, 0.4)
    small = picture(8)
    found = np.array(
        [jitter(small, 0.4, Stream(key("test", n))).float().mean() for n in range(1500)]
    )
    expected = np.array([theirs(small).float().mean() for _ in range(1500)])
    for power in (1, 2):
        one = (found - expected.mean()) ** power
        two = (expected - expected.mean()) ** power
        assert abs(one.mean() - two.mean()) < 5 * math.sqrt((one.var() + two.var()) / 1500)
    assert jitter(small, 1.0, Stream(1)).dtype == torch.uint8


def test_three_augment_is_one_of_three_operations():
    """Grey and solarised as by Pillow's operators; blurred as by Pillow, whose Gaussian is
    approximate."""
    kinds = {"grey": 0, "solarised": 0, "blurred": 0}
    image = picture()
    solarised = torch.where(image >= 128, 255 - image, image)
    for number in range(300):
        found = three_augment(image, Stream(key("test", number)))
        if torch.equal(found, solarised):
            kinds["solarised"] += 1
        elif torch.equal(found[0], found[1]) and torch.equal(found[1], found[2]):
            expected = np.array(
                Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L")
            ).astype(int)
            assert np.abs(found[0].numpy() - expected).max() <= 1
            kinds["grey"] += 1
        else:
            kinds["blurred"] += 1
            stream = Stream(key("test", number))
            assert stream.integer(3) == 2
            sigma = stream.uniform(0.1, 2.0)
            blur = ImageFilter.GaussianBlur(sigma)
            expected = np.array(
                Image.fromarray(image.permute(1, 2, 0).numpy()).filter(blur)
            ).astype(int)
            difference = np.abs(found.permute(1, 2, 0).numpy() - expected)[7:-7, 7:-7]
            assert difference.mean() < 2 and difference.max() < 25
    assert all(abs(count - 100) < 5 * math.sqrt(300 * 2 / 9) for count in kinds.values())


@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_rectangles_are_distributed_as_timms(most):
    """Erased share and number of erased rows of 2,000 images, both moments: five standard
    errors."""
    random.seed(0)
    theirs = RandomErasing(1.0, max_count=most, device="cpu")
    blank = torch.full((3, 40, 56), 255, dtype=torch.uint8)
    found = [erase(blank, most, "const", IMAGENET, key("test", n))[0] != 255 for n in range(2000)]
    expected = [theirs(torch.ones(3, 40, 56))[0] == 0 for _ in range(2000)]

    def statistics(masks):
        return np.array([[mask.float().mean().item(), mask.any(1).sum().item()] for mask in masks])

    ours = statistics(found)
    reference = statistics(expected)
    for power in (1, 2):
        one = (ours - reference.mean(0)) ** power
        two = (reference - reference.mean(0)) ** power
        assert (
            np.abs(one.mean(0) - two.mean(0)) < 5 * np.sqrt((one.var(0) + two.var(0)) / 2000)
        ).all()


def test_rectangles_are_filled_with_what_the_model_sees_as_nothing_or_as_noise():
    """Normalised: 0 within half a level; or of mean 0 and deviation 1, as what lies beyond black
    and white is rare for a mean of a half and a deviation of a tenth."""
    colours = Colours((0.5, 0.4, 0.6), (0.1, 0.1, 0.1))
    image = picture(64)
    before = image.clone()
    constant = erase(image, 1, "const", colours, 3)
    assert torch.equal(image, before)
    mask = (constant != image).any(0)
    assert mask.any() and not mask.all()
    assert (
        {tuple(pixel) for pixel in constant[:, mask].T.tolist()}
        == {colours.grey}
        == {(128, 102, 153)}
    )
    values = []
    for number in range(200):
        noisy = erase(
            torch.full((3, 64, 64), 255, dtype=torch.uint8),
            1,
            "pixel",
            colours,
            key("noise", number),
        )
        inside = (noisy != 255).any(0)
        values.append(noisy[:, inside].double() / 255)
    values = (torch.cat(values, 1) - torch.tensor(colours.mean)[:, None]) / 0.1
    # Some hundred thousand values; rounding to a level adds 1e-4 to the variance.
    assert abs(values.mean()) < 0.02 and abs(values.std() - 1) < 0.02


@pytest.mark.parametrize("augment", ["none", *POLICIES])
def test_draws_depend_on_seed_epoch_and_sample_alone(augment):
    """Repeated in another order, with other states of all generators; and other names draw other
    pixels."""
    data = Data(augment=augment, **EVERYTHING)
    image = Pixels(picture())
    names = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]

    def made(seed, epoch, index):
        return Training(data, seed)(image, 32, epoch, index)

    first = [made(*name) for name in names]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    states = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.random.get_rng_state().tolist(),
    )
    again = [made(*name) for name in reversed(names)][::-1]
    assert states == (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.random.get_rng_state().tolist(),
    )
    for one, two in zip(first, again):
        assert torch.equal(one, two)
        assert one.dtype == torch.uint8 and one.shape == (3, 32, 32)
    assert len({tuple(pixels.flatten().tolist()) for pixels in first}) == 4


def test_one_does_not_change_what_another_draws():
    """Crop and flip with and without the rest; erased rectangles with and without jitter."""
    image = Pixels(picture())
    erasing = {"random_erasing": 1.0}
    for index in range(10):
        plain = Training(Data(), 3)(image, 32, 1, index)
        erased = Training(Data(**erasing), 3)(image, 32, 1, index)
        mask = (erased != plain).any(0)
        both = Training(Data(color_jitter=0.4, **erasing), 3)(image, 32, 1, index)
        grey = torch.tensor(IMAGENET.grey, dtype=torch.uint8)[:, None, None]
        assert mask.any() and (both == grey).all(0)[mask].all()


@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_images_are_erased_at_their_rate(probability):
    """2,000 draws: five standard errors of 0.25 are 0.048. Never shows in a tenth of them."""
    draws = 2000 if probability else 200
    image = Pixels(torch.full((3, 16, 16), 255, dtype=torch.uint8))
    transform = Training(Data(random_erasing=probability), 0)
    erased = [bool((transform(image, 16, 0, index) != 255).any()) for index in range(draws)]
    assert abs(np.mean(erased) - probability) <= (0.048 if probability else 0)


def test_every_kind_of_policy_changes_pixels():
    image = Pixels(picture())
    for augment in POLICIES:
        changed = 0
        for index in range(20):
            plain = Training(Data(), 3)(image, 32, 1, index)
            changed += not torch.equal(
                Training(Data(augment=augment), 3)(image, 32, 1, index), plain
            )
        assert changed > 10, augment
    assert augmentation.IMAGENET.grey == (124, 116, 104)

"""Mixup and cutmix against loops over single pixels in float64, and their draws against closed forms."""

import math
import random

import numpy as np
import pytest
import torch

from data.mixing import Mixing, draw, mix_images, mix_targets
from recipe.config import Data

BOTH = Data(mixup=0.2, cutmix=0.85)
MIXUP = Data(mixup=0.2)
CUTMIX = Data(cutmix=0.85)
MANY = 4000


def plan_of(data, step=0, number=0, rows=4, valid=None, height=9, width=7, seed=0):
    return draw(data, seed, step, number, rows, rows if valid is None else valid, height, width)


def pictures(rows, height=9, width=7):
    drawn = np.random.RandomState(rows).randint(0, 256, (rows, 3, height, width))
    return torch.from_numpy(drawn.astype(np.uint8))


def mixed_by_the_pixel(images, shares, box, valid):
    """The published rule on one value at a time, in float64; rows from `valid` on are left alone."""
    n, channels, height, width = images.shape
    top, left, box_height, box_width = box
    mixed, cut = np.zeros(images.shape), np.zeros(images.shape)
    for out, source in ((mixed, images.astype(float)), (cut, mixed)):
        for i in range(n):
            for c in range(channels):
                for y in range(height):
                    for x in range(width):
                        value = source[i, c, y, x]
                        if i < valid and out is mixed:
                            value = shares[i] * value + (1 - shares[i]) * source[(i - 1) % valid, c, y, x]
                        elif i < valid and top <= y < top + box_height and left <= x < left + box_width:
                            value = source[(i - (2 if valid > 2 else 1)) % valid, c, y, x]
                        out[i, c, y, x] = value
    return cut


def test_nothing_is_planned_where_the_recipe_does_not_mix():
    assert plan_of(Data()) is None


@pytest.mark.parametrize("data", [BOTH, MIXUP, CUTMIX], ids=["both", "mixup", "cutmix"])
@pytest.mark.parametrize(
    ("rows", "valid"), [(2, 2), (3, 3), (3, 2), (3, 1), (3, 0), (5, 5), (5, 4)], ids=lambda value: str(value)
)
def test_images_are_mixed_as_by_a_loop_over_pixels(data, rows, valid):
    """Three float32 operations on values up to 255: 255 x 3 x 2^-24 is 4.6e-5."""
    images, boxes = pictures(rows), 0
    for step in range(8):
        plan = plan_of(data, step, rows=rows, valid=valid)
        assert (plan.share.dtype, plan.share.shape) == (torch.float32, (rows,))
        before = images.clone()
        actual = mix_images(images, plan)
        assert torch.equal(images, before)
        assert (actual.dtype, actual.shape) == (torch.float32, images.shape)
        expected = mixed_by_the_pixel(images.numpy(), plan.share.double().numpy(), plan.box, valid)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=4.6e-5)
        assert torch.equal(actual[valid:], images[valid:].float()), "padding"
        if valid < 2:
            assert torch.equal(actual, images.float())
        boxes += plan.box[2] > 0
        if valid > 1:
            assert bool((plan.share[:valid] < 1).any()) == bool(data.mixup)
    assert boxes > 0 if valid > 1 and data.cutmix is not None else boxes == 0


@pytest.mark.parametrize("data", [BOTH, MIXUP, CUTMIX], ids=["both", "mixup", "cutmix"])
@pytest.mark.parametrize(("rows", "valid"), [(2, 2), (3, 3), (3, 2), (3, 1), (3, 0), (5, 5), (6, 4)])
def test_targets_are_the_pixels_that_each_image_has_in_a_row(data, rows, valid):
    """Image i is 255 in the colour of its own, so the mean of a colour over a row is its image's share of it.

    Three colours: images are told apart three at a time. Float32 means of 63 values: 1e-5.
    """
    for step in range(12):
        plan = plan_of(data, step, rows=rows, valid=valid)
        labels = torch.arange(rows)
        targets = mix_targets(labels, plan, rows)
        assert (targets.dtype, targets.shape) == (torch.float32, (rows, rows))
        np.testing.assert_allclose(targets.sum(1).numpy(), 1, atol=1e-6)
        shares = torch.zeros(rows, rows)
        for first in range(0, rows, 3):
            images = torch.zeros(rows, 3, 9, 7, dtype=torch.uint8)
            for colour in range(min(3, rows - first)):
                images[first + colour, colour] = 255
            means = mix_images(images, plan).mean((2, 3)) / 255
            shares[:, first : first + 3] = means[:, : min(3, rows - first)]
        np.testing.assert_allclose(targets.numpy(), shares.numpy(), rtol=0, atol=1e-5)
        assert torch.equal(targets[valid:], torch.eye(rows)[valid:]), "padding"


def test_partners_of_the_same_class_add_up():
    """By hand: rows 0 and 2 of class 1, row 1 of class 0; every row keeps 3/4, the box is half of the image."""
    plan = Mixing(torch.full((3,), 0.75), torch.tensor([2, 0, 1]), (0, 0, 2, 1), torch.tensor([1, 2, 0]), 0.5)
    targets = mix_targets(torch.tensor([1, 0, 1]), plan, 4)
    mixed = [[0, 1, 0, 0], [0.75, 0.25, 0, 0], [0.25, 0.75, 0, 0]]
    expected = [[(a + b) / 2 for a, b in zip(mixed[i], mixed[j])] for i, j in ((0, 1), (1, 2), (2, 0))]
    np.testing.assert_allclose(targets.numpy(), expected, atol=1e-7)


def test_targets_without_a_plan_are_one_hot():
    targets = mix_targets(torch.tensor([2, 0, 2]), None, 4)
    assert targets.dtype == torch.float32
    assert targets.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_mixup_keeps_the_larger_share_of_a_symmetric_beta(alpha):
    """E max(l, 1 - l) = 1 - 2 / B(a, a) x integral over t from 0 to 1/2 of t^a (1 - t)^(a - 1), summed over
    the middles of 10^5 strips. Five standard errors of the sample's mean, and of its mean square."""
    t = (np.arange(100_000) + 0.5) / 200_000
    weight = (t * (1 - t)) ** (alpha - 1) / 200_000
    total = weight.sum()
    if alpha < 1:  # the integrable peak at 0, which strips miss: substitute t = s^(1/a)
        s = (np.arange(100_000) + 0.5) / 100_000 * 0.5**alpha
        t = s ** (1 / alpha)
        weight = (1 - t) ** (alpha - 1) / alpha * 0.5**alpha / 100_000
        total = weight.sum()
    assert 2 * total == pytest.approx(math.gamma(alpha) ** 2 / math.gamma(2 * alpha), rel=1e-4)
    shares = np.stack([plan_of(Data(mixup=alpha), step, rows=8).share.numpy() for step in range(MANY)]).astype(float)
    assert shares.min() >= 0.5 and shares.max() <= 1
    for power in (1, 2):
        expected = (weight * (1 - t) ** power).sum() / total
        sample = shares**power
        assert abs(sample.mean() - expected) < 5 * sample.std() / math.sqrt(sample.size)
    correlation = np.corrcoef(shares.T) - np.eye(8)
    assert np.abs(correlation).max() < 5 / math.sqrt(MANY), "each image has a draw of its own"


@pytest.mark.parametrize("cutmix", [0.62, 0.85, 1.0])
def test_cutmix_keeps_what_the_published_rule_keeps(cutmix):
    """With a = e^-4: P(none) = 1.55 c - 0.96, and else P(lambda <= x) = (e^(4 x - 4) - a) / (1 - a), of mean
    1 + (5 a - 1) / (1 - a) / 4. On 10^5 pixels a side rounding is nothing. Kolmogorov's distance exceeds 2.2 /
    sqrt(n) once in 8000 samples."""
    plans = [plan_of(Data(cutmix=cutmix), step, height=100_000, width=100_000) for step in range(MANY)]
    kept = np.array([plan.kept for plan in plans])
    none = 1.55 * cutmix - 0.96
    assert abs((kept == 1).mean() - none) < 5 * math.sqrt(none * (1 - none) / MANY) + 1e-9
    a = math.exp(-4)
    expected = none + (1 - none) * (1 + (5 * a - 1) / (1 - a) / 4)
    assert abs(kept.mean() - expected) < 5 * kept.std() / math.sqrt(MANY)
    drawn = np.sort(kept[kept < 1])
    assert drawn[0] >= 0
    assert cutmix > 0.62 or drawn[0] < 0.03, "one in 420 where there is a box"
    distribution = (np.exp(4 * drawn - 4) - a) / (1 - a)
    steps = np.arange(len(drawn) + 1) / len(drawn)
    distance = max(np.abs(distribution - steps[1:]).max(), np.abs(distribution - steps[:-1]).max())
    assert distance < 2.2 / math.sqrt(len(drawn))


@pytest.mark.parametrize(("height", "width"), [(380, 380), (90, 60), (5, 8), (1, 1)])
def test_boxes_lie_inside_the_image_and_have_its_aspect(height, width):
    """Each edge is rounded by half a pixel at most, so a side by one: the shares of the two sides differ by less
    than a pixel of each."""
    plans = [plan_of(CUTMIX, step, height=height, width=width) for step in range(MANY)]
    top, left, h, w = np.array([plan.box for plan in plans]).T
    assert (top >= 0).all() and (left >= 0).all() and (h >= 0).all() and (w >= 0).all()
    assert (top + h <= height).all() and (left + w <= width).all()
    assert (np.abs(h / height - w / width) <= 1 / height + 1 / width + 1e-12).all()
    np.testing.assert_allclose([plan.kept for plan in plans], 1 - h * w / (height * width), atol=1e-12)


def test_boxes_are_centred_anywhere_and_then_pushed_inside():
    """A centre nearer to an edge than half a side is pushed, which happens in half a side of all cases; else
    it is uniform in what is left. Five standard errors."""
    side, pixels = [], 100_000
    first, second = [], []
    for step in range(MANY):
        plan = plan_of(CUTMIX, step, height=pixels, width=pixels)
        if plan.kept < 1:
            top, left, height, width = plan.box
            side.append(height / pixels)
            first.append(top / (pixels - height) if height < pixels else 0.5)
            second.append(left / (pixels - width) if width < pixels else 0.5)
    side = np.array(side)
    for place in (np.array(first), np.array(second)):
        error = 5 * math.sqrt(0.25 / len(side))
        assert abs((place == 0).mean() - side.mean() / 2) < error
        assert abs((place == 1).mean() - side.mean() / 2) < error
        inner = place[(place > 0) & (place < 1)]
        assert abs(inner.mean() - 0.5) < 5 * math.sqrt(1 / 12 / len(inner))
        assert abs(inner.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / len(inner))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(len(side))


def comparable(plan):
    return plan.share.tolist(), plan.box


def test_draws_depend_on_seed_step_and_micro_batch_alone():
    first = comparable(plan_of(BOTH, 5, 3, seed=2))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()
    assert comparable(plan_of(BOTH, 5, 3, seed=2)) == first
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()) == states
    names = [(5, 3, 2), (5, 2, 3), (3, 5, 2), (2, 5, 3), (2, 3, 5)]
    assert len({tuple(plan_of(MIXUP, *name[:2], seed=name[2]).share.tolist()) for name in names}) == 5
    boxes = [[plan_of(CUTMIX, step, *name, 4, None, 380, 380).box for step in range(8)] for name in ((0,), (1,))]
    assert boxes[0] != boxes[1]


def test_each_of_the_two_draws_the_same_without_the_other_and_beside_padding():
    for step in range(20):
        both = plan_of(BOTH, step)
        assert both.box == plan_of(CUTMIX, step).box
        assert both.share.tolist() == plan_of(MIXUP, step).share.tolist()
        assert plan_of(BOTH, step, valid=3).share.tolist() == [*both.share[:3].tolist(), 1]


def test_mixup_and_cutmix_are_independent():
    """2500 draws at 0.85, where 900 have no box: five standard errors of a correlation."""
    plans = [plan_of(BOTH, step, height=1000, width=1000) for step in range(2500)]
    correlation = np.corrcoef([plan.share[0].item() for plan in plans], [plan.kept for plan in plans])[0, 1]
    assert abs(correlation) < 5 / math.sqrt(2500)


def test_draws_never_change():
    """Runs must be repeatable with later versions, of NumPy's Beta sampler too. Recorded from the first version."""
    plan = plan_of(BOTH, 3, 2, height=380, width=380)
    np.testing.assert_allclose(plan.share.numpy(), [0.99990833, 0.99999952, 0.91294432, 0.8598125], rtol=1e-6)
    assert plan.box == (77, 34, 144, 144)


@pytest.mark.parametrize("alpha", [5e-324, 1e-100, 1e-9])
def test_the_smallest_alphas_mix_nothing_and_come_back(alpha):
    """Their Beta is a coin; NumPy 1.24 looks for it for ever."""
    assert plan_of(Data(mixup=alpha)).share.tolist() == [1, 1, 1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="mixes on a CUDA device")
def test_a_gpu_mixes_the_same_without_waiting():
    """A float32 operation may be contracted with the next on a GPU: a unit in the last place of 255."""
    images, labels = pictures(5), torch.tensor([3, 1, 0, 1, 2])
    there, labels_there = images.cuda(), labels.cuda()
    for step in range(10):
        plan = plan_of(BOTH, step, rows=5, valid=4)
        torch.cuda.set_sync_debug_mode("error")
        try:
            mixed, targets = mix_images(there, plan), mix_targets(labels_there, plan, 7)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(mixed.cpu(), mix_images(images, plan), rtol=0, atol=4e-5)
        torch.testing.assert_close(targets.cpu(), mix_targets(labels, plan, 7), rtol=0, atol=1e-6)

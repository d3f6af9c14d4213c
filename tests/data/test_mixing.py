"""Mixup and cutmix against loops over single pixels in float64, and their draws against closed
forms."""

import functools
import math
import re

import numpy as np
import pytest
import torch
from timm.data import Mixup, auto_augment

from data.mixing import draw, mix_images, mix_targets
from data.transforms import _operations
from recipe.config import Data
from tests.conftest import ROOT

BOTH = Data(mixup=0.2, cutmix=0.85)
MIXUP = Data(mixup=0.2)
CUTMIX = Data(cutmix=0.85)
MANY = 4000


def plan_of(data, step=0, number=0, rows=4, valid=None, height=9, width=7, seed=0):
    valid = rows if valid is None else valid
    return draw(data, seed, (step, number), rows=rows, valid=valid, size=(height, width))


@functools.lru_cache(maxsize=None)  # two tests look at each
def plans_of_cutmix(cutmix):
    """MANY plans of the published rule for images so large that rounding is nothing."""
    data = Data(mixing="g16", cutmix=cutmix)
    return [plan_of(data, step, height=100_000, width=100_000) for step in range(MANY)]


def pictures(rows):
    return torch.from_numpy(
        np.random.RandomState(rows).randint(0, 256, (rows, 3, 9, 7)).astype(np.uint8)
    )


def mixed_by_the_row(images, shares, box, valid):
    """The published rule on one image at a time, in float64; rows from `valid` on are left
    alone."""
    top, left, height, width = box
    mixed = images.astype(float)
    for i in range(valid):
        mixed[i] = shares[i] * images[i] + (1 - shares[i]) * images[(i - 1) % valid]
    cut = mixed.copy()
    for i in range(valid):
        donor = mixed[(i - (2 if valid > 2 else 1)) % valid]
        cut[i, :, top : top + height, left : left + width] = donor[
            :, top : top + height, left : left + width
        ]
    return cut


@pytest.mark.parametrize("data", [BOTH, MIXUP, CUTMIX], ids=["both", "mixup", "cutmix"])
@pytest.mark.parametrize(
    ("rows", "valid"), [(2, 2), (3, 3), (4, 3), (3, 1), (3, 0), (5, 5), (6, 4)]
)
def test_images_and_targets_are_mixed_as_by_the_published_rule(data, rows, valid):
    """Three float32 operations on values up to 255: 255 x 3 x 2^-24 is 4.6e-5.

    Targets are the shares of images in a row's pixels: mixed so are images of which each has a
    colour of its own.
    """
    images = pictures(rows)
    boxes = 0
    for step in range(8):
        plan = plan_of(data, step, rows=rows, valid=valid)
        before = images.clone()
        actual = mix_images(images, plan)
        assert torch.equal(images, before) and actual.dtype == plan.share.dtype == torch.float32
        shares = plan.share.double().numpy()
        expected = mixed_by_the_row(images.numpy(), shares, plan.box, valid)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=4.6e-5)
        untouched = valid if valid > 1 else 0
        assert torch.equal(actual[untouched:], images[untouched:].float())
        assert bool((plan.share < 1).any()) == (bool(data.mixup) and valid > 1)
        boxes += plan.box[2] > 0
        colours = np.eye(rows)[:, :, None, None] * np.ones((9, 7))
        expected = mixed_by_the_row(colours, shares, plan.box, valid).mean((2, 3))
        np.testing.assert_allclose(
            mix_targets(torch.arange(rows), plan, rows).numpy(), expected, rtol=0, atol=1e-6
        )
    assert boxes > 0 if valid > 1 and data.cutmix is not None else boxes == 0


def test_targets_without_a_plan_are_one_hot():
    assert plan_of(Data()) is None
    assert torch.equal(mix_targets(torch.tensor([2, 0, 2]), None, 4), torch.eye(4)[[2, 0, 2]])


@pytest.mark.parametrize("alpha", [0.2, 5.0])
def test_mixup_keeps_the_larger_share_of_a_symmetric_beta(alpha):
    """E max(l, 1 - l)^k by summing s = t^a over 10^5 strips, the density of l = t up to 1/2.

    Five standard errors of the sample's mean, and of its mean square.
    """
    s = (np.arange(100_000) + 0.5) / 100_000 * 0.5**alpha
    t = s ** (1 / alpha)
    weight = (1 - t) ** (alpha - 1)
    shares = np.stack(
        [plan_of(Data(mixup=alpha), step, rows=8).share.numpy() for step in range(MANY)]
    ).astype(float)
    assert shares.min() >= 0.5 and shares.max() <= 1
    for power in (1, 2):
        expected = (weight * (1 - t) ** power).sum() / weight.sum()
        sample = shares**power
        assert abs(sample.mean() - expected) < 5 * sample.std() / math.sqrt(sample.size)
    correlation = np.corrcoef(shares.T) - np.eye(8)
    assert np.abs(correlation).max() < 5 / math.sqrt(MANY), "each image has a draw of its own"
    # a coin, which NumPy 1.24 throws for ever
    assert plan_of(Data(mixup=5e-324)).share.tolist() == [1] * 4


@pytest.mark.parametrize("cutmix", [0.62, 0.85, 1.0])
def test_cutmix_keeps_what_the_published_rule_keeps(cutmix):
    """With a = e^-4: P(none) = 1.55 c - 0.96, and else P(lambda <= x) = (e^(4 x - 4) - a) / (1 -
    a), of mean 1 + (5 a - 1) / (1 - a) / 4. On 10^5 pixels a side rounding is nothing. Kolmogorov's
    distance exceeds 2.2 / sqrt(n) once in 8000 samples."""
    kept = np.array([plan.kept for plan in plans_of_cutmix(cutmix)])
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
    assert max(
        abs(distribution - steps[1:]).max(), abs(distribution - steps[:-1]).max()
    ) < 2.2 / math.sqrt(len(drawn))


@pytest.mark.parametrize(("height", "width"), [(380, 380), (90, 60), (5, 8), (1, 1)])
def test_boxes_lie_inside_the_image_and_have_its_aspect(height, width):
    """Each edge is rounded by half a pixel at most, so a side by one: the shares of the two sides
    differ by less than a pixel of each."""
    plans = [plan_of(CUTMIX, step, height=height, width=width) for step in range(1000)]
    top, left, h, w = np.array([plan.box for plan in plans]).T
    assert min(top.min(), left.min(), h.min(), w.min()) >= 0
    assert (top + h <= height).all() and (left + w <= width).all()
    assert (np.abs(h / height - w / width) <= 1 / height + 1 / width + 1e-12).all()
    np.testing.assert_allclose(
        [plan.kept for plan in plans], 1 - h * w / (height * width), atol=1e-12
    )


def test_draws_depend_on_seed_step_and_micro_batch_alone_and_never_change():
    """Runs must be repeatable with later versions, of NumPy's Beta sampler too.

    Recorded from the first version.
    """
    plan = plan_of(BOTH, 3, 2, height=380, width=380)
    np.testing.assert_allclose(
        plan.share.numpy(), [0.99990833, 0.99999952, 0.91294432, 0.8598125], rtol=1e-6
    )
    assert plan.box == (77, 34, 144, 144)
    states = np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()
    names = [(5, 3, 2), (5, 2, 3), (3, 5, 2), (2, 5, 3), (2, 3, 5)]
    plans = [
        plan_of(BOTH, step, number, seed=seed, height=380, width=380)
        for step, number, seed in names
    ]
    assert (np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()) == states
    assert (
        len({tuple(plan.share.tolist()) for plan in plans}) == 5
        and len({plan.box for plan in plans}) > 2
    )
    for step in range(20):  # each the same without the other, and beside padding
        both = plan_of(BOTH, step)
        assert (both.share.tolist(), both.box) == (
            plan_of(MIXUP, step).share.tolist(),
            plan_of(CUTMIX, step).box,
        )
        assert plan_of(BOTH, step, valid=3).share.tolist() == [*both.share[:3].tolist(), 1]


TIMM = {"mixing": "timm", "mixup": 0.8, "cutmix": 1.0}


def timms(count, **keys):
    """timm's own share of `count` batches of two images of 60 x 90: an independent sample."""
    np.random.seed(0)
    options = {
        "mixup_alpha": 0.8,
        "cutmix_alpha": 1.0,
        "label_smoothing": 0.0,
        "num_classes": 2,
        **keys,
    }
    theirs = Mixup(**options)
    shares = []
    labels = torch.tensor([0, 1])
    for _ in range(count):
        images = torch.stack([torch.zeros(1, 60, 90), torch.ones(1, 60, 90)])
        shares.append(theirs(images, labels)[1][0, 0].item())
    return np.array(shares)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param({}, {}, marks=pytest.mark.slow),
        ({"mixing_switch": 0.2, "mixing_probability": 0.7}, {"switch_prob": 0.2, "prob": 0.7}),
        pytest.param(
            {"mixup": 0.0, "cutmix": 0.5},
            {"mixup_alpha": 0.0, "cutmix_alpha": 0.5},
            marks=pytest.mark.slow,
        ),
        pytest.param({"cutmix": None}, {"cutmix_alpha": 0.0}, marks=pytest.mark.slow),
    ],
    ids=["both", "rarer", "cutmix", "mixup"],
)
def test_shares_are_distributed_as_timms(ours, theirs):
    """Each class's share of the target, after the box was cut off at the border: Kolmogorov's
    distance of two samples of 4,000 exceeds 2.2 sqrt(2 / n) once in 8,000 pairs; and that nothing
    is mixed is as likely (five errors)."""
    data = Data(**{**TIMM, **ours})
    plans = [plan_of(data, step, rows=2, height=60, width=90) for step in range(MANY)]
    targets = [mix_targets(torch.tensor([0, 1]), plan, 2)[0, 0].item() for plan in plans]
    expected = timms(MANY, **theirs)
    found = np.sort(np.array(targets))
    levels = np.unique(np.concatenate([found, np.sort(expected)])) + 1e-6
    distance = (
        np.abs(np.searchsorted(found, levels) - np.searchsorted(np.sort(expected), levels)).max()
        / MANY
    )
    assert distance < 2.2 * math.sqrt(2 / MANY)
    unmixed = [(values > 1 - 1e-6).mean() for values in (np.array(targets), expected)]
    assert abs(unmixed[0] - unmixed[1]) < 5 * math.sqrt(2 * 0.25 / MANY)


def test_a_micro_batch_has_one_share_and_either_mixup_or_cutmix():
    cut = 0
    for step in range(200):
        plan = plan_of(Data(**TIMM), step, rows=5, valid=4, height=60, width=90)
        shares = set(plan.share[:4].tolist())
        assert len(shares) == 1 and plan.share[4] == 1
        assert shares == {1.0} or plan.box == (0, 0, 0, 0)
        cut += plan.box[2] > 0
    assert 60 < cut < 140, "half of them, but for boxes without a pixel"


@pytest.mark.parametrize("valid", [1, 2, 3, 5])
def test_pixels_and_targets_of_timms_rule_agree(valid):
    """Targets are the shares of images in a row's pixels: see the first test of this file."""
    for step in range(8):
        plan = plan_of(Data(**TIMM), step, rows=5, valid=valid)
        shares = plan.share.double().numpy()
        expected = mixed_by_the_row(pictures(5).numpy(), shares, plan.box, valid)
        np.testing.assert_allclose(
            mix_images(pictures(5), plan).numpy(), expected, rtol=0, atol=4.6e-5
        )
        colours = np.eye(5)[:, :, None, None] * np.ones((9, 7))
        expected = mixed_by_the_row(colours, shares, plan.box, valid).mean((2, 3))
        np.testing.assert_allclose(
            mix_targets(torch.arange(5), plan, 5).numpy(), expected, rtol=0, atol=1e-6
        )


def test_null_is_the_published_rule():
    for step in range(20):
        named = plan_of(Data(mixing="g16", mixup=0.2, cutmix=0.85), step)
        null = plan_of(BOTH, step)
        assert named.share.tolist() == null.share.tolist() and named.box == null.box
    assert Data().mixing == "g16"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="mixes on a CUDA device")
def test_a_gpu_mixes_the_same_without_waiting():
    """A float32 operation may be contracted with the next on a GPU: a unit in the last place of
    255."""
    images = pictures(5)
    labels = torch.tensor([3, 1, 0, 1, 2])
    there = images.cuda(), labels.cuda()
    for step in range(10):
        plan = plan_of(BOTH, step, rows=5, valid=4)
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan_there = draw(
                BOTH, 0, (step, 0), rows=5, valid=4, size=(9, 7), device=there[0].device
            )
            mixed = mix_images(there[0], plan_there)
            targets = mix_targets(there[1], plan_there, 7)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(mixed.cpu(), mix_images(images, plan), rtol=0, atol=4e-5)
        torch.testing.assert_close(targets.cpu(), mix_targets(labels, plan, 7), rtol=0, atol=1e-6)


def test_the_docs_give_the_share_of_pixels_that_cutmix_replaces():
    """Smaller is stronger, which no other program's key is.

    The mean of 4,000 boxes is exact to a percent.
    """
    text = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    said = re.search(
        r"`0.62` replaces (\d+) % of the pixels on average, `0.85` (\d+) %, and `1`, the weakest, (\d+) %",
        text,
    )
    described = Data.fields()["cutmix"].description
    for cutmix, percent in zip((0.62, 0.85, 1.0), map(int, said.groups())):
        replaced = np.mean([1 - plan.kept for plan in plans_of_cutmix(cutmix)])
        assert abs(100 * replaced - percent) < 1
        assert f"{percent} %" in described


def test_the_docs_translate_timms_randaugment():
    """Of rotation, timm's level 9 of 10 is torchvision's magnitude 27 of 30, and is applied half
    the time."""
    ours = _operations("randaugment", 2, 27)
    degrees = ours._AUGMENTATION_SPACE["Rotate"][0](ours.num_magnitude_bins, 224, 224)
    assert float(degrees[27]) == pytest.approx(27) and float(degrees[9]) == pytest.approx(9)
    timms = auto_augment.rand_augment_transform("rand-m9", {})
    rotation = next(each for each in timms.ops if each.name == "Rotate")
    assert abs(rotation.level_fn(rotation.magnitude, {})[0]) == pytest.approx(27)
    assert (rotation.prob, timms.num_layers) == (0.5, 2)
    text = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    assert "data.randaugment_magnitude=27" in text and "with probability 0.5" in text

"""Learning rates against closed forms, at the corners of the curve and over all of it."""

import math
from fractions import Fraction

import pytest
import torch
from timm.scheduler import CosineLRScheduler, StepLRScheduler

from optim import schedule
from recipe import batch
from recipe.batch import Lengths
from recipe.config import Schedule

SECTIONS = {
    "polynomial": {"power": 2.0, "final_ratio": 0.0625},
    "cosine": {"final_ratio": 0.0625},
    "exponential": {"decay_rate": 0.97, "decay_epochs": 2.4},
    "constant": {},
}


def curve(name, warmup=40, steps_per_epoch=8, peak=4.0, **keys):
    """A warm-up of 40 of 200 steps to a rate of 4; the decay ends at 0.25, the drops come every
    19.2 steps."""
    section = Schedule(name=name, peak=peak, **{**SECTIONS[name], **keys})
    return schedule.curve(
        section, peak, Lengths(steps_per_epoch=steps_per_epoch, dropped=0, total=200, warmup=warmup)
    )


@pytest.mark.parametrize("name", SECTIONS)
def test_the_warm_up_rises_from_zero_by_equal_amounts(name):
    """One rounding each of product, quotient and expectation: 4 units of float64's precision.

    Without one, the first update has the peak.
    """
    rate = curve(name)
    assert rate(0) == 0
    for step in range(40):
        assert rate(step) == pytest.approx(4.0 * (step / 40), rel=2**-50, abs=0)
    assert curve(name, warmup=0)(0) == 4.0


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_what_is_left_of_the_polynomial_is_a_power_of_what_is_left_of_the_decay(power):
    rate = curve("polynomial", power=power)
    for step in (40, 41, 80, 160, 199, 200):
        assert rate(step) == pytest.approx(0.25 + (4.0 - 0.25) * ((200 - step) / 160) ** power), (
            step
        )
    assert rate(40) == 4.0 and rate(200) == rate(201) == rate(10**9) == 0.25


def timms(scheduler, peak, **options):
    """A scheduler of timm's as a function of the step.

    Warm-up is added before the schedule proper or laid over it.
    """
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], peak)
    return lambda step: scheduler(optimizer, **options)._get_lr(step)[0]


def test_the_cosine_and_the_stairs_are_timms():
    """Both in float64: a few roundings.

    Drops every 16 steps: with a fraction timm's may come a step late.
    """
    cosine = {"t_initial": 160, "lr_min": 0.25, "warmup_t": 40, "warmup_prefix": True}
    pairs = [(curve("cosine"), timms(CosineLRScheduler, 4.0, **cosine))]
    for warmup in (0, 40):
        stairs = {"decay_t": 16, "decay_rate": 0.97, "warmup_t": warmup, "warmup_prefix": False}
        pairs.append(
            (curve("exponential", warmup, decay_epochs=2.0), timms(StepLRScheduler, 4.0, **stairs))
        )
    for ours, theirs in pairs:
        for step in range(260):
            assert ours(step) == pytest.approx(theirs(step), rel=2**-48, abs=0)


def test_a_drop_comes_at_its_step_whatever_floating_point_makes_of_the_interval():
    """Tenths of an epoch against exact fractions: 6 % of the quotients that are whole lie below."""
    for tenths in (*range(1, 12), 22, 24, 39):
        for per_epoch in (*range(1, 60), 75, 100, 208, 300):
            exact = Fraction(tenths, 10) * per_epoch
            rate = curve("exponential", 0, per_epoch, 1.0, decay_rate=0.5, decay_epochs=tenths / 10)
            for drops in (1, 3, 17):
                due = math.ceil(exact * drops)
                assert rate(due) == 0.5 ** (due // exact), (tenths, per_epoch)
                assert rate(due - 1) == 0.5 ** ((due - 1) // exact), (tenths, per_epoch)


# From the recipe to a curve: ImageNet has 1,281,167 images.


def test_the_published_recipe(tiny):
    """0.00138107 an image, 2**-9.5 in six digits, 70 of 350 epochs of warm-up, power 2 (default).

    A half of the decay is left at epoch 210, a quarter at 280; the last rate is 1e-5 of the peak.
    """
    recipe = tiny(
        "batch.global=6144",
        "run.epochs=350",
        "schedule.peak_per_image=0.00138107",
        "schedule.warmup_epochs=70",
    )
    lengths = batch.lengths(recipe, 1281167)
    rate = schedule.create(recipe, lengths)
    assert (lengths.steps_per_epoch, lengths.warmup, lengths.total) == (208, 70 * 208, 350 * 208)
    peak = rate(70 * 208)
    assert peak == pytest.approx(2**-9.5 * 6144, rel=1e-5) == pytest.approx(8.485, abs=5e-4)
    assert max(rate(step) for step in range(0, 350 * 208, 104)) == peak
    for epoch, share in ((0, 0), (7, 1 / 10), (35, 1 / 2), (210, 1 / 4), (280, 1 / 16), (350, 0)):
        final = 0 if epoch < 70 else peak * 1e-5
        assert rate(epoch * 208) == pytest.approx(final + (peak - final) * share, rel=1e-12), epoch


@pytest.mark.parametrize(
    ("name", "overrides", "epochs", "expected"),
    [
        # 0.97 every 2.4 epochs, 3,002.4 steps: after the warm-up two have passed, at the end of 350
        # epochs 145.
        (
            "exponential",
            ("schedule.peak=0.016", "schedule.batch_rule=linear", "schedule.reference_batch=256"),
            350,
            {
                0: 0,
                3127: 0.031994884,
                6254: 0.063989768,
                6255: 0.0602176,
                9007: 0.0602176,
                9008: 0.058411072,
            },
        ),
        # Half-way from 5 to 105 epochs the mean of 2 and a tenth of it; the square root of 4 times
        # the batch is 2.
        (
            "cosine",
            (
                "schedule.peak=1",
                "schedule.batch_rule=sqrt",
                "schedule.reference_batch=256",
                "schedule.final_ratio=0.1",
            ),
            105,
            {0: 0, 1251: 0.4, 5 * 1251: 2.0, 55 * 1251: 1.1, 105 * 1251: 0.2},
        ),
        (
            "constant",
            ("schedule.peak_per_image=0.001",),
            9,
            {0: 0, 1251: 0.2048, 5 * 1251: 1.024, 9 * 1251: 1.024},
        ),
    ],
    ids=["exponential, as published for EfficientNet", "cosine", "constant"],
)
def test_the_schedules_of_a_recipe(tiny, name, overrides, epochs, expected):
    """5 epochs of warm-up, 1,251 steps an epoch."""
    common = ("batch.global=1024", "batch.micro=64", "schedule.warmup_epochs=5")
    recipe = tiny(*common, f"schedule.name={name}", f"run.epochs={epochs}", *overrides)
    rate = schedule.create(recipe, batch.lengths(recipe, 1281167))
    for step, wanted in expected.items():
        assert rate(step) == pytest.approx(wanted, rel=1e-7), step

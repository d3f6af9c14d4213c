"""Learning rates against closed forms, at the corners of the curve and over all of it."""

import math
from fractions import Fraction

import pytest
import torch
from timm.scheduler import CosineLRScheduler, StepLRScheduler

from optim import schedule
from optim.schedule import constant, cosine, exponential, polynomial
from recipe import batch

CURVE = {"peak": 3.0, "warmup": 40, "total": 200, "power": 2.0, "final": 0.25}


def test_the_first_update_has_rate_zero():
    assert polynomial(0, **CURVE) == 0


def test_the_warm_up_rises_by_equal_amounts():
    """One rounding each of product, quotient and expectation: 4 units of float64's precision."""
    for step in range(41):
        assert polynomial(step, **CURVE) == pytest.approx(3.0 * (step / 40), rel=2**-50, abs=0)


def test_the_rate_is_continuous_at_the_end_of_the_warm_up():
    """There it is the peak exactly; a step earlier a 40th less, a step later less by about 2/160 of peak - final."""
    assert polynomial(40, **CURVE) == 3.0
    assert polynomial(39, **CURVE) == pytest.approx(3.0 * 39 / 40)
    assert polynomial(41, **CURVE) == pytest.approx(3.0 - (3.0 - 0.25) * (2 / 160 - 1 / 160**2))


def test_without_warm_up_the_first_update_has_the_peak():
    assert polynomial(0, **{**CURVE, "warmup": 0}) == 3.0


@pytest.mark.parametrize(("power", "share"), [(1.0, 1 / 4), (2.0, 1 / 16), (3.0, 1 / 64), (0.5, 1 / 2)])
def test_when_a_quarter_of_the_decay_is_left_its_power_is_left_of_the_rate(power, share):
    curve = {**CURVE, "power": power}
    assert polynomial(40 + 120, **curve) == pytest.approx(0.25 + (3.0 - 0.25) * share)


def test_the_last_update_is_a_step_above_the_final_rate():
    assert polynomial(199, **CURVE) == pytest.approx(0.25 + (3.0 - 0.25) / 160**2)


@pytest.mark.parametrize("step", [200, 201, 10**9])
def test_from_the_end_on_the_rate_is_the_final_one(step):
    assert polynomial(step, **CURVE) == 0.25


def test_the_rate_rises_to_the_peak_and_then_falls():
    rates = [polynomial(step, **CURVE) for step in range(201)]
    assert all(before < after for before, after in zip(rates[:40], rates[1:41]))
    assert all(before > after for before, after in zip(rates[40:], rates[41:]))


def published(tiny, images=1281167):
    """The published schedule on ImageNet: 0.00138107 an image, 70 of 350 epochs of warm-up, power 2 (default)."""
    recipe = tiny(
        "batch.global=6144",
        "run.epochs=350",
        "schedule.peak_per_image=0.00138107",
        "schedule.warmup_epochs=70",
    )
    lengths = batch.lengths(recipe, images)
    return schedule.create(recipe, lengths), lengths


def test_the_published_recipe_has_208_updates_an_epoch(tiny):
    _, lengths = published(tiny)
    assert (lengths.steps_per_epoch, lengths.warmup, lengths.total) == (208, 70 * 208, 350 * 208)


def test_the_published_recipe_peaks_at_8_485_after_70_epochs(tiny):
    """The published peak is 2**-9.5 an image; the recipe writes that in six digits."""
    rate, _ = published(tiny)
    assert rate(70 * 208) == pytest.approx(2**-9.5 * 6144, rel=1e-5)
    assert rate(70 * 208) == pytest.approx(8.485, abs=5e-4)
    assert max(rate(step) for step in range(0, 350 * 208, 104)) == rate(70 * 208)


@pytest.mark.parametrize(
    ("epoch", "of_peak"), [(0, 0), (7, 1 / 10), (35, 1 / 2), (210, 1 / 4), (280, 1 / 16), (350, 0)]
)
def test_the_published_recipe_passes_through_its_curve(tiny, epoch, of_peak):
    """A half of the decay is left at epoch 210, a quarter at 280; the last rate is 1e-5 of the peak."""
    rate, _ = published(tiny)
    peak = 0.00138107 * 6144
    final = 0 if epoch < 70 else peak * 1e-5
    assert rate(epoch * 208) == pytest.approx(final + (peak - final) * of_peak, rel=1e-12)


def test_a_peak_of_its_own_does_not_depend_on_the_batch(tiny):
    recipe = tiny("schedule.peak=2.5", "schedule.final_ratio=0.5", "schedule.power=1", "run.steps=12")
    rate = schedule.create(recipe, batch.lengths(recipe, 1437))
    assert [rate(step) for step in (0, 1, 2, 7, 12)] == pytest.approx([0, 1.25, 2.5, 1.875, 1.25])


COSINE = {"peak": 3.0, "warmup": 40, "total": 200, "final": 0.25}
STAIRS = {"peak": 2.0, "warmup": 40, "decay_rate": 0.97, "decay_steps": 19.2}


@pytest.mark.parametrize(
    "curve",
    [
        lambda step: polynomial(step, **CURVE),
        lambda step: cosine(step, **COSINE),
        lambda step: exponential(step, **{**STAIRS, "peak": 3.0}),
        lambda step: constant(step, peak=3.0, warmup=40),
    ],
    ids=["polynomial", "cosine", "exponential", "constant"],
)
def test_all_warm_up_alike_from_zero(curve):
    """One rounding each of product, quotient and expectation."""
    assert curve(0) == 0
    for step in range(40):
        assert curve(step) == pytest.approx(3.0 * (step / 40), rel=2**-50, abs=0)


@pytest.mark.parametrize(("done", "share"), [(0, 1), (1 / 4, (2 + 2**0.5) / 4), (1 / 2, 1 / 2), (3 / 4, 0.1464466)])
def test_the_cosine_passes_through_its_angles(done, share):
    """(1 + cos) / 2 at 0, 45, 90 and 135 degrees; 160 steps decay."""
    assert cosine(40 + int(160 * done), **COSINE) == pytest.approx(0.25 + 2.75 * share, rel=1e-7)


@pytest.mark.parametrize("step", [200, 201, 10**9])
def test_from_the_end_on_the_cosine_stays_at_the_final_rate(step):
    assert cosine(step, **COSINE) == 0.25


def test_without_warm_up_all_begin_at_the_peak():
    assert cosine(0, **{**COSINE, "warmup": 0}) == 3.0
    assert exponential(0, **{**STAIRS, "warmup": 0}) == 2.0
    assert constant(0, peak=3.0, warmup=0) == 3.0


def timms(scheduler, peak, **options):
    """A scheduler of timm's as a function of the step. Warm-up is added before the schedule proper or laid over it."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], peak)
    return lambda step: scheduler(optimizer, **options)._get_lr(step)[0]


def test_the_cosine_is_timms():
    """Both in float64: a few roundings."""
    theirs = timms(CosineLRScheduler, 3.0, t_initial=160, lr_min=0.25, warmup_t=40, warmup_prefix=True)
    for step in range(260):
        assert cosine(step, **COSINE) == pytest.approx(theirs(step), rel=2**-48, abs=0)


@pytest.mark.parametrize("warmup", [0, 40])
def test_the_stairs_are_timms(warmup):
    """Drops every 16 steps: with a fraction timm's may come a step late."""
    curve = {**STAIRS, "warmup": warmup, "decay_steps": 16.0}
    theirs = timms(StepLRScheduler, 2.0, decay_t=16, decay_rate=0.97, warmup_t=warmup, warmup_prefix=False)
    for step in range(260):
        assert exponential(step, **curve) == pytest.approx(theirs(step), rel=2**-48, abs=0)


@pytest.mark.parametrize(
    ("step", "drops"), [(40, 2), (57, 2), (58, 3), (76, 3), (77, 4), (95, 4), (96, 5), (115, 5), (116, 6), (192, 10)]
)
def test_the_drops_are_counted_from_the_start_of_the_run(step, drops):
    """At 19.2, 38.4, 57.6, 76.8, 96, 115.2 ... 192 steps: two of them during the warm-up of 40."""
    assert exponential(step, **STAIRS) == pytest.approx(2.0 * 0.97**drops, rel=1e-12)


def test_a_drop_comes_at_its_step_whatever_floating_point_makes_of_the_interval():
    """Tenths of an epoch, of 1 to 300 steps, against exact fractions: 6 % of the quotients that are whole lie below."""
    for tenths in range(1, 40):
        for per_epoch in range(1, 301):
            exact = Fraction(tenths, 10) * per_epoch
            for drops in (1, 3, 17):
                due = math.ceil(exact * drops)
                curve = {"peak": 1.0, "warmup": 0, "decay_rate": 0.5, "decay_steps": tenths / 10 * per_epoch}
                assert exponential(due, **curve) == 0.5 ** (due // exact), (tenths, per_epoch)
                assert exponential(due - 1, **curve) == 0.5 ** ((due - 1) // exact), (tenths, per_epoch)


def of_efficientnet(tiny, *overrides):
    """The published controls of EfficientNet: rate 0.016 for 256 images, 5 epochs of warm-up; 1,251 steps an epoch."""
    recipe = tiny("batch.global=1024", "batch.micro=64", "schedule.warmup_epochs=5", *overrides)
    return schedule.create(recipe, batch.lengths(recipe, 1281167))


def test_the_published_stairs_of_efficientnet(tiny):
    """0.97 every 2.4 epochs, 3,002.4 steps: after the warm-up two have passed, at the end of 350 epochs 145."""
    rate = of_efficientnet(
        tiny,
        "schedule.name=exponential",
        "schedule.peak=0.016",
        "schedule.batch_rule=linear",
        "schedule.reference_batch=256",
        "run.epochs=350",
    )
    table = {0: 0, 3127: 0.031994884, 6254: 0.063989768, 6255: 0.0602176, 9007: 0.0602176, 9008: 0.058411072}
    table = {**table, 12009: 0.058411072, 12010: 0.05665874, 350 * 1251 - 1: 0.064 * 0.97**145}
    for step, expected in table.items():
        assert rate(step) == pytest.approx(expected, rel=1e-7), step


def test_the_cosine_of_a_recipe(tiny):
    """Half-way from 5 to 105 epochs the mean of 2 and a tenth of it; the square root of 4 times the batch is 2."""
    rate = of_efficientnet(
        tiny,
        "schedule.name=cosine",
        "schedule.peak=1.0",
        "schedule.batch_rule=sqrt",
        "schedule.reference_batch=256",
        "schedule.final_ratio=0.1",
        "run.epochs=105",
    )
    assert [rate(epoch * 1251) for epoch in (0, 1, 5, 55, 105)] == pytest.approx([0, 0.4, 2.0, 1.1, 0.2])


def test_the_constant_rate_of_a_recipe(tiny):
    rate = of_efficientnet(tiny, "schedule.name=constant", "schedule.peak_per_image=0.001", "run.epochs=9")
    assert [rate(epoch * 1251) for epoch in (0, 1, 5, 6, 9)] == pytest.approx([0, 0.2048, 1.024, 1.024, 1.024])

"""Learning rates against closed forms, at the corners of the curve and over all of it."""

import pytest

from optim import schedule
from optim.schedule import polynomial
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

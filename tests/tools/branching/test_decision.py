"""The critical batch that branches show is that of the task, where it is known: SGD on a noisy
quadratic in float64."""

import math

import numpy as np
import pytest

from common.errors import UserError
from recipe import loading
from recipe.batch import rate_factor
from tests.conftest import QUICKSTART
from tests.tools.branching.quadratic import expected, sampled
from tools.branching import decision
from tools.branching.plan import RULES, Branch, Plan

STEPS = 128
PLAN = Plan(batch=64, per_epoch=64, total=1000, points=[100], largest=16, steps=STEPS)
COPIES = (
    500  # of each curvature: the loss of a branch differs from its expectation by a percent or two
)


def of_order(order):
    return np.random.default_rng(order).normal(size=(STEPS, 40, COPIES))


def excesses(noise, rate, rule):
    """Expected excess of each multiple over the run's own batch."""
    first = expected(noise, rate, 1, 1.0, STEPS)
    return [
        expected(noise, rate, each, rate_factor(rule, each), STEPS) / first - 1
        for each in PLAN.multiples
    ]


@pytest.mark.parametrize(
    ("noise", "rate", "known"),
    [
        # Almost no noise: progress is all that counts. By the root half as many updates at 1.4
        # times the rate lose half of it; linearly nothing is lost until the rate is beyond what the
        # largest curvature bears.
        (0.0, 0.3, {"sqrt": 1, "linear": 8}),
        (0.01, 0.3, {"sqrt": 1, "linear": 8}),
        # Almost nothing but noise, of which larger batches have less: at a low rate too few updates
        # are left in the end, at a higher one the linear rule has too large steps.
        (10.0, 0.05, {"sqrt": 8, "linear": 8}),
        (10.0, 0.1, {"sqrt": 16, "linear": 4}),
    ],
)
def test_the_critical_batch_of_a_noisy_quadratic_is_found(noise, rate, known):
    """Known from exact moments, and not by a hair: no excess lies within a fifth of the
    tolerance."""
    tolerance = decision.LEAST_TOLERANCE
    for rule in RULES:
        found = excesses(noise, rate, rule)
        assert all(abs(each - tolerance) > tolerance / 5 for each in found), found
        recovered = [each for each, excess in zip(PLAN.multiples, found) if excess <= tolerance]
        assert recovered == PLAN.multiples[: len(recovered)]
        assert known[rule] == max([1, *recovered])
    orders = {order: of_order(order) for order in range(2)}

    def loss(branch):
        factor = rate_factor(branch.rule or "none", branch.multiple)
        return sampled(noise, rate, branch.multiple, factor, orders[branch.order])

    (point,) = decision.judge(PLAN, {branch: loss(branch) for branch in PLAN.branches()})
    assert point.tolerance == tolerance and point.spread < tolerance / 2
    assert point.multiples == known and point.multiple == max(known.values())


def losses(first=1.0, other=1.0, sqrt=(1.0, 1.0, 1.0, 1.0), linear=(1.0, 1.0, 1.0, 1.0), step=100):
    """Losses of the branches from a checkpoint."""
    orders = {Branch(step, 1): first, Branch(step, 1, order=1): other}
    rules = {"sqrt": sqrt, "linear": linear}
    found = {
        Branch(step, each, rule): loss
        for rule in RULES
        for each, loss in zip(PLAN.multiples, rules[rule])
    }
    return {**orders, **found}


def judged(**given):
    (point,) = decision.judge(PLAN, losses(**given))
    return point


def test_a_tolerance_is_at_least_four_percent_and_above_the_spread():
    assert judged(other=1.01).tolerance == 0.04
    wide = judged(first=2.0, other=1.8)
    assert (wide.spread, wide.tolerance) == pytest.approx((0.1, 0.2))
    assert judged(first=2.0, other=2.2).tolerance == pytest.approx(0.2)


def test_a_batch_counts_if_it_and_all_smaller_ones_have_recovered():
    """A loss below that of the first branch has, an infinite one has not."""
    point = judged(sqrt=(0.5, 1.039, 1.041, 1.0), linear=(1.041, 1.0, 1.0, 1.0))
    assert point.multiples == {"sqrt": 4, "linear": 1} and point.multiple == 4
    assert [each.recovered for each in point.results["sqrt"]] == [True, True, False, True]
    assert judged(sqrt=(1.0, math.inf, 1.0, 1.0), linear=(math.nan,) * 4).multiples == {
        "sqrt": 2,
        "linear": 1,
    }


@pytest.mark.parametrize("given", [{"first": math.inf}, {"other": math.nan}])
def test_nothing_is_compared_with_a_branch_that_diverged(given):
    with pytest.raises(
        UserError,
        match=r"from step 100 has no finite loss; branch a run with a lower schedule\.peak",
    ):
        judged(**given)


SEVERAL = PLAN._replace(points=[100, 500, 900])


def along(*multiples):
    """Points whose largest multiples by the root and linearly are those pairs."""
    found = []
    for step, pair in zip(SEVERAL.points, multiples):
        point = decision.judge(PLAN._replace(points=[step]), losses(step=step))[0]
        found.append(point._replace(multiples=dict(zip(RULES, pair))))
    return found


@pytest.fixture(scope="module")
def recipe():
    return loading.load(QUICKSTART, ["run.epochs=null", "run.steps=1000"])


def test_the_critical_batch_of_a_run_is_the_geometric_mean_of_its_checkpoints():
    points = along((1, 2), (8, 4), (4, 2))
    assert decision.critical(SEVERAL, points) == pytest.approx(64 * (2 * 8 * 4) ** (1 / 3))
    assert not decision.is_bound(SEVERAL, points) and decision.is_bound(
        SEVERAL, along((1, 2), (1, 16), (1, 1))
    )


def test_a_schedule_grows_at_the_checkpoints_and_never_to_more_than_a_later_one_bears(recipe):
    """Epochs of 64 steps, 1000 steps: by the root 100 single updates, then of 2 steps, from 900 on
    of 4."""
    growth = decision.growth(SEVERAL, along((4, 1), (2, 1), (4, 2)), recipe)
    assert growth == ("sqrt", [(0, 64), (6400, 128), (57600, 256)], growth.updates)
    # From step 900 on: epochs end at 960 and 1000.
    assert growth.updates == 100 + 400 + 15 + 10
    linear = decision.growth(SEVERAL, along((1, 2), (2, 4), (2, 4)), recipe)
    assert linear.rule == "linear" and linear.pairs == [(0, 64), (6400, 128), (32000, 256)]
    assert decision.growth(SEVERAL, along((8, 8), (8, 8), (1, 1)), recipe) is None

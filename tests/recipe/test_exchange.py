"""The section `exchange`: which keys go together, and what a run with them is said to be."""

import pytest

from recipe.batch import describe
from recipe.loading import load
from tests.conftest import QUICKSTART


def recipe(*overrides):
    return load(QUICKSTART, overrides)


def test_keys_that_only_say_how_another_method_sends_are_ignored():
    plain = recipe("exchange.density=0.01")
    assert recipe("exchange.density=0.01", "exchange.compress=update", "exchange.wire=float16") == plain
    assert recipe("exchange.dense_1d=false", "exchange.density_warmup=[]", "exchange.density=0.01") == plain


def test_a_section_becomes_that_of_another_method():
    own = recipe("exchange.method=topk", "exchange.dense_1d=true", "exchange.density=0.01", "exchange.delay=2").exchange
    assert own.to("gtopk", pattern="butterfly").model_dump(include={"method", "dense_1d", "density", "pattern"}) == {
        "method": "gtopk", "dense_1d": True, "density": 0.01, "pattern": "butterfly",
    }  # fmt: skip
    assert own.refused_by("dense") == {"dense_1d": False} and own.refused_by("gtopk") == {}
    assert own.to("dense") == recipe("exchange.density=0.01", "exchange.delay=2").exchange


UPDATE = ("exchange.method=gtopk", "exchange.compress=update")


def test_local_steps_begin_after_the_dense_ones():
    section = recipe("exchange.method=local", "exchange.dense_steps=3", "exchange.dense_epochs=0.5").exchange
    assert [section.is_dense(step, 10) for step in (0, 2, 4, 5)] == [True, True, True, False]
    assert [section.is_dense(step, None) for step in (2, 3)] == [True, False]  # an engine that does not train


def test_densities_by_step():
    """Dense first, then one density an epoch of 10 steps, then the recipe's."""
    section = recipe("exchange.method=gtopk", "exchange.density_warmup=[0.25, 0.05]", "exchange.dense_steps=3").exchange
    found = [section.density_at(step, 10) for step in (0, 2, 3, 9, 10, 19, 20, 1000)]
    assert found == [1, 1, 0.25, 0.25, 0.05, 0.05, 0.001, 0.001]
    assert recipe("exchange.method=topk").exchange.density_at(0, None) == 0.001  # an engine that does not train


@pytest.mark.parametrize(
    ("overrides", "beside"),
    [
        ((), 0.0),
        (("exchange.delay=3",), 1.0),
        (("exchange.method=local", "exchange.delay=1"), 1 / 8),
        (("exchange.method=local", "exchange.delay=1", "exchange.fragments=4"), 0.5),
        (("exchange.method=local", "exchange.delay=3", "exchange.fragments=8"), 1.0),
    ],
)
def test_a_late_exchange_runs_beside_steps(overrides, beside):
    assert recipe(*overrides).exchange.beside == beside


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("exchange.method=half",), "exchange half (float16), order fast"),
        (("exchange.order=tree", "exchange.delay=1"), "exchange dense, order tree, gradients 1 step late"),
        (("exchange.method=topk", "exchange.wire=float16"), "exchange topk (float16), density 0.001 of the update"),
        (("exchange.method=topk", "optimizer.name=sgd"), "exchange topk (float32), density 0.001 of the gradient"),
        (("exchange.method=topk", "exchange.delay=1"), "density 0.001 of the gradient, gradients 1 step late"),
        (
            (*UPDATE, "exchange.pattern=butterfly", "exchange.density_warmup=[0.25,0.06]", "exchange.dense_1d=true"),
            "exchange gtopk (butterfly, float32), density 0.001 of the update, after 0.25, 0.06 in the first epochs, "
            "conserving, factor masking, dense 1d",
        ),
        (("exchange.bits=4",), "exchange dense, in 4 bits"),
        (("exchange.method=topk", "exchange.bits=8"), "exchange topk (int8)"),
        (("exchange.method=local", "exchange.bits=8"), "mean of the weights every 8 steps, in 8 bits"),
        (("exchange.method=local", "exchange.delay=2"), "mean of the weights every 8 steps, means 2 steps late"),
        (
            ("exchange.method=local", "exchange.outer=nesterov", "exchange.fragments=4", "exchange.dense_epochs=2"),
            "exchange local, outer Nesterov 0.7, 0.9 every 8 steps, in 4 fragments, dense for 2 epochs",
        ),
        (("exchange.method=gtopk", "exchange.conserve=false"), "density 0.001 of the update, published residual rule"),
    ],
)  # fmt: skip
def test_the_plan_says_what_is_exchanged(overrides, text):
    assert text in describe(recipe(*overrides))


@pytest.mark.parametrize(
    ("overrides", "density", "masked"),
    [
        ((), 0.001, True),
        ((), 0.01, True),
        ((), 0.04, False),
        (("exchange.factor_masking=true",), 0.04, True),
        (("exchange.factor_masking=false",), 0.001, False),
        (("exchange.compress=gradient",), 0.001, False),
        (("optimizer.name=sgd", "schedule.peak=0.1"), 0.001, False),
    ],
)
def test_momentum_of_what_is_sent_is_cleared_where_little_is_sent(overrides, density, masked):
    asked = recipe("exchange.method=topk", *overrides)
    assert asked.exchange.masks(asked.optimizer, density) == masked

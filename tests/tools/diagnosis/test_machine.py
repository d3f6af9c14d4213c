"""The machine that is written down makes the plan predict what was measured; every kind of exchange can be tried."""

import platform

import pytest
import torch

from engines import choice
from parallel import exchange
from parallel.costs import Link
from parallel.exchange import Gradient
from recipe import batch as arithmetic
from recipe import loading
from recipe.exchange import Exchange
from tests.conftest import QUICKSTART
from tools.diagnosis import machine
from tools.diagnosis.images import Reading
from tools.diagnosis.links import Links, Method
from tools.diagnosis.splitting import Passes, Shape, Times, spread
from tools.planning import scaling, workload

BY_ITSELF = 0.010  # seconds of the exchange
MICRO_BATCH = 0.150  # seconds on the slowest stage


def planned_exchange(exposed, *overrides, measured=True, by_itself=BY_ITSELF):
    """Machine that was measured with an exchange that adds `exposed` seconds to a step; its plan's seconds of that."""
    recipe = loading.load(QUICKSTART, ["parallel.replicas=2", "exchange.method=dense", *overrides])
    stages, work = recipe.parallel.stages, workload.of(recipe)
    batch = arithmetic.divide(recipe, 2)
    parameters = max(stage.parameters for stage in work.stages)
    share = [stage.multiply_adds / max(each.multiply_adds for each in work.stages) for stage in work.stages]
    own = {rank: [batch.accumulation * MICRO_BATCH * share[rank % stages]] for rank in range(2 * stages)}
    whole = batch.accumulation * MICRO_BATCH
    passes = Passes(own, {0: [whole], 1: [whole]})
    step = whole + exposed + 0.01
    times = Times(Shape(batch.accumulation, stages), [step], [0.0], [step], [whole + 0.01], [0.01], passes)
    # A ring of two: each sends half of the gradient twice.
    bandwidth = work.gradient_bytes * parameters / by_itself
    links = Links(spread([0.0]), spread([bandwidth]), False)
    candidate = choice.Candidate(exchange.named("dense"), by_itself, 0.0)
    method = Method(candidate, spread([by_itself]) if measured else None)
    reading, to_device = Reading(spread([1e9]), 10, 0), spread([1e12])
    hosts = [platform.node()] * 2 * stages
    found = machine.described(recipe, batch, torch.device("cpu"), hosts, times, work, reading, to_device, links, method)
    return found, scaling.predict(recipe, found, 2, work).parts["exchange"]


@pytest.mark.parametrize("exposed", [0.0, 0.005, 0.009, 0.010])
@pytest.mark.parametrize("overrides", [(), ("parallel.recompute=true",), ("parallel.stages=2",)])
def test_the_plan_predicts_the_exchange_that_a_step_was_seen_to_wait_for(exposed, overrides):
    found, predicted = planned_exchange(exposed, *overrides)
    # Figures are written with five digits.
    assert predicted == pytest.approx(exposed, abs=1e-4 * BY_ITSELF)
    assert 0 <= found.overlap <= 1


def test_overlap_is_a_share_of_the_backward_pass():
    """5 of 10 ms are hidden behind a pass of two thirds of 150 ms, or a half of them where blocks are recomputed."""
    assert planned_exchange(0.005)[0].overlap == pytest.approx(0.05)
    assert planned_exchange(0.005, "parallel.recompute=true")[0].overlap == pytest.approx(1 / 15)
    # An exchange that takes longer beside a step, was not measured, or comes late.
    assert planned_exchange(0.02)[0].overlap == 0.0
    assert planned_exchange(0.005, measured=False)[0].overlap == 0.0
    assert planned_exchange(0.0, "exchange.delay=1")[0].overlap == 0.0
    # All of an exchange that takes longer than the pass.
    assert planned_exchange(0.0, by_itself=1.0)[0].overlap == 1.0


HALF = ("exchange.method=half", "exchange.wire=bfloat16")
GTOPK = (
    "exchange.method=gtopk", "exchange.pattern=butterfly", "exchange.compress=gradient",
    "exchange.dense_1d=true", "exchange.density_warmup=[0.5]", "exchange.delay=1",
)  # fmt: skip
RECIPES = [
    (), HALF, ("exchange.order=tree",), ("exchange.method=none",), ("exchange.method=auto",),
    ("exchange.method=topk", "exchange.wire=float16", "exchange.density=0.01"), GTOPK,
]  # fmt: skip


@pytest.mark.parametrize("overrides", RECIPES)
def test_each_method_has_a_section_that_goes_with_the_recipe(overrides):
    recipe = loading.load(QUICKSTART, overrides)
    methods, batch = exchange.variants(recipe.exchange), arithmetic.divide(recipe)
    predicted = choice.predict(methods, recipe, batch, Gradient(1000, 0), Link(1e-4, 1e-8))
    assert [each.name for each in predicted] == [method.name for method in methods]
    assert {"dense", "half", "topk", "gtopk owners"} <= {each.name for each in predicted}
    for section in (each.method.section for each in predicted):
        # As if it had been written: model_copy checks nothing.
        arithmetic.divide(recipe.model_copy(update={"exchange": Exchange(**section.model_dump())}))
        assert section.delay == 0


def test_keys_of_the_recipes_own_method_are_kept():
    recipe = loading.load(QUICKSTART, GTOPK)
    expected = recipe.exchange.model_copy(update={"density_warmup": [], "delay": 0})
    assert exchange.named("gtopk butterfly", recipe.exchange).section == expected
    assert exchange.named("half", loading.load(QUICKSTART, HALF).exchange).section.wire == "bfloat16"

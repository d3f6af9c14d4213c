"""The machine that is written down makes the plan predict what was measured."""

from types import SimpleNamespace

import pytest
import torch

from engines import choice
from parallel import exchange
from recipe import batch as arithmetic
from recipe import loading
from recipe.exchange import Exchange
from tests.conftest import QUICKSTART
from tools.diagnosis import machine
from tools.diagnosis.images import Reading
from tools.diagnosis.links import Links, Method
from tools.diagnosis.splitting import Passes, Times, spread
from tools.planning import scaling, workload

BY_ITSELF = 0.010  # seconds of the exchange
MICRO_BATCH = 0.150  # seconds on the slowest stage


def planned_exchange(exposed, *overrides, measured=True, by_itself=BY_ITSELF):
    """Machine that was measured with an exchange that adds `exposed` seconds to a step; its plan's
    seconds of that."""
    recipe = loading.load(QUICKSTART, ["parallel.replicas=2", "exchange.method=dense", *overrides])
    stages = recipe.parallel.stages
    work = workload.of(recipe)
    batch = arithmetic.divide(recipe, 2)
    share = [
        stage.multiply_adds / max(each.multiply_adds for each in work.stages)
        for stage in work.stages
    ]
    own = {
        rank: [batch.accumulation * MICRO_BATCH * share[rank % stages]]
        for rank in range(2 * stages)
    }
    whole = batch.accumulation * MICRO_BATCH
    passes = Passes(own, {0: [whole], 1: [whole]})
    step = whole + exposed + 0.01
    times = Times(
        batch.accumulation,
        stages,
        1,
        as_trained=[step],
        waited=[0.0],
        from_memory=[step],
        without_exchange=[whole + 0.01],
        update=[0.01],
        passes=passes,
    )
    # A ring of two: each sends half of the gradient twice.
    bandwidth = work.gradient_bytes * max(stage.parameters for stage in work.stages) / by_itself
    candidate = choice.Candidate(exchange.named("dense"), by_itself, 0.0)
    examined = SimpleNamespace(
        batch=batch,
        times=times,
        about={"device": "cpu", "cpu": "one", "cores": 2, "date": "today"},
        hosts=["host"] * 2 * stages,
        reading=Reading(spread([1e9]), 10, 0),
        to_device=spread([1e12]),
        links=Links(spread([0.0]), spread([bandwidth]), False),
        methods=[Method(candidate, spread([by_itself]) if measured else None)],
        straggling=0.0,
    )
    found = machine.described(recipe, torch.device("cpu"), work, examined)
    return found, scaling.predict(recipe, found, 2, work).parts["exchange"]


@pytest.mark.parametrize("exposed", [0.0, 0.005, 0.010])
@pytest.mark.parametrize("overrides", [(), ("parallel.recompute=true",), ("parallel.stages=2",)])
def test_the_plan_predicts_the_exchange_that_a_step_was_seen_to_wait_for(exposed, overrides):
    found, predicted = planned_exchange(exposed, *overrides)
    # Figures are written with five digits.
    assert predicted == pytest.approx(exposed, abs=1e-4 * BY_ITSELF)
    assert 0 <= found.overlap <= 1


def test_overlap_is_a_share_of_the_backward_pass():
    """5 of 10 ms are hidden behind a pass of two thirds of 150 ms, or a half of them where blocks
    are recomputed."""
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
    "exchange.method=gtopk",
    "exchange.compress=gradient",
    "exchange.density_warmup=[0.5]",
    "exchange.delay=1",
)


@pytest.mark.parametrize(
    "overrides", [("exchange.order=tree",), ("exchange.method=auto",), HALF, GTOPK]
)
def test_every_method_can_be_tried_with_the_recipes_own_keys(overrides):
    recipe = loading.load(QUICKSTART, overrides)
    sections = {method.name: method.section for method in exchange.variants(recipe.exchange)}
    assert {"dense", "half", "topk", "gtopk owners"} <= sections.keys()
    for section in sections.values():
        # As if it had been written: model_copy checks nothing.
        arithmetic.divide(recipe.model_copy(update={"exchange": Exchange(**section.model_dump())}))
        assert section.delay == 0
    if overrides in (HALF, GTOPK):
        timed = {"density_warmup": [], "delay": 0} if overrides == GTOPK else {}
        assert sections[recipe.exchange.variant] == recipe.exchange.model_copy(update=timed)

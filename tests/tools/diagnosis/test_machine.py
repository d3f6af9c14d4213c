"""The machine that is written down makes the plan predict what was measured."""

import platform

import pytest
import torch

from recipe import batch as arithmetic
from recipe import loading
from tests.conftest import QUICKSTART
from tools.diagnosis import machine
from tools.diagnosis.images import Reading
from tools.diagnosis.links import Links, Method
from tools.diagnosis.splitting import Passes, Shape, Times, spread
from tools.planning import scaling, workload

ALONE = 0.010  # seconds of the exchange by itself
MICRO_BATCH = 0.150  # seconds on the slowest stage


def planned_exchange(exposed, *overrides, measured=True):
    """Machine that was measured with an exchange that adds `exposed` seconds to a step; what its plan says of that."""
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
    bandwidth = work.gradient_bytes * parameters / ALONE
    links = Links(spread([0.0]), spread([bandwidth]), False)
    method = Method("dense", ALONE, spread([ALONE]) if measured else None)
    reading, to_device = Reading(spread([1e9]), 10, 0), spread([1e12])
    hosts = [platform.node()] * 2 * stages
    found = machine.described(recipe, batch, torch.device("cpu"), hosts, times, work, reading, to_device, links, method)
    return found, scaling.predict(recipe, found, 2, work).parts["exchange"]


@pytest.mark.parametrize("exposed", [0.0, 0.005, 0.009, 0.010])
@pytest.mark.parametrize("overrides", [(), ("parallel.recompute=true",), ("parallel.stages=2",)])
def test_the_plan_predicts_the_exchange_that_a_step_was_seen_to_wait_for(exposed, overrides):
    found, predicted = planned_exchange(exposed, *overrides)
    # Figures are written with five digits.
    assert predicted == pytest.approx(exposed, abs=1e-4 * ALONE)
    assert 0 <= found.overlap <= 1


def test_overlap_is_a_share_of_the_backward_pass():
    """5 of 10 ms are hidden behind a pass of two thirds of 150 ms, or a half of them where blocks are recomputed."""
    assert planned_exchange(0.005)[0].overlap == pytest.approx(0.05)
    assert planned_exchange(0.005, "parallel.recompute=true")[0].overlap == pytest.approx(1 / 15)


def test_an_exchange_that_takes_longer_beside_a_step_overlaps_nothing():
    assert planned_exchange(0.02)[0].overlap == 0.0


def test_no_more_is_hidden_than_the_backward_pass_is_long():
    assert machine._overlap(0.0, Method("dense", 1.0, spread([1.0])), 0.1) == 1.0


def test_nothing_is_known_to_overlap_where_the_exchange_was_not_measured_or_comes_late():
    assert planned_exchange(0.005, measured=False)[0].overlap == 0.0
    assert planned_exchange(0.0, "exchange.delay=1")[0].overlap == 0.0

"""Local steps in the engine: with stages, half weights, averages, scores and resumes."""

import pytest
import torch

from tests.engines import worlds
from tests.engines.test_exchange import SGD
from tests.engines.worlds import FLOAT32, alone, case, engine_of, evaluation, goes_on, micro_batches, outcome, trains
from tests.tensors import assert_bitwise_equal

pytestmark = pytest.mark.multiprocess

LOCAL = ("exchange.method=local", "exchange.local_steps=2")
LATE = (*LOCAL, "exchange.local_steps=3", "exchange.bits=8", "exchange.delay=2", "exchange.fragments=2")
OUTER = (*LOCAL, "exchange.outer=nesterov", "exchange.fragments=2", "exchange.dense_steps=1")


def together_after_each(processes):
    """Norms are each replica's own."""
    _, weights, found = trains(processes, (*SGD, *LOCAL, "exchange.local_steps=1"))
    return (), weights, found


@pytest.mark.parametrize("run", [case(1, 2, together_after_each)])
def test_the_mean_after_every_step_of_plain_sgd_is_a_dense_exchange(run):
    """Without momentum the mean of the replicas' updates is the update of the mean: only sums are in another order."""
    assert worlds.distance(outcome(run)[2], alone(*SGD)[2]) < 1e-5


def after_each_step(processes):
    """Of each of two steps the weights of every replica, what is saved, and the scores."""
    engine = engine_of(processes, LOCAL, steps_per_epoch=2)
    found = []
    for step in range(2):
        engine.train_step(micro_batches(step, engine), step, 2.0)
        saved = engine.state_dict()
        states = [state for state in engine.replica_states() if engine.topology.is_main]
        scores = []
        for weights in ("trained", "step_average"):
            with engine.using(weights):
                scores.append(evaluation(engine))
        found.append((saved, states, scores))
    return [scores for *_, scores in found], (), found


def means(states, kind):
    return {name: sum(state[kind][name].double() for state in states) / len(states) for name in states[0][kind]}


@pytest.mark.parametrize("run", [case(1, 2, after_each_step)])
def test_what_is_saved_and_scored_is_the_mean(run):
    """Half weights: to their rounding. Replicas are apart after the first step and one again after the second."""
    for step, (saved, states, scores) in enumerate(outcome(run)):
        assert len(states) == 2 and [images for images, *_ in scores] == [20, 20]
        one, other = (state["weights"] for state in states)
        assert any(not torch.equal(one[name], other[name]) for name in one) == (step == 0)
        for name, mean in means(states, "weights").items():
            torch.testing.assert_close(saved["weights"][name].double(), mean, rtol=2**-10, atol=2**-24)
        for name, mean in means(states, "step_average").items():
            found = saved["averages"]["step_average"]["weights"][name]
            torch.testing.assert_close(found.double(), mean, rtol=2**-22, atol=1e-7)


def resumed(processes, overrides):
    """All that 4 steps save, and what 2 more save after 2."""
    whole = goes_on(processes, overrides, 0, 4)[2]
    saved = goes_on(processes, overrides, 0, 2)[2]
    common, _, again = goes_on(processes, overrides, 2, 2, *processes.from_main(lambda: saved))
    return common, (), (whole, again)


@pytest.mark.parametrize("run", [case(1, 2, resumed, LATE), case(1, 2, resumed, OUTER)])
def test_a_run_that_is_saved_and_resumed_has_the_same_bits(run):
    """Half weights, momenta and averages of each replica, and what the outer optimizer keeps."""
    (state, states), (found, found_states) = outcome(run)
    assert_bitwise_equal(found, state)
    assert len(states) == 2
    for one, other in zip(found_states, states, strict=True):
        assert_bitwise_equal(one, other)


APART = (*LOCAL, *FLOAT32, "exchange.local_steps=4")


def two_steps(processes):
    """What is saved while replicas are apart; their weights differ, so no digest of them is compared."""
    common, _, found = goes_on(processes, APART, 0, 2)
    return common, (), found


@pytest.mark.parametrize("run", [case(1, 2, two_steps)])
def test_one_replica_goes_on_from_the_mean_of_two(run):
    """Of weights, momenta and averages, to the rounding of an addition."""
    state, states = outcome(run)
    _, (own,) = goes_on(worlds.single(), APART, 2, 0, state, states)[2]
    for kind in ("weights", "momentum_buffer", "step_average"):
        for name, mean in means(states, kind).items():
            torch.testing.assert_close(own[kind][name].double(), mean, rtol=2**-22, atol=1e-9)

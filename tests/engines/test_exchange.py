"""Sparse, rounded, local and late exchanges in the engine: with stages, replicas, half weights and
resumes."""

import copy
import functools

import pytest
import torch

from engines.base import one_step
from engines.exchange import _overlap
from models import costs
from models.balance import BlockCost
from models.efficientnet import build
from tests.engines import worlds
from tests.engines.worlds import (
    FLOAT32,
    TREE,
    alone,
    case,
    engine_of,
    evaluation,
    goes_on,
    micro_batches,
    outcome,
    saved_after,
    single,
    trains,
)
from tests.tensors import assert_bitwise_equal

pytestmark = pytest.mark.multiprocess

SGD = (
    "optimizer.name=sgd",
    "optimizer.momentum=0.0",
    "optimizer.weight_decay=0.0",
    "schedule.peak=0.1",
    *FLOAT32,
)
GTOPK = ("exchange.method=gtopk", "exchange.density=0.02")
WHOLE = (*FLOAT32, "exchange.method=gtopk", "exchange.density=1.0")
UPDATES = (*WHOLE, "exchange.compress=update")
LOCAL = ("exchange.method=local", "exchange.local_steps=2")


def section(*keys):
    return [f"exchange.{key}" for key in keys]


@pytest.mark.parametrize(
    ("run", "least", "most"),
    [
        (case(1, 2, trains, (*WHOLE, "exchange.compress=gradient")), 0, 1e-5),
        (case(1, 2, trains, (*FLOAT32, "exchange.bits=8")), 1e-4, 0.05),
        (
            case(1, 2, trains, (*FLOAT32, "exchange.method=half", "exchange.wire=bfloat16")),
            1e-4,
            2e-2,
        ),
    ],
)
def test_whole_and_rounded_gradients_are_near_a_dense_exchange(run, least, most):
    """Density 1 differs by the order of sums alone, as in tests/engines/test_distributed.py.

    With 8 bits a value is off by half of 1/127 of its block's largest, and what is kept is made
    good; bfloat16 rounds twice to 2**-8. Three steps and the trust ratios carry that on to some
    hundredths; a share left out would show as 1.
    """
    assert least <= worlds.distance(outcome(run)[2], alone(*FLOAT32)[2]) < most


@pytest.mark.parametrize(
    ("run", "bound"), [(None, 1e-5), (case(1, 2, trains, (*UPDATES, "exchange.sketch=4099")), 0.05)]
)
def test_whole_updates_are_those_of_a_dense_exchange(run, bound):
    """A replica alone knows its norms; several find those of their mean gradient, here to 1 % a
    layer."""
    results, _, state = alone(*UPDATES) if run is None else outcome(run)
    expected_results, _, expected = alone(*FLOAT32)
    assert worlds.distance(state, expected) < bound
    for result, wanted in zip(results, expected_results):
        assert result[3] == pytest.approx(wanted[3], rel=bound)
        assert result[4] == pytest.approx(wanted[4], rel=max(0.1, bound) if run else 1e-4)


SPARSE = (*SGD, *GTOPK)
ONE_STEP = {"steps": 1}


@pytest.mark.parametrize(
    ("run", "vectors_whole"),
    [
        (
            case(
                2,
                2,
                trains,
                (*SPARSE, *section("pattern=butterfly", "stage_share=threshold")),
                ONE_STEP,
            ),
            False,
        ),
        (case(1, 2, trains, (*SPARSE, "exchange.dense_1d=true"), ONE_STEP), True),
    ],
)
def test_as_many_weights_move_as_are_sent(run, vectors_whole):
    """One step of plain SGD: a fiftieth of the weights, shared over the stages; and all of the
    vectors, if they are sent whole (but those whose gradient is exactly 0)."""
    state = outcome(run)[2]
    recipe = worlds.recipe_of(())
    sent = moved = whole = 0
    for name, before in build(recipe.model, recipe.run.seed).named_parameters():
        changed = int((state["weights"][name] != before).sum())
        if vectors_whole and before.dim() == 1:
            whole += changed / before.numel()
            continue
        sent += before.numel()
        moved += changed
    assert 0.95 * round(0.02 * sent) < moved <= round(0.02 * sent) + run.stages
    assert (whole > 20) == vectors_whole


# Sessions -----------------------------------------------------------------------------------------


def resumed(processes, overrides):
    """All that 5 steps save, and 3 in an engine that takes over after 2.

    Replicas of local steps may end apart.
    """
    engine = engine_of(processes, overrides, steps_per_epoch=2)
    saved = copy.deepcopy(saved_after(engine, 0, 2))
    whole = saved_after(engine, 2, 3)
    engine._exchange.close()
    common, own, again = goes_on(processes, overrides, 2, 3, *processes.from_main(lambda: saved))
    return common, () if LOCAL[0] in overrides else own, (whole, again)


def resumed_slowly(*overrides):
    """A case of two replicas whose test is slow."""
    return case(1, 2, resumed, overrides, slow=True).values[0]


DGC = ("compress=update", "density_warmup=[0.25, 0.05]", "dense_steps=1")
LATE = ("local_steps=3", "bits=8", "delay=2", "fragments=2")
OUTER = ("outer=nesterov", "fragments=2", "dense_steps=1")


@pytest.mark.parametrize(
    ("run", "replicas"),
    [
        (case(2, 2, resumed, (*GTOPK, *section(*DGC))), 2),
        (
            case(1, 2, resumed, (*GTOPK, *section("pattern=butterfly", "delay=2", "wire=float16"))),
            2,
        ),
        (case(1, 2, resumed, (*LOCAL, *section(*LATE))), 2),
        pytest.param(resumed_slowly("exchange.bits=4", *FLOAT32), 2, marks=pytest.mark.slow),
        pytest.param(resumed_slowly("exchange.delay=2"), 0, marks=pytest.mark.slow),
        pytest.param(resumed_slowly(*LOCAL, *section(*OUTER)), 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_saved_and_resumed_has_the_same_bits(run, replicas):
    """Also with half weights, density by epoch, gradients that are still to be applied, momenta and
    averages of each replica, and what the outer optimizer keeps. Args: replicas: those with a state
    of their own."""
    (state, states), (found, found_states) = outcome(run)
    assert_bitwise_equal(found, state)
    assert len(states) == replicas
    for one, other in zip(found_states, states, strict=True):
        assert_bitwise_equal(one, other)


@functools.lru_cache(maxsize=None)
def of_one_process():
    """What two steps of a single process save."""
    return goes_on(single(), GTOPK, 0, 2)[2]


def goes_on_from(processes, saved):
    return goes_on(processes, GTOPK, 2, 0, *saved)


THREE = case(1, 3, goes_on, GTOPK, 0, 2, slow=True).values[0]
TWO_OF_THREE = case(1, 2, goes_on_from, lambda: outcome(THREE), slow=True).values[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (case(1, 2, goes_on, GTOPK, 0, 2), None),
        (None, case(2, 2, goes_on_from, of_one_process)),
        pytest.param(THREE, TWO_OF_THREE, marks=pytest.mark.slow),
    ],
)
def test_another_number_of_replicas_keeps_the_same_in_all(before, after):
    """The sum over replicas of what they keep stays, to float32 rounding of a few additions and
    thirds."""
    _, states = saved = of_one_process() if before is None else outcome(before)
    _, shared = goes_on_from(single(), saved)[2] if after is None else outcome(after)
    assert len(shared) == (1 if after is None else 2)
    for name in states[0]["residual"]:
        total = sum(state["residual"][name].double() for state in states)
        found = sum(state["residual"][name].double() for state in shared)
        torch.testing.assert_close(
            found, total, rtol=0, atol=max(4 * 2**-23 * total.abs().max().item(), 1e-30)
        )


def test_replicas_take_the_state_of_their_images():
    assert [_overlap(old, 4, 0, 2) for old in range(4)] == [1, 1, 0, 0]
    assert [_overlap(1, 2, new, 4) for new in range(4)] == [0, 0, 0.5, 0.5]
    assert [_overlap(1, 3, new, 2) for new in range(2)] == [0.5, 0.5]


def refuses(processes):
    state, states = processes.from_main(of_one_process)
    name = next(iter(states[0]["residual"]))
    states = [{**states[0], "residual": {**states[0]["residual"], name: torch.zeros(3)}}]
    with pytest.raises(ValueError) as error:
        goes_on(processes, GTOPK, 2, steps=0, saved=state, states=states)
    return str(error.value), (), str(error.value)


@pytest.mark.parametrize("run", [case(1, 2, refuses)])
def test_a_state_that_does_not_fit_is_named_on_every_rank(run):
    assert " is [3], the model's is [" in outcome(run)


SKIPPING = (*GTOPK, "precision.dynamic_loss_scale=true", "precision.loss_scale=1024")


@pytest.mark.parametrize("run", [case(2, 2, trains, SKIPPING, {"poisoned": 3})])
def test_a_gradient_that_is_not_finite_anywhere_is_kept_nowhere(run):
    """The update is left out and the loss scale falls; what was not sent stays finite, so the next
    step is made."""
    results, _, state = outcome(run)
    assert [result[5] for result in results] == [0, 1, 1]
    assert state["loss_scale"]["scale"] == 512
    assert all(torch.isfinite(tensor).all() for tensor in state["weights"].values())


# Late gradients -----------------------------------------------------------------------------------


def test_late_gradients_are_those_of_earlier_steps():
    """Weights stand still until the first one is due, which is therefore that of a step without
    delay."""
    late, prompt = (
        engine_of(single(), (*FLOAT32, TREE, f"exchange.delay={delay}")) for delay in (2, 0)
    )
    start = late.weights.state_dict()
    for step in range(3):
        assert_bitwise_equal(late.weights.state_dict(), start)
        result = late.train_step(micro_batches(step, late), one_step(step), 2.0, measure=True)
        assert (result.norms is None) == (step < 2)
        assert result.loss > 0 and result.images == 12
    prompt.train_step(micro_batches(0, prompt), one_step(0), 2.0)
    assert_bitwise_equal(late.weights.state_dict(), prompt.weights.state_dict())
    late.close()


def test_more_late_gradients_than_fit_are_refused():
    saved = goes_on(single(), ("exchange.delay=2",), 0, 3)[2][0]
    engine = engine_of(single(), ("exchange.delay=1",))
    with pytest.raises(
        ValueError, match=r"2 gradients are still to be applied, but exchange\.delay is 1"
    ):
        engine.load_state_dict(saved)
    engine.close()


DELAYED = ("exchange.delay=1", TREE)


@pytest.mark.parametrize("run", [case(1, 2, goes_on, DELAYED, 0, 4)])
def test_late_gradients_do_not_depend_on_the_topology(run):
    """In tree order to the bit: the exchange beside the next step's computation adds what it would
    have."""
    assert_bitwise_equal(outcome(run)[0], goes_on(single(), DELAYED, 0, 4)[2][0])


def test_a_late_gradient_that_is_not_finite_is_left_out_when_it_is_due():
    engine = engine_of(single(), ("exchange.delay=2",))
    worlds.poison(engine)
    skipped = [
        engine.train_step(micro_batches(step, engine), one_step(step), 2.0).skipped.item()
        for step in range(5)
    ]
    assert skipped == [0, 0, 0, 1, 1]  # the gradient of step 1 is due in step 3
    engine.close()


# Local steps --------------------------------------------------------------------------------------


def together_after_each(processes):
    """Norms are each replica's own."""
    return (), *trains(processes, (*SGD, *LOCAL, "exchange.local_steps=1"))[1:]


@pytest.mark.parametrize("run", [case(1, 2, together_after_each)])
def test_the_mean_after_every_step_of_plain_sgd_is_a_dense_exchange(run):
    """Without momentum the mean of the replicas' updates is the update of the mean: only sums are
    in another order."""
    assert worlds.distance(outcome(run)[2], alone(*SGD)[2]) < 1e-5


def after_each_step(processes):
    """Of each of two steps the weights of every replica, what is saved, and the scores."""
    engine = engine_of(processes, LOCAL, steps_per_epoch=2)
    found = []
    for step in range(2):
        engine.train_step(micro_batches(step, engine), one_step(step), 2.0)
        saved = engine.state_dict()
        states = [state for state in engine.replica_states() if engine.topology.is_main]
        scores = []
        for weights in ("trained", "step_average"):
            with engine.using(weights):
                scores.append(evaluation(engine))
        found.append((saved, states, scores))
    return [scores for *_, scores in found], (), found


def means(states, kind):
    return {
        name: sum(state[kind][name].double() for state in states) / len(states)
        for name in states[0][kind]
    }


@pytest.mark.parametrize("run", [case(1, 2, after_each_step)])
def test_what_is_saved_and_scored_is_the_mean(run):
    """Half weights: to their rounding.

    Replicas are apart after the first step and one again after the second.
    """
    for step, (saved, states, scores) in enumerate(outcome(run)):
        assert len(states) == 2 and [images for images, *_ in scores] == [20, 20]
        one, other = (state["weights"] for state in states)
        assert any(not torch.equal(one[name], other[name]) for name in one) == (step == 0)
        averaged = saved["averages"]["step_average"]["weights"]
        places = (
            ("weights", saved["weights"], 2**-10, 2**-24),
            ("step_average", averaged, 2**-22, 1e-7),
        )
        for kind, found, rtol, atol in places:
            for name, mean in means(states, kind).items():
                torch.testing.assert_close(found[name].double(), mean, rtol=rtol, atol=atol)


APART = (*LOCAL, *FLOAT32, "exchange.local_steps=4")


def two_steps(processes):
    """What is saved while replicas are apart; their weights differ, so no digest of them is
    compared."""
    common, _, found = goes_on(processes, APART, 0, 2)
    return common, (), found


@pytest.mark.parametrize("run", [case(1, 2, two_steps)])
def test_one_replica_goes_on_from_the_mean_of_two(run):
    """Of weights, momenta and averages, to the rounding of an addition."""
    state, states = outcome(run)
    _, (own,) = goes_on(single(), APART, 2, steps=0, saved=state, states=states)[2]
    for kind in ("weights", "momentum_buffer", "step_average"):
        for name, mean in means(states, kind).items():
            torch.testing.assert_close(own[kind][name].double(), mean, rtol=2**-22, atol=1e-9)


@pytest.mark.parametrize(
    "keys",
    [("outer=nesterov",), ("bits=8",), ("outer=nesterov", "bits=4", "delay=1", "fragments=2")],
    ids=str,
)
def test_local_steps_begin_from_weights_that_are_loaded(keys):
    """Not from the random ones before: at a rate of 0 no bit moves."""
    engine = engine_of(single(), (*LOCAL, *FLOAT32, *section(*keys)), steps_per_epoch=2)
    drawn = {name: torch.full(shape, 0.1) for name, shape in engine.shapes.items()}
    engine.load_weights(drawn)
    for step in range(4):
        engine.train_step(micro_batches(step, engine), one_step(step), 0.0)
    assert_bitwise_equal(engine.state_dict()["weights"], drawn)
    engine._exchange.close()


# Measured times -----------------------------------------------------------------------------------


def pretended(slow, model, images, repetitions=10):
    """Costs as if the block `slow` took nearly all of the time."""
    sizes = {
        name: sum(each.numel() for each in model.block(name).parameters()) for name in model.names
    }
    times = {name: 1.0 if name == slow else 1e-6 for name in sizes}
    return {name: BlockCost(times[name], times[name], 1, 1, size) for name, size in sizes.items()}


def measures(processes, overrides):
    """What two steps save where either of two blocks is slow, with the cut and the line about it;
    without the noise scale, whose sums over stages depend on the cut in their last bits."""
    found = []
    measure = costs.measure
    keys = ("parallel.split=auto", *overrides, "log.noise_scale=false")
    for slow in ("stem", "head"):
        costs.measure = functools.partial(pretended, slow)
        (cut, notes), own, (state, states) = goes_on(processes, keys, 0, 2)
        found.append(
            (
                {"model": state, **{str(number): each for number, each in enumerate(states)}},
                cut,
                notes[0],
            )
        )
    costs.measure = measure
    return [each[1:] for each in found], own, found


BOUND = {
    "gtopk selects within each stage": (2, GTOPK),
    "topk selects within each stage": (
        2, ("exchange.method=topk", *GTOPK[1:], "exchange.delay=1", "exchange.stage_share=threshold"),
    ),
    "exchange.bits rounds blocks of a stage": (1, ("exchange.bits=4", *FLOAT32)),
    "local takes means of parts of a stage": (1, (*LOCAL, *section(*OUTER))),
    "exchange.order fast adds 3 replicas' gradients as they lie in a stage": (3, FLOAT32),
    "running statistics of 3 replicas are added as they lie in a stage": (3, (TREE, "model.norm=batch")),
}  # fmt: skip


@pytest.mark.parametrize(
    "run",
    [case(2, replicas, measures, keys, slow=keys != GTOPK) for replicas, keys in BOUND.values()],
)
def test_where_the_cut_decides_what_is_learned_no_time_is_measured(run):
    """Equal runs on machines that find other blocks slow have the same bits, and the line has the
    reason."""
    (first, cut, line), (second, *others) = outcome(run)
    assert [cut, line] == others
    (why,) = [each for each, (_, keys) in BOUND.items() if keys == run.arguments[0]]
    assert line.startswith(
        f"split [{', '.join(cut)}] (counted, not measured: {why}, so that another cut would be "
    )
    assert_bitwise_equal(first, second)


@pytest.mark.parametrize(
    "run", [case(2, 2, measures, FLOAT32), case(2, 3, measures, (TREE,), slow=True)]
)
def test_where_times_are_measured_the_cut_changes_no_bit(run):
    (first, cut, line), (second, other, _) = outcome(run)
    assert cut != other and line.startswith(f"split [{', '.join(cut)}] (measured): ")
    assert_bitwise_equal(first, second)

"""Sparse and late gradients in the engine: with stages, replicas, half weights, loss scales and resumes."""

import functools

import pytest
import torch

from engines.exchange import _overlap
from models import costs
from models.balance import BlockCost
from models.efficientnet import build
from tests.engines import worlds
from tests.engines.worlds import FLOAT32, TREE, alone, case, engine_of, goes_on, micro_batches, outcome, single, trains
from tests.tensors import assert_bitwise_equal

pytestmark = pytest.mark.multiprocess

SGD = ("optimizer.name=sgd", "optimizer.momentum=0.0", "optimizer.weight_decay=0.0", "schedule.peak=0.1", *FLOAT32)
GTOPK = ("exchange.method=gtopk", "exchange.density=0.02")
WHOLE = (*FLOAT32, "exchange.method=gtopk", "exchange.density=1.0")
UPDATES = (*WHOLE, "exchange.compress=update")


@pytest.mark.parametrize(
    ("run", "least", "bound"),
    [
        (case(1, 2, trains, (*WHOLE, "exchange.compress=gradient")).values[0], 0, 1e-5),
        (case(1, 2, trains, (*FLOAT32, "exchange.bits=8")).values[0], 1e-4, 0.05),
    ],
)
def test_whole_gradients_and_few_bits_are_near_a_dense_exchange(run, least, bound):
    """Density 1 differs by the order of sums alone, as in tests/engines/test_distributed.py. With 8 bits a value is off
    by half of 1/127 of its block's largest, and what is kept is made good: over three steps weights are off by some
    hundredths of their way, where a share left out would show as 1."""
    assert least <= worlds.distance(outcome(run)[2], alone(*FLOAT32)[2]) < bound


@pytest.mark.parametrize(
    ("run", "bound"), [(None, 1e-5), (case(1, 2, trains, (*UPDATES, "exchange.sketch=4099")).values[0], 0.05)]
)
def test_whole_updates_are_those_of_a_dense_exchange(run, bound):
    """A replica alone knows its norms; several find those of their mean gradient, here to 1 % a layer."""
    results, _, state = alone(*UPDATES) if run is None else outcome(run)
    expected_results, _, expected = alone(*FLOAT32)
    assert worlds.distance(state, expected) < bound
    for result, wanted in zip(results, expected_results):
        assert result[3] == pytest.approx(wanted[3], rel=bound)
        assert result[4] == pytest.approx(wanted[4], rel=max(0.1, bound) if run else 1e-4)


def one_step(stages, replicas, *overrides):
    return case(stages, replicas, trains, (*SGD, *GTOPK, *overrides), {"steps": 1})


@pytest.mark.parametrize(
    "run",
    [
        None,
        one_step(2, 2, "exchange.pattern=butterfly", "exchange.stage_share=threshold"),
        one_step(1, 2, "exchange.dense_1d=true"),
    ],
)
def test_as_many_weights_move_as_are_sent(run):
    """One step of plain SGD: a fiftieth of the weights, shared over the stages; and all of the vectors, if they are
    sent whole (but those whose gradient is exactly 0)."""
    state = (alone(*SGD, *GTOPK, steps=1) if run is None else outcome(run))[2]
    vectors_whole = run is not None and "exchange.dense_1d=true" in run.arguments[0]
    recipe = worlds.recipe_of(())
    sent = moved = whole = 0
    for name, before in build(recipe.model, recipe.run.seed).named_parameters():
        changed = int((state["weights"][name] != before).sum())
        if vectors_whole and before.dim() == 1:
            whole += changed / before.numel()
            continue
        sent += before.numel()
        moved += changed
    assert 0.95 * round(0.02 * sent) < moved <= round(0.02 * sent) + (run.stages if run else 1)
    assert (whole > 20) == vectors_whole


# Sessions -----------------------------------------------------------------------------------------------------------


def resumed(processes, overrides):
    """All that 5 steps save, and what 3 more save after 2."""
    whole = goes_on(processes, overrides, 0, 5)[2]
    saved = goes_on(processes, overrides, 0, 2)[2]
    common, own, again = goes_on(processes, overrides, 2, 3, *processes.from_main(lambda: saved))
    return common, own, (whole, again)


DGC = (
    "exchange.compress=update",
    "exchange.factor_masking=true",
    "exchange.density_warmup=[0.25, 0.05]",
    "exchange.dense_steps=1",
)


@pytest.mark.parametrize(
    "run",
    [
        case(2, 2, resumed, (*GTOPK, *DGC)),
        case(1, 2, resumed, (*GTOPK, "exchange.pattern=butterfly", "exchange.delay=2", "exchange.wire=float16")),
        case(1, 2, resumed, ("exchange.bits=4", *FLOAT32)),
        case(1, 2, resumed, ("exchange.delay=2",)),
    ],
)
def test_a_run_that_is_saved_and_resumed_has_the_same_bits(run):
    """Also with half weights, density by epoch, and gradients that are still to be applied."""
    (state, states), (found, found_states) = outcome(run)
    assert_bitwise_equal(found, state)
    assert len(states) == (0 if run.arguments[0] == ("exchange.delay=2",) else 2)
    for one, other in zip(found_states, states, strict=True):
        assert_bitwise_equal(one, other)


@functools.lru_cache(maxsize=None)
def of_one_process():
    """What two steps of a single process save."""
    return goes_on(single(), GTOPK, 0, 2)[2]


def goes_on_from(processes, saved):
    return goes_on(processes, GTOPK, 2, 0, *saved)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (case(1, 2, goes_on, GTOPK, 0, 2).values[0], None),
        (None, case(2, 2, goes_on_from, of_one_process).values[0]),
        pytest.param(case(1, 3, goes_on, GTOPK, 0, 2, slow=True).values[0], (1, 2), marks=pytest.mark.slow),
    ],
)
def test_another_number_of_replicas_keeps_the_same_in_all(before, after):
    """The sum over replicas of what they keep stays, to float32 rounding of a few additions and thirds."""
    _, states = saved = of_one_process() if before is None else outcome(before)
    if after is None:
        _, shared = goes_on_from(single(), saved)[2]
    else:
        _, shared = worlds.now(*after, goes_on_from, saved) if after == (1, 2) else outcome(after)
    assert len(shared) == (1 if after is None else 2)
    for name in states[0]["residual"]:
        total = sum(state["residual"][name].double() for state in states)
        found = sum(state["residual"][name].double() for state in shared)
        torch.testing.assert_close(found, total, rtol=0, atol=max(4 * 2**-23 * total.abs().max().item(), 1e-30))


def test_replicas_take_the_state_of_their_images():
    assert [_overlap(old, 4, 0, 2) for old in range(4)] == [1, 1, 0, 0]
    assert [_overlap(1, 2, new, 4) for new in range(4)] == [0, 0, 0.5, 0.5]
    assert [_overlap(1, 3, new, 2) for new in range(2)] == [0.5, 0.5]


def refuses(processes):
    state, states = processes.from_main(of_one_process)
    name = next(iter(states[0]["residual"]))
    states = [{**states[0], "residual": {**states[0]["residual"], name: torch.zeros(3)}}]
    with pytest.raises(ValueError) as error:
        goes_on(processes, GTOPK, 2, 0, state, states)
    return str(error.value), (), str(error.value)


@pytest.mark.parametrize("run", [case(1, 2, refuses)])
def test_a_state_that_does_not_fit_is_named_on_every_rank(run):
    assert " is [3], the model's is [" in outcome(run)


SKIPPING = (*GTOPK, "precision.dynamic_loss_scale=true", "precision.loss_scale=1024")


@pytest.mark.parametrize("run", [case(2, 2, trains, SKIPPING, {"poisoned": 3})])
def test_a_gradient_that_is_not_finite_anywhere_is_kept_nowhere(run):
    """The update is left out and the loss scale falls; what was not sent stays finite, so the next step is made."""
    results, _, state = outcome(run)
    assert [result[5] for result in results] == [0, 1, 1]
    assert state["loss_scale"]["scale"] == 512
    assert all(torch.isfinite(tensor).all() for tensor in state["weights"].values())


# Late gradients -----------------------------------------------------------------------------------------------------


def late(delay, steps):
    """Weights where gradients are applied so many steps late, by a list instead of the engine's own means."""
    engine = engine_of(single(), (TREE,))
    waiting, compute, weights = [], engine._compute_gradients, engine.weights
    prepare, apply = weights.prepare, weights.apply

    def computed(batches, steps):
        compute(batches, steps)
        waiting.append(engine.weights.gradients.flat.clone())

    def prepared(divisor):
        if len(waiting) <= delay:
            return torch.tensor(True)
        weights.gradients.flat.copy_(waiting.pop(0))
        return prepare(divisor)

    engine._compute_gradients, weights.prepare = computed, prepared
    weights.apply = lambda step, *arguments: apply(step, *arguments) if step >= delay else None
    for step in range(steps):
        engine.train_step(micro_batches(step, engine), step, 2.0)
    return engine.weights.state_dict()


def test_late_gradients_are_those_of_earlier_steps():
    engine = engine_of(single(), ("exchange.delay=2", TREE))
    start = engine.weights.state_dict()
    for step in range(5):
        result = engine.train_step(micro_batches(step, engine), step, 2.0, measure=True)
        assert (result.norms is None) == (step < 2)
        assert result.loss > 0 and result.images == 12
        if step < 2:
            assert_bitwise_equal(engine.weights.state_dict(), start)
    engine.close()
    assert_bitwise_equal(engine.weights.state_dict(), late(2, 5))


DELAYED = ("exchange.delay=1", TREE)


@pytest.mark.parametrize("run", [case(1, 2, goes_on, DELAYED, 0, 4)])
def test_late_gradients_do_not_depend_on_the_topology(run):
    """In tree order to the bit: the exchange beside the next step's computation adds what it would have."""
    assert_bitwise_equal(outcome(run)[0], goes_on(single(), DELAYED, 0, 4)[2][0])


def test_a_late_gradient_that_is_not_finite_is_left_out_when_it_is_due():
    engine = engine_of(single(), ("exchange.delay=2",))
    worlds.poison(engine)
    skipped = [engine.train_step(micro_batches(step, engine), step, 2.0).skipped.item() for step in range(5)]
    assert skipped == [0, 0, 0, 1, 1]  # the gradient of step 1 is due in step 3
    engine.close()


# Measured times -----------------------------------------------------------------------------------------------------


def pretended(slow, model, images, repetitions=10):
    """Costs as if the block `slow` took nearly all of the time."""
    sizes = {name: sum(each.numel() for each in model.block(name).parameters()) for name in model.names}
    times = {name: 1.0 if name == slow else 1e-6 for name in sizes}
    return {name: BlockCost(times[name], times[name], 1, 1, size) for name, size in sizes.items()}


def measures(processes, overrides):
    """What two steps save where either of two blocks is slow, with the cut and the line about it; without the noise
    scale, whose sums over stages depend on the cut in their last bits."""
    found, measure = [], costs.measure
    for slow in ("stem", "head"):
        costs.measure = functools.partial(pretended, slow)
        (cut, notes), own, (state, states) = goes_on(processes, (*overrides, "log.noise_scale=false"), 0, 2)
        found.append(({"model": state, **{str(number): each for number, each in enumerate(states)}}, cut, notes[0]))
    costs.measure = measure
    return [each[1:] for each in found], own, found


BOUND = {
    "gtopk selects within each stage": (2, GTOPK),
    "topk selects within each stage": (
        2, ("exchange.method=topk", *GTOPK[1:], "exchange.delay=1", "exchange.stage_share=threshold"),
    ),
    "exchange.order fast adds 3 replicas' gradients as they lie in a stage": (3, FLOAT32),
    "running statistics of 3 replicas are added as they lie in a stage": (3, (TREE, "model.norm=batch")),
}  # fmt: skip


@pytest.mark.parametrize(
    "run", [case(2, replicas, measures, keys, slow=keys != GTOPK) for replicas, keys in BOUND.values()]
)
def test_where_the_cut_decides_what_is_learned_no_time_is_measured(run):
    """Equal runs on machines that find other blocks slow have the same bits, and the line has the reason."""
    (first, cut, line), (second, *others) = outcome(run)
    assert [cut, line] == others
    (why,) = [each for each, (_, keys) in BOUND.items() if keys == run.arguments[0]]
    assert line.startswith(f"split [{', '.join(cut)}] (counted, not measured: {why}, so that another cut would be ")
    assert_bitwise_equal(first, second)


@pytest.mark.parametrize("run", [case(2, 2, measures, FLOAT32), case(2, 3, measures, (TREE,), slow=True)])
def test_where_times_are_measured_the_cut_changes_no_bit(run):
    (first, cut, line), (second, other, _) = outcome(run)
    assert cut != other and line.startswith(f"split [{', '.join(cut)}] (measured): ")
    assert_bitwise_equal(first, second)

"""Sparse and late gradients in the engine: with stages, replicas, half weights, loss scales and resumes."""

import functools

import pytest
import torch

from engines import factory
from engines.exchange import _overlap
from models import costs
from models.balance import BlockCost
from models.efficientnet import build
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.batch import divide
from tests import world
from tests.engines.test_distributed import FLOAT32, alone, distance, micro_batches, poison, recipe_of, several
from tests.tensors import assert_bitwise_equal

pytestmark = pytest.mark.multiprocess
SLOW = pytest.mark.slow

SGD = ("optimizer.name=sgd", "optimizer.momentum=0.0", "optimizer.weight_decay=0.0", "schedule.peak=0.1", *FLOAT32)
GTOPK = ("exchange.method=gtopk", "exchange.density=0.02")


@pytest.fixture(scope="module")
def one_process(_one_thread):
    return alone(*FLOAT32)


@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), pytest.param(2, 2, marks=SLOW)])
def test_whole_gradients_are_those_of_a_dense_exchange(one_process, stages, replicas):
    """Density 1: they differ by the order of sums alone, as in tests/engines/test_distributed.py."""
    _, _, state = several(stages, replicas, *FLOAT32, "exchange.method=gtopk", "exchange.density=1.0")
    assert distance(state, one_process[2]) < 1e-5


@pytest.mark.parametrize(
    "overrides",
    [
        (1, 1, ()),
        (1, 3, ("exchange.pattern=butterfly",)),
        (2, 2, ()),
        (2, 2, ("exchange.stage_share=threshold",)),
        (1, 2, ("exchange.dense_1d=true",)),
    ],
)
def test_as_many_weights_move_as_are_sent(overrides):
    """One step of plain SGD: a fiftieth of the weights, shared over the stages; and all of the vectors, if they are
    sent whole (but those whose gradient is exactly 0)."""
    stages, replicas, more = overrides
    state = (several(stages, replicas, *SGD, *GTOPK, *more, steps=1) if stages * replicas > 1 else alone_one_step())[2]
    recipe = recipe_of(())
    sent = moved = whole = 0
    for name, before in build(recipe.model, recipe.run.seed).named_parameters():
        changed = int((state["weights"][name] != before).sum())
        if "exchange.dense_1d=true" in more and before.dim() == 1:
            whole += changed / before.numel()
            continue
        sent += before.numel()
        moved += changed
    assert 0.95 * round(0.02 * sent) < moved <= round(0.02 * sent) + stages
    assert whole == 0 or whole > 20


def alone_one_step():
    return alone(*SGD, *GTOPK, steps=1)


def replica_states_of(engine):
    return [state for state in engine.replica_states() if engine.topology.is_main]


def rank_goes_on(rank, size, stages, overrides, first, steps, saved, replica_states):
    """Some steps after what was saved, and all that is to be saved then."""
    recipe = recipe_of((f"parallel.stages={stages}", *overrides))
    topology = Topology(size // stages, stages, rank, rank)
    processes = Processes(topology, torch.device("cpu"))
    engine = factory.create(recipe, divide(recipe, topology.replicas), processes, steps_per_epoch=2)
    if saved is not None:
        engine.load_state_dict(saved)
        engine.load_replica_states(len(replica_states), lambda number: replica_states[number])
    for step in range(first, first + steps):
        batches = micro_batches(step, engine.batch, topology.replica) if topology.is_first else iter(())
        engine.train_step(batches, step, 2.0, measure=True)
    outcome = engine.state_dict(), replica_states_of(engine), engine.weights.state_dict(), (engine.cut, engine.notes)
    engine.close()
    return outcome


def goes_on(stages, replicas, overrides, first, steps, saved=None, replica_states=()):
    """What the main rank would save; replicas of a stage have the same weights."""
    arguments = (stages, overrides, first, steps, saved, list(replica_states))
    ranks = world.run(stages * replicas, rank_goes_on, *arguments, connect=False, timeout=120)
    return agreed(ranks, stages)[:2]


def agreed(ranks, stages):
    for rank, (_, _, own, _) in enumerate(ranks):
        assert_bitwise_equal(own, ranks[rank % stages][2])
    return ranks[0]


DGC = (
    "exchange.momentum_correction=true",
    "exchange.factor_masking=true",
    "exchange.density_warmup=[0.25, 0.05]",
    "exchange.dense_steps=1",
)


@pytest.mark.parametrize(
    ("stages", "replicas", "overrides"),
    [
        pytest.param(1, 2, GTOPK, marks=SLOW),
        (2, 2, (*GTOPK, *DGC)),
        (1, 3, (*GTOPK, "exchange.pattern=butterfly", "exchange.delay=2", "exchange.wire=float16")),
        pytest.param(1, 2, ("exchange.delay=3",), marks=SLOW),
    ],
)
def test_a_run_that_is_saved_and_resumed_has_the_same_bits(stages, replicas, overrides):
    """Also with half weights, density by epoch, and gradients that are still to be applied."""
    whole = goes_on(stages, replicas, overrides, 0, 5)
    saved = goes_on(stages, replicas, overrides, 0, 2)
    assert len(saved[1]) == (replicas if GTOPK[0] in overrides else 0)
    again = goes_on(stages, replicas, overrides, 2, 3, *saved)
    assert_bitwise_equal(again[0], whole[0])
    for state, expected in zip(again[1], whole[1]):
        assert_bitwise_equal(state, expected)


@pytest.mark.slow
def test_what_replicas_keep_is_not_nothing():
    """Or else the test above would show little: a resume without it ends elsewhere."""
    whole = goes_on(1, 2, GTOPK, 0, 3)
    saved, states = goes_on(1, 2, GTOPK, 0, 2)
    empty = [
        {kind: {name: 0 * tensor for name, tensor in kept.items()} for kind, kept in each.items()} for each in states
    ]
    with pytest.raises(AssertionError):
        assert_bitwise_equal(goes_on(1, 2, GTOPK, 2, 1, saved, empty)[0], whole[0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((1, 4), (1, 2), marks=SLOW),
        ((1, 2), (2, 2)),
        pytest.param((1, 2), (1, 3), marks=SLOW),
        pytest.param((2, 2), (1, 1), marks=SLOW),
    ],
)
def test_another_number_of_replicas_keeps_the_same_in_all(before, after):
    """The sum over replicas of what is kept stays, to float32 rounding of a few additions and thirds."""
    saved, states = goes_on(*before, GTOPK, 0, 2)
    _, shared = goes_on(*after, GTOPK, 2, 0, saved, states)
    assert len(shared) == after[1]
    for name in states[0]["residual"]:
        total = sum(state["residual"][name].double() for state in states)
        largest = total.abs().max().item()
        found = sum(state["residual"][name].double() for state in shared)
        torch.testing.assert_close(found, total, rtol=0, atol=max(4 * 2**-23 * largest, 1e-30))


def test_replicas_take_what_belongs_to_their_images():
    assert [_overlap(old, 4, 0, 2) for old in range(4)] == [1, 1, 0, 0]
    assert [_overlap(1, 2, new, 4) for new in range(4)] == [0, 0, 0.5, 0.5]
    assert [_overlap(1, 3, new, 2) for new in range(2)] == [0.5, 0.5]
    for olds, news in ((3, 2), (5, 7), (8, 3)):
        for old in range(olds):
            assert sum(_overlap(old, olds, new, news) for new in range(news)) == pytest.approx(1)


def test_a_state_that_does_not_fit_is_named_on_every_rank():
    saved, states = goes_on(1, 2, GTOPK, 0, 1)
    name = next(iter(states[1]["residual"]))
    states[1]["residual"][name] = torch.zeros(3)
    with pytest.raises(ValueError, match=rf"{name} is \[3\], the model's is"):
        goes_on(1, 2, GTOPK, 1, 0, saved, states)


@pytest.mark.parametrize(("stages", "replicas", "poisoned"), [pytest.param(1, 2, 1, marks=SLOW), (2, 2, 3)])
def test_a_gradient_that_is_not_finite_anywhere_is_kept_nowhere(stages, replicas, poisoned):
    """The update is left out and the loss scale falls; what was not sent stays finite, so the next step is made."""
    overrides = (*GTOPK, "precision.dynamic_loss_scale=true", "precision.loss_scale=1024")
    results, _, state = several(stages, replicas, *overrides, poisoned=poisoned)
    assert [result[5] for result in results] == [0, 1, 1]
    assert state["loss_scale"]["scale"] == 512
    assert all(torch.isfinite(tensor).all() for tensor in state["weights"].values())


def late(recipe, delay, steps):
    """Weights where gradients are applied so many steps late, by a list instead of the engine's own means."""
    engine = factory.create(recipe, divide(recipe, 1))
    waiting, compute, weights = [], engine._compute_gradients, engine.weights
    prepare, apply = weights.prepare, weights.apply

    def computed(batches, step):
        compute(batches, step)
        waiting.append(engine.weights.gradients.flat.clone())

    def prepared(divisor):
        if len(waiting) <= delay:
            return torch.tensor(True)
        weights.gradients.flat.copy_(waiting.pop(0))
        return prepare(divisor)

    def applied(step, *arguments):
        return apply(step, *arguments) if step >= delay else None

    engine._compute_gradients, weights.prepare, weights.apply = computed, prepared, applied
    for step in range(steps):
        engine.train_step(micro_batches(step, engine.batch, 0), step, 2.0)
    return engine.weights.state_dict()


@pytest.mark.parametrize("delay", [1, 3])
def test_late_gradients_are_those_of_earlier_steps(delay):
    recipe = recipe_of((f"exchange.delay={delay}", "exchange.order=tree"))
    engine = factory.create(recipe, divide(recipe, 1))
    start = engine.weights.state_dict()
    for step in range(5):
        result = engine.train_step(micro_batches(step, engine.batch, 0), step, 2.0, measure=True)
        assert (result.norms is None) == (step < delay)
        assert result.loss > 0 and result.images == 24
        if step < delay:
            assert_bitwise_equal(engine.weights.state_dict(), start)
    engine.close()
    assert_bitwise_equal(engine.weights.state_dict(), late(recipe_of(("exchange.order=tree",)), delay, 5))


@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), pytest.param(2, 2, marks=SLOW)])
def test_late_gradients_do_not_depend_on_the_topology(stages, replicas):
    """In tree order to the bit: the exchange beside the next step's computation adds what it would have."""
    overrides = ("exchange.delay=1", "exchange.order=tree")
    assert_bitwise_equal(goes_on(stages, replicas, overrides, 0, 4)[0], goes_on(1, 1, overrides, 0, 4)[0])


def test_a_late_gradient_that_is_not_finite_is_left_out_when_it_is_due():
    recipe = recipe_of(("exchange.delay=2",))
    engine = factory.create(recipe, divide(recipe, 1))
    poison(engine)
    skipped = [engine.train_step(micro_batches(step, engine.batch, 0), step, 2.0).skipped.item() for step in range(5)]
    assert skipped == [0, 0, 0, 1, 1]  # the gradient of step 1 is due in step 3
    engine.close()


# Measured times ---------------------------------------------------------------------------------------------------


def pretended(slow, model, images, repetitions=10):
    """Costs as if the block `slow` took nearly all of the time."""
    sizes = {name: sum(each.numel() for each in model.block(name).parameters()) for name in model.names}
    times = {name: 1.0 if name == slow else 1e-6 for name in sizes}
    return {name: BlockCost(times[name], times[name], 1, 1, size) for name, size in sizes.items()}


def rank_measures(rank, size, slow, stages, overrides):
    costs.measure = functools.partial(pretended, slow)
    return rank_goes_on(rank, size, stages, overrides, 0, 2, None, ())


def measured(slow, stages, replicas, *overrides):
    """What a run of two steps saves of the model and of its replicas, and its cut with the line about it."""
    ranks = world.run(stages * replicas, rank_measures, slow, stages, overrides, connect=False, timeout=240)
    state, states, _, (cut, notes) = agreed(ranks, stages)
    return {"model": state, **{str(number): each for number, each in enumerate(states)}}, cut, notes[0]


@pytest.mark.parametrize(
    ("stages", "replicas", "overrides", "why"),
    [
        (2, 2, GTOPK, "gtopk selects within each stage"),
        pytest.param(
            2,
            2,
            ("exchange.method=topk", *GTOPK[1:], "exchange.delay=1", "exchange.stage_share=threshold"),
            "topk selects within each stage",
            marks=SLOW,
        ),
        pytest.param(
            2, 3, FLOAT32, "exchange.order fast adds 3 replicas' gradients as they lie in a stage", marks=SLOW
        ),
        pytest.param(
            2,
            3,
            ("exchange.order=tree", "model.norm=batch"),
            "running statistics of 3 replicas are added as they lie in a stage",
            marks=SLOW,
        ),
    ],
)
def test_where_the_cut_decides_what_is_learned_no_time_is_measured(stages, replicas, overrides, why):
    """Equal runs on machines that find other blocks slow have the same bits, and say why nothing is measured."""
    first, cut, said = measured("stem", stages, replicas, *overrides)
    second, *others = measured("head", stages, replicas, *overrides)
    assert [cut, said] == others
    assert said.startswith(f"split [{', '.join(cut)}] (counted, not measured: {why}, so that another cut would be ")
    assert_bitwise_equal(first, second)


@pytest.mark.parametrize(
    ("stages", "replicas", "overrides"),
    [
        (2, 2, FLOAT32),
        pytest.param(2, 2, ("model.norm=batch", "exchange.delay=0"), marks=SLOW),
        pytest.param(2, 3, ("exchange.order=tree",), marks=SLOW),
        pytest.param(2, 3, ("exchange.method=half", "exchange.delay=1"), marks=SLOW),
    ],
)
def test_where_times_are_measured_the_cut_changes_no_bit(stages, replicas, overrides):
    first, cut, said = measured("stem", stages, replicas, *overrides)
    second, other, _ = measured("head", stages, replicas, *overrides)
    assert cut != other and said.startswith(f"split [{', '.join(cut)}] (measured): ")
    assert_bitwise_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "overrides"), [(2, GTOPK), (3, FLOAT32)])
def test_another_cut_is_another_result_where_no_time_is_measured(replicas, overrides):
    """Or else the first of these tests would show nothing."""
    first, second = (
        goes_on(2, replicas, (*overrides, f"parallel.split=[{name}]"), 0, 2)[0] for name in ("blocks.0.0", "head")
    )
    with pytest.raises(AssertionError):
        assert_bitwise_equal(first["weights"], second["weights"])

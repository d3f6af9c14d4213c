"""Stages and replicas in processes of their own learn what one process learns."""

import itertools

import pytest
import torch

from engines import factory
from engines.base import one_step
from models.families import build
from optim.factory import hidden_layers
from parallel.topology import Topology
from recipe.batch import divide
from recipe.course import Update
from tests import world
from tests.engines import worlds
from tests.engines.worlds import (
    FLOAT32,
    TREE,
    alone,
    case,
    digest,
    distance,
    engine_of,
    micro_batches,
    outcome,
    single,
)
from tests.tensors import assert_bitwise_equal

pytestmark = pytest.mark.multiprocess
TREE_OF_TWELVE = (TREE, "batch.global=24")  # 12 = 3 x 2^2 micro batches


def several(stages, replicas, *overrides, slow=False, **options):
    return case(stages, replicas, worlds.trains, overrides, options, slow=slow)


@pytest.mark.parametrize(
    "run",
    [
        several(2, 1, "parallel.split=auto", "parallel.schedule=1f1b", "parallel.recompute=true"),
        several(2, 1, "parallel.schedule=interleaved"),
        several(3, 1, "parallel.schedule=1f1b", "parallel.recompute=true", slow=True),
    ],
)
def test_stages_change_no_bit(run):
    """A pipeline computes the same micro batches and adds them up in the same order: weights,
    momenta, averages, norms and scores are equal bit for bit."""
    results, scores, state = outcome(run)
    expected = alone()
    assert_bitwise_equal(state, expected[2])
    assert (results, scores) == expected[:2]


@pytest.mark.parametrize(
    "run",
    [
        several(1, 2, *FLOAT32),
        several(2, 2, *FLOAT32, "parallel.schedule=1f1b"),
        several(4, 3, *FLOAT32, "parallel.recompute=true", slow=True),
    ],
)
def test_replicas_differ_by_the_order_of_sums_alone(run):
    """12 gradients added in another order differ by a few roundings, 2**-23 of their size; three
    steps and the trust ratios carry that on. A replica's share left out, or counted twice, shows at
    0.1 and more."""
    results, scores, state = outcome(run)
    expected_results, expected_scores, expected = alone(*FLOAT32)
    assert distance(state, expected) < 1e-5
    assert scores[0] == expected_scores[0] == 20
    assert scores[1:] == pytest.approx(expected_scores[1:], rel=1e-5)
    for result, wanted in zip(results, expected_results):
        assert result[0] == pytest.approx(wanted[0], rel=1e-6)
        assert result[1:3] == wanted[1:3]
        assert result[3] == pytest.approx(wanted[3], rel=1e-5)
        assert result[4] == pytest.approx(wanted[4], rel=1e-4)


@pytest.mark.parametrize("run", [several(2, 2, TREE, "parallel.recompute=true")])
def test_a_tree_has_the_same_bits_for_every_topology(run):
    """Half weights, rounding, averages and all."""
    results, scores, state = outcome(run)
    expected = alone(TREE)
    assert_bitwise_equal(state, expected[2])
    assert results[0][1:] == expected[0][0][1:]
    assert scores[2:] == expected[1][2:]
    with pytest.raises(AssertionError):
        # it is not a running sum, or else this would show nothing
        assert_bitwise_equal(alone()[2], alone(TREE)[2])


FAST = ((1, 5),)  # and stages with NESTEROV
WHOLE = ("log.noise_scale=false",)  # stages add it up: its last bits depend on their number
TOPOLOGIES = [(stages, replicas) for stages in (1, 2) for replicas in range(2, 9)]
NESTEROV = several(2, 2, *TREE_OF_TWELVE, *WHOLE, "optimizer.nesterov=true")


@pytest.mark.parametrize(
    "run",
    [
        several(*each, *TREE_OF_TWELVE, *(WHOLE if each[0] > 1 else ()), slow=each not in FAST)
        for each in TOPOLOGIES
    ]
    + [NESTEROV],
)
def test_any_number_of_replicas_has_the_bits_of_one_process(run):
    """12 micro batches are uneven shares on 5, 7 and 8 replicas, and several subtrees each on 3, 6
    and 7. Weights, momenta, averages, noise scale, losses, hits, norms and scores."""
    results, scores, state = outcome(run)
    expected = alone(*run.arguments[0])
    assert_bitwise_equal(state, expected[2])
    assert results == expected[0]
    assert scores == expected[1]


MUON = (TREE, "optimizer.name=muon")


@pytest.mark.parametrize(
    "run",
    [
        several(2, 1, *MUON, *WHOLE, lr=0.01, slow=True),
        several(1, 3, *MUON, lr=0.01, slow=True),
        several(2, 2, *MUON, *WHOLE, lr=0.01),
    ],
)
def test_orthogonal_steps_have_the_same_bits_for_every_topology(run):
    """A stage does not take its own first and last layer for the model's.

    Each replica makes the products of matrices for itself.
    """
    results, scores, state = outcome(run)
    expected = alone(*run.arguments[0], lr=0.01)
    assert_bitwise_equal(state, expected[2])
    assert results == expected[0]
    assert scores == expected[1]
    # AdamW steps the others
    by_muon = {name for name, squares in state["exp_avg_sq"].items() if not squares.any()}
    assert by_muon == set(hidden_layers(build(worlds.recipe_of(MUON).model, 0))) != set()


MOVING = (*TREE_OF_TWELVE, *WHOLE, "parallel.schedule=1f1b")
# Of 12 micro batches among two or three replicas, by step.
DIVISIONS = {2: {1: (0, 7, 12), 2: (0, 2, 12)}, 3: {1: (0, 7, 9, 12), 2: (0, 2, 10, 12)}}


def moves(processes, overrides):
    """A case: `train` with other shares from steps 1 and 2 on."""
    engine = engine_of(processes, overrides)
    train_step = engine.train_step
    divisions = DIVISIONS.get(processes.topology.replicas, {})

    def divided(batches, update, *arguments, **keywords):
        step = update.step
        if step in divisions:
            engine.set_shares(step, [range(*ends) for ends in itertools.pairwise(divisions[step])])
            batches = micro_batches(step, engine)
        return train_step(batches, update, *arguments, **keywords)

    engine.train_step = divided
    found = worlds.train(engine)
    return found[:2], digest(engine.weights.state_dict()), found


@pytest.mark.parametrize(
    "run",
    [
        case(1, 3, moves, TREE_OF_TWELVE, slow=True),
        case(2, 3, moves, MOVING, slow=True),
        case(2, 2, moves, MOVING),
    ],
)
def test_shares_that_change_from_step_to_step_change_no_bit(run):
    results, scores, state = outcome(run)
    expected = alone(*run.arguments[0])
    assert_bitwise_equal(state, expected[2])
    assert (results, scores) == expected[:2]


SKIPPING = (TREE, "precision.dynamic_loss_scale=true", "precision.loss_scale=1024")


@pytest.mark.parametrize("run", [several(2, 2, *SKIPPING, poisoned=3)])
def test_a_gradient_that_is_not_finite_anywhere_skips_the_update_everywhere(run):
    """One rank has a NaN in step 1.

    All leave that step out, whichever stage and replica it belongs to.
    """
    results, _, state = outcome(run)
    assert [result[5] for result in results] == [0, 1, 1]
    assert state["loss_scale"]["scale"] == 512
    assert_bitwise_equal(state, alone(*SKIPPING, poisoned=0)[2])


BATCH_NORM = (*FLOAT32, "model.norm=batch", "model.norm_momentum=0.1", "average.step_decay=null")


@pytest.mark.parametrize(
    "run",
    [
        several(1, 3, *BATCH_NORM, lr=0.0, slow=True),
        several(2, 2, *BATCH_NORM, "parallel.recompute=true", lr=0.0),
    ],
)
def test_running_statistics_are_those_of_one_process(run):
    """Micro batches move a statistic one after the other; the replicas' moves are put in a row.

    In float32, to its rounding: 2**-23 of statistics of the order of 1, over 36 moves. At rate 0,
    for with two images in a batch normalisation weights that differ in the last bit do not stay
    close.
    """
    expected = alone(*BATCH_NORM, lr=0.0)[2]
    state = outcome(run)[2]
    assert state["buffers"].keys() == expected["buffers"].keys() != set()
    for name, buffer in expected["buffers"].items():
        torch.testing.assert_close(state["buffers"][name], buffer, rtol=2e-5, atol=2e-5)


CLIPPED = ("optimizer.name=sgd", "schedule.peak=0.1", "optimizer.clip_norm=0.3")
SIZES = (*CLIPPED, "data.image_sizes=[[0,16],[1,24]]", "log.noise_scale=false")


@pytest.mark.parametrize("run", [several(2, 1, *SIZES, sizes=(16, 24, 24), steps_per_epoch=1)])
def test_image_sizes_change_and_gradients_are_clipped_within_a_pipeline(run):
    """At a third of the norm; that of all stages counts, to the bit."""
    expected = alone(*SIZES, sizes=(16, 24, 24), steps_per_epoch=1)
    assert expected[0][0][3]["gradient"] > 0.6
    results, _, state = outcome(run)
    assert results == expected[0]
    assert_bitwise_equal(state, expected[2])


def continued(processes):
    """The third step after two others, which a single process made."""
    saved = worlds.train(engine_of(single(), (TREE,)), steps=2)[2]
    # an epoch has ended after two steps here, in the whole run after three
    saved["averages"].pop("epoch_average")
    return worlds.trains(
        processes, (TREE, "average.epoch_decay=null"), {"first": 2, "steps": 1, "saved": saved}
    )


@pytest.mark.parametrize("run", [case(2, 2, continued)])
def test_a_state_goes_on_in_another_topology(run):
    """What a process saved after two steps, four continue to the third, to the bit."""
    state = outcome(run)[2]
    whole = alone(TREE)[2]
    assert_bitwise_equal(
        state, {**whole, "averages": {"step_average": whole["averages"]["step_average"]}}
    )


HALF = (*FLOAT32, "precision.compute=bfloat16")


@pytest.mark.parametrize("run", [several(1, 2, *HALF, steps=1)])
def test_half_precision_gradients_are_collected_before_they_are_sent(run):
    """With bfloat16 compute each parameter's gradient is added into the float32 buffer while the
    last backward pass still runs. One step: from then on a last bit may decide how a working weight
    is rounded."""
    assert distance(outcome(run)[2], alone(*HALF, steps=1)[2]) < 1e-5


def rank_on_gpu(rank, size):
    recipe = worlds.recipe_of(("run.device=cuda", "precision.compute=float32", TREE))
    engine = factory.create(
        recipe, divide(recipe, size), factory.connect(recipe, Topology(size, 1, rank, rank))
    )
    outcome = worlds.train(engine)
    engine.close()
    return outcome


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
def test_two_gpus_learn_what_one_learns():
    """float32 on both sides; cuDNN may choose other kernels in another process, hence no bits."""
    recipe = worlds.recipe_of(("run.device=cuda", "precision.compute=float32"))
    expected = worlds.train(factory.create(recipe, divide(recipe, 1)))
    outcomes = world.run(2, rank_on_gpu, connect=False, timeout=300)
    assert distance(outcomes[0][2], expected[2]) < 1e-2


@pytest.mark.parametrize(
    "run", [several(*pair, *TREE_OF_TWELVE, steps=20, slow=True) for pair in ((1, 4), (4, 2))]
)
def test_twenty_updates_have_the_same_bits_everywhere(run):
    assert_bitwise_equal(outcome(run)[2], alone(*TREE_OF_TWELVE, steps=20)[2])


# Updates of several steps -------------------------------------------------------------------------


def grow(engine, updates):
    """Losses, hits and images of each update."""
    found = []
    for update in updates:
        steps = range(update.step, update.end)
        batches = itertools.chain.from_iterable(micro_batches(step, engine) for step in steps)
        result = engine.train_step(batches, update, 2.0)
        found.append((result.loss.item(), result.correct.item(), result.images))
    return found


STILL = (
    "model.dropout=0",
    "model.drop_path=0",
    "data.mixup=0",
    "data.cutmix=null",
    "log.noise_scale=false",
)


def test_an_update_of_two_steps_is_one_of_twice_the_batch():
    """To the bit where nothing is drawn: same images in the same order, added up in one buffer,
    same divisor."""
    two = engine_of(single(), (*FLOAT32, *STILL))
    large = engine_of(single(), (*FLOAT32, *STILL, "batch.global=24"))
    ((loss, correct, images),) = grow(two, [Update(0, 2, 0)])
    given = itertools.chain(micro_batches(0, two), micro_batches(1, two))
    result = large.train_step(given, one_step(0), 2.0)
    assert (loss, correct, images) == (
        result.loss.item(),
        result.correct.item(),
        24,
    ) and result.images == 24
    for part in ("weights", "momentum_buffer"):
        assert_bitwise_equal(two.state_dict()[part], large.state_dict()[part])


def grows(processes):
    """A case: what updates of one, two and three steps give, with every kind of random draw."""
    engine = engine_of(processes, FLOAT32)
    found = grow(engine, (Update(0, 1, 0), Update(1, 2, 1), Update(3, 3, 2)))
    return found, digest(engine.weights.state_dict()), (found, engine.state_dict())


@pytest.mark.parametrize("run", [case(2, 2, grows)])
def test_replicas_and_stages_change_nothing_but_roundings_in_a_growing_batch(run):
    found, state = outcome(run)
    expected, expected_state = grows(single())[2]
    assert [images for *_, images in found] == [12, 24, 36]
    for ours, theirs in zip(found, expected):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and abs(ours[1] - theirs[1]) <= 1
    assert distance(state, expected_state) < 1e-4

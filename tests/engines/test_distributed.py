"""Stages and replicas in processes of their own learn what one process learns."""

import pytest
import torch

from data.batches import MicroBatch
from engines import base, factory
from models.efficientnet import build
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import loading
from recipe.batch import divide
from tests import world
from tests.conftest import QUICKSTART, TINY
from tests.engines.noise import as_micro_batches, noise_images
from tests.tensors import assert_bitwise_equal

pytestmark = pytest.mark.multiprocess
SLOW = pytest.mark.slow

# Every kind of random draw is on, and both averages.
RECIPE = (
    *TINY,
    "run.device=cpu",
    "batch.global=24",
    "batch.micro=2",
    "model.dropout=0.3",
    "model.drop_path=0.3",
    "data.mixup=0.2",
    "data.cutmix=0.85",
    "data.label_smoothing=0.1",
    "average.step_decay=0.9",
    "average.epoch_decay=0.9",
)
STEPS = 3


def micro_batches(step, batch, replica, size=16):
    """This replica's share of the step's images."""
    share = slice(replica * batch.accumulation, (replica + 1) * batch.accumulation)
    yield from list(as_micro_batches(*noise_images(24, step, size=size), batch.micro, step))[share]


def evaluation(engine, size=16):
    """Scores of 20 images in batches of 6, the last with 2, on whichever ranks they enter."""
    images, labels = noise_images(24, 99, size=size)
    rows = 6
    total = -(-20 // rows)
    place, counts = engine.topology, []
    for number in range(total * place.replica // place.replicas, total * (place.replica + 1) // place.replicas):
        batch = None
        if place.is_first:
            start, valid = number * rows, min(rows, 20 - number * rows)
            padded, padding = torch.zeros(rows, 3, size, size, dtype=torch.uint8), [0] * (rows - valid)
            padded[:valid] = images[start : start + valid]
            own = torch.tensor(labels[start : start + valid].tolist() + padding)
            batch = MicroBatch(padded, own, own, valid, number, 0, ())
        counts.append(engine.evaluate_step(batch))
    found, _ = base.total(counts, [], engine.processes, engine.device)
    return found.images, found.loss.item(), found.top1.item(), found.top5.item()


def train(engine, first=0, steps=STEPS, sizes=(16,), saved=None, lr=2.0):
    """Steps, and what the engine says of them; then scores, and the state where it is gathered."""
    if saved is not None:
        engine.load_state_dict(saved)
    results = []
    for step in range(first, first + steps):
        own, size = engine.topology.replica, sizes[step % len(sizes)]
        batches = micro_batches(step, engine.batch, own, size) if engine.topology.is_first else iter(())
        result = engine.train_step(batches, step, lr, measure=True)
        norms = {name: getattr(result.norms, name).item() for name in ("gradient", "weight", "update")}
        trust = {name: ratio.item() for name, ratio in result.norms.trust.items()}
        results.append((result.loss.item(), result.correct.item(), result.images, norms, trust, result.skipped.item()))
    engine.end_epoch()
    scores = evaluation(engine)
    return results, scores, engine.state_dict()


def recipe_of(overrides):
    return loading.load(QUICKSTART, [*RECIPE, "batch.evaluation=6", *overrides])


def rank_trains(rank, size, stages, overrides, options, poisoned=None):
    recipe = recipe_of((f"parallel.stages={stages}", *overrides))
    topology = Topology(size // stages, stages, rank, rank)
    engine = factory.create(recipe, divide(recipe, topology.replicas), Processes(topology, torch.device("cpu")))
    if rank == poisoned:
        poison(engine)
    outcome = train(engine, **options)
    own = engine.weights.state_dict()
    engine.close()
    return outcome, own


def alone(*overrides, **options):
    recipe = recipe_of(overrides)
    return train(factory.create(recipe, divide(recipe, 1)), **options)


def poison(engine):
    """One gradient of this rank is not finite in step 1."""
    combine = engine._compute_gradients

    def poisoned(micro_batches, step):
        combine(micro_batches, step)
        if step == 1:
            engine.weights.gradients.flat[3] = float("nan")

    engine._compute_gradients = poisoned


def several(stages, replicas, *overrides, poisoned=None, **options):
    """What the main rank says; every rank is told the same, and replicas never drift apart."""
    arguments = (stages, overrides, options, poisoned)
    outcomes = world.run(stages * replicas, rank_trains, *arguments, connect=False)
    for outcome, _ in outcomes[1:]:
        assert repr(outcome[:2]) == repr(outcomes[0][0][:2])  # NaN is NaN
    for rank, (_, own) in enumerate(outcomes):
        assert_bitwise_equal(own, outcomes[rank % stages][1])
    return outcomes[0][0]


def distance(actual, expected):
    """|actual - expected| over how far `expected` moved, all weights in one."""
    recipe = recipe_of(())
    initial = dict(build(recipe.model, recipe.run.seed).named_parameters())
    moved = [expected["weights"][name].double() - tensor.detach().double() for name, tensor in initial.items()]
    apart = [actual["weights"][name].double() - expected["weights"][name].double() for name in initial]
    return (norm_of(apart) / norm_of(moved)).item()


def norm_of(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors]).norm()


@pytest.fixture(scope="module")
def one_process(_one_thread):
    return alone()


@pytest.mark.parametrize(
    ("stages", "overrides"),
    [
        pytest.param(2, ("parallel.split=[blocks.3.0]",), marks=SLOW),
        (2, ("parallel.split=auto", "parallel.schedule=1f1b")),
        (2, ("parallel.schedule=interleaved",)),
        (3, ("parallel.schedule=1f1b", "parallel.recompute=true")),
        pytest.param(2, ("parallel.split=counted", "parallel.recompute=[blocks.1.0,head]"), marks=SLOW),
    ],
)
def test_stages_change_no_bit(one_process, stages, overrides):
    """A pipeline computes the same micro batches and adds them up in the same order: weights, momenta, averages, norms
    and scores are equal bit for bit."""
    results, scores, state = several(stages, 1, *overrides)
    assert_bitwise_equal(state, one_process[2])
    assert results == one_process[0]
    assert scores == one_process[1]


FLOAT32 = ("precision.weights=float32",)


@pytest.fixture(scope="module")
def float32_process(_one_thread):
    return alone(*FLOAT32)


@pytest.mark.parametrize(
    ("stages", "replicas", "overrides"),
    [
        (1, 2, ()),
        (1, 3, ("exchange.order=tree",)),
        (2, 2, ("parallel.schedule=1f1b",)),
        pytest.param(2, 3, (), marks=SLOW),
        pytest.param(4, 2, (), marks=SLOW),
        pytest.param(4, 3, ("parallel.recompute=true",), marks=SLOW),
    ],
)
def test_replicas_differ_by_the_order_of_sums_alone(float32_process, stages, replicas, overrides):
    """12 gradients added in another order differ by a few roundings, 2**-23 of their size; three steps and the trust
    ratios carry that on. A replica's share left out, or counted twice, shows at 0.1 and more."""
    results, scores, state = several(stages, replicas, *FLOAT32, *overrides)
    expected_results, expected_scores, expected = float32_process
    assert distance(state, expected) < 1e-5
    assert scores[0] == expected_scores[0] == 20
    assert scores[1:] == pytest.approx(expected_scores[1:], rel=1e-5)
    for result, wanted in zip(results, expected_results):
        assert result[0] == pytest.approx(wanted[0], rel=1e-6)
        assert result[1:3] == wanted[1:3]
        assert result[3] == pytest.approx(wanted[3], rel=1e-5)
        assert result[4] == pytest.approx(wanted[4], rel=1e-4)


@pytest.fixture(scope="module")
def tree_process(_one_thread):
    return alone("exchange.order=tree")


@pytest.mark.parametrize(
    ("stages", "replicas", "overrides"),
    [
        pytest.param(1, 2, (), marks=SLOW),
        (1, 4, ()),
        (2, 2, ("parallel.recompute=true",)),
        pytest.param(2, 1, ("parallel.schedule=interleaved",), marks=SLOW),
        pytest.param(4, 2, (), marks=SLOW),
    ],
)
def test_a_tree_has_the_same_bits_for_every_topology(tree_process, stages, replicas, overrides):
    """12 = 3 x 2^2 micro batches: 1, 2 and 4 replicas continue one tree. Half weights, rounding, averages and all."""
    results, scores, state = several(stages, replicas, "exchange.order=tree", *overrides)
    assert_bitwise_equal(state, tree_process[2])
    assert results[0][1:] == tree_process[0][0][1:]
    assert scores[2:] == tree_process[1][2:]


def test_a_tree_is_not_a_running_sum(one_process, tree_process):
    """Or else the test above would show nothing."""
    with pytest.raises(AssertionError):
        assert_bitwise_equal(one_process[2], tree_process[2])


@pytest.mark.parametrize(("wire", "bound"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_half_precision_on_the_wire(float32_process, wire, bound):
    """Two roundings to 2**-11 (bfloat16: 2**-8) of each gradient; three steps and the trust ratios carry them on."""
    _, _, state = several(1, 2, *FLOAT32, "exchange.method=half", f"exchange.wire={wire}")
    assert 1e-6 < distance(state, float32_process[2]) < bound


def rank_drifts(rank, size):
    recipe = recipe_of(("exchange.method=none",))
    topology = Topology(size, 1, rank, rank)
    engine = factory.create(recipe, divide(recipe, size), Processes(topology, torch.device("cpu")))
    train(engine)
    own = engine.weights.state_dict()["weights"]
    engine.close()
    return own


def test_without_exchange_replicas_go_their_own_ways():
    one, other = world.run(2, rank_drifts, connect=False)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("stages", "replicas", "poisoned"),
    [pytest.param(1, 2, 1, marks=SLOW), pytest.param(2, 1, 0, marks=SLOW), (2, 2, 3)],
)
def test_a_gradient_that_is_not_finite_anywhere_skips_the_update_everywhere(stages, replicas, poisoned):
    """One rank has a NaN in step 1. All leave that step out, whichever stage and replica it belongs to."""
    overrides = ("exchange.order=tree", "precision.dynamic_loss_scale=true", "precision.loss_scale=1024")
    results, _, state = several(stages, replicas, *overrides, poisoned=poisoned)
    assert [result[5] for result in results] == [0, 1, 1]
    assert state["loss_scale"]["scale"] == 512
    recipe = recipe_of(overrides)
    engine = factory.create(recipe, divide(recipe, 1))
    poison(engine)
    assert_bitwise_equal(state, train(engine)[2])


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), pytest.param(1, 3, marks=SLOW), (2, 2)])
def test_running_statistics_are_those_of_one_process(stages, replicas):
    """Micro batches move a statistic one after the other; the replicas' moves are put in a row. In float32, to its
    rounding: 2**-23 of statistics of the order of 1, over 36 moves. At rate 0, for with two images in a batch
    normalisation weights that differ in the last bit do not stay close."""
    overrides = (*FLOAT32, "model.norm=batch", "model.norm_momentum=0.1", "average.step_decay=null")
    expected = alone(*overrides, lr=0.0)[2]
    recomputed = ("parallel.recompute=true",) if stages > 1 else ()
    state = several(stages, replicas, *overrides, *recomputed, lr=0.0)[2]
    assert state["buffers"].keys() == expected["buffers"].keys() != set()
    for name, buffer in expected["buffers"].items():
        torch.testing.assert_close(state["buffers"][name], buffer, rtol=2e-5, atol=2e-5)
    if replicas == 1:
        assert_bitwise_equal(state, expected)


def test_image_sizes_may_change_within_a_pipeline():
    sizes = ("data.image_sizes=[[0,16],[1,24]]",)
    expected = alone(*sizes, sizes=(16, 24))
    state = several(2, 1, *sizes, sizes=(16, 24))[2]
    assert_bitwise_equal(state, expected[2])


def test_the_gradient_of_the_whole_model_is_clipped():
    """At a third of its norm; the norm of all stages counts, to the bit."""
    clip = ("optimizer.name=sgd", "optimizer.clip_norm=0.3", "schedule.peak=0.1")
    expected = alone(*clip)
    assert expected[0][0][3]["gradient"] > 0.6
    results, _, state = several(2, 1, *clip)
    assert results == expected[0]
    assert_bitwise_equal(state, expected[2])
    with pytest.raises(AssertionError):
        assert_bitwise_equal(state, alone("optimizer.name=sgd", "schedule.peak=0.1")[2])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 2), (1, 1)),
        ((1, 1), (2, 2)),
        *(pytest.param(*pair, marks=SLOW) for pair in (((2, 2), (1, 4)), ((1, 2), (2, 1)))),
    ],
)
def test_a_state_goes_on_in_another_topology(tree_process, before, after):
    """What one topology saved after two steps, another continues to the third, to the bit."""
    tree = "exchange.order=tree"
    two_steps = {"steps": 2}
    saved = (alone(tree, **two_steps) if before == (1, 1) else several(*before, tree, **two_steps))[2]
    del saved["averages"]["epoch_average"]  # an epoch has ended after two steps here, in the whole run after three
    expected = {**tree_process[2], "averages": {"step_average": tree_process[2]["averages"]["step_average"]}}
    overrides = (tree, "average.epoch_decay=null")
    rest = {"first": 2, "steps": 1, "saved": saved}
    state = (alone(*overrides, **rest) if after == (1, 1) else several(*after, *overrides, **rest))[2]
    assert_bitwise_equal(state, expected)


def test_half_precision_gradients_are_collected_before_they_are_sent():
    """With bfloat16 compute each parameter's gradient is added into the float32 buffer while the last backward pass
    still runs. One step: from then on a last bit may decide how a working weight is rounded."""
    overrides = (*FLOAT32, "precision.compute=bfloat16")
    expected = alone(*overrides, steps=1)[2]
    assert distance(several(1, 2, *overrides, steps=1)[2], expected) < 1e-5
    assert_bitwise_equal(several(2, 1, *overrides, steps=1)[2], expected)


def rank_on_gpu(rank, size):
    recipe = recipe_of(("run.device=cuda", "precision.compute=float32", "exchange.order=tree"))
    topology = Topology(size, 1, rank, rank)
    engine = factory.create(recipe, divide(recipe, size), factory.connect(recipe, topology))
    outcome = train(engine)
    engine.close()
    return outcome


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
def test_two_gpus_learn_what_one_learns():
    """float32 on both sides; cuDNN may choose other kernels in another process, hence no bits."""
    recipe = recipe_of(("run.device=cuda", "precision.compute=float32"))
    expected = train(factory.create(recipe, divide(recipe, 1)))
    outcomes = world.run(2, rank_on_gpu, connect=False, timeout=300)
    assert distance(outcomes[0][2], expected[2]) < 1e-2


@pytest.mark.slow
def test_twenty_updates_have_the_same_bits_everywhere():
    tree = "exchange.order=tree"
    expected = alone(tree, steps=20)
    for stages, replicas in ((2, 1), (1, 2), (2, 2), (1, 4), (4, 2)):
        assert_bitwise_equal(several(stages, replicas, tree, steps=20)[2], expected[2])

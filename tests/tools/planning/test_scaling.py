"""A step's time by cause, against sums by hand; what the exchange takes; when the batch has to grow."""

import numpy as np
import pytest

from parallel import costs, exchange
from parallel.costs import Link
from parallel.exchange import Gradient
from recipe.loading import load
from tests.conftest import QUICKSTART, ROOT
from tools.planning import machine, scaling, workload

POD, GPU = (ROOT / "configs" / name for name in ("pod.yaml", "gpu.yaml"))
BOW, A100 = machine.load("bow_pod"), machine.load("dgx_a100")
DENSE = exchange.named("dense")


def with_figure(place, **values):
    changed = {name: getattr(place, name).model_copy(update={"value": value}) for name, value in values.items()}
    return place.model_copy(update=changed)


@pytest.fixture(scope="module")
def pod():
    recipe = load(POD)
    return recipe, workload.of(recipe)


@pytest.fixture(scope="module")
def gpu():
    recipe = load(GPU, ["run.device=cuda"])
    return recipe, workload.of(recipe)


def test_a_step_is_the_sum_of_its_causes_and_all_images_go_through(pod):
    for replicas in scaling.REPLICAS:
        row = scaling.predict(pod[0], BOW, replicas, pod[1])
        assert sum(row.parts.values()) == pytest.approx(row.seconds, rel=1e-12)
        assert min(row.parts.values()) >= 0
        assert row.global_batch == 3 * row.accumulation * row.replicas
        assert row.images_per_second == pytest.approx(row.global_batch / row.seconds)
        assert 0 < row.efficiency <= 1


@pytest.mark.parametrize(
    ("overrides", "idle"),
    [
        (["parallel.stages=1"], 0),
        (["parallel.stages=3"], 2),
        (["parallel.stages=3", "parallel.schedule=1f1b"], 2),
        (["parallel.stages=2", "parallel.schedule=interleaved"], 0.5),
    ],
)
def test_pipelines_idle_for_one_micro_batch_less_than_stages(overrides, idle):
    recipe = load(QUICKSTART, ["run.device=cuda", "batch.micro=8", *overrides])
    work = workload.of(recipe)
    slowest = 8 * max(stage.multiply_adds for stage in work.stages) / A100.rate.value
    assert scaling.predict(recipe, A100, 1, work).parts["bubble"] == pytest.approx(idle * slowest)


def test_stages_on_ipus_fill_twice_or_take_turns(pod):
    """128 replicas: 16 micro batches and 2 K - 2 = 2 to fill and drain, each as long as the slowest stage takes."""
    recipe, work = pod
    parts, passes = scaling.predict(recipe, BOW, 128, work).parts, [stage.multiply_adds for stage in work.stages]
    assert parts["compute"] + parts["imbalance"] == pytest.approx(16 * 3 * max(passes) / BOW.rate.value)
    assert parts["bubble"] == pytest.approx(2 * 3 * max(passes) / BOW.rate.value)
    turns = scaling.predict(load(POD, ["parallel.schedule=sharded"]), BOW, 128, work).parts
    assert turns["bubble"] == turns["imbalance"] == 0
    assert turns["compute"] == pytest.approx(16 * 3 * sum(passes) / BOW.rate.value)


@pytest.mark.parametrize(
    ("overrides", "replicas", "batch", "accumulation"),
    [
        ([], 512, 6144, 4),
        ([], 1024, 9216, 3),  # two micro batches would not fill two stages on IPUs, which need 2 K - 1
        (["run.device=cuda", "parallel.stages=1", "parallel.split=[]"], 2048, 6144, 1),
        (["run.device=cuda", "parallel.stages=1", "parallel.split=[]"], 4096, 12288, 1),
        (["run.device=cuda", "parallel.schedule=1f1b"], 2048, 12288, 2),
        ([], 100, 6300, 21),  # not to be divided: the next that can
    ],
)
def test_the_batch_grows_where_replicas_cannot_share_it(overrides, replicas, batch, accumulation):
    recipe = load(POD, overrides)
    row = scaling.predict(recipe, BOW if recipe.run.device == "ipu" else A100, replicas, workload.of(recipe))
    assert (row.global_batch, row.accumulation, row.grown) == (batch, accumulation, batch > 6144)


def test_straggling_is_the_expected_slowest_of_many_in_proportion_to_the_step(gpu):
    """Blom's formula is good to a hundredth; 20,000 draws have a standard error of a hundredth of their deviation."""
    slowest = np.random.default_rng(0).standard_normal((20_000, 64)).max(axis=1).mean()
    assert scaling.slowest_of(64) == pytest.approx(slowest, abs=0.03) and scaling.slowest_of(1) == 0
    recipe, work = gpu
    calm, restless = (scaling.predict(recipe, with_figure(A100, straggling=s), 64, work) for s in (0.0, 0.05))
    assert calm.parts["straggling"] == 0
    assert restless.parts["straggling"] == pytest.approx(0.05 * scaling.slowest_of(64) * calm.seconds)


def test_reading_or_copying_costs_as_much_as_it_takes_longer_than_the_rest(gpu):
    recipe, work = gpu
    slow = with_figure(A100, decode=5.0)  # 16 cores: 80 images a second for each GPU
    row = scaling.predict(recipe, slow, 8, work)
    assert row.images_per_second == pytest.approx(8 * 16 * 5)
    assert row.limit == "input"
    drawn = load(GPU, ["run.device=cuda", "data.source=glyphs"])
    assert scaling.predict(drawn, slow, 8, work).parts["input"] == 0  # nothing is read or decoded
    thin = with_figure(A100, to_device=100 * 3 * 380**2)
    assert scaling.predict(recipe, thin, 1, work).images_per_second == pytest.approx(100)


NEAR, FAR = (Link(reach.latency.value, 1 / reach.bandwidth.value) for reach in A100.links)


def exchanged(method, replicas, stages):
    """Seconds of 8 million elements of 4 bytes each."""
    parts = [workload.StageWork([], 0, 8_000_000, 0)] * stages
    return scaling.exchange(A100, exchange.named(method), replicas, workload.Workload(0, {}, parts, "", frozenset()))


@pytest.mark.parametrize(
    ("replicas", "stages", "expected"),
    [
        (8, 1, DENSE.seconds(NEAR, 8, Gradient(8_000_000))),
        # Eight in a host scatter and gather; each then exchanges an eighth with seven others, one of each host.
        (64, 1, DENSE.seconds(NEAR, 8, Gradient(8_000_000)) + DENSE.seconds(FAR, 8, Gradient(1_000_000))),
        # Stages leave fewer replicas near each other.
        (8, 2, DENSE.seconds(NEAR, 4, Gradient(8_000_000)) + DENSE.seconds(FAR, 2, Gradient(2_000_000))),
    ],
)
def test_whole_gradients_go_around_a_ring_at_each_level_of_links(replicas, stages, expected):
    found = exchanged("dense", replicas, stages)
    assert found == pytest.approx(expected)
    assert 0 == exchanged("none", replicas, stages) < exchanged("half", replicas, stages) < found


@pytest.mark.parametrize("name", ["topk", "gtopk butterfly"])
def test_sparse_exchanges_go_over_the_farthest_links(name):
    expected = exchange.named(name).rounds(64) * FAR.message(costs.message_bytes(8000, "float32"))
    assert exchanged(name, 64, 1) == expected


def test_an_exchange_beside_the_backward_pass_is_hidden_as_far_as_it_lasts(gpu):
    recipe, work = gpu
    open_, hidden, none = (
        scaling.predict(recipe, A100.model_copy(update={"overlap": share}), 4096, work).parts["exchange"]
        for share in (0.0, 0.05, 1.0)
    )
    assert hidden == pytest.approx(open_ - 0.05 * 32 * 2 * work.multiply_adds / A100.rate.value)
    assert none == 0


def test_late_gradients_are_exchanged_beside_the_next_step_on_cpus_alone():
    """docs/exchange.md: on CUDA the exchange does not overlap yet."""
    small = machine.load("two_cores")
    on_time, late = (load(QUICKSTART, [f"exchange.delay={delay}"]) for delay in (0, 1))
    work = workload.of(late)
    parts = scaling.predict(late, small, 4096, work).parts
    whole = scaling.predict(on_time, small, 4096, work).parts["exchange"]
    assert parts["exchange"] == pytest.approx(whole - parts["compute"])
    assert scaling.predict(late, small, 2, work).parts["exchange"] == 0
    assert scaling.predict(late, A100, 2, work).parts["exchange"] > 0

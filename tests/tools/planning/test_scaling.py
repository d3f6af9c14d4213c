"""A step's time by cause, against sums by hand; what the exchange takes; when the batch has to
grow."""

import functools

import numpy as np
import pytest

from parallel import costs, exchange
from parallel.costs import Link
from parallel.exchange import Gradient
from recipe.loading import load
from tests.conftest import ROOT
from tools.planning import machine, scaling, workload

BOW, A100, CORES = map(machine.load, ("bow_pod", "dgx_a100", "two_cores"))
DENSE = exchange.named("dense")


@functools.lru_cache(maxsize=None)
def setting(config, *overrides):
    recipe = load(ROOT / "configs" / f"{config}.yaml", overrides)
    return recipe, workload.of(recipe)


def step(place, replicas, config, *overrides):
    recipe, work = setting(config, *overrides)
    return scaling.predict(recipe, place, replicas, work)


GPU = ("gpu", "run.device=cuda", "batch.micro=32")


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
    arguments = ("quickstart", "run.device=cuda", "batch.micro=8", *overrides)
    slowest = (
        8 * max(stage.multiply_adds for stage in setting(*arguments)[1].stages) / A100.rate.value
    )
    assert step(A100, 1, *arguments).parts["bubble"] == pytest.approx(idle * slowest)


def test_stages_on_ipus_fill_twice_or_take_turns():
    """128 replicas: 16 micro batches and 2 K - 2 = 2 to fill and drain, each as long as the slowest
    stage takes."""
    parts = step(BOW, 128, "pod").parts
    passes = [stage.multiply_adds for stage in setting("pod")[1].stages]
    assert parts["compute"] + parts["imbalance"] == pytest.approx(
        16 * 3 * max(passes) / BOW.rate.value
    )
    assert parts["bubble"] == pytest.approx(2 * 3 * max(passes) / BOW.rate.value)
    turns = step(BOW, 128, "pod", "parallel.schedule=sharded").parts
    assert turns["bubble"] == turns["imbalance"] == 0
    assert turns["compute"] == pytest.approx(16 * 3 * sum(passes) / BOW.rate.value)


TREE = ("run.device=cuda", "exchange.order=tree")


def test_a_tree_sends_each_partial_sum_and_hides_none_of_them():
    """2,048 micro batches: 3 replicas send 4 1/3 each and gather one; 4 replicas have one each, as
    a ring does."""
    three, four = (
        step(A100, replicas, "pod", *TREE, "parallel.stages=1", "parallel.split=[]")
        for replicas in (3, 4)
    )
    work = setting("pod", "parallel.stages=1", "parallel.split=[]")[1]
    for row, sums in ((three, 13 / 3), (four, 1.0)):
        sent = Gradient((sums + 1) / 2 * work.stages[0].parameters)
        assert row.parts["exchange"] == pytest.approx(DENSE.seconds(NEAR, row.replicas, sent))


@pytest.mark.parametrize(
    ("overrides", "replicas", "batch", "accumulation"),
    [
        # two micro batches would not fill two stages on IPUs, which need 2 K - 1
        ([], 1024, 9216, 3),
        (["run.device=cuda", "parallel.stages=1", "parallel.split=[]"], 2048, 6144, 1),
        (["run.device=cuda", "parallel.stages=1", "parallel.split=[]"], 4096, 12288, 1),
        (["run.device=cuda", "parallel.schedule=1f1b"], 2048, 12288, 2),
        ([], 100, 6300, 21),  # not to be divided: the next that can
        ([*TREE, "parallel.stages=1", "parallel.split=[]"], 100, 6144, 21),
        ([*TREE, "parallel.schedule=1f1b"], 2048, 12288, 2),
    ],
)
def test_the_batch_grows_where_replicas_cannot_share_it(overrides, replicas, batch, accumulation):
    row = step(A100 if overrides else BOW, replicas, "pod", *overrides)
    assert (row.global_batch, row.accumulation, row.grown) == (batch, accumulation, batch > 6144)


def test_straggling_is_the_expected_slowest_of_many_in_proportion_to_the_step():
    """Blom's formula is good to a hundredth; 20,000 draws have a standard error of a hundredth of
    their deviation."""
    slowest = np.random.default_rng(0).standard_normal((20_000, 64)).max(axis=1).mean()
    assert scaling.slowest_of(64) == pytest.approx(slowest, abs=0.03) and scaling.slowest_of(1) == 0
    calm, restless = (
        step(workload.changed(A100, "straggling", value=spread), 64, *GPU) for spread in (0.0, 0.05)
    )
    assert calm.parts["straggling"] == 0
    assert restless.parts["straggling"] == pytest.approx(
        0.05 * scaling.slowest_of(64) * calm.seconds
    )


def test_reading_or_copying_costs_as_much_as_it_takes_longer_than_the_rest():
    slow = workload.changed(A100, "decode", value=5.0)  # 16 cores: 80 images a second for each GPU
    row = step(slow, 8, *GPU)
    assert (row.images_per_second, row.limit) == (pytest.approx(8 * 16 * 5), "input")
    # nothing is read or decoded
    assert step(slow, 8, *GPU, "data.source=glyphs").parts["input"] == 0
    thin = workload.changed(A100, "to_device", value=100 * 3 * 380**2)
    assert step(thin, 1, *GPU).images_per_second == pytest.approx(100)


NEAR, FAR = (Link(reach.latency.value, 1 / reach.bandwidth.value) for reach in A100.links)


def exchanged(method, replicas, stages):
    """Seconds of 8 million elements of 4 bytes each."""
    parts = [workload.StageWork([], 0, 8_000_000, 0)] * stages
    return scaling.exchange(
        A100, exchange.named(method), replicas, workload.Workload(0, {}, parts, "", frozenset())
    )


@pytest.mark.parametrize(
    ("replicas", "stages", "expected"),
    [
        (8, 1, DENSE.seconds(NEAR, 8, Gradient(8_000_000))),
        # Eight in a host scatter and gather; each then exchanges an eighth with seven others, one
        # of each host.
        (
            64,
            1,
            DENSE.seconds(NEAR, 8, Gradient(8_000_000))
            + DENSE.seconds(FAR, 8, Gradient(1_000_000)),
        ),
        # Stages leave fewer replicas near each other.
        (
            8,
            2,
            DENSE.seconds(NEAR, 4, Gradient(8_000_000))
            + DENSE.seconds(FAR, 2, Gradient(2_000_000)),
        ),
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


def test_an_exchange_is_hidden_beside_the_backward_pass_or_if_late_on_cpus_the_next_step():
    """On CUDA late exchanges do not overlap (docs/exchange.md)."""
    places = (A100.model_copy(update={"overlap": share}) for share in (0.0, 0.05, 1.0))
    whole, part, none = (step(place, 4096, *GPU).parts["exchange"] for place in places)
    assert part == pytest.approx(
        whole - 0.05 * 32 * 2 * setting(*GPU)[1].multiply_adds / A100.rate.value
    )
    assert none == 0
    on_time, late = (
        step(CORES, 4096, "quickstart", f"exchange.delay={delay}").parts for delay in (0, 1)
    )
    assert late["exchange"] == pytest.approx(on_time["exchange"] - late["compute"])
    two = [
        step(place, 2, "quickstart", "exchange.delay=1").parts["exchange"]
        for place in (CORES, A100)
    ]
    assert two[0] == 0 < two[1]

"""Work and bytes of each device, against the model that an engine builds, the state that it keeps,
what autograd keeps, and closed forms; the widest model."""

import itertools

import pytest
import torch

from common.errors import ConfigError
from models import costs, shapes
from models.efficientnet import build
from models.shapes import BlockShape
from optim.factory import create
from optim.weight_state import WeightState
from recipe.batch import divide
from recipe.loading import load
from tests.conftest import QUICKSTART, ROOT
from tools.planning import machine, workload

POD = ROOT / "configs" / "pod256.yaml"
BOW = machine.load("bow_pod")
A100 = machine.load("dgx_a100")


def work_of(config, *overrides):
    return workload.of(load(config, overrides))


@pytest.mark.parametrize(("recompute", "passes"), [("false", 3), ("true", 4)])
def test_work_is_three_passes_or_four_of_blocks_that_are_computed_again(recompute, passes):
    work = work_of(POD, f"parallel.recompute={recompute}")
    assert sum(stage.multiply_adds for stage in work.stages) == passes * work.multiply_adds
    some = work_of(QUICKSTART, "parallel.recompute=[stem, head]")
    twice = sum(some.shapes[name].multiply_adds for name in ("stem", "head"))
    assert some.stages[0].multiply_adds == 3 * some.multiply_adds + twice


def test_stages_that_are_not_named_are_balanced_by_multiply_adds():
    """No border of blocks makes the slower of two stages faster."""
    work = work_of(POD, "parallel.split=counted")
    names = list(work.shapes)
    slowest = [
        max(
            sum(work.shapes[name].multiply_adds for name in part)
            for part in (names[:cut], names[cut:])
        )
        for cut in range(2, len(names))  # a stage before the stem would have nothing to learn
    ]
    assert max(stage.multiply_adds for stage in work.stages) == 4 * min(slowest)
    assert work.imbalance < work_of(POD).imbalance


def test_interleaved_devices_have_every_other_part():
    work = work_of(
        QUICKSTART, "parallel.stages=2", "parallel.schedule=interleaved", "batch.global=256"
    )
    first, second = work.stages
    assert sorted([*first.names, *second.names]) == sorted(work.shapes)
    assert list(work.shapes).index(first.names[-1]) > list(work.shapes).index(second.names[0])


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            ["parallel.stages=2", "parallel.split=[blocks.9.9]"],
            "parallel.split: blocks.9.9 is not a block; the blocks",
        ),
        (
            ["parallel.stages=30"],
            "parallel.stages: 30 parts are more than the 12 blocks with parameters",
        ),
    ],
)
def test_cuts_that_cannot_be_made_are_refused(overrides, fault):
    with pytest.raises(ConfigError) as caught:
        work_of(QUICKSTART, *overrides)
    assert str(caught.value).startswith(fault)


@pytest.mark.parametrize("optimizer", ["lars", "sgd", "rmsprop", "lamb", "adamw", "muon"])
@pytest.mark.parametrize(
    ("weights", "compute"),
    [("float16",) * 2, ("float32",) * 2, ("float16", "float32"), ("float32", "bfloat16")],
)
def test_bytes_of_a_parameter_are_those_of_the_buffers_that_an_update_has(
    optimizer, weights, compute
):
    precision = [f"precision.weights={weights}", f"precision.compute={compute}"]
    recipe = load(QUICKSTART, [f"optimizer.name={optimizer}", *precision])
    state = WeightState(
        build(recipe.model, 0).to(getattr(torch, compute)).named_parameters(),
        lambda parameters: create(recipe.optimizer, parameters, ()),
        dtype=getattr(torch, weights),
        rounding="stochastic",
        seed=0,
    )
    kept = state._buffers
    update = state._update
    buffers = [kept.gradients, kept.weights, kept.working, *kept.slots.values()]
    if recipe.optimizer.scratch:
        buffers += [update._weights, *update._slots.values()]
    sizes = {buffer.untyped_storage().data_ptr(): buffer.element_size() for buffer in buffers}
    assert sum(sizes.values()) == workload.state_bytes(recipe, "cpu")


def test_averages_are_float32_and_none_of_an_ipus():
    plain, averaged = (
        load(QUICKSTART, [f"average.epoch_decay={decay}"]) for decay in ("null", "0.97")
    )
    assert workload.state_bytes(averaged, "cuda") - workload.state_bytes(plain, "cuda") == 4


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        ("name=lars", 2 + 4),  # the momentum, and LAMB's second moment, which stays 0
        ("name=lamb", 4 + 4),
        ("name=rmsprop", 4 + 4),
        ("name=rmsprop optimizer.momentum=0", 4),
        ("name=sgd", 2),
        ("name=sgd optimizer.momentum=0", 0),
    ],
)
def test_the_state_of_an_ipus_optimizer_is_that_of_its_form_there(optimizer, state):
    """docs/ipu.md, chapter 3, says which form it is."""
    recipe = load(POD, f"optimizer.{optimizer}".split())
    # beside the weight and the float32 gradient
    assert workload.state_bytes(recipe, "ipu") == 2 + 4 + state


def test_on_a_pod_an_optimizer_without_a_form_there_is_counted_as_elsewhere():
    recipe = load(QUICKSTART, ["optimizer.name=adamw"])
    assert workload.state_bytes(recipe, "ipu") == 2 + 4 + 4 + 4


def kept(names, found, again, held, device):
    *_, (_, in_flight, once) = workload.elements(names, found, again, device)
    return held * in_flight + once


def stages_of(recipe, device, wanted=None):
    return workload.by_stage(recipe, device, divide(recipe), workload.of(recipe), wanted)


def test_one_stage_keeps_what_autograd_keeps_of_a_micro_batch():
    overrides = ["batch.micro=3", "batch.global=12", "precision.compute=float32", "data.mixup=0"]
    recipe = load(QUICKSTART, overrides)
    images = torch.zeros(3, 3, recipe.model.image_size, recipe.model.image_size, dtype=torch.uint8)
    measured = costs.measure(build(recipe.model, 0), images, repetitions=1)
    ((state, activations),) = stages_of(recipe, "cpu")
    assert activations == sum(cost.saved for cost in measured.values())
    assert state == workload.state_bytes(recipe, "cpu") * sum(
        cost.parameters for cost in measured.values()
    )
    ((_, half),) = stages_of(load(QUICKSTART, [*overrides, "precision.compute=float16"]), "cuda")
    assert activations == 2 * half


@pytest.mark.parametrize(
    ("device", "overrides", "held"),
    [
        ("cuda", [], [8, 8, 8, 8]),  # GPipe: all micro batches of a step
        ("cuda", ["parallel.schedule=1f1b"], [4, 3, 2, 1]),
        ("ipu", [], [7, 5, 3, 1]),
        (
            "ipu",
            ["parallel.schedule=sharded", "run.device=ipu", "optimizer.trust=momentum"],
            [1, 1, 1, 1],
        ),
    ],
)
def test_micro_batches_in_flight(device, overrides, held):
    recipe = load(QUICKSTART, ["parallel.stages=4", "batch.micro=8", *overrides])
    assert workload.in_flight(recipe.parallel, device, divide(recipe).accumulation, 4) == held


# Blocks of (saved, output) elements an image.
BLOCKS = {
    "preprocess": BlockShape(0, 0, 0, 0, 5),
    "a": BlockShape(1, 1, 0, 100, 7),
    "b": BlockShape(1, 1, 0, 40, 9),
    "c": BlockShape(1, 1, 0, 60, 2),
}


@pytest.mark.parametrize(
    ("device", "again", "held", "expected"),
    [
        ("cuda", "", 4, 4 * 200),
        # inputs of all blocks, and the largest while it is computed again
        ("cuda", "abc", 4, 4 * (5 + 7 + 9) + 100),
        ("cuda", "b", 4, 4 * (100 + 7 + 60) + 40),
        # the stage's input, and all of the stage while it is computed again
        (
            "ipu",
            "abc",
            3,
            3 * 5 + 200,
        ),
        ("ipu", "bc", 3, 3 * (100 + 7) + 100),
    ],
)
def test_activations_in_flight_by_hand(device, again, held, expected):
    assert kept(list(BLOCKS), BLOCKS, frozenset(again), held, device) == expected


def test_the_published_recipe_fits_by_recomputation_and_tiles_that_only_move_data_hold_nothing_else():
    """Three micro batches in flight are too many for the first IPU. 32 of 1,472 tiles move data
    where I/O overlaps, which a pipeline's does not (recipe/ipu/options.py)."""
    recipe, sharded = (
        load(POD, ["parallel.replicas=128", *more]) for more in ([], ["parallel.schedule=sharded"])
    )
    room = workload.available(recipe, BOW, divide(recipe))
    assert (
        max(map(sum, stages_of(recipe, "ipu", False)))
        > room
        > max(map(sum, stages_of(recipe, "ipu")))
    )
    assert room == 1472 * 624_000
    assert workload.available(sharded, BOW, divide(sharded)) == pytest.approx(1440 * 624_000)


@pytest.mark.parametrize("overrides", [[], ["parallel.recompute=true", "parallel.schedule=1f1b"]])
@pytest.mark.parametrize("stages", [1, 3, 13])  # 13: a block each
def test_the_widest_model_fits_and_the_next_one_does_not(stages, overrides):
    """Against all cuts of the widest model and of the one a step wider, tried one by one."""
    recipe = load(QUICKSTART, ["run.device=cuda", "batch.micro=16", *overrides])
    batch = divide(recipe)

    def least(width):
        found = shapes.blocks(
            recipe.model.model_copy(update={"width": width}), recipe.model.image_size
        )
        names = list(found)
        again = workload.recomputed(recipe, names)
        held = workload.in_flight(recipe.parallel, "cuda", batch.accumulation, stages)

        def size(part, count):
            state = workload.state_bytes(recipe, "cuda") * sum(
                found[name].parameters for name in part
            )
            return state + 2 * 16 * kept(part, found, again, count, "cuda")

        edges = [
            (0, *cuts, len(names))
            for cuts in itertools.combinations(range(1, len(names)), stages - 1)
        ]
        cut = [[names[start:end] for start, end in zip(each, each[1:])] for each in edges]
        return min(max(map(size, parts, held)) for parts in cut)

    small, tiny = (workload.changed(A100, "memory", value=value) for value in (30e6, 1000.0))
    widest = workload.widest(recipe, small, batch, stages)
    assert widest.bytes == least(widest.width) <= 30e6 < least(widest.width + 0.05)
    assert workload.widest(recipe, tiny, batch, stages) == (stages, None, 0, 0)

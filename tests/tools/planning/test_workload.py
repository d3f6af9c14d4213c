"""Work of each device, against the model that an engine builds and the state that it keeps."""

import pytest
import torch

from models.efficientnet import build
from optim.factory import create
from optim.half_weights import WeightState
from recipe.errors import ConfigError
from recipe.loading import load
from tests.conftest import QUICKSTART, ROOT
from tools.planning import workload

POD = ROOT / "configs" / "pod16.yaml"


def work_of(config, *overrides):
    return workload.of(load(config, overrides))


def test_stages_are_those_of_the_recipe_and_cover_the_model():
    work = work_of(POD)
    first, second = work.stages
    assert (first.names[0], first.names[-1], second.names[0]) == ("preprocess", "blocks.2.3", "blocks.3.0")
    assert [stage.parameters for stage in work.stages] == [557_930, 18_770_238]  # configs/b4_g16.yaml says so, too
    assert work.parameters == 19_328_168
    assert work.cut == "as the recipe says"


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
        max(sum(work.shapes[name].multiply_adds for name in part) for part in (names[:cut], names[cut:]))
        for cut in range(2, len(names))  # a stage before the stem would have nothing to learn
    ]
    assert max(stage.multiply_adds for stage in work.stages) == 4 * min(slowest)
    assert work.imbalance < work_of(POD).imbalance


def test_interleaved_devices_have_every_other_part():
    work = work_of(QUICKSTART, "parallel.stages=2", "parallel.schedule=interleaved", "batch.global=256")
    first, second = work.stages
    assert sorted([*first.names, *second.names]) == sorted(work.shapes)
    assert list(work.shapes).index(first.names[-1]) > list(work.shapes).index(second.names[0])


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["parallel.stages=2", "parallel.split=[blocks.9.9]"], "parallel.split: blocks.9.9 is not a block; the blocks"),
        (["parallel.stages=30"], "parallel.stages: 30 parts are more than the 12 blocks with parameters"),
    ],
)
def test_cuts_that_cannot_be_made_are_refused(overrides, fault):
    with pytest.raises(ConfigError) as caught:
        work_of(QUICKSTART, *overrides)
    assert str(caught.value).startswith(fault)


@pytest.mark.parametrize("optimizer", ["lars", "sgd", "rmsprop", "lamb"])
@pytest.mark.parametrize(
    ("weights", "compute"), [("float16",) * 2, ("float32",) * 2, ("float16", "float32"), ("float32", "bfloat16")]
)
def test_bytes_of_a_parameter_are_those_of_the_buffers_that_an_update_has(optimizer, weights, compute):
    recipe = load(
        QUICKSTART, [f"optimizer.name={optimizer}", f"precision.weights={weights}", f"precision.compute={compute}"]
    )
    model = build(recipe.model, 0).to(getattr(torch, compute))
    state = WeightState(
        model.named_parameters(),
        lambda parameters: create(recipe.optimizer, parameters, ()),
        dtype=getattr(torch, weights),
        rounding="stochastic",
        seed=0,
    )
    kept, update = state._buffers, state._update
    buffers = [kept.gradients, kept.weights, kept.working, *kept.slots.values()]
    if recipe.optimizer.scratch:
        buffers += [update._weights, *update._slots.values()]
    sizes = {buffer.untyped_storage().data_ptr(): buffer.element_size() for buffer in buffers}
    assert sum(sizes.values()) == workload.state_bytes(recipe, "cpu")


def test_averages_are_float32_and_none_of_an_ipus():
    plain, averaged = (load(QUICKSTART, [f"average.epoch_decay={decay}"]) for decay in ("null", "0.97"))
    assert workload.state_bytes(averaged, "cuda") - workload.state_bytes(plain, "cuda") == 4
    assert workload.state_bytes(load(POD), "ipu") == 2 + 2 + 4  # weights, momentum, float32 accumulator

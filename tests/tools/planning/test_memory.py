"""Bytes of each stage, against closed forms of small models and against what autograd keeps; the widest model."""

import itertools

import pytest
import torch

from models import costs, shapes
from models.efficientnet import build
from models.shapes import BlockShape
from recipe.batch import divide
from recipe.loading import load
from tests.conftest import QUICKSTART, ROOT
from tools.planning import machine, workload

POD = ROOT / "configs" / "pod256.yaml"
BOW, A100 = machine.load("bow_pod"), machine.load("dgx_a100")


def kept(names, found, again, held, device):
    *_, (_, in_flight, once) = workload.elements(names, found, again, device)
    return held * in_flight + once


def planned(recipe, device):
    return workload.by_stage(recipe, device, divide(recipe), workload.of(recipe))


def with_memory(value):
    return A100.model_copy(update={"memory": A100.memory.model_copy(update={"value": value})})


def test_one_stage_keeps_what_autograd_keeps_of_a_micro_batch():
    overrides = ["batch.micro=3", "batch.global=12", "precision.compute=float32", "data.mixup=0"]
    recipe = load(QUICKSTART, overrides)
    images = torch.zeros(3, 3, recipe.model.image_size, recipe.model.image_size, dtype=torch.uint8)
    measured = costs.measure(build(recipe.model, 0), images, repetitions=1)
    (stage,) = planned(recipe, "cpu")
    assert stage.activations == sum(cost.saved for cost in measured.values())
    assert stage.state == workload.state_bytes(recipe, "cpu") * sum(cost.parameters for cost in measured.values())
    (half,) = planned(load(QUICKSTART, [*overrides, "precision.compute=float16"]), "cuda")
    assert stage.activations == 2 * half.activations


@pytest.mark.parametrize(
    ("device", "overrides", "held"),
    [
        ("cuda", [], [8, 8, 8, 8]),  # GPipe: all micro batches of a step
        ("cuda", ["parallel.schedule=1f1b"], [4, 3, 2, 1]),
        ("ipu", [], [7, 5, 3, 1]),
        ("ipu", ["parallel.schedule=sharded", "run.device=ipu", "optimizer.trust=momentum"], [1, 1, 1, 1]),
    ],
)
def test_micro_batches_in_flight(device, overrides, held):
    recipe = load(QUICKSTART, ["parallel.stages=4", "batch.micro=8", *overrides])
    assert workload.in_flight(recipe, device, divide(recipe), 4) == held


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
        ("cuda", "abc", 4, 4 * (5 + 7 + 9) + 100),  # inputs of all blocks, and the largest while it is computed again
        ("cuda", "b", 4, 4 * (100 + 7 + 60) + 40),
        ("ipu", "abc", 3, 3 * 5 + 200),  # the stage's input, and all of the stage while it is computed again
        ("ipu", "bc", 3, 3 * (100 + 7) + 100),
    ],
)
def test_activations_in_flight_by_hand(device, again, held, expected):
    assert kept(list(BLOCKS), BLOCKS, frozenset(again), held, device) == expected


def test_the_published_recipe_fits_by_recomputation_and_tiles_that_only_move_data_hold_nothing_else():
    """Three micro batches in flight are too many for the first IPU. 32 of 1,472 tiles move data where I/O overlaps,
    which a pipeline's does not (recipe/ipu.py)."""
    recipe, sharded = (load(POD, ["parallel.replicas=128", *more]) for more in ([], ["parallel.schedule=sharded"]))
    room = workload.available(recipe, BOW, divide(recipe))
    plain = workload.by_stage(recipe, "ipu", divide(recipe), workload.of(recipe), frozenset())
    assert max(map(sum, plain)) > room > max(map(sum, planned(recipe, "ipu")))
    assert room == 1472 * 624_000
    assert workload.available(sharded, BOW, divide(sharded)) == pytest.approx(1440 * 624_000)


@pytest.mark.parametrize("overrides", [[], ["parallel.recompute=true", "parallel.schedule=1f1b"]])
@pytest.mark.parametrize("stages", [1, 3, 13])  # 13: a block each
def test_the_widest_model_fits_and_the_next_one_does_not(stages, overrides):
    """Against all cuts of the widest model and of the one a step wider, tried one by one."""
    recipe = load(QUICKSTART, ["run.device=cuda", "batch.micro=16", *overrides])
    batch = divide(recipe)

    def least(width):
        found = shapes.blocks(recipe.model.model_copy(update={"width": width}), recipe.model.image_size)
        names = list(found)
        again, held = workload.recomputed(recipe, names), workload.in_flight(recipe, "cuda", batch, stages)

        def size(part, count):
            state = workload.state_bytes(recipe, "cuda") * sum(found[name].parameters for name in part)
            return state + 2 * 16 * kept(part, found, again, count, "cuda")

        edges = [(0, *cuts, len(names)) for cuts in itertools.combinations(range(1, len(names)), stages - 1)]
        cut = [[names[start:end] for start, end in zip(each, each[1:])] for each in edges]
        return min(max(map(size, parts, held)) for parts in cut)

    widest = workload.widest(recipe, with_memory(30e6), batch, stages)
    assert widest.bytes == least(widest.width) <= 30e6 < least(widest.width + 0.05)
    assert workload.widest(recipe, with_memory(1000.0), batch, stages) == (stages, None, 0, 0)

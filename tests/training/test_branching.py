"""A run that begins in the state of another run's checkpoint goes on as that one would, or
otherwise where it should.

The other run is that of tests/ranks.py: dropout, stochastic depth, mixing and both averages; its
rate is constant.
"""

import dataclasses

import pytest

from common.errors import CheckpointError
from engines.torch_engine import TorchEngine
from recipe import loading
from tests import ranks
from tests.conftest import QUICKSTART
from tests.tensors import flat
from training import branching
from training.checkpoint import CheckpointFolder
from training.metrics import read_events
from training.progression import Progression
from training.run import run

STEP = 6
STEPS = 10
OVERRIDES = (
    *ranks.RECIPE,
    *ranks.SMALL,
    "batch.micro=12",
    "exchange.order=fast",
    "precision.weights=float16",
    "schedule.name=constant",
    "schedule.warmup_steps=0",
    "log.every_steps=1",
    "checkpoint.keep_last=100",
)


def newest(folder):
    return CheckpointFolder(folder / "checkpoints", 2, True).load_newest(warn=pytest.fail)


@pytest.fixture(scope="module", autouse=True)
def _no_measuring():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
        yield


@pytest.fixture(scope="module")
def other(tmp_path_factory, _no_measuring):
    """The folder of a finished run with a checkpoint at STEP."""
    folder = tmp_path_factory.mktemp("other") / "run"
    run(loading.load(QUICKSTART, [*OVERRIDES, f"run.output={folder}"]))
    return folder


@pytest.fixture
def branch(other, tmp_path):
    """branch(*overrides): trains a branch of the run from STEP on; its folder."""

    def train(*overrides):
        recipe = loading.load(
            other / "config.yaml", [f"run.output={tmp_path / 'branch'}", *overrides]
        )
        folder = branching.begin(other, STEP, recipe)
        assert branching.is_begun(folder)
        run(recipe)
        return folder

    return train


def tensors(content):
    return {
        name: (tensor.dtype, tensor.numpy().tobytes())
        for name, tensor in flat(content["engine"]).items()
    }


def losses(folder):
    return {event["step"]: event["loss"] for event in read_events(folder)["train"]}


@pytest.mark.parametrize("schedule", ["null", pytest.param("[[0, 24]]", marks=pytest.mark.slow)])
def test_with_the_same_recipe_it_ends_with_the_bits_of_the_other_run(branch, other, schedule):
    """Its log begins at its first step, and its counters at none."""
    folder = branch(f"batch.schedule={schedule}")
    assert tensors(newest(folder)) == tensors(newest(other))
    expected = losses(other)
    assert losses(folder) == {step: expected[step] for step in range(STEP + 1, STEPS + 1)}


def test_only_the_state_and_the_position_go_along(other, tmp_path):
    recipe = loading.load(
        other / "config.yaml", [f"run.output={tmp_path / 'branch'}", "run.seed=7"]
    )
    assert not branching.is_begun(tmp_path / "branch")
    folder = branching.begin(other, STEP, recipe)
    content = newest(folder)
    before = CheckpointFolder(other / "checkpoints", 2, True)
    from training.checkpoint import load

    given = load(before.path(STEP))
    assert tensors(content) == tensors(given) and content["classes"] == given["classes"]
    digest = given["progression"]["images_digest"]
    assert digest
    fresh = Progression(step=STEP, images_digest=digest, rounding=given["progression"]["rounding"])
    assert content["progression"] == dataclasses.asdict(fresh)
    assert loading.load(folder / "config.yaml") == recipe


def test_another_seed_has_other_images_and_a_larger_batch_fewer_updates(branch, tmp_path):
    """From step 6 on: 7 and 8 together, then 9 and 10; an epoch has 5 steps."""
    folder = branch("run.seed=1", "batch.schedule=[[0, 24], [144, 48]]", "schedule.peak=3")
    events = read_events(folder)["train"]
    assert [(event["step"], event["batch"], event["lr"]) for event in events] == [
        (8, 48, 3),
        (10, 48, 3),
    ]


def test_a_checkpoint_that_is_not_there_or_damaged_is_named(other, tmp_path):
    recipe = loading.load(other / "config.yaml", [f"run.output={tmp_path / 'branch'}"])
    with pytest.raises(CheckpointError, match=r"step-00000005\.pt: no such checkpoint; "):
        branching.begin(other, 5, recipe)
    assert not (tmp_path / "branch").exists()

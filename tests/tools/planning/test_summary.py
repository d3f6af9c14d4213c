"""What a plan adds to its parts: what must be read, how long training takes, whether all fits."""

import pytest

from recipe.errors import ConfigError
from recipe.loading import load
from tests.conftest import QUICKSTART, ROOT
from tools.planning import machine, summary

GPU = ROOT / "configs" / "gpu.yaml"
A100 = machine.load("dgx_a100")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("POPDIST_NUM_IPUS_PER_REPLICA", raising=False)


def test_what_must_be_read_follows_from_the_rate():
    plan = summary.make(load(GPU, ["run.device=cuda", "parallel.replicas=64"]), A100)
    rate = plan.own.images_per_second
    assert plan.input.images_per_second == rate
    assert plan.input.device_bytes_per_second == pytest.approx(rate * 3 * 380 * 380)
    assert plan.input.file_bytes_per_second == pytest.approx(rate * 147.9e9 / 1_281_167, rel=1e-3)
    assert plan.input.cores == pytest.approx(rate / 520)
    assert plan.input.cores_there == 16 * 64


def test_images_in_memory_are_not_read_from_files():
    plan = summary.make(load(QUICKSTART), A100)
    assert plan.input.file_bytes_per_second is None
    assert plan.input.cores is None
    assert plan.input.device_bytes_per_second == pytest.approx(plan.own.images_per_second * 3 * 28 * 28)


def test_without_a_number_of_images_there_are_no_hours():
    plan = summary.make(load(GPU, ["data.train_images=null"]), A100)
    assert plan.own_hours is None
    assert set(plan.hours) == {None}


def test_a_batch_that_has_outgrown_the_images_has_no_hours():
    """4,096 replicas of 32 digits are more than there are: 1,437."""
    plan = summary.make(load(QUICKSTART), A100)
    assert plan.hours[0] == pytest.approx(36 * 22 * plan.rows[0].seconds / 3600)
    assert plan.rows[-1].global_batch > 1437
    assert plan.hours[-1] is None


def test_a_warm_up_stays_a_part_of_a_run_of_fewer_and_larger_steps():
    """Given in steps it may become longer than the run: there are no hours then, and no complaint."""
    plan = summary.make(load(GPU, ["schedule.warmup_epochs=null", "schedule.warmup_steps=70000"]), A100)
    assert plan.hours[0] is not None
    assert plan.hours[-1] is None


def test_memory_is_given_with_and_without_recomputation():
    plan = summary.make(load(GPU, ["parallel.recompute=[blocks.1.0, blocks.1.1, blocks.1.2]"]), A100)
    (here,), (plain,), (everything,) = plan.memory.recipe, plan.memory.plain, plan.memory.recomputed
    assert everything.activations < here.activations < plain.activations
    assert plan.memory.fits
    assert not summary.make(load(GPU, ["batch.micro=6144"]), A100).memory.fits


def test_the_four_questions_about_width_are_asked():
    assert [each.stages for each in summary.make(load(QUICKSTART), A100).widest] == [1, 2, 4, 8]


def test_an_impossible_recipe_is_refused():
    with pytest.raises(ConfigError, match=r"batch.global 64 is not a multiple of 32 micro x 3 replicas"):
        summary.make(load(QUICKSTART, ["parallel.replicas=3"]), A100)


def test_epochs_of_small_images_take_less_time():
    """300 epochs at 128 px and 50 at 380, each by the step that its size takes."""
    mixed = summary.make(load(GPU, ["data.image_sizes=[[0, 128], [300, 380]]"]), A100)
    small, large = (summary.make(load(GPU, [f"model.image_size={size}"]), A100).own.seconds for size in (128, 380))
    assert mixed.own.seconds == large
    assert mixed.own_hours == pytest.approx(208 * (300 * small + 50 * large) / 3600)


def test_a_size_that_the_run_never_comes_to_takes_no_time():
    short = ["run.epochs=100", "data.image_sizes=[[0, 128], [300, 380]]"]
    plan = summary.make(load(GPU, short), A100)
    small = summary.make(load(GPU, ["model.image_size=128", "run.epochs=100"]), A100)
    assert plan.own_hours == pytest.approx(small.own_hours)


def test_beside_gpipe_the_widths_of_1f1b_are_given():
    """Of one stage they are the same."""
    plan = summary.make(load(GPU), A100)
    assert plan.widest_1f1b[0] == plan.widest[0]
    assert plan.widest_1f1b[1].width > (plan.widest[1].width or 0)
    assert summary.make(load(GPU, ["parallel.schedule=1f1b"]), A100).widest_1f1b == []
    assert summary.make(load(ROOT / "configs" / "pod16.yaml"), machine.load("bow_pod")).widest_1f1b == []

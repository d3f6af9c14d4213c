"""Figures that a plan adds to its parts: bytes to be read, hours of training, whether all fits."""

import functools

import pytest

from recipe.loading import load
from tests.conftest import QUICKSTART, ROOT
from tools.planning import machine, summary

GPU = ROOT / "configs" / "gpu.yaml"


@functools.lru_cache(maxsize=None)
def planned(config, *overrides, place="dgx_a100"):
    return summary.make(load(config, overrides), machine.load(place))


def test_input_follows_from_the_rate():
    plan = planned(GPU, "run.device=cuda", "parallel.replicas=64")
    rate = plan.step.images_per_second
    expected = {
        "images_per_second": rate,
        "device_bytes_per_second": rate * 3 * 380 * 380,
        "cores": rate / 520,
    }
    expected.update(file_bytes_per_second=rate * 147.9e9 / 1_281_167, cores_there=16 * 64)
    assert plan.input._asdict() == pytest.approx(expected, rel=1e-3)
    hub = planned(
        GPU.with_name("imagenet_huggingface.yaml"), "run.device=cuda", "parallel.replicas=64"
    )
    assert hub.input == plan.input, "its images are decoded, too"
    in_memory = planned(QUICKSTART).input
    assert (in_memory.file_bytes_per_second, in_memory.cores) == (None, None)


def test_hours_are_known_where_images_and_steps_are():
    unknown = planned(GPU, "data.train_images=null")
    assert {row.hours for row in (unknown.step, *unknown.scaling)} == {None}
    # 4,096 replicas of 32 digits are more than there are: 1,437.
    first, *_, last = planned(QUICKSTART).scaling
    assert first.hours == pytest.approx(36 * 22 * first.seconds / 3600)
    assert last.global_batch > 1437 and last.hours is None
    # A warm-up given in steps may become longer than a run of fewer and larger steps.
    first, *_, last = planned(
        GPU, "schedule.warmup_epochs=null", "schedule.warmup_steps=70000"
    ).scaling
    assert first.hours is not None and last.hours is None


def test_epochs_of_small_images_take_less_time():
    """300 epochs at 128 px and 50 at 380, each by the step that its size takes; a size that never
    comes takes none."""
    sizes = "data.image_sizes=[[0, 128], [300, 380]]"
    mixed = planned(GPU, sizes).step
    small, large = (planned(GPU, f"model.image_size={size}").step.seconds for size in (128, 380))
    assert mixed.seconds == large
    assert mixed.hours == pytest.approx(208 * (300 * small + 50 * large) / 3600)
    assert planned(GPU, "run.epochs=100", sizes).step.hours == pytest.approx(
        208 * 100 * small / 3600
    )


def test_beside_gpipe_the_widths_of_1f1b_are_given():
    """Of one stage they are the same."""
    plan = planned(GPU)
    assert [each.stages for each in plan.widest] == [1, 2, 4, 8]
    assert plan.widest_1f1b[0] == plan.widest[0]
    assert plan.widest_1f1b[1].width > (plan.widest[1].width or 0)
    assert planned(GPU, "parallel.schedule=1f1b").widest_1f1b == []

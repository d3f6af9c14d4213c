"""The benchmark of a step: what its sides are given and compute, what claims are made of; its parts
lose no work."""

import math

import pytest
import torch

from benchmarks import step, step_norms, step_parts
from benchmarks.ranks import Ours
from benchmarks.step import LAYOUTS, OURS, OURS_BEFORE
from benchmarks.step_norms import SHAPES
from benchmarks.step_parts import PARTS, Call, Rates
from benchmarks.timm_peer import Loop
from common.errors import ConfigError
from models import shapes
from models.efficientnet import build
from models.native import library
from models.native.block import NativeInverted
from models.normalization import GroupNormAct

CONTIGUOUS, CHANNELS_LAST = LAYOUTS


@pytest.fixture(scope="module")
def native():
    if library.fault():
        pytest.skip(library.fault())


def small(*overrides):
    """B4's kinds of blocks, one of which has a group convolution of 24 channels, on few and small
    images."""
    return step.recipe(
        *step.B4,
        "model.depth=0.5",
        "model.image_size=32",
        "batch.micro=2",
        "batch.global=4",
        *overrides,
    )


def test_claims_are_about_the_layout_in_which_timm_is_faster():
    one = {
        CONTIGUOUS: [4.0] * 3,
        CHANNELS_LAST: [3.0, 9.0, 3.0],
        OURS_BEFORE: [5.0] * 3,
        OURS: [2.0, 3.0, 2.0],
    }
    two = {CONTIGUOUS: [2.0] * 3, CHANNELS_LAST: [3.0] * 3, OURS_BEFORE: [5.0] * 3, OURS: [1.0] * 3}
    large = {
        CONTIGUOUS: [6.0] * 3,
        CHANNELS_LAST: [5.0] * 3,
        OURS_BEFORE: [5.0] * 3,
        OURS: [4.0] * 3,
    }
    made = {claim["name"]: claim for claim in step.step_claims(one, two, large)}
    assert {name: claim["value"] for name, claim in made.items()} == {
        "step_speedup_over_timm": 1.5,
        "step_speedup_over_timm_2_threads": 2.0,
        "step_speedup_over_before": 2.5,
        "b4_step_speedup_over_timm": 1.25,
    }
    assert made["step_speedup_over_timm"]["spread"] == [1.5, 3.0]
    speedups = {
        row["side"]: row["speedup_over_timm"] for row in step.step_rows("step", 1, one, images=64)
    }
    assert speedups[CONTIGUOUS] == 0.75 and speedups[CHANNELS_LAST] == 1.0 and speedups[OURS] == 1.5


def test_with_files_each_side_has_its_fastest_setting(monkeypatch):
    """timm also its fastest layout."""
    fastest = {CONTIGUOUS: (3.0, (1, 1)), CHANNELS_LAST: (2.0, (2, 1)), OURS: (1.0, (1, 2))}
    monkeypatch.setattr(step, "ours", lambda plan: OURS)
    monkeypatch.setattr(
        step,
        "timms",
        lambda plan, layout: next(name for name in LAYOUTS if LAYOUTS[name] == layout),
    )
    monkeypatch.setattr(
        step,
        "seconds_with_files",
        lambda side, setting: fastest[side][0] * (1 if setting == fastest[side][1] else 9),
    )
    rows, ratios = step.measure_files("files", step.SMALL, rounds=3, trials=1)
    assert [(row["side"], row["threads"], row["workers"]) for row in rows] == [
        (CHANNELS_LAST, 2, 1),
        (OURS, 1, 2),
    ]
    assert ratios == [2.0] * 3


@pytest.mark.parametrize("name", LAYOUTS)
def test_timms_model_gets_images_in_its_layout(name):
    plan = step.recipe(*step.SMALL)
    loop = Loop(plan.model, lr=0.1, layout=LAYOUTS[name])
    seen = []
    loop._model.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    loop.update([(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))])
    assert seen[0].is_contiguous(memory_format=LAYOUTS[name])
    assert seen[0].is_contiguous() == (name == CONTIGUOUS)


def test_our_step_is_native_and_the_one_before_is_not(native):
    """With float16 weights, too."""
    for changes, expected in (
        (step.NATIVE, True),
        ((*step.NATIVE, "precision.weights=float16"), True),
        (step.BEFORE, False),
    ):
        block = Ours(small(*changes)).engine._model.block("blocks.1.0")
        assert isinstance(block, NativeInverted) is expected


def test_without_our_functions_there_is_no_figure(monkeypatch):
    monkeypatch.setattr("sys.argv", ["step"])
    monkeypatch.setattr(library, "fault", lambda: "c++: not found")
    with pytest.raises(ConfigError, match=r"benchmarks\.step: no native kernels: c\+\+: not found"):
        step.main()


# ---- Normalisation.


@pytest.mark.parametrize(("model", "overrides"), [("B0 64 px", step.B0), ("B4 224 px", step.B4)])
def test_shapes_of_normalisations_are_those_of_the_models(model, overrides):
    plan = step.recipe(*overrides)
    found = set()

    def see(module, given, made):
        found.add((plan.batch.micro, *made.shape[2:], made.shape[1]))

    with torch.device("meta"):
        built = build(plan.model, 0)
        for module in built.modules():
            if isinstance(module, GroupNormAct) and module.apply_act:
                module.register_forward_hook(see)
        built(
            torch.zeros(
                plan.batch.micro, 3, plan.model.image_size, plan.model.image_size, dtype=torch.uint8
            )
        )
    own = [shape for shape in SHAPES if shape.model == model]
    assert (
        own and {(shape.images, shape.size, shape.size, shape.channels) for shape in own} <= found
    )


def test_both_sides_of_a_normalisation_compute_the_same(native):
    """Within float32's rounding of sums over 64 pixels of 16 channels."""
    sides = step_norms.sides(step_norms.Shape("small", 2, 8, 64))
    torch.testing.assert_close(
        sides["ours, forward"]().permute(0, 3, 1, 2), sides["torch, forward"]()
    )
    dx, dweight, dbias = sides["ours, backward"]()
    expected = sides["torch, backward"]()
    torch.testing.assert_close(
        (dx.permute(0, 3, 1, 2), dweight, dbias), expected, rtol=1e-4, atol=1e-4
    )


def test_claims_about_normalisation_are_those_of_the_worst_shape():
    """Of shapes that no cache holds."""
    good, bad, worst = (
        {"copy": [1.0, 2.0], "ours, forward": [forward, forward], "ours, backward": [6.0, 6.0]}
        for forward in (2.0, 4.0, 9.0)
    )
    times = {SHAPES[0]: worst, SHAPES[4]: good, SHAPES[-1]: bad}
    made = {claim["name"]: claim for claim in step_norms.norm_claims(times)}
    assert made["norm_time_over_copy"]["value"] == 3.0 and not made["norm_time_over_copy"]["holds"]
    assert made["norm_time_over_copy"]["spread"] == [2.0, 4.0]
    assert made["norm_time_over_copy_backward"]["value"] == 4.5
    (copy, *_) = step_norms.rows(SHAPES[0], good)
    assert (copy["time_over_limit"], copy["limit_ms"], copy["mebibytes"]) == (1.0, 1500.0, 8.0)


# ---- Parts.


@pytest.mark.slow
def test_parts_of_a_step_have_all_its_work_and_all_its_time(native):
    """Multiply-adds are those of models/shapes.py, three times forward's, without the gradient of
    the images."""
    plan = small(*step.NATIVE)
    ours = Ours(plan)
    blocks = shapes.blocks(plan.model, 32)
    calls = step_parts.counted(ours)
    forward = sum(block.multiply_adds for block in blocks.values())
    expected = plan.batch.global_ * (3 * forward - blocks["stem"].multiply_adds)
    assert sum(call.multiply_adds for call in calls) == expected
    assert {call.part for call in calls} == {*PARTS} - {step_parts.REST}
    assert all(call.bytes for call in calls)

    steps = [step_parts.profiled(ours) for _ in range(2)]
    assert all(seconds > 0 for step in steps for seconds in step.values())
    rows = step_parts.rows("parts", steps, calls, Rates(1e10, {2**20: 1e10}))
    *parts, whole = rows
    assert [row["side"] for row in rows] == [*PARTS, step_parts.ALL] and whole["share"] == 1
    assert math.isclose(sum(row["million_multiply_adds"] or 0 for row in parts), expected / 1e6)
    assert math.isclose(sum(row["limit_ms"] or 0 for row in parts), whole["limit_ms"])


def test_a_call_moves_what_it_reads_and_writes(native):
    """An addition in place reads and writes its tensor; memory that is given for an output is not
    read."""
    calls = []
    y = torch.ones(1, 2, 2, 16)
    gate = torch.ones(1, 16)
    step_parts._named("multiply_", step_parts.SQUEEZE, calls)(y, gate)
    norm = library.Norm(library.group_moments(y, 4, 1e-3), torch.ones(16), torch.ones(16))
    by_group = torch.zeros(1, 4, 2)
    step_parts._named("input_gradient", step_parts.NORMS, calls)(
        library.LINEAR, y, norm, by_group, y, out=y
    )
    assert [call.bytes for call in calls] == [4 * (64 + 16 + 64), 4 * (3 * 64 + 8 + 16 + 16 + 8)]


def test_the_limit_of_a_call_is_its_arithmetic_or_its_memory():
    """Memory at the rate of the copy that is nearest in size."""
    rates = Rates(multiply_adds=1e9, bytes={10**3: 1e9, 10**6: 1e8})
    assert rates.limit(Call("", 2000, 1000)) == pytest.approx(2e-6)
    assert rates.limit(Call("", 500, 1000)) == pytest.approx(1e-6)
    assert rates.limit(Call("", 500, 10**5)) == pytest.approx(1e-3)

"""What a recipe may say: defaults, types, ranges, and the keys that depend on each other."""

import itertools
from typing import get_args

import pytest
import timm
from pydantic import ValidationError

from recipe.config import ALTERNATIVES, Data, Model, Parallel, Recipe, Run, Schedule
from recipe.errors import ConfigError
from recipe.network import SCALES

SECTIONS = {name: field.annotation for name, field in Recipe.model_fields.items()}


def test_every_section_and_key_says_what_it_is():
    for section in SECTIONS.values():
        assert section.__doc__.endswith(".")
        for key, field in section.fields().items():
            assert field.description and not field.description.endswith("."), key


@pytest.mark.parametrize(
    ("override", "inside", "outside"),
    [
("run.seed", "0", "-1"), ("run.steps", "1", "0"), ("run.images", "1", "0"), ("run.epochs", "1e-300", "0"),
        ("model.width", "1e-300", "0"), ("model.depth", "1e-300", "0.0"), ("model.group_size", "1", "0"),
        ("model.expansion", "1", "0"), ("model.norm_groups", "1", "0"), ("model.norm_eps", "1e-300", "0"),
        ("model.image_size", "8", "7"), ("model.dropout", "0", "-1e-9"), ("model.drop_path", "0", "-1e-9"),
        ("model.classes", "2", "1"), ("batch.global", "1", "0"), ("batch.micro", "1", "0"),
        ("batch.evaluation", "1", "0"), ("parallel.stages", "1", "0"), ("parallel.replicas", "1", "0"),
        ("precision.loss_scale", "1e-300", "0"), ("precision.max_skipped_steps", "0", "-1"),
        ("optimizer.momentum", "0", "-1e-9"), ("optimizer.weight_decay", "0", "-1e-9"),
        ("optimizer.trust_coefficient", "1e-300", "0"), ("optimizer.skip_lr_scale", "1e-300", "0"),
        ("schedule.peak", "1e-300", "0"), ("schedule.peak_per_image", "1e-300", "0"),
        ("schedule.warmup_epochs", "0", "-1e-9"), ("schedule.warmup_steps", "0", "-1"),
        ("schedule.warmup_images", "0", "-1"), ("schedule.power", "1e-300", "0"),
        ("schedule.final_ratio", "0", "-1e-9"), ("data.train_images", "1", "0"), ("data.workers", "0", "-1"),
        ("data.prefetch", "1", "0"), ("data.flip", "0", "-1e-9"), ("data.crop_fraction", "1e-300", "0"),
        ("data.label_smoothing", "0", "-1e-9"), ("data.crop_area", "[1e-300, 1]", "[0, 1]"),
        ("data.crop_aspect", "[1e-300, 1]", "[0, 1]"), ("log.every_steps", "1", "0"),
        ("evaluation.every_epochs", "1e-300", "0"), ("checkpoint.every_epochs", "1e-300", "0"),
        ("checkpoint.keep_last", "2", "1"), ("run.seed", str(2**63 - 1), str(2**63)),
        ("model.dropout", "0.999", "1"), ("model.drop_path", "0.999", "1"), ("optimizer.momentum", "0.999", "1"),
        ("schedule.final_ratio", "1", "1.001"), ("data.flip", "1", "1.001"), ("data.crop_fraction", "1", "1.001"),
        ("data.label_smoothing", "0.999", "1"), ("data.crop_area", "[1, 1]", "[1, 1.001]"),
        ("data.crop_aspect", "[2, 2]", "[2, 1]"), ("checkpoint.every_epochs", "1", "1.001"),
    ],
)  # fmt: skip
def test_ends_of_ranges(tiny, override, inside, outside):
    tiny(f"{override}={inside}")
    with pytest.raises(ConfigError, match=rf"^command line: {override}: "):
        tiny(f"{override}={outside}")


@pytest.mark.parametrize("section", SECTIONS)
def test_numbers_are_finite(section, tiny):
    """An infinity in YAML is a number too large for a float, such as 1e999."""
    for kind in getattr(SECTIONS[section], "kinds", {None: SECTIONS[section]}).values():
        named = [f"{section}.{kind.tag}={kind.default_name()}"] if hasattr(kind, "tag") else []
        numbers = {key: (field.annotation, *get_args(field.annotation)) for key, field in kind.fields().items()}
        for key, value in itertools.product((key for key in numbers if float in numbers[key]), ("1e999", "-1e999")):
            with pytest.raises(ConfigError, match=f"^command line: {section}.{key}: must be "):
                tiny(*named, f"{section}.{key}={value}")


@pytest.mark.parametrize("name", SCALES)
def test_resolutions_are_timms(name):
    """Width and depth are compared in tests/models/test_efficientnet.py, by the parameters they lead to."""
    _, height, width = timm.get_pretrained_cfg(f"tf_{name}").input_size
    assert Model(name=name).image_size == height == width


def test_the_name_scales_what_is_not_given():
    assert (Model().width, Model().depth, Model().image_size, Model().dropout) == (1.4, 1.8, 380, 0.4)
    given = Model(name="efficientnet_b0", depth=0.5, image_size=None, dropout=0.0)
    assert (given.width, given.depth, given.image_size, given.dropout) == (1.0, 0.5, 224, 0.0)


def test_cut_points_are_one_fewer_than_stages_or_left_to_the_program():
    assert Parallel(stages=3, split="auto") == Parallel(stages=3, split=None) == Parallel(stages=3)
    assert Parallel(stages=3).model_dump()["split"] == "auto"
    assert Parallel(stages=3, split=["blocks.1.0", "blocks.3.0"]).stages == 3
    assert Parallel(stages=1, split=[]).parts == 1
    for stages, split in ((1, ["blocks.3.0"]), (3, ["blocks.3.0"]), (2, ["blocks.1.0", "blocks.3.0"])):
        with pytest.raises(ValidationError, match=f"split names {len(split)} .* {stages} stages need {stages - 1}"):
            Parallel(stages=stages, split=split)


def test_an_interleaved_schedule_has_several_parts_on_each_device():
    assert Parallel(stages=2, schedule="interleaved").virtual_stages == 2
    assert Parallel(stages=2, schedule="interleaved", virtual_stages=3).parts == 6
    for faulty, message in (
        ({"stages": 1, "schedule": "interleaved"}, "needs stages of 2 or more"),
        ({"stages": 2, "virtual_stages": 2}, "virtual_stages goes with schedule interleaved"),
        ({"stages": 2, "schedule": "interleaved", "split": ["b"]}, "split names 1 .* 2 stages x 2 virtual need 3"),
    ):
        with pytest.raises(ValidationError, match=message):
            Parallel(**faulty)


def test_recomputation_is_a_switch_or_a_list_of_blocks():
    assert Parallel(recompute=["stem", "head"]).recompute == ["stem", "head"]
    for faulty in ("all", 1, [3], None):
        with pytest.raises(ValidationError, match="must be true, false or a list of blocks"):
            Parallel(recompute=faulty)


def test_auto_replicas_are_null_in_the_program_and_auto_in_files():
    assert Parallel(replicas="auto") == Parallel(replicas=None) == Parallel()
    assert Parallel().model_dump()["replicas"] == "auto"
    assert Parallel(replicas=64).model_dump()["replicas"] == 64


@pytest.mark.parametrize(
    ("section", "keys", "rest"),
    [
        (Run, ("epochs", "steps", "images"), {}),
        (Schedule, ("peak", "peak_per_image"), {}),
        (Schedule, ("warmup_epochs", "warmup_steps", "warmup_images"), {"peak": 1}),
    ],
)
def test_of_alternatives_one_is_given(section, keys, rest):
    for one, other in zip(keys, keys[1:]):
        assert getattr(section(**rest, **{one: 2}), one) == 2
        with pytest.raises(ValidationError, match=f"{one} and {other} are both given; keep one"):
            section(**rest, **{one: 2, other: 2})
    if rest:
        section(**rest)
    else:
        with pytest.raises(ValidationError, match=f"one of {', '.join(keys)} is needed"):
            section()


def test_alternatives_name_keys_that_exist():
    names = {f"{section}.{key}" for section, model in SECTIONS.items() for key in model.fields()}
    assert all(name in names for group in ALTERNATIVES for name in group)
    assert all(len({name.split(".")[0] for name in group}) == 1 for group in ALTERNATIVES)


def test_a_recipe_cannot_be_changed(tiny):
    with pytest.raises(ValidationError, match="frozen"):
        tiny().run.seed = 1


def test_a_run_is_named_by_letters_digits_and_harmless_signs(tiny):
    """The name becomes a folder below runs/: it must not lead out of there, nor hide."""
    for name in ("b4_g16", "a", "6144", "α-1.5"):
        assert tiny(f"run.name='{name}'").run.name == name
    for name in ("", "..", ".", ".hidden", "-x", "a/b", "a b", "a\n", "..\\\\x"):
        with pytest.raises(ConfigError, match=r"^command line: run\.name: must match pattern"):
            tiny(f'run.name="{name}"'.replace("\n", "\\n"))


def test_pairs_and_triples_are_refused_by_the_key_that_is_wrong():
    with pytest.raises(ValidationError, match=r"std\n.*every value must be positive"):
        Model(std=(0.2, 0.0, 0.2), mean=(-1, 0, 1))
    with pytest.raises(ValidationError, match=r"crop_area\n.*\[0.5, 1.5\]: a crop cannot exceed the image"):
        Data(crop_area=[0.5, 1.5])
    with pytest.raises(ValidationError, match=r"crop_aspect\n.*\[2.0, 1.0\] must be \[low, high\]"):
        Data(crop_aspect=[2, 1])

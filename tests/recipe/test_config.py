"""What a recipe may say: defaults, ranges, and the keys that depend on each other. Refusals are in test_refusals.py."""

import pytest
import timm
from pydantic import ValidationError

from recipe.config import ALTERNATIVES, Model, Parallel, Recipe, Run
from recipe.errors import ConfigError
from recipe.network import SCALES

SECTIONS = {name: field.annotation for name, field in Recipe.model_fields.items()}


def test_every_section_and_key_has_a_description():
    for section in SECTIONS.values():
        assert section.__doc__.endswith(".")
        for key, field in section.fields().items():
            assert field.description and not field.description.endswith("."), key


# (a value just inside, one just outside): the keys whose range ends there.
ENDS = {
    ("1", "0"): [
        "run.steps", "run.images", "model.group_size", "model.expansion", "model.norm_groups", "batch.global",
        "batch.micro", "batch.evaluation", "parallel.stages", "parallel.replicas", "data.train_images", "data.prefetch",
        "exchange.density", "log.every_steps",
    ],
    ("1e-300", "0"): [
        "run.epochs", "model.width", "model.depth", "model.norm_eps", "precision.loss_scale", "schedule.peak",
        "optimizer.trust_coefficient", "optimizer.skip_lr_scale", "schedule.peak_per_image", "schedule.power",
        "data.crop_fraction", "evaluation.every_epochs", "checkpoint.every_epochs",
    ],
    ("0", "-1"): [
        "run.seed", "precision.max_skipped_steps", "schedule.warmup_steps", "schedule.warmup_images", "data.workers",
        "exchange.delay",
    ],
    ("0", "-1e-9"): [
        "model.dropout", "model.drop_path", "optimizer.momentum", "optimizer.weight_decay", "schedule.warmup_epochs",
        "schedule.final_ratio", "data.flip", "data.label_smoothing",
    ],
    ("0.999", "1"): [
        "model.dropout", "model.drop_path", "optimizer.momentum", "average.step_decay", "data.label_smoothing",
    ],
    ("1", "1.001"): ["schedule.final_ratio", "data.flip", "data.crop_fraction", "checkpoint.every_epochs"],
    ("[1e-300, 1]", "[0, 1]"): ["data.crop_area", "data.crop_aspect"],
    ("[1, 1]", "[1, 1.001]"): ["data.crop_area"],
    ("2", "1"): ["model.classes", "checkpoint.keep_last"],
    ("8", "7"): ["model.image_size"],
    ("32", "30"): ["ipu.io_tiles"],
    ("192", "194"): ["ipu.io_tiles"],
    (str(2**63 - 1), str(2**63)): ["run.seed"],
}  # fmt: skip


@pytest.mark.parametrize(("inside", "outside"), ENDS)
def test_ends_of_ranges(tiny, inside, outside):
    for key in ENDS[inside, outside]:
        tiny(f"{key}={inside}")
        with pytest.raises(ConfigError, match=rf"^command line: {key}: "):
            tiny(f"{key}={outside}")


@pytest.mark.parametrize("name", SCALES)
def test_resolutions_are_timms(name):
    """Width and depth are compared in tests/models/test_efficientnet.py, by the parameters they lead to."""
    _, height, width = timm.get_pretrained_cfg(f"tf_{name}").input_size
    assert Model(name=name).image_size == height == width


def test_the_name_scales_what_is_not_given():
    assert (Model().width, Model().depth, Model().image_size, Model().dropout) == (1.4, 1.8, 380, 0.4)
    given = Model(name="efficientnet_b0", depth=0.5, image_size=None, dropout=0.0)
    assert (given.width, given.depth, given.image_size, given.dropout) == (1.0, 0.5, 224, 0.0)


def test_auto_is_null_in_the_program_and_auto_in_files():
    assert Parallel(stages=3, split="auto") == Parallel(stages=3, split=None) == Parallel(stages=3)
    assert Parallel(replicas="auto") == Parallel(replicas=None) == Parallel()
    assert Parallel(stages=3).model_dump()["split"] == Parallel().model_dump()["replicas"] == "auto"
    assert Parallel(replicas=64).model_dump()["replicas"] == 64


def test_an_interleaved_schedule_has_several_parts_on_each_device():
    assert Parallel(stages=2, schedule="interleaved").virtual_stages == 2
    assert Parallel(stages=2, schedule="interleaved", virtual_stages=3).parts == 6
    assert Parallel(stages=3, split=["blocks.1.0", "blocks.3.0"]).parts == 3 and Parallel(split=[]).parts == 1
    assert Parallel(recompute=["stem", "head"]).recompute == ["stem", "head"]


def test_alternatives_are_keys_of_one_section_each():
    for section, *keys in [[group[0].split(".")[0], *group] for group in ALTERNATIVES]:
        assert all(key in [f"{section}.{name}" for name in SECTIONS[section].fields()] for key in keys)
    with pytest.raises(ValidationError, match="one of epochs, steps, images is needed, found epochs and steps"):
        Run(epochs=2, steps=2)


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

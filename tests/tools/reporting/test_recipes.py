"""Settings are found by comparing whole recipes, not lists of keys."""

import pytest

from recipe import loading
from recipe.config import Recipe
from tests.conftest import QUICKSTART, ROOT
from tools.reporting.recipes import differences, settings, text


@pytest.mark.parametrize("name", ["quickstart", "pod16", "gpu", "ablation/bs768_rmsprop", "finetune"])
def test_the_settings_alone_make_the_recipe_again(name):
    """Laid over nothing but the names, they give an equal recipe: none is missing."""
    recipe = loading.load(ROOT / "configs" / f"{name}.yaml")
    found = settings(recipe)
    names = [f"{part}.name={getattr(recipe, part).name}" for part in ("run", "model", "optimizer", "schedule")]
    rest = [f"{setting[0]}={quoted(setting[1])}" for setting in found if not setting[0].endswith(".name")]
    assert loading.loads("", "nothing", [*names, *rest]) == recipe
    assert all(setting[1] != setting[2] and setting[3] for setting in found)


def quoted(value):
    return f"'{value}'" if value.replace(".", "", 1).isalpha() and value not in ("true", "false", "null") else value


def test_the_defaults_are_those_of_the_name():
    """B0's own size is no setting of a recipe that names B0, nor is SGD's momentum of one that names SGD."""
    plain = loading.loads(
        "", "x", ["run.epochs=1", "schedule.peak=1", "model.name=efficientnet_b0", "optimizer.name=sgd"]
    )
    keys = {setting[0] for setting in settings(plain)}
    assert keys == {"run.epochs", "schedule.peak", "model.name", "optimizer.name"}
    assert isinstance(plain, Recipe) and plain.model.image_size == 224


def test_only_the_keys_that_differ_are_listed():
    first, second, third = (
        loading.load(QUICKSTART, overrides)
        for overrides in (
            [],
            ["run.name=b", "run.output=/elsewhere"],
            ["optimizer.momentum=0.8", "data.crop_area=[0.5, 1]"],
        )
    )
    assert differences([first, second]) == []
    assert differences([first, second, third]) == [
        ("optimizer.momentum", ["0.9", "0.9", "0.8"]),
        ("data.crop_area", ["[0.75, 1]", "[0.75, 1]", "[0.5, 1]"]),
    ]


def test_a_peak_that_follows_the_batch_is_listed():
    overrides = ["schedule.batch_rule=linear", "schedule.reference_batch=64"]
    small, large = (loading.load(QUICKSTART, [*overrides, f"batch.global={size}"]) for size in (64, 128))
    assert differences([small, large]) == [
        ("batch.global", ["64", "128"]),
        ("peak learning rate, as it follows", ["2", "4"]),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "null"), (True, "true"), (36.0, "36"), (1e-5, "1e-05"), ([[0, 1.5]], "[[0, 1.5]]"), ("a", "a")],
)
def test_values_are_shown_as_a_recipe_has_them(value, expected):
    assert text(value) == expected

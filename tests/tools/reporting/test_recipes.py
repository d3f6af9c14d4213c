"""Settings are found by comparing whole recipes, not lists of keys."""

import pytest

from recipe import loading
from tests.conftest import QUICKSTART, ROOT
from tools.reporting.sections import differences, settings


@pytest.mark.parametrize("name", ["quickstart", "pod16", "ablation/bs768_rmsprop"])
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
    overrides = ["run.epochs=1", "schedule.peak=1", "model.name=efficientnet_b0", "optimizer.name=sgd"]
    found = {setting[0] for setting in settings(loading.loads("", "x", overrides))}
    assert found == {override.partition("=")[0] for override in overrides}


def test_only_the_keys_that_differ_are_listed_and_a_peak_that_follows_the_batch():
    rule = ["schedule.batch_rule=linear", "schedule.reference_batch=64"]
    first, second, third = (
        loading.load(QUICKSTART, [*rule, *overrides])
        for overrides in (
            ["batch.global=64"],
            ["batch.global=64", "run.name=b", "run.output=/elsewhere"],
            ["batch.global=128", "optimizer.momentum=0.8", "data.crop_area=[0.5, 1]", "optimizer.clip_norm=1e-5"],
        )
    )
    assert differences([first, second]) == []
    assert differences([first, second, third]) == [
        ("batch.global", ["64", "64", "128"]),
        ("optimizer.clip_norm", ["null", "null", "1e-05"]),
        ("optimizer.momentum", ["0.9", "0.9", "0.8"]),
        ("data.crop_area", ["[0.75, 1]", "[0.75, 1]", "[0.5, 1]"]),
        ("peak learning rate, as it follows", ["2", "2", "4"]),
    ]

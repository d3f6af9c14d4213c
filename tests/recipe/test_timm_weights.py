"""Keys that follow from the name of timm's weights: against timm's own models."""

import re

import pytest
import timm
import torch
from timm.data import resolve_data_config
from timm.layers import Conv2dSame

from common.errors import ConfigError
from models.families import build
from recipe import loading, timm_models, timm_weights
from tests.conftest import QUICKSTART
from training.weights import StoredWeights, fitted

PRETRAINED = [
    name
    for name in timm.list_pretrained("*")
    if re.match("(tf_)?efficientnet_b[0-7](?!_pruned)", name)
]


def of(name, *overrides):
    return loading.load(QUICKSTART, [f"model.init_from=timm:{name}", *overrides])


# Weights of one architecture may have other means than those that timm takes by default.
OTHERS = [
    "mobilenetv3_large_100.miil_in21k_ft_in1k",
    "mobilenetv3_large_100.ra4_e3600_r224_in1k",
    "convnext_base.clip_laion2b_augreg_ft_in12k_in1k",
]
WITHOUT_A_TAG = [*(f"efficientnet_b{size}" for size in range(6)), "resnet18"]


@pytest.mark.parametrize("name", [*PRETRAINED, *OTHERS, *WITHOUT_A_TAG])
def test_means_are_those_of_timms_registry(name):
    expected = timm.get_pretrained_cfg(name)
    model = of(name).model
    assert (model.mean, model.std) == (expected.mean, expected.std)


def test_means_are_printed_and_those_of_an_unknown_tag_follow_the_name():
    recipe = of(OTHERS[0])
    line = timm_weights.preparation(recipe.model, recipe.data)
    assert "model.mean=[0, 0, 0], model.std=[1, 1, 1]" in line
    assert of("tf_efficientnet_b1.mine:/tmp/w.pth").model.mean == (0.485, 0.456, 0.406)
    assert of("efficientnet_b1.ra4.mine:/tmp/w.pth").model.mean == (0.5, 0.5, 0.5)


def test_means_of_weights_in_a_lower_layer_do_not_stay(tmp_path):
    lower = tmp_path / "lower.yaml"
    lower.write_text(
        f"extends: {QUICKSTART}\nmodel: {{init_from: 'timm:tf_efficientnet_b5.ap_in1k'}}"
    )
    model = loading.load(lower, ["model.init_from=timm:efficientnet_b0.ra_in1k"]).model
    assert model.mean == timm.get_pretrained_cfg("efficientnet_b0.ra_in1k").mean
    assert model.std == timm.get_pretrained_cfg("efficientnet_b0.ra_in1k").std


@pytest.mark.parametrize(
    "name", ["efficientnet_b0.ra_in1k", "tf_efficientnet_b0_ns", "tf_efficientnet_b1.ap_in1k"]
)
def test_the_model_is_timms(name):
    """Parameters fit with no other key, and padding and epsilon are the layers' own."""
    recipe = of(name, "model.classes=1000")
    theirs = timm.create_model(name.partition(".")[0] if "_ns" not in name else name[:-3])
    ours = build(recipe.model, 0)
    shapes = {each: tuple(tensor.shape) for each, tensor in ours.state_dict().items()}
    stored = StoredWeights("x", theirs.state_dict(), None, None)
    tensors, fresh = fitted(stored, shapes, recipe.model, new_classifier=False)
    assert tensors.keys() == shapes.keys() and fresh == []
    assert recipe.model.norm_eps == theirs.bn1.eps
    assert (recipe.model.padding == "same") == isinstance(theirs.conv_stem, Conv2dSame)
    ours.load_state_dict(tensors)
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    mean, std = (
        torch.tensor(each).view(3, 1, 1) * 255 for each in (recipe.model.mean, recipe.model.std)
    )
    with torch.no_grad():
        expected = theirs.eval()((images - mean) / std)
        # Float32 through some eighty layers.
        torch.testing.assert_close(ours.eval()(images), expected, rtol=1e-3, atol=1e-4)


def test_keys_of_the_same_layer_win_and_a_file_may_follow_the_name():
    recipe = of("tf_efficientnet_b4:/tmp/w.pth", "model.image_size=64", "model.dropout=0.1")
    assert (recipe.model.name, recipe.model.width, recipe.model.image_size) == (
        "efficientnet_b4",
        1.4,
        64,
    )
    assert timm_weights.parse(recipe.model.init_from) == ("tf_efficientnet_b4", "/tmp/w.pth")
    assert loading.loads(loading.dump(recipe), "again") == recipe


@pytest.mark.parametrize(
    "name", ["resnet18.a1_in1k", "efficientnet_b1_pruned.in1k", "tf_efficientnet_b8"]
)
def test_weights_of_other_models_name_models_of_timm(name):
    """Their size is that of timm's scores, whatever the recipe had before."""
    recipe = of(name, "model.classes=7")
    assert (recipe.model.name, recipe.model.architecture) == ("timm", name.partition(".")[0])
    configuration = timm.get_pretrained_cfg(name)
    assert (
        recipe.model.image_size == (configuration.test_input_size or configuration.input_size)[-1]
    )
    assert loading.loads(loading.dump(recipe), "again") == recipe


def test_a_recipe_may_want_timms_own_efficientnet():
    recipe = loading.load(
        QUICKSTART, ["model.name=timm", "model.init_from=timm:efficientnet_b0.ra_in1k"]
    )
    assert (recipe.model.name, recipe.model.architecture) == ("timm", "efficientnet_b0")


def test_weights_of_models_that_timm_does_not_have_are_refused():
    with pytest.raises(ConfigError, match="timm has no model 'tf'"):
        of("tf")


@pytest.mark.parametrize(
    "name", timm.list_pretrained("*resnet*") + timm.list_pretrained("*efficientnet_b*")
)
def test_images_are_those_of_timms_scores(name):
    """Against timm's own reading of its configuration, as its validate.py asks for it."""
    configuration = timm.get_pretrained_cfg(name).to_dict()
    expected = resolve_data_config(pretrained_cfg=configuration, use_test_size=True)
    scoring = timm_models.scoring(name)
    assert scoring.test_size == expected["input_size"][-1]
    assert scoring.train_size == configuration["input_size"][-1]
    found = (scoring.interpolation, scoring.crop_fraction, scoring.crop_mode)
    assert found == (expected["interpolation"], expected["crop_pct"], expected["crop_mode"])


def test_a_run_trains_at_the_weights_training_size_and_scores_at_their_test_size():
    recipe = of("resnet10t.c3_in1k", "model.classes=7")
    data = recipe.data
    assert (recipe.model.image_size, data.image_sizes) == (224, [[0, 176]])
    assert (data.interpolation, data.crop_fraction, data.crop_mode) == ("bicubic", 0.95, "center")
    assert data.crop_rounding == "down"
    line = timm_weights.preparation(recipe.model, data)
    assert line.startswith(
        "images as timm's resnet10t.c3_in1k: model.image_size=224, model.mean=[0.485, "
    )
    assert "given" not in line and "data.image_sizes=[[0, 176]]" in line


def test_keys_that_the_user_gives_win_and_are_named():
    """On the command line in any order, and beside the weights in a file."""
    given = ("data.crop_fraction=0.9", "model.image_size=64")
    recipe = of("resnet10t.c3_in1k", *given)
    assert (recipe.model.image_size, recipe.data.image_sizes, recipe.data.crop_fraction) == (
        64,
        None,
        0.9,
    )
    assert recipe.data.interpolation == "bicubic"
    line = timm_weights.preparation(recipe.model, recipe.data)
    assert "given: model.image_size=64 (timm: 224), data.crop_fraction=0.9 (timm: 0.95)" in line
    assert loading.loads(loading.dump(recipe), "again") == recipe
    before = loading.load(QUICKSTART, [*given, "model.init_from=timm:resnet10t.c3_in1k"])
    assert before == recipe


def test_a_file_that_names_weights_may_give_keys_beside_them(tmp_path):
    path = tmp_path / "mine.yaml"
    model = "model: {init_from: 'timm:resnet10t.c3_in1k', image_size: 96}"
    path.write_text(f"extends: {QUICKSTART}\ndata: {{interpolation: bilinear}}\n{model}\n")
    recipe = loading.load(path)
    assert (recipe.model.image_size, recipe.data.image_sizes, recipe.data.interpolation) == (
        96,
        None,
        "bilinear",
    )
    assert recipe.data.crop_fraction == 0.95


def test_a_run_that_began_before_these_keys_keeps_its_images():
    """config.yaml of such a run names its weights and all keys but these."""
    old = loading.load(
        QUICKSTART, ["model.init_from=timm:resnet10t.c3_in1k", "model.image_size=176"]
    )
    text = loading.dump(old)
    for key in ("interpolation", "crop_mode", "crop_rounding"):
        text = re.sub(rf"\n  {key}: \w+", "", text)
    data = loading.loads(text, "config.yaml").data
    assert (data.interpolation, data.crop_mode, data.crop_rounding) == (
        "bilinear",
        "center",
        "nearest",
    )


def test_names_of_before_and_unknown_tags():
    assert timm_models.scoring("tf_efficientnet_b4_ns") == timm_models.scoring(
        "tf_efficientnet_b4.ns_jft_in1k"
    )
    assert timm_models.scoring("resnet10t.mine") is None
    recipe = of("resnet10t.mine:/tmp/w.pth")
    assert recipe.data.interpolation == "bilinear"
    assert timm_weights.preparation(recipe.model, recipe.data) is None


def test_weights_alone_make_a_recipe_for_scoring():
    recipe = loading.of_weights("timm:resnet10t.c3_in1k", ["data.root=/imagenet"])
    assert (recipe.model.name, recipe.model.architecture, recipe.model.classes) == (
        "timm",
        "resnet10t",
        1000,
    )
    assert (recipe.data.source, recipe.data.root, recipe.model.image_size) == (
        "folder",
        "/imagenet",
        224,
    )
    assert loading.of_weights("timm:tf_efficientnet_b0.ap_in1k").model.mean == (0.5, 0.5, 0.5)
    with pytest.raises(ConfigError, match="timm has no model 'tf'"):
        loading.of_weights("timm:tf")

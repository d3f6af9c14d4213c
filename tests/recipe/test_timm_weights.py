"""Keys that follow from the name of timm's weights: against timm's own models."""

import re

import pytest
import timm
import torch
from timm.layers import Conv2dSame

from common.errors import ConfigError
from models.families import build
from recipe import loading, timm_weights
from tests.conftest import QUICKSTART
from training.weights import StoredWeights, fitted

PRETRAINED = [name for name in timm.list_pretrained("*") if re.match("(tf_)?efficientnet_b[0-7](?!_pruned)", name)]


def of(name, *overrides):
    return loading.load(QUICKSTART, [f"model.init_from=timm:{name}", *overrides])


@pytest.mark.parametrize("name", PRETRAINED)
def test_means_are_those_of_timms_registry(name):
    expected, model = timm.get_pretrained_cfg(name), of(name).model
    assert (model.mean, model.std) == (expected.mean, expected.std)


@pytest.mark.parametrize("name", ["efficientnet_b0.ra_in1k", "tf_efficientnet_b0_ns", "tf_efficientnet_b1.ap_in1k"])
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
    mean, std = (torch.tensor(each).view(3, 1, 1) * 255 for each in (recipe.model.mean, recipe.model.std))
    with torch.no_grad():
        expected = theirs.eval()((images - mean) / std)
        # Float32 through some eighty layers.
        torch.testing.assert_close(ours.eval()(images), expected, rtol=1e-3, atol=1e-4)


def test_keys_of_the_same_layer_win_and_a_file_may_follow_the_name():
    recipe = of("tf_efficientnet_b4:/tmp/w.pth", "model.image_size=64", "model.dropout=0.1")
    assert (recipe.model.name, recipe.model.width, recipe.model.image_size) == ("efficientnet_b4", 1.4, 64)
    assert timm_weights.parse(recipe.model.init_from) == ("tf_efficientnet_b4", "/tmp/w.pth")
    assert loading.loads(loading.dump(recipe), "again") == recipe


@pytest.mark.parametrize("name", ["resnet18.a1_in1k", "efficientnet_b1_pruned.in1k", "tf_efficientnet_b8"])
def test_weights_of_other_models_name_models_of_timm(name):
    """Their size and means are the architecture's, whatever the recipe had before."""
    recipe = of(name, "model.classes=7")
    assert (recipe.model.name, recipe.model.architecture) == ("timm", name.partition(".")[0])
    assert recipe.model.image_size == timm.get_pretrained_cfg(recipe.model.architecture).input_size[-1]
    assert loading.loads(loading.dump(recipe), "again") == recipe


def test_a_recipe_may_want_timms_own_efficientnet():
    recipe = loading.load(QUICKSTART, ["model.name=timm", "model.init_from=timm:efficientnet_b0.ra_in1k"])
    assert (recipe.model.name, recipe.model.architecture) == ("timm", "efficientnet_b0")


def test_weights_of_models_that_timm_does_not_have_are_refused():
    with pytest.raises(ConfigError, match="timm has no model 'tf'"):
        of("tf")

"""Which normalisation stands where in the models, which parameters are its, and half precision with each."""

import math

import pytest
import torch

from models.costs import multiply_adds
from models.efficientnet import build
from models.normalization import NORMS, BatchNormAct, GroupNormAct, ProxyNormAct
from recipe.config import Model

VARIANTS = [{"norm": "group"}, {"norm": "layer"}, {"norm": "batch"}, {"norm": "layer", "proxy_norm": True}]


def on_meta(**section):
    """The model's shapes without its numbers."""
    with torch.device("meta"):
        return build(Model(**section), seed=0)


def kinds(model):
    """(with activation, without): the norms of a model, told apart by timm's names."""
    norms = {name: module for name, module in model.named_modules() if isinstance(module, NORMS)}
    assert all(name.split(".")[-1].startswith("bn") for name in norms)
    plain = {name for name in norms if name.endswith("bn3") or (name.startswith("blocks.0.") and name.endswith("bn2"))}
    return [norms[name] for name in norms if name not in plain], [norms[name] for name in norms if name in plain]


@pytest.mark.parametrize(("norm", "groups"), [("group", 8), ("layer", 1)])
def test_group_and_layer_normalisation_follow_the_recipe(norm, groups):
    active, plain = kinds(on_meta(norm=norm, norm_groups=8, norm_eps=0.25))
    assert (len(active), len(plain)) == (64, 32)
    for module in active + plain:
        assert type(module) is GroupNormAct
        assert (module.num_groups, module.eps, module.apply_act) == (groups, 0.25, module in active)
        assert module.bias is not None


def test_batch_normalisation_follows_the_recipe():
    active, plain = kinds(on_meta(norm="batch", norm_groups=5, norm_eps=0.25, norm_momentum=0.125))
    assert (len(active), len(plain)) == (64, 32)
    for module in active + plain:
        assert type(module) is BatchNormAct
        assert (module.eps, module.momentum, module.apply_act) == (0.25, 0.125, module in active)


@pytest.mark.parametrize(("norm", "groups"), [("group", 8), ("layer", 1)])
def test_proxy_normalisation_stands_where_an_activation_does(norm, groups):
    """And where none follows, the bias goes, as in the published code."""
    active, plain = kinds(on_meta(norm=norm, norm_groups=8, norm_eps=0.25, proxy_norm=True, proxy_eps=0.5))
    assert (len(active), len(plain)) == (64, 32)
    for module in active:
        assert type(module) is ProxyNormAct
        assert (module.num_groups, module.eps, module.proxy_eps) == (groups, 0.25, 0.5)
    for module in plain:
        assert type(module) is GroupNormAct
        assert (module.num_groups, module.eps, module.apply_act, module.bias) == (groups, 0.25, False, None)


@pytest.mark.parametrize("section", VARIANTS, ids=str)
def test_norms_own_every_parameter_with_one_axis_but_the_biases_of_convolutions_and_classifier(section):
    """What an optimizer may treat on its own: also the proxy's parameters."""
    model = on_meta(**section)
    owned = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, NORMS)
        for name, _ in module.named_parameters(recurse=False)
    }
    flat = {name for name, parameter in model.named_parameters() if parameter.ndim == 1}
    assert {name for name in flat - owned if not name.endswith((".se.conv_reduce.bias", ".se.conv_expand.bias"))} == {
        "head.classifier.bias"
    }
    assert owned <= flat
    assert ("head.bn2.proxy_shift" in owned) == section.get("proxy_norm", False)


@pytest.mark.parametrize("section", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_near_float32(dtype, section):
    """Twenty layers of rounding at eps / 2 that add up at random: sqrt(20) eps of the logits' spread, times a
    margin of 8 for activations larger than the logits, in training and evaluation."""
    images = torch.randint(0, 256, (4, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    recipe = Model(name="efficientnet_b0", width=0.5, depth=0.1, dropout=0.0, drop_path=0.0, **section)
    model, half = (build(recipe, seed=0) for _ in range(2))
    half.to(dtype)
    with torch.no_grad():
        for training in (True, False):
            expected, actual = model.train(training)(images), half.train(training)(images)
            assert actual.dtype == dtype
            error = (actual.float() - expected).abs().max()
            assert error < 8 * math.sqrt(20) * torch.finfo(dtype).eps * expected.std()


@pytest.mark.parametrize("section", VARIANTS, ids=str)
def test_every_variant_can_be_counted_without_numbers(section):
    """On the meta device, also half: the multiply-adds are those of the convolutions, whatever normalises."""
    model = on_meta(name="efficientnet_b0", **section).half()
    assert multiply_adds(model, 64) == multiply_adds(on_meta(name="efficientnet_b0"), 64)
    assert model(torch.zeros(2, 3, 64, 64, dtype=torch.uint8, device="meta")).dtype == torch.float16

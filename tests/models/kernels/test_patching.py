"""Fused layers in the place of others: which, and that nobody who holds their parameters or names can tell."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from models.efficientnet import build
from models.kernels import patching
from models.kernels.patching import patch
from models.normalization import GroupNormAct, norm_parameters
from recipe.config import Model

SMALL = {"name": "efficientnet_b0", "width": 0.25, "depth": 0.1, "image_size": 16, "classes": 10}


class FusedNorm(GroupNormAct):
    """As a kernel's layer: of the replaced one's class, with its Parameters."""


class FusedConv(nn.Conv2d):
    pass


def share(kind, module):
    fused = kind.__new__(kind)
    fused.__dict__.update(module.__dict__)
    return fused


@pytest.fixture
def stand_ins(monkeypatch):
    """Without Triton; their arithmetic is that of what they replace."""
    kernels = {
        "group_norm": SimpleNamespace(
            replaces=lambda module: type(module) is GroupNormAct, fuse=lambda module: share(FusedNorm, module)
        ),
        "group_conv": SimpleNamespace(
            replaces=lambda module: type(module) is nn.Conv2d and module.groups > 1,
            fuse=lambda module: share(FusedConv, module),
        ),
    }
    monkeypatch.setattr(patching, "_load", kernels.__getitem__)


def model_of(**keys):
    return build(Model(**{**SMALL, **keys}), seed=0)


def kinds(model, kind):
    return [name for name, module in model.named_modules() if type(module) is kind]


def test_layers_are_replaced_by_name_of_kernel_and_their_names_returned(stand_ins):
    model = model_of()
    norms = kinds(model, GroupNormAct)
    assert patch(model, ["group_norm"]) == norms
    assert kinds(model, FusedNorm) == norms and not kinds(model, FusedConv)
    assert model.block("stem").bn1 is model.get_submodule("stem.bn1")
    convolutions = patch(model)
    assert convolutions and kinds(model, FusedConv) == convolutions
    assert patch(model) == []


def test_parameters_are_the_same_objects_under_the_same_names(stand_ins):
    model = model_of()
    before, state, norms = dict(model.named_parameters()), list(model.state_dict()), norm_parameters(model)
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    expected = model(images)
    assert patch(model)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert (list(model.state_dict()), norm_parameters(model)) == (state, norms)
    assert torch.equal(model(images), expected)


def test_models_without_such_layers_and_lone_layers(stand_ins):
    model = model_of(norm="batch", group_size=1, padding="same")
    before = dict(model.named_modules())
    assert patch(model, ["group_norm"]) == [] and dict(model.named_modules()) == before
    with pytest.raises(AssertionError, match="has no place"):
        patch(GroupNormAct(8, 4, 1e-3))


@pytest.mark.parametrize("padding", ["same", "torch"])
def test_all_grouped_convolutions_are_replaced(padding):
    """By the real kernel; with TensorFlow's padding those of stride 2 are timm's Conv2dSame."""
    group_conv = pytest.importorskip("models.kernels.group_conv")
    with torch.device("meta"):
        model = model_of(width=1, padding=padding)
    grouped = [module for module in model.modules() if isinstance(module, nn.Conv2d) and module.groups > 1]
    assert {type(module).__name__ for module in grouped} == {"Conv2d"} | (
        {"Conv2dSame"} if padding == "same" else set()
    )
    assert len(grouped) >= 5 and all(map(group_conv.replaces, grouped))


def test_our_kernels_are_patched_in_likewise():
    """With the real ones, all normalisations and the group convolutions; float32 sums in another order. The
    first blocks have each kind of layer."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, plain = model_of().to(device), model_of().to(device)
    names = set(patch(model))
    grouped = [name for name, module in plain.named_modules() if getattr(module, "groups", 1) > 1]
    assert names == {*kinds(plain, GroupNormAct), *(name for name in grouped if "conv_dw" in name)} - {
        "blocks.0.0.conv_dw"  # of 8 channels, in a single group of 8
    }
    assert norm_parameters(model) == norm_parameters(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    images = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8, device=device)
    first = plain.names[:4]
    kinds_of_layers = {type(module).__name__ for module in model.part(first).modules()}
    assert kinds_of_layers >= {"FusedGroupNormAct", "FusedGroupConv2d"}
    with torch.backends.cudnn.flags(allow_tf32=False), torch.no_grad():
        torch.testing.assert_close(model.part(first)(images), plain.part(first)(images), rtol=1e-3, atol=1e-4)

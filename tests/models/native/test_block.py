"""Whole blocks by our functions against timm's blocks of the same layers."""

import copy
import functools

import pytest
import torch
from timm.models._efficientnet_blocks import DepthwiseSeparableConv, InvertedResidual
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.efficientnet import build
from models.native.block import NativeHead, NativeInverted, NativeSeparable
from models.native.patching import patch
from models.stochastic import DropPath
from recipe.config import Model
from tests.models.native.exact import assert_no_worse
from tests.models.native.test_layers import images

# Without a residual and with one, without an expansion and with one.
BLOCKS = {
    "blocks.0.0": NativeSeparable,
    "blocks.0.1": NativeSeparable,
    "blocks.1.0": NativeInverted,
    "blocks.1.1": NativeInverted,
}
every_block = pytest.mark.parametrize("name", BLOCKS)


def model_of(**keys):
    """A model whose norms and biases are not at their first values."""
    shape = {"name": "efficientnet_b0", "width": 1.0, "depth": 1.4, "image_size": 32, "classes": 10}
    model = build(Model(**{**shape, "drop_path": 0.0, "dropout": 0.0, **keys}), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@functools.lru_cache(maxsize=None)
def models(**keys):
    """timm's model and ours, with the same parameters. For all tests: they copy what they take."""
    plain = model_of(**keys)
    ours = copy.deepcopy(plain)
    patch(ours)
    return plain, ours


def pair(name, **keys):
    """timm's block and ours, with the same parameters."""
    plain, ours = (copy.deepcopy(model.block(name)) for model in models(**keys))
    for block in (plain, ours):
        if isinstance(block.drop_path, DropPath):
            block.drop_path.rate = keys["drop_path"]  # by depth it would be less
    assert type(ours) is BLOCKS[name] and ours.has_skip == name.endswith(".1")
    return plain, ours


def entering(block, count=6, height=13, width=8, seed=1):
    return images(
        count,
        (block.conv_pw if hasattr(block, "conv_pwl") else block.conv_dw).in_channels,
        height,
        width,
        seed=seed,
    )


def results(block, x, dy=None):
    """Output and gradients, by name."""
    x = x.detach().requires_grad_()
    y = block(x)
    dy = images(*y.shape, seed=9).to(y.dtype) if dy is None else dy
    names = ["dx", *(name for name, _ in block.named_parameters())]
    return {
        "y": y.detach(),
        **dict(zip(names, torch.autograd.grad(y, [x, *block.parameters()], dy))),
    }


def exact(plain, x):
    return results(copy.deepcopy(plain).double(), x.double().contiguous())


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("width", [0.5, 1.0])
@pytest.mark.parametrize("padding", ["same", "torch"])
@every_block
def test_outputs_and_gradients_are_those_of_timms_block(name, padding, width):
    """Convolved side by side, and line by line; even sides and odd ones.

    At half the width the second block's convolution has 8 channels, and is torch's.
    """
    plain, ours = pair(name, width=width, padding=padding)
    for x in (entering(plain), entering(plain, 2, 20, 17), entering(plain, 1, 1, 1)):
        assert_no_worse(results(ours, x), results(plain, x.contiguous()), exact(plain, x))


@pytest.mark.parametrize("name", ["blocks.0.1", "blocks.1.1"])
def test_images_that_are_dropped_keep_the_bits_of_the_shortcut(name):
    plain, ours = pair(name, drop_path=0.5)
    x = entering(plain, 8)
    kept = ours.drop_path.current(x)
    dropped = kept == 0
    assert 0 < dropped.sum() < 8 and torch.equal(kept, plain.drop_path.current(x))
    found = results(ours, x)
    assert_no_worse(found, results(plain, x.contiguous()), exact(plain, x))
    assert torch.equal(found["y"][dropped], x[dropped])
    assert torch.equal(found["dx"][dropped], images(*x.shape, seed=9)[dropped])
    ours.eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain.eval()(x.contiguous()), rtol=1e-5, atol=1e-5)
    ours.drop_path.mask = torch.zeros(8)  # as compiled blocks do
    assert torch.equal(ours(x), x)


@every_block
def test_inputs_and_gradients_in_any_layout_give_the_same_bits(name):
    """Planes, of x and of dy; and neither is written to."""
    _, ours = pair(name)
    x = entering(ours)
    expected = results(ours, x)
    dy = images(*expected["y"].shape, seed=9)
    given = x.contiguous(), dy.contiguous()
    assert_same(results(ours, *given), expected)
    assert torch.equal(given[0], x) and torch.equal(given[1], dy)
    assert expected["y"].is_contiguous(memory_format=torch.channels_last)


@every_block
def test_what_needs_no_gradient_gets_none(name):
    """Frozen parameters, all or some, or an input without gradient: the others keep their bits."""
    _, ours = pair(name)
    x = entering(ours)
    expected = results(ours, x)
    y = ours(x)
    names = [name for name, _ in ours.named_parameters()]
    found = torch.autograd.grad(y, list(ours.parameters()), images(*y.shape, seed=9))
    assert_same(dict(zip(names, found)), {name: expected[name] for name in names})
    for frozen in (names[::2], names):
        for name, parameter in ours.named_parameters():
            parameter.requires_grad_(name not in frozen)
            parameter.grad = None
        leaf = x.detach().requires_grad_()
        ours(leaf).backward(images(*y.shape, seed=9))
        found = {
            "dx": leaf.grad,
            **{name: each.grad for name, each in ours.named_parameters() if each.grad is not None},
        }
        assert_same(found, {name: expected[name] for name in ["dx", *(set(names) - set(frozen))]})
    assert ours(x).grad_fn is None
    with torch.inference_mode():
        assert torch.equal(ours(x), expected["y"])


@every_block
def test_micro_batches_may_be_in_flight(name):
    """As in a pipeline: two forward passes, then their backward passes."""
    _, ours = pair(name)
    first, second = (entering(ours, seed=seed).requires_grad_() for seed in (1, 2))
    expected = [results(ours, x) for x in (first, second)]
    outputs = [ours(x) for x in (first, second)]
    for x, y, each in zip((first, second), outputs, expected):
        gradients = torch.autograd.grad(y, [x, *ours.parameters()], images(*y.shape, seed=9))
        assert_same({"y": y.detach(), **dict(zip(list(each)[1:], gradients))}, each)


@every_block
def test_computed_again_it_has_the_same_bits(name):
    """By torch's reentrant checkpoint, with stochastic depth."""
    _, ours = pair(name, drop_path=0.5)
    x = entering(ours)
    expected = results(ours, x)
    leaf = x.detach().requires_grad_()
    y = checkpoint(ours, leaf, use_reentrant=True)
    y.backward(images(*y.shape, seed=9))
    found = {
        "y": y.detach(),
        "dx": leaf.grad,
        **{name: each.grad for name, each in ours.named_parameters()},
    }
    assert_same(found, expected)


def test_few_tensors_as_wide_as_the_expansion_are_kept():
    """Three: the expansion, the group convolution of it, and what the gates leave of that."""
    _, ours = pair("blocks.1.1")
    x = entering(ours).requires_grad_()
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor
    ):
        ours(x)
    wide = 4 * x.numel()
    assert sum(tensor.numel() == wide for tensor in kept.values()) == 3
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    assert sum(tensor.numel() for tensor in kept.values()) < 3.5 * wide + 2 * x.numel() + parameters


def test_a_second_derivative_is_refused():
    _, ours = pair("blocks.1.1")
    x = entering(ours, 1, 3, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    "change", ["act1", "gate", "se", "aa", "conv_s2d", "drop_path", "norm", "bias"]
)
@pytest.mark.parametrize("kind", [NativeSeparable, NativeInverted])
def test_blocks_with_other_layers_stay_timms(kind, change):
    """Their layers are ours all the same."""
    model = model_of(width=0.25, depth=0.4)
    block = model.block("blocks.0.0" if kind is NativeSeparable else "blocks.1.0")
    projection = "conv_pw" if kind is NativeSeparable else "conv_pwl"
    if change in ("act1", "gate"):
        setattr(block.se, change, nn.Hardsigmoid())
    elif change == "norm":
        block.bn2 = nn.Identity()
    elif change == "bias":
        block.conv_pw.bias = nn.Parameter(torch.zeros(block.conv_pw.out_channels))
    else:
        setattr(block, change, nn.Dropout(0.1))
    names = patch(model)
    # A projection may have a bias, an expansion may not.
    assert (type(block) is kind) == (change == "bias" and kind is NativeSeparable)
    assert type(block) in (kind, DepthwiseSeparableConv, InvertedResidual)
    assert any(name.endswith(projection) for name in names)


def test_the_head_pools_what_it_never_stores():
    """Also where the gradient of its means is not contiguous."""
    plain = model_of(width=0.25, depth=0.1)
    ours = copy.deepcopy(plain)
    patch(ours)
    plain = plain.block("head")
    ours = ours.block("head")
    assert type(ours) is NativeHead
    x = images(5, plain.conv_head.in_channels, 3, 4)
    dy = torch.randn(5, 10, generator=torch.Generator().manual_seed(3))
    found = results(ours, x, dy)
    assert_no_worse(
        found,
        results(plain, x.contiguous(), dy),
        results(copy.deepcopy(plain).double(), x.double(), dy.double()),
    )
    pooled = ours.pooled(x)
    weights = torch.randn(pooled.shape[::-1], generator=torch.Generator().manual_seed(4))
    expected = torch.autograd.grad(pooled, ours.bn2.weight, weights.t().contiguous())
    (pooled,) = [ours.pooled(x)]
    assert torch.equal(torch.autograd.grad(pooled, ours.bn2.weight, weights.t())[0], expected[0])

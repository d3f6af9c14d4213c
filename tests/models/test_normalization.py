"""Group and layer normalisation against their formula in float64, where half-precision statistics would show."""

import numpy as np
import pytest
import torch

from models.normalization import GroupNormAct

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _device_is_there(request):
    if request.getfixturevalue("device") == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def closed_form(x, weight, bias, groups, eps, apply_act):
    """Output in float64 NumPy, from inputs as they are after rounding to their own dtype."""
    x, weight, bias = (tensor.detach().double().cpu().numpy() for tensor in (x, weight, bias))
    n, c, h, w = x.shape
    grouped = x.reshape(n, groups, -1)
    mean = grouped.mean(2, keepdims=True)
    variance = ((grouped - mean) ** 2).mean(2, keepdims=True)
    y = ((grouped - mean) / np.sqrt(variance + eps)).reshape(n, c, h, w)
    y = y * weight[:, None, None] + bias[:, None, None]
    return y / (1 + np.exp(-y)) if apply_act else y


def layer(channels=24, groups=4, eps=1e-3, apply_act=True, shift=True):
    norm = GroupNormAct(channels, groups, eps, apply_act, shift)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(channels, generator=generator) + 0.5)
        if shift:
            norm.bias.copy_(torch.randn(channels, generator=generator))
    return norm


def inputs(mean, std, shape=(3, 24, 19, 17)):
    """Each group has its own mean and scale, so statistics over the wrong elements are wrong by much."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    factors = 1 + 0.5 * torch.rand(shape[0], 4, 1, generator=generator, dtype=torch.float64)
    return mean + std * (x.view(shape[0], 4, -1) * factors).view(shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("apply_act", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mean", "std"), [(0, 1), (100, 1), (0, 0.01)], ids=["even", "offset", "small"])
@pytest.mark.parametrize("groups", [4, 1], ids=["group", "layer"])
def test_statistics_are_exact_in_every_dtype(groups, mean, std, dtype, apply_act, device):
    """Two roundings to the dtype, of the normalised value and after SiLU, of eps / 2 each, relative to the
    value (at least 1) and with a margin of 2. A mean kept in float16 would be off by up to 0.03 at an offset
    of 100, in bfloat16 by 0.25; the square of 100 in float16 leaves no digit for a variance of 1.

    Of float32, the offset takes two digits itself: x - mean is exact to 100 eps / std.
    """
    norm = layer(groups=groups, apply_act=apply_act).to(device, dtype)
    x = inputs(mean, std).to(device, dtype)
    expected = closed_form(x, norm.weight, norm.bias, groups, 1e-3, apply_act)
    with torch.no_grad():
        actual = norm(x)
    assert actual.dtype == dtype
    scale = np.maximum(np.abs(expected), 1)
    tolerance = 2 * torch.finfo(dtype).eps * (1 if dtype != torch.float32 else 4 + mean / std)
    assert (np.abs(actual.double().cpu().numpy() - expected) / scale).max() < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("apply_act", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("groups", [4, 1], ids=["group", "layer"])
def test_gradients_are_those_of_the_formula(groups, dtype, apply_act, device):
    """Against autograd through the formula in float64, relative to the largest gradient of each tensor.

    The gradient of x is rounded to the dtype at most three times; those of weight and bias are sums of 969
    terms of either sign, each a product of rounded factors: 8 eps of the largest holds all of them.
    """
    norm = layer(groups=groups, apply_act=apply_act).to(device, dtype)
    x = inputs(5, 1).to(device, dtype).requires_grad_()
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    norm(x).backward(upstream)

    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, norm.weight, norm.bias)]
    grouped = leaves[0].view(3, groups, -1)
    centred = grouped - grouped.mean(2, keepdim=True)
    y = (centred / (centred.square().mean(2, keepdim=True) + 1e-3).sqrt()).view(x.shape)
    y = y * leaves[1].view(-1, 1, 1) + leaves[2].view(-1, 1, 1)
    (y * y.sigmoid() if apply_act else y).backward(upstream.double())
    for actual, leaf in zip((x.grad, norm.weight.grad, norm.bias.grad), leaves):
        assert actual.dtype == dtype
        difference = (actual.double() - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert difference < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("device", DEVICES)
def test_epsilon_is_added_to_the_variance(device):
    """A constant image has no variance: it becomes the bias, and tiny ones stay tiny below sqrt(eps)."""
    norm = layer(apply_act=False).double().to(device)
    flat = torch.full((1, 24, 4, 4), 7.0, dtype=torch.float64, device=device)
    expected = norm.bias.view(1, -1, 1, 1).expand(1, 24, 4, 4)
    torch.testing.assert_close(norm(flat), expected, rtol=0, atol=1e-12)
    signs = flat / 7 * 1e-3 * torch.tensor([1.0, -1.0], device=device).repeat(8).view(4, 4)
    expected = expected + norm.weight.view(-1, 1, 1) * signs / (1e-6 + 1e-3) ** 0.5
    torch.testing.assert_close(norm(signs), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_images_and_groups_do_not_see_each_other(device):
    norm = layer().to(device)
    x = inputs(0, 1).float().to(device)
    changed = x.clone()
    changed[1, 6:12] = 3 * changed[1, 6:12] + torch.randn(6, 19, 17).to(device)
    before, after = norm(x), norm(changed)
    same = torch.ones(3, 24, dtype=torch.bool)
    same[1, 6:12] = False
    assert torch.equal(before[same], after[same])
    assert not (before[~same] == after[~same]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_input_is_left_as_it_was(device):
    """SiLU works in place on the output of the normalisation, not on its input."""
    x = inputs(0, 1).float().to(device)
    copy = x.clone()
    layer().to(device)(x)
    assert torch.equal(x, copy)


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_bias_there_is_none(device):
    """What stands in a model with proxy normalisation where no activation follows. One rounding of eps, twice."""
    norm = layer(apply_act=False, shift=False).to(device)
    assert list(norm.state_dict()) == ["weight"]
    x = inputs(3, 1).float().to(device)
    expected = closed_form(x, norm.weight, torch.zeros(24), 4, 1e-3, False)
    assert np.abs(norm(x).detach().cpu().numpy() - expected).max() < 1e-5

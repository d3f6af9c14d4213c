"""Batch normalisation against its formula in float64, against timm's, and what a change of dtype leaves of it."""

import copy

import numpy as np
import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn

from models.normalization import BatchNormAct

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [torch.float32, torch.float16, torch.bfloat16]
EPS, MOMENTUM = 1e-3, 0.3


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def layer(apply_act=True, channels=12):
    """Scales and biases that differ, and running statistics that are neither 0 nor 1."""
    norm = BatchNormAct(channels, EPS, MOMENTUM, apply_act)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(channels, generator=generator) + 0.5)
        norm.bias.copy_(torch.randn(channels, generator=generator))
        norm.running_mean.copy_(torch.randn(channels, generator=generator))
        norm.running_var.copy_(torch.rand(channels, generator=generator) + 0.5)
    return norm


def inputs(mean=0.0, std=1.0, seed=1, shape=(3, 12, 9, 7)):
    """Each channel has its own mean and scale, float64."""
    generator = torch.Generator().manual_seed(seed)
    x, means, factors = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in (shape, (shape[1], 1, 1), (shape[1], 1, 1))
    )
    return mean + std * (means + (1 + factors.abs()) * x)


def doubles(*tensors):
    return tuple(tensor.detach().double().cpu().numpy() for tensor in tensors)


def normalised(x, mean, variance, weight, bias, apply_act):
    """The formula in float64 NumPy; all but x are [C]."""
    mean, variance, weight, bias = (values[:, None, None] for values in (mean, variance, weight, bias))
    y = (x - mean) / np.sqrt(variance + EPS) * weight + bias
    return y / (1 + np.exp(-y)) if apply_act else y


def near(actual, expected, dtype, mean=0.0, std=1.0):
    """Two roundings to the dtype, after the normalisation and after SiLU, of eps / 2 of the value, or of 1 for
    smaller ones, with a margin of 2. Of float32, an offset takes its digits: x - mean is exact to `mean` eps / std."""
    tolerance = 2 * torch.finfo(dtype).eps * (1 if dtype != torch.float32 else 4 + mean / std)
    error = np.abs(actual.detach().double().cpu().numpy() - expected) / np.maximum(np.abs(expected), 1)
    return actual.dtype == dtype and error.max() < tolerance


@pytest.mark.parametrize("apply_act", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("mean", "std"), [(0, 1), (100, 1), (0, 0.01)], ids=["even", "offset", "small"])
def test_training_normalises_by_the_micro_batch(mean, std, dtype, apply_act, device):
    norm = layer(apply_act).to(device, dtype)
    x = inputs(mean, std).to(device, dtype)
    values, weight, bias = doubles(x, norm.weight, norm.bias)
    expected = normalised(values, values.mean((0, 2, 3)), values.var((0, 2, 3)), weight, bias, apply_act)
    assert near(norm(x), expected, dtype, mean, std)


@pytest.mark.parametrize("apply_act", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_evaluation_normalises_by_the_running_statistics_and_keeps_them(dtype, apply_act, device):
    norm = layer(apply_act).to(device, dtype).eval()
    before = copy.deepcopy(norm.state_dict())
    x = inputs().to(device, dtype)
    expected = normalised(*doubles(x, norm.running_mean, norm.running_var, norm.weight, norm.bias), apply_act)
    output = norm(x)
    assert near(output, expected, dtype)
    assert all(torch.equal(value, before[key]) for key, value in norm.state_dict().items())
    alone = norm(x[:1]).detach().double().cpu().numpy()  # vectorised in other places: equal to rounding
    assert near(output[:1], alone, dtype)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("apply_act", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_gradients_are_those_of_the_formula(dtype, apply_act, training, device):
    """Against autograd through the formula in float64, relative to the largest gradient of each tensor.

    The gradient of x is rounded to the dtype at most three times; those of weight and bias are sums of 189 terms
    of either sign, each a product of rounded factors: 8 eps of the largest holds all of them.
    """
    norm = layer(apply_act).to(device, dtype).train(training)
    x = inputs(5).to(device, dtype).requires_grad_()
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    mean, variance = norm.running_mean.double(), norm.running_var.double()
    norm(x).backward(upstream)

    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, norm.weight, norm.bias)]
    if training:
        mean, variance = leaves[0].mean((0, 2, 3)), leaves[0].var((0, 2, 3), unbiased=False)
    y = (leaves[0] - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + EPS).sqrt()
    y = y * leaves[1].view(-1, 1, 1) + leaves[2].view(-1, 1, 1)
    (y * y.sigmoid() if apply_act else y).backward(upstream.double())
    for actual, leaf in zip((x.grad, norm.weight.grad, norm.bias.grad), leaves):
        assert actual.dtype == dtype
        difference = (actual.double() - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert difference < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_running_statistics_after_several_micro_batches(dtype, device):
    """An exponential average of each micro batch's mean and unbiased variance, from what was there before. Float32
    in every dtype: five averages, each rounded to 2**-24 of values up to 100; a half-precision average would be
    off by a hundred times the tolerance."""
    norm = layer().to(device, dtype)
    mean, variance = doubles(norm.running_mean, norm.running_var)
    for seed, size in enumerate((9, 9, 5, 2, 9)):
        x = inputs(mean=30, std=2, seed=seed, shape=(2, 12, size, 7)).to(device, dtype)
        norm(x)
        (values,) = doubles(x)
        mean = (1 - MOMENTUM) * mean + MOMENTUM * values.mean((0, 2, 3))
        variance = (1 - MOMENTUM) * variance + MOMENTUM * values.var((0, 2, 3), ddof=1)
    for actual, expected in ((norm.running_mean, mean), (norm.running_var, variance)):
        assert actual.dtype == torch.float32
        np.testing.assert_allclose(actual.double().cpu().numpy(), expected, rtol=2e-6)


@pytest.mark.parametrize("apply_act", [True, False], ids=["silu", "plain"])
def test_it_is_timms_layer(apply_act, device):
    """The same kernel with the same arguments: equality is bitwise, of outputs, gradients and statistics."""
    ours = layer(apply_act).to(device)
    theirs = BatchNormAct2d(12, eps=EPS, momentum=MOMENTUM, apply_act=apply_act, act_layer=nn.SiLU).to(device)
    assert set(theirs.state_dict()) - set(ours.state_dict()) == {"num_batches_tracked"}
    theirs.load_state_dict({**theirs.state_dict(), **ours.state_dict()})
    for seed in range(3):
        x = inputs(seed=seed).float().to(device)
        first, second = ours(x), theirs(x)
        assert torch.equal(first, second)
        first.square().sum().backward()
        second.square().sum().backward()
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())
    gradients = dict(theirs.named_parameters())
    assert all(torch.equal(value.grad, gradients[key].grad) for key, value in ours.named_parameters())
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(
    "move",
    [
        lambda norm, dtype: norm.to(dtype),
        lambda norm, dtype: norm.to("cpu", dtype),
        lambda norm, dtype: norm.to(dtype).to(torch.device("cpu"), non_blocking=True),
        lambda norm, dtype: norm.double().to(dtype).cpu(),
        lambda norm, dtype: norm.half().to(dtype),
        lambda norm, dtype: copy.deepcopy(norm.type(dtype)).share_memory(),
        lambda norm, dtype: nn.Sequential(norm, nn.Conv2d(12, 1, 1)).to(dtype)[0],
    ],
)
def test_running_statistics_stay_float32_when_the_model_becomes_half(move, dtype):
    """Bit for bit, in either direction: 1 + 2**-20 has no place in half precision."""
    fresh = layer()
    fresh.running_mean.fill_(1 + 2**-20)
    expected = copy.deepcopy(fresh.state_dict())
    norm = move(fresh, dtype)
    assert {parameter.dtype for parameter in norm.parameters()} == {dtype}
    assert norm(inputs().to(dtype)).dtype == dtype
    norm = move(norm.eval(), dtype)
    norm.load_state_dict(expected)
    norm = move(norm, dtype)
    for name in ("running_mean", "running_var"):
        value = norm.state_dict()[name]
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name])


def test_float64_models_are_float64_throughout():
    norm = layer().double()
    assert {value.dtype for value in norm.state_dict().values()} == {torch.float64}
    assert norm(inputs()).dtype == torch.float64


def test_it_can_be_built_on_the_meta_device_and_moved_off_it():
    with torch.device("meta"):
        norm = BatchNormAct(12, EPS, MOMENTUM)
    assert {value.device.type for value in norm.half().state_dict().values()} == {"meta"}
    assert norm.running_var.dtype == torch.float32
    assert norm(torch.zeros(2, 12, 3, 3, device="meta", dtype=torch.float16)).shape == (2, 12, 3, 3)
    norm = norm.to_empty(device="cpu")
    norm.load_state_dict(layer().state_dict())
    assert torch.equal(norm.running_var, layer().running_var)


def test_one_value_per_channel_has_no_variance():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer()(torch.zeros(1, 12, 1, 1))
    assert layer().eval()(torch.zeros(1, 12, 1, 1)).isfinite().all()


def test_the_input_is_left_as_it_was(device):
    """SiLU works in place on the output of the normalisation, not on its input."""
    x = inputs().float().to(device)
    before = x.clone()
    norm = layer().to(device)
    norm(x)
    norm.eval()(x)
    assert torch.equal(x, before)

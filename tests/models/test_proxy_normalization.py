"""Proxy normalisation against its definition: Gaussian integrals on a fine grid, in float64."""

import copy
import itertools

import numpy as np
import pytest
import torch

from models.normalization import ProxyNormAct

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [torch.float32, torch.float16, torch.bfloat16]
NAMES = ["weight", "bias", "proxy_shift", "proxy_scale"]
EPS, PROXY_EPS = 1e-3, 0.03

# Trapezoids from -12 to 12 standard deviations: both the ends and, for a smooth integrand, the steps cost less than
# float64 holds.
GRID = torch.linspace(-12, 12, 4001, dtype=torch.float64)
DENSITY = torch.exp(-GRID.square() / 2) * (GRID[1] - GRID[0]) / (2 * np.pi) ** 0.5


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def layer(groups=4, channels=24):
    """Parameters that differ from their start and from each other; weight x (1 + proxy_scale) up to 2."""
    norm = ProxyNormAct(channels, groups, EPS, PROXY_EPS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(channels, generator=generator) + 0.5)
        norm.bias.copy_(torch.randn(channels, generator=generator))
        norm.proxy_shift.copy_(torch.randn(channels, generator=generator) / 2)
        norm.proxy_scale.copy_((torch.rand(channels, generator=generator) - 0.5) * 0.6)
    return norm


def inputs(shape=(3, 24, 9, 7), mean=0.0):
    """Channels have means and scales of their own, which a group normalisation leaves there. Float64."""
    generator = torch.Generator().manual_seed(1)
    x, means, factors = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in (shape, (shape[1], 1, 1), (shape[1], 1, 1))
    )
    return mean + means + (1 + factors.abs()) * x


def leaves_of(norm, x):
    return [tensor.detach().double().cpu().requires_grad_() for tensor in (x, *(getattr(norm, name) for name in NAMES))]


def moments(weight, bias, shift, scale):
    """E[silu(weight Y + bias)] and its variance for Y ~ N(shift, (1 + scale)^2), by the definition; [C] each."""
    y = shift[:, None] + (1 + scale[:, None]) * GRID
    z = weight[:, None] * y + bias[:, None]
    z = z * z.sigmoid()
    mean = (z * DENSITY).sum(1)
    return mean, ((z - mean[:, None]).square() * DENSITY).sum(1)


def formula(x, weight, bias, shift, scale, groups):
    grouped = x.reshape(len(x), groups, -1)
    centred = grouped - grouped.mean(2, keepdim=True)
    y = (centred / (centred.square().mean(2, keepdim=True) + EPS).sqrt()).reshape(x.shape)
    z = y * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)
    mean, variance = (values.view(-1, 1, 1) for values in moments(weight, bias, shift, scale))
    return (z * z.sigmoid() - mean) / (variance + PROXY_EPS).sqrt()


@pytest.mark.parametrize(("spread", "tolerance"), [(0.5, 2e-6), (1, 4e-6), (2, 2e-5), (3, 5e-4)])
def test_moments_are_the_integrals(spread, tolerance):
    """Of a SiLU that sees a Gaussian of standard deviation `spread`. Up to 1, float32 rounds more than the
    quadrature, some eps; from there the error of 32 nodes grows, and is a tenth of what 200 quantiles leave at 3.
    Relative to the standard deviation, which is the unit of the output."""
    cases = torch.tensor(list(itertools.product((-3.0, -1.0, 0.0, 1.0, 3.0), (0.6, 1.0, 1.3), (-1.0, 0.0, 0.5))))
    norm = ProxyNormAct(len(cases), 1, EPS, PROXY_EPS)
    with torch.no_grad():
        norm.bias.copy_(cases[:, 0])
        norm.proxy_scale.copy_(cases[:, 1] - 1)
        norm.proxy_shift.copy_(cases[:, 2])
        norm.weight.copy_(spread / cases[:, 1])
        actual_mean, actual_variance = norm.moments()
        mean, variance = moments(*(getattr(norm, name).double() for name in NAMES))
    assert actual_mean.dtype == actual_variance.dtype == torch.float32
    deviation = (variance + PROXY_EPS).sqrt()
    assert ((actual_mean.double() - mean) / deviation).abs().max() < tolerance
    assert ((actual_variance.double() + PROXY_EPS).sqrt() / deviation - 1).abs().max() < tolerance


def test_moments_of_the_start_are_the_known_constants():
    """SiLU of a standard Gaussian has mean 0.2066 and variance 0.3131 (integrals to four digits)."""
    mean, variance = (values.tolist() for values in ProxyNormAct(8, 4, EPS, PROXY_EPS).moments())
    assert mean == pytest.approx([0.2066] * 8, abs=5e-5)
    assert variance == pytest.approx([0.3131] * 8, abs=5e-5)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("groups", [4, 1], ids=["group", "layer"])
@pytest.mark.parametrize("mean", [0, 100], ids=["even", "offset"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_outputs_are_those_of_the_formula(dtype, mean, groups, training, device):
    """Rounded to the dtype after the normalisation, after SiLU and at the end, by eps / 2 of the value or of 1 for
    smaller ones, each passed on by at most 1 / sqrt(0.03) < 6. In float32 the moments add 2e-6 x 6, and an offset
    takes its digits: x - mean is exact to 100 eps."""
    norm = layer(groups).to(device, dtype).train(training)
    x = inputs(mean=mean).to(device, dtype)
    with torch.no_grad():
        expected = formula(*leaves_of(norm, x), groups)
        actual = norm(x)
    assert actual.dtype == dtype
    error = (actual.double().cpu() - expected).abs() / expected.abs().clamp(min=1)
    eps = torch.finfo(dtype).eps
    assert error.max() < (6 * 1.5 * eps if dtype != torch.float32 else 1.2e-5 + 6 * mean * eps)


@pytest.mark.parametrize("groups", [4, 1], ids=["group", "layer"])
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_gradients_are_those_of_the_formula(dtype, groups, device):
    """Of x and all four parameters, relative to the largest of each tensor, by autograd through the integrals.

    Four roundings on the way back to x. Those of the parameters are sums of 189 terms of either sign of such
    products, where the proxy's part and the direct one partly cancel:
    32 eps of the largest holds all of them (17 seen).
    """
    norm = layer(groups).to(device, dtype)
    x = inputs(mean=2).to(device, dtype).requires_grad_()
    upstream = (torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) + 0.5).to(device, dtype)
    norm(x).backward(upstream)
    leaves = leaves_of(norm, x)
    formula(*leaves, groups).backward(upstream.double().cpu())
    for actual, leaf in zip((x, *(getattr(norm, name) for name in NAMES)), leaves):
        assert actual.grad.dtype == dtype
        difference = (actual.grad.double().cpu() - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert difference < 32 * torch.finfo(dtype).eps


def test_float16_gradients_do_not_overflow_where_they_fit(device):
    """The gradient of a channel's subtracted mean is a sum over pixels: here 4 x 20 x 20 x 100 = 160,000, beyond
    float16's 65,504; the parameter's own is a twentieth of it."""
    norm = ProxyNormAct(24, 1, EPS, PROXY_EPS)
    torch.nn.init.constant_(norm.weight, 0.05)
    norm = norm.to(device, torch.float16)
    x = inputs((4, 24, 20, 20)).to(device, torch.float16)
    norm(x).backward(torch.full_like(x, 100))
    for name in ("proxy_shift", "proxy_scale"):
        assert getattr(norm, name).grad.isfinite().all()
    assert norm.proxy_shift.grad.abs().min() > 1000


def test_gaussian_channels_come_out_centred_and_scaled(device):
    """What it is for: where the values are as the proxy has them, the output has mean 0 and variance
    v / (v + 0.03), v = 0.3131; 80,000 values of each channel are off by five standard errors, 0.02, at most."""
    norm = ProxyNormAct(4, 1, EPS, PROXY_EPS).to(device)
    x = torch.randn(5, 4, 126, 127, generator=torch.Generator().manual_seed(3)).to(device)
    output = norm(x).detach().double()
    assert output.mean((0, 2, 3)).abs().max() < 0.02
    assert (output.var((0, 2, 3)) - 0.3131 / 0.3431).abs().max() < 0.06
    assert torch.nn.functional.silu(x).mean((0, 2, 3)).min() > 0.19


def test_images_do_not_see_each_other(device):
    """Alone, an image is vectorised in other places: equal to a few units of rounding, of values up to 20."""
    norm = layer().to(device)
    x = inputs().float().to(device)
    torch.testing.assert_close(norm(x[1:2]), norm(x)[1:2], rtol=1e-6, atol=1e-5)
    before = x.clone()
    norm(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_moments_are_float32_whatever_the_model_is(dtype):
    """Also after a detour: the nodes are the same numbers. The state dict holds what is learnt and nothing else."""
    norm = layer().half().to("cpu", dtype)
    moved = copy.deepcopy(norm).to("cpu").to(dtype)
    assert {values.dtype for values in moved.moments()} == {torch.float32}
    in_float32 = copy.deepcopy(moved).float().moments()  # of the same, already rounded parameters
    assert all(torch.equal(first, second) for first, second in zip(moved.moments(), in_float32))
    fresh = dict(layer().named_buffers())
    for name, buffer in moved.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, fresh[name])
    assert list(moved.state_dict()) == NAMES
    assert {value.dtype for value in moved.state_dict().values()} == {dtype}
    assert {values.dtype for values in layer().double().moments()} == {torch.float64}


def test_the_parameters_start_where_the_proxy_is_a_standard_gaussian():
    norm = ProxyNormAct(8, 4, EPS, PROXY_EPS)
    starts = {name: set(parameter.tolist()) for name, parameter in norm.named_parameters()}
    assert starts == {"weight": {1.0}, "bias": {0.0}, "proxy_shift": {0.0}, "proxy_scale": {0.0}}


def test_it_can_be_built_on_the_meta_device():
    with torch.device("meta"):
        norm = ProxyNormAct(8, 4, EPS, PROXY_EPS).half()
    assert norm(torch.zeros(2, 8, 3, 3, device="meta", dtype=torch.float16)).dtype == torch.float16
    assert {buffer.device.type for buffer in norm.buffers()} == {"meta"}

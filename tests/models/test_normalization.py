"""Group, layer, batch and proxy normalisation, and that of pixels, against their formulas in
float64."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from models.normalization import BatchNormAct, GroupNormAct, ProxyNormAct
from models.preprocess import Preprocess
from recipe.config import Model
from tests.models.test_costs import OLD

KINDS = [torch.float32, torch.float16, torch.bfloat16]
LEARNT = ["weight", "bias", "proxy_shift", "proxy_scale"]
CHANNELS = 24
EPS = 1e-3
MOMENTUM = 0.3
PROXY_EPS = 0.03
MAKERS = {
    "group": lambda apply_act: GroupNormAct(CHANNELS, 4, EPS, apply_act),
    "layer": lambda apply_act: GroupNormAct(CHANNELS, 1, EPS, apply_act),
    "batch": lambda apply_act: BatchNormAct(CHANNELS, EPS, MOMENTUM, apply_act),
    "proxy": lambda _: ProxyNormAct(CHANNELS, 4, EPS, PROXY_EPS),
    "proxy of layer": lambda _: ProxyNormAct(CHANNELS, 1, EPS, PROXY_EPS),
}
CASES = [
    *itertools.product(("group", "layer", "batch"), (True, False)),
    ("proxy", True),
    ("proxy of layer", True),
]
every_layer = pytest.mark.parametrize(("kind", "apply_act"), CASES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", KINDS, ids=str)

every_move = pytest.mark.parametrize(
    "move",
    [
        lambda block, dtype: copy.deepcopy(block.double().half().type(dtype)).share_memory(),
        lambda block, dtype: nn.Sequential(block, nn.Conv2d(CHANNELS, 1, 1)).to(dtype).to("cpu")[0],
    ],
)

# Trapezoids from -12 to 12 standard deviations: both the ends and, for a smooth integrand, the
# steps cost less than float64 holds.
GRID = torch.linspace(-12, 12, 4001, dtype=torch.float64)
DENSITY = torch.exp(-GRID.square() / 2) * (GRID[1] - GRID[0]) / (2 * np.pi) ** 0.5


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def layer(kind, apply_act=True):
    """Everything differs from its start and from channel to channel; weight x (1 + proxy_scale) up
    to 2."""
    norm = MAKERS[kind](apply_act)
    drawn = torch.Generator().manual_seed(0)
    ranges = {"weight": (0.5, 1.5), "running_var": (0.5, 1.5), "proxy_scale": (-0.3, 0.3)}
    for name, values in norm.state_dict().items():
        low, high = ranges.get(name, (-1.5, 1.5))
        values.copy_(low + (high - low) * torch.rand(CHANNELS, generator=drawn))
    return norm


def inputs(mean=0.0, std=1.0, seed=1, shape=(3, CHANNELS, 9, 7)):
    """Each channel has its own mean and scale, float64: statistics over the wrong elements are
    wrong by much."""
    drawn = torch.Generator().manual_seed(seed)
    x, means, factors = (
        torch.randn(size, generator=drawn, dtype=torch.float64)
        for size in (shape, (shape[1], 1, 1), (shape[1], 1, 1))
    )
    return mean + std * (means + (1 + factors.abs()) * x)


def moments(weight, bias, shift, scale):
    """E[silu(weight Y + bias)] and its variance for Y ~ N(shift, (1 + scale)^2), by the definition;
    [C] each."""
    z = weight[:, None] * (shift[:, None] + (1 + scale[:, None]) * GRID) + bias[:, None]
    z = z * z.sigmoid()
    mean = (z * DENSITY).sum(1)
    return mean, ((z - mean[:, None]).square() * DENSITY).sum(1)


def leaves_of(norm, x):
    """x and what is learnt, as they are after rounding to their dtype, in float64."""
    learnt = [getattr(norm, name) for name in LEARNT if hasattr(norm, name)]
    return [tensor.detach().double().cpu().requires_grad_() for tensor in (x, *learnt)]


def formula(norm, x, weight, bias, *proxy):
    if isinstance(norm, BatchNormAct):
        mean = norm.running_mean.double().cpu()
        variance = norm.running_var.double().cpu()
        if norm.training:
            mean = x.mean((0, 2, 3))
            variance = x.var((0, 2, 3), unbiased=False)
        y = (x - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + EPS).sqrt()
    else:
        grouped = x.reshape(len(x), norm.num_groups, -1)
        centred = grouped - grouped.mean(2, keepdim=True)
        y = (centred / (centred.square().mean(2, keepdim=True) + EPS).sqrt()).reshape(x.shape)
    z = y * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)
    z = z * z.sigmoid() if norm.apply_act else z
    if proxy:
        mean, variance = (values.view(-1, 1, 1) for values in moments(weight, bias, *proxy))
        z = (z - mean) / (variance + PROXY_EPS).sqrt()
    return z


@every_dtype
@every_layer
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_outputs_and_gradients_are_those_of_the_formula(kind, apply_act, dtype, training, device):
    """Two roundings to the dtype, of eps / 2 of the value, or of 1 for smaller ones, with a margin
    of 2. In float32 x - mean is exact to 100 eps / std at an offset of 100; statistics kept in half
    precision would be off by 0.03 or more. A proxy rounds a third time, and passes each rounding on
    by at most 1 / sqrt(0.03) < 6; its moments add 2e-6 x 6.

    Gradients relative to the largest of each tensor. That of x is rounded to the dtype at most
    three times; those of the parameters are sums of 189 terms of either sign, each a product of
    rounded factors: 8 eps of the largest holds all of them. A proxy's part and the direct one
    partly cancel: 32 eps.
    """
    norm = layer(kind, apply_act).to(device, dtype).train(training)
    eps = torch.finfo(dtype).eps
    for mean, std in ((0, 1), (100, 1), (0, 0.01)):
        x = inputs(mean, std).to(device, dtype)
        before = x.clone()
        state = copy.deepcopy(norm.state_dict())
        with torch.no_grad():
            expected = formula(norm, *leaves_of(norm, x))
            actual = norm(x)
        assert actual.dtype == dtype and torch.equal(x, before)
        error = ((actual.double().cpu() - expected).abs() / expected.abs().clamp(min=1)).max()
        if kind.startswith("proxy"):
            assert error < (9 * eps if dtype != torch.float32 else 1.2e-5 + 6 * mean * eps / std)
        else:
            assert error < 2 * eps * (1 if dtype != torch.float32 else 4 + mean / std)
        if not training:
            assert all(torch.equal(value, state[key]) for key, value in norm.state_dict().items())
    x = inputs(2 if kind.startswith("proxy") else 5).to(device, dtype).requires_grad_()
    upstream = (torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) + 0.5).to(
        device, dtype
    )
    leaves = leaves_of(norm, x)
    formula(norm, *leaves).backward(upstream.double().cpu())
    norm(x).backward(upstream)
    for actual, leaf in zip(
        (x, *(getattr(norm, name) for name in LEARNT if hasattr(norm, name))), leaves
    ):
        assert actual.grad.dtype == dtype
        difference = (actual.grad.double().cpu() - leaf.grad).abs().max() / leaf.grad.abs().max()
        assert difference < (32 if kind.startswith("proxy") else 8) * torch.finfo(dtype).eps


@every_dtype
def test_running_statistics_after_several_micro_batches(dtype, device):
    """An exponential average of each micro batch's mean and unbiased variance, in float32 in every
    dtype: five roundings to 2**-24 of values up to 100. In half precision it would be off by a
    hundred times the tolerance."""
    norm = layer("batch").to(device, dtype)
    mean, variance = (
        values.double().cpu().numpy() for values in (norm.running_mean, norm.running_var)
    )
    for seed, size in enumerate((9, 9, 5, 2, 9)):
        x = inputs(mean=30, std=2, seed=seed, shape=(2, CHANNELS, size, 7)).to(device, dtype)
        norm(x)
        values = x.double().cpu().numpy()
        mean = (1 - MOMENTUM) * mean + MOMENTUM * values.mean((0, 2, 3))
        variance = (1 - MOMENTUM) * variance + MOMENTUM * values.var((0, 2, 3), ddof=1)
    for actual, expected in ((norm.running_mean, mean), (norm.running_var, variance)):
        assert actual.dtype == torch.float32
        np.testing.assert_allclose(actual.double().cpu().numpy(), expected, rtol=2e-6)


@every_dtype
@every_move
@pytest.mark.parametrize("kind", ["batch", "proxy"])
def test_buffers_stay_float32_when_the_model_becomes_half(kind, move, dtype):
    """Bit for bit, in either direction: 1 + 2**-20 has no place in half precision.

    The state dict of a proxy holds what is learnt and nothing else.
    """
    fresh = layer(kind)
    next(fresh.buffers()).view(-1)[0] = 1 + 2**-20
    expected = {name: buffer.clone() for name, buffer in fresh.named_buffers()}
    norm = move(fresh, dtype)
    assert {parameter.dtype for parameter in norm.parameters()} == {dtype}
    assert norm(inputs().to(dtype)).dtype == dtype
    if kind == "proxy":
        assert {values.dtype for values in norm.moments()} == {torch.float32}
        assert list(norm.state_dict()) == LEARNT
    else:
        norm.load_state_dict({**norm.state_dict(), **expected})
    for name, buffer in move(norm, dtype).named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, expected[name])


def test_float16_gradients_do_not_overflow_where_they_fit(device):
    """The gradient of a channel's subtracted mean is a sum over pixels: here 4 x 20 x 20 x 100 =
    160,000, beyond float16's 65,504; the parameter's own is a twentieth of it."""
    norm = ProxyNormAct(CHANNELS, 1, EPS, PROXY_EPS)
    torch.nn.init.constant_(norm.weight, 0.05)
    norm = norm.to(device, torch.float16)
    x = inputs(shape=(4, CHANNELS, 20, 20)).to(device, torch.float16)
    norm(x).backward(torch.full_like(x, 100))
    for name in ("proxy_shift", "proxy_scale"):
        assert getattr(norm, name).grad.isfinite().all()
    assert norm.proxy_shift.grad.abs().min() > 1000


MEAN = Model().mean
STD = Model().std
ALL_VALUES = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)


@every_dtype
def test_pixels_are_normalised_right_in_the_layout_asked_for(dtype):
    """(image / 255 - mean) / std, every uint8 and, as mixed images are, float32.

    In float32, of values to 4.5: the scaled pixel, its constant, the shift and the sum are rounded
    by half a unit of 4.5 each, 2**-22; together below 1e-6. Then one rounding to the dtype, by half
    its eps. The images are left as they were.
    """
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (MEAN, STD))
    assert len({*MEAN}) == len({*STD}) == 3  # channels are told apart
    mixed = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 255
    for images in (ALL_VALUES, mixed, mixed.contiguous(memory_format=torch.channels_last)):
        for wanted in (torch.contiguous_format, torch.channels_last, None):
            block = Preprocess(MEAN, STD).to(dtype)
            if wanted is not None:
                block.memory_format = wanted
            before = images.clone()
            output = block(images)
            expected = (images.double() / 255 - mean) / std
            assert (output.dtype, output.shape) == (dtype, images.shape)
            assert output.is_contiguous(memory_format=wanted or torch.contiguous_format)
            rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
            assert ((output.double() - expected).abs() <= 1e-6 + rounding * expected.abs()).all()
            if not OLD:  # whose CPUs do not cast so, which is for GPUs
                as_a_gpu_does = block.in_one_pass(images)
                assert (
                    torch.equal(as_a_gpu_does, output) and as_a_gpu_does.stride() == output.stride()
                )
            assert torch.equal(images, before)
    assert torch.equal(block(ALL_VALUES.float()), block(ALL_VALUES))


@every_dtype
@every_move
def test_the_dtype_is_the_last_one_asked_for_whatever_the_device(move, dtype):
    """A move to a device must not take the dtype back: half-precision convolutions would refuse the
    images. And the constants are the same float32 numbers after any number of moves; they are no
    part of a state dict."""
    block = move(Preprocess(MEAN, STD), dtype)
    fresh = Preprocess(MEAN, STD)
    assert block(ALL_VALUES).dtype == dtype
    for name in ("scale", "shift"):
        assert getattr(block, name).dtype == torch.float32
        assert torch.equal(getattr(block, name), getattr(fresh, name))
    assert block.state_dict() == {} and list(block.parameters()) == []

"""Grouped convolution by our kernels against torch's and timm's in float64, on the GPU or in
Triton's interpreter."""

import copy
import itertools

import pytest
import torch
from timm.layers import Conv2dSame, create_conv2d
from torch import nn

pytest.importorskip("triton")

from models.kernels import group_conv, group_norm
from models.kernels.group_conv import FusedGroupConv2d, replaces

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
every_format = pytest.mark.parametrize("form", FORMATS)
# Kernel, stride, padding and format.
FAST = (3, 2, "same", "channels_last")


@pytest.fixture(autouse=True)
def _products_of_bfloat16(monkeypatch):
    """Triton's interpreter holds bfloat16 as uint16, and its product multiplies these integers."""
    if DEVICE == "cuda":
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    product = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(
            (handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32
        )

    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *others: product(self, widened(a), widened(b), *others),
    )


def convolution(
    kernel=3, stride=1, padding="torch", channels=32, group=16, dtype=torch.float32, seed=0
):
    """As timm builds a block's: a Conv2d, or for "same" with stride 2 a Conv2dSame."""
    pad = "same" if padding == "same" else ""
    conv = create_conv2d(
        channels, channels, kernel, stride=stride, padding=pad, groups=channels // group
    )
    with torch.no_grad():
        conv.weight.copy_(
            torch.randn(conv.weight.shape, generator=torch.Generator().manual_seed(seed))
        )
    return conv.to(DEVICE, dtype)


def images(shape, form="contiguous", dtype=torch.float32, seed=1):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(DEVICE, dtype).contiguous(memory_format=FORMATS[form])


def results(conv, x, upstream):
    """Output, gradient of x, gradient of the weights."""
    x = x.detach().clone().requires_grad_()
    y = conv(x)
    return [y.detach(), *torch.autograd.grad(y, [x, conv.weight], upstream.to(y))]


def exact(conv, x, upstream):
    """The same in float64 by torch and timm."""
    return results(copy.deepcopy(conv).cpu().double(), x.cpu().double(), upstream.cpu().double())


def stored(exact, dtype):
    """As a kernel rounds it; Triton's interpreter cuts bfloat16 off."""
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        exact = (exact.float().view(torch.int32) & -(2**16)).view(torch.float32)
    return exact.to(dtype)


def check(conv, x):
    """Relative to each tensor's largest value.

    In half precision one rounding, of eps / 2, is all that shows; Triton's interpreter cuts bfloat16
    off instead, by up to eps. In float32, sums of up to 400 products of either sign are rounded at
    every addition, which goes as a random walk: 4 eps. TF32 would be off by 1,000 of these.
    """
    upstream = images(conv(x).shape, dtype=x.dtype, seed=2)
    found = results(FusedGroupConv2d.of(conv), x, upstream)
    roundings = {
        torch.float32: 4,
        torch.float16: 0.51,
        torch.bfloat16: 0.51 if DEVICE == "cuda" else 1.01,
    }
    tolerance = torch.finfo(x.dtype).eps * roundings[x.dtype]
    for name, actual, expected in zip(
        ("output", "input", "weight"), found, exact(conv, x, upstream)
    ):
        assert actual.dtype == x.dtype and actual.shape == expected.shape
        difference = (actual.cpu().double() - expected).abs().max() / expected.abs().max()
        assert difference <= tolerance, f"{name}: {difference / torch.finfo(x.dtype).eps:.3g} eps"
    return found


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "form"),
    [
        pytest.param(*each, marks=() if each == FAST else pytest.mark.slow)
        for each in itertools.product((3, 5), (1, 2), ("same", "torch"), FORMATS)
    ],
)
def test_output_and_gradients_are_the_convolutions(kernel, stride, padding, form):
    """TensorFlow's padding differs between the odd and the even side."""
    for height, width in ((5, 6), (1, kernel - 2)):  # images may be smaller than the kernel
        check(convolution(kernel, stride, padding), images((1, 32, height, width), form))


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.float16, "channels_last"),
        pytest.param(torch.bfloat16, "contiguous", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sums_of_half_precision_are_float32(dtype, form, monkeypatch):
    """Also where the weights' gradient is added up in parts: it is the exact one rounded once.

    But for the few elements that float32's own rounding takes across a boundary, one in a thousand
    or so; parts in half precision would change every third.
    """
    monkeypatch.setattr(group_conv, "_LEAST_TILES", 1)
    conv = convolution(3, 2, "same", dtype=dtype)
    x = images((1, 32, 11, 8), form, dtype)
    y, dx, dw = check(conv, x)
    upstream = images(y.shape, dtype=dtype, seed=2)
    assert (dw.cpu() == stored(exact(conv, x, upstream)[2], dtype)).double().mean() > 0.98
    again = results(FusedGroupConv2d.of(conv), x, upstream)
    assert all(torch.equal(one, other) for one, other in zip((y, dx, dw), again)), (
        "results repeat to the bit"
    )
    assert y.is_contiguous(memory_format=FORMATS[form]) and dx.is_contiguous(
        memory_format=FORMATS[form]
    )


@pytest.mark.parametrize(
    ("channels", "group", "form"),
    [
        (48, 16, "channels_last"),
        pytest.param(64, 32, "contiguous", marks=pytest.mark.slow),
        pytest.param(128, 16, "channels_last", marks=pytest.mark.slow),
        pytest.param(96, 16, "contiguous", marks=pytest.mark.slow),
    ],
)
def test_groups_do_not_mix(channels, group, form):
    """One, two or four groups a program, one to three programs.

    Weights in another layout than they have at first.
    """
    conv = convolution(3, 2, "same", channels, group)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    _, _, gradient = check(conv, images((1, channels, 6, 5), form))
    assert gradient.stride() == conv.weight.stride(), "autograd would copy it"


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "form"),
    [
        pytest.param(*each, marks=() if each == FAST else pytest.mark.slow)
        for each in itertools.product((3, 5), (1, 2), ("same", "torch"), FORMATS)
    ],
)
def test_tiles_of_lines_meet(kernel, stride, padding, form, monkeypatch):
    """Float16, which has several lines a program: blocks of lines that the image does not fill, two
    tiles a line, and one that is wider than the image.

    The weights' gradient is added up in several parts, of which the last are empty where the stride
    is 1.
    """
    monkeypatch.setattr(group_conv, "_LEAST_TILES", 1)
    monkeypatch.setattr(group_conv, "_WARPS", 40)
    for height, columns in ((9, (16,)), (6, (32,))):
        monkeypatch.setattr(group_conv, "_COLUMNS", columns)
        x = images((1, 32, height, 19), form, torch.float16)
        check(convolution(kernel, stride, padding, dtype=torch.float16), x)


@pytest.mark.parametrize(
    ("parts", "kernel", "form"),
    [
        (1, 3, "contiguous"),
        pytest.param(35, 5, "channels_last", marks=pytest.mark.slow),
        (130, 3, "contiguous"),
    ],
)
def test_all_parts_of_the_weights_gradient_are_added(parts, kernel, form):
    """One, and more than a program adds at a time, in either layout of the weights; a tile that is
    not full."""
    weight = convolution(kernel).weight.detach().contiguous(memory_format=FORMATS[form])
    sums = images((parts, 2, kernel, kernel, 16 * 16)).view(parts, 2, kernel, kernel, 16, 16)
    found = group_conv.Launches(images((1, 32, 4, 4)), weight, 1, False)._added(sums, torch.float32)
    expected = sums.cpu().double().sum(0).permute(0, 3, 4, 1, 2).reshape(weight.shape)
    assert found.stride() == weight.stride()
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-6, atol=1e-6 * parts**0.5)


@pytest.mark.parametrize(
    ("stride", "form", "dtype"),
    [
        (1, "channels_last", torch.float16),
        pytest.param(2, "contiguous", torch.float32, marks=pytest.mark.slow),
        pytest.param(1, "contiguous", torch.float16, marks=pytest.mark.slow),
    ],
)
def test_statistics_are_those_of_the_output_as_it_is_stored(stride, form, dtype):
    """Merged, they are mean and variance of each image's groups; parts at the edges have fewer
    pixels. A mean of 30 standard deviations takes no digits. Sums of 800 float32 terms: 64 eps."""
    conv = FusedGroupConv2d.of(convolution(3, stride, channels=64, dtype=dtype))
    x = images((2, 64, 5, 35), form, dtype)
    with torch.no_grad():
        conv.weight.add_(0.5 if dtype == torch.float32 else 0)
        x += 30 if dtype == torch.float32 else 0
        y, partial = conv.with_statistics(x)
        assert torch.equal(y, conv(x))
        tiles = group_norm.Tiles(y, 4)
        mean, scale = group_norm.merge_statistics(partial, tiles, 1e-3, y.shape[2:], conv.parts(x))
    values = y.double().reshape(2, 4, -1)
    tolerance = 64 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(mean.double(), values.mean(2), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        scale.double(), (values.var(2, correction=0) + 1e-3).rsqrt(), rtol=tolerance, atol=0
    )


def test_narrow_and_wide_tiles_waste_few_columns():
    """Of the widths of EfficientNet-B4 at 380 pixels."""
    x = images((1, 32, 4, 4), "channels_last", torch.float16)
    launches = group_conv.Launches(x, convolution().weight, 1, False)
    assert [launches._columns(width) for width in (190, 95, 48, 24, 12)] == [32, 32, 16, 32, 16]


def test_other_layouts_become_contiguous():
    check(convolution(), images((1, 64, 3, 2))[:, ::2])


@pytest.mark.parametrize("wanted", ["input", pytest.param("weight", marks=pytest.mark.slow)])
def test_only_wanted_gradients_are_computed(wanted, monkeypatch):
    """Images want none: the kernel for it does not run; as with frozen weights."""
    conv = convolution()
    x = images((1, 32, 4, 4))
    expected = dict(
        zip(("input", "weight"), results(FusedGroupConv2d.of(conv), x, torch.ones(1, 32, 4, 4))[1:])
    )
    conv.weight.requires_grad_(wanted == "weight")
    x.requires_grad_(wanted == "input")
    other = {"input": "weight", "weight": "input"}[wanted]
    monkeypatch.setattr(group_conv.Launches, f"{other}_gradient", None)
    FusedGroupConv2d.of(conv)(x).sum().backward()
    assert torch.equal({"input": x, "weight": conv.weight}[wanted].grad, expected[wanted])


def test_a_second_derivative_is_refused():
    """And nothing is kept where no gradient is wanted."""
    fused = FusedGroupConv2d.of(convolution())
    x = images((1, 32, 4, 4)).requires_grad_()
    with torch.no_grad():
        assert fused(x).grad_fn is None
    (gradient,) = torch.autograd.grad(fused(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_what_the_kernels_take_and_what_not():
    for setting in itertools.product((3, 5), (1, 2), ("same", "torch")):
        assert replaces(convolution(*setting))
    assert replaces(convolution(channels=64, group=32))
    taken = {
        "in_channels": 32,
        "out_channels": 32,
        "kernel_size": 3,
        "padding": 1,
        "groups": 2,
        "bias": False,
    }
    assert replaces(nn.Conv2d(**taken))
    for other in (
        {"groups": 32},
        {"groups": 4},
        {"groups": 1},
        {"bias": True},
        {"out_channels": 64},
        {"dilation": 2, "padding": 2},
        {"stride": 3},
        {"stride": (1, 2)},
        {"padding_mode": "reflect"},
        {"kernel_size": 1, "padding": 0},
        {"kernel_size": 7, "padding": 3},
        {"kernel_size": (3, 5)},
        {"kernel_size": 5},
        {"padding": 0},
        {"padding": (1, 0)},
        {"padding": "same"},
    ):
        assert not replaces(nn.Conv2d(**{**taken, **other})), other
    assert not replaces(FusedGroupConv2d.of(convolution()))
    assert not replaces(Conv2dSame(32, 32, 3, dilation=2, groups=2, bias=False))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device with 20 GB")
@every_format
def test_more_elements_than_32_bits_can_count(form):
    """The last image lies past the first 2^31 elements, and gives what it gives alone."""
    conv = FusedGroupConv2d.of(convolution(dtype=torch.float16))
    last = images((1, 32, 1450, 1450), form, torch.float16)
    x = torch.zeros(33, *last.shape[1:], dtype=torch.float16, device=DEVICE).contiguous(
        memory_format=FORMATS[form]
    )
    x[-1:] = last
    assert x.numel() > 2**31
    with torch.no_grad():
        assert torch.equal(conv(x)[-1:], conv(last))

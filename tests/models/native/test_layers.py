"""Single layers by our functions against torch's and timm's in float64, and which layers they
take."""

import copy
import itertools

import pytest
import torch
from timm.layers import Conv2dSame, create_conv2d
from torch import nn

from models.native.layers import GroupConv2d, NativeGroupNormAct, NativeProxyNormAct, Pointwise
from models.normalization import BatchNormAct, GroupNormAct, ProxyNormAct
from tests.models.native.exact import EPS, FLOAT32, drawn

FORMATS = [torch.channels_last, torch.contiguous_format]


def ours(layer, kind):
    """A copy of the layer, by our functions."""
    assert kind.replaces(layer)
    layer = copy.deepcopy(layer)
    layer.__class__ = kind
    return layer


def images(*shape, layout=torch.channels_last, seed=1):
    """[N, C, H, W]."""
    count, channels, height, width = shape
    return (
        drawn(count, height, width, channels, seed=seed)
        .permute(0, 3, 1, 2)
        .contiguous(memory_format=layout)
    )


def results(layer, x, dy=None):
    """Output, gradient of x, and gradients of the parameters."""
    x = x.detach().requires_grad_()
    y = layer(x)
    dy = images(*y.shape, seed=9) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy.to(y.dtype))]


def exact(layer, x, dy=None):
    """The same in float64, by the layer itself."""
    return results(copy.deepcopy(layer).double(), x.double().contiguous(), dy)


def assert_close(actual, expected, eps):
    """Relative to each tensor's largest number."""
    for number, (one, other) in enumerate(zip(actual, expected)):
        error = (one.double() - other).abs().max() / other.abs().max() / FLOAT32
        assert error <= eps, f"{number}: {error:.1f} eps"


def same(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other))


# ---- Convolutions.


def convolution(kernel, stride, same_padding, channels=32, seed=0):
    """As timm builds a block's: with TensorFlow's padding and a stride of 2 it is a Conv2dSame."""
    padding = "same" if same_padding else ""
    conv = create_conv2d(
        channels, channels, kernel, stride=stride, padding=padding, groups=channels // 16
    )
    with torch.no_grad():
        conv.weight.copy_(drawn(*conv.weight.shape, seed=seed) / (4 * kernel))
    return conv


@pytest.mark.parametrize(("kernel", "stride"), [*itertools.product((3, 5, 7), (1, 2))])
def test_group_convolutions_are_padded_as_timms(kernel, stride):
    """TensorFlow's padding puts its odd line to the end, so even and odd sides differ.

    Sums of 784 products: 24 eps.
    """
    for padding in (True, False):
        conv = convolution(kernel, stride, padding)
        assert isinstance(conv, Conv2dSame) == (padding and stride == 2)
        for shape in ((1, 32, 1, 2), (2, 32, 7, 8), (3, 32, 14, 13), (5, 32, 5, 4), (6, 32, 2, 9)):
            x = images(*shape)
            assert_close(results(ours(conv, GroupConv2d), x), exact(conv, x), 24)


@pytest.mark.parametrize("kind", ["group", "pointwise"])
def test_inputs_in_any_layout_give_the_same_bits(kind):
    """Planes, every other image, and memory that begins at no multiple of a vector; gradients
    likewise. Activations are channels-last in each case."""
    if kind == "group":
        layer = ours(convolution(3, 2, True), GroupConv2d)
    else:
        layer = ours(nn.Conv2d(32, 32, 1, bias=False), Pointwise)
    x = images(4, 32, 7, 5)
    expected = results(layer, x)
    dy = images(*expected[0].shape, seed=9)
    apart = torch.stack([x, x], 1).flatten(0, 1)[::2]
    shifted = (
        torch.cat([torch.zeros(1), x.permute(0, 2, 3, 1).flatten()])[1:]
        .view(4, 7, 5, 32)
        .permute(0, 3, 1, 2)
    )
    for other in (x.contiguous(), apart, shifted):
        found = results(layer, other, dy.contiguous())
        assert same(found, expected)
        assert found[0].is_contiguous(memory_format=torch.channels_last)
    weight = layer.weight.data
    layer.weight.data = weight.contiguous(memory_format=torch.channels_last)
    assert same(results(layer, x), expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", FORMATS, ids=str)
def test_pointwise_convolutions_are_products(layout, bias):
    """Sums of 48 and of 105 products of either sign: 8 eps."""
    for conv in (
        nn.Conv2d(48, 24, 1, bias=bias),
        create_conv2d(48, 24, 1, padding="same", bias=bias),
    ):
        x = images(3, 48, 7, 5, layout=layout)
        found = results(ours(conv, Pointwise), x)
        assert_close(found, exact(conv, x), 8)
        assert found[0].is_contiguous(memory_format=torch.channels_last)


def test_a_batch_may_be_empty():
    """As from a filter; torch's layers do it too."""
    for layer in (
        ours(convolution(3, 1, False), GroupConv2d),
        ours(GroupNormAct(32, 4, EPS), NativeGroupNormAct),
    ):
        y, dx, *gradients = results(layer, torch.zeros(0, 32, 5, 5), torch.zeros(0, 32, 5, 5))
        assert y.shape == dx.shape == (0, 32, 5, 5)
        assert not any(gradient.any() for gradient in gradients)


# ---- Normalisations.


def norm(channels, apply_act=True, shift=True, groups=4, kind=GroupNormAct):
    layer = kind(channels, groups, EPS, *((0.03,) if kind is ProxyNormAct else (apply_act, shift)))
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.add_(0.3 * drawn(channels, seed=number))
    return layer


@pytest.mark.parametrize("layout", FORMATS, ids=str)
@pytest.mark.parametrize(("apply_act", "shift"), [*itertools.product((True, False), (True, False))])
def test_normalizations_are_those_of_the_layer(apply_act, shift, layout):
    """Sums of up to 3,150 terms, as in the tests of the functions: 8 eps and half the root."""
    for groups, shape in ((1, (2, 12, 7, 5)), (4, (3, 40, 1, 1)), (4, (1, 8, 70, 45))):
        layer = norm(shape[1], apply_act, shift, groups)
        x = images(*shape, layout=layout)
        found = results(ours(layer, NativeGroupNormAct), x)
        assert_close(found, exact(layer, x), 8 + (shape[2] * shape[3]) ** 0.5 / 2)
        assert found[0].is_contiguous(memory_format=torch.channels_last)


class Residual(nn.Module):
    """A layer whose output is scaled for each image and added to `residual`."""

    def __init__(self, layer, kept, residual):
        super().__init__()
        self.layer = layer
        self.kept = kept
        self.residual = nn.Parameter(residual)

    def forward(self, x):
        if isinstance(self.layer, NativeGroupNormAct):
            return self.layer.added(x, self.kept, self.residual)
        return self.layer(x) * self.kept.to(x).view(-1, 1, 1, 1) + self.residual


@pytest.mark.parametrize("apply_act", [True, False])
def test_a_residual_is_added_to_what_is_kept_of_each_image(apply_act):
    """An image that is dropped keeps the bits of the residual, and has no gradient.

    In either layout.
    """
    layer = norm(24, apply_act)
    kept = torch.tensor([1.25, 0.0, 1.25])
    x = images(3, 24, 5, 7)
    residual = images(3, 24, 5, 7, seed=2)
    whole = Residual(layer, kept, residual)
    expected = exact(whole, x)
    for each in (residual, residual.contiguous()):
        found = results(Residual(ours(layer, NativeGroupNormAct), kept, each), x)
        assert_close(found, expected, 12)
        assert torch.equal(found[0][1], residual[1])
        assert not found[1][1].any()


def test_a_mean_over_pixels_may_follow():
    """Its gradient is one number for many pixels."""
    layer = ours(norm(12), NativeGroupNormAct)
    x = images(2, 12, 7, 5)
    dy = drawn(2, 12, 1, 1, seed=3).expand(2, 12, 7, 5)
    assert same(results(layer, x, dy), results(layer, x, dy.contiguous()))


def test_proxy_normalization_is_ours_below_its_proxy(monkeypatch):
    """The proxy's own arithmetic stays torch's, which adds two roundings and sums of 105 terms."""
    layer = norm(12, kind=ProxyNormAct)
    fused = ours(layer, NativeProxyNormAct)
    x = images(3, 12, 7, 5)
    expected = exact(layer, x)
    monkeypatch.setattr(nn.functional, "group_norm", None)
    assert_close(results(fused, x), expected, 32)
    assert list(fused.state_dict()) == list(layer.state_dict())


def test_only_the_input_is_kept_for_the_backward_pass():
    """Beside it: the parameters, and two numbers for each image and group."""
    layer = ours(norm(12), NativeGroupNormAct)
    x = images(2, 12, 7, 5).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        layer(x)
    known = {tensor.data_ptr() for tensor in (x, *layer.parameters())}
    assert {tensor.data_ptr() for tensor in kept} >= known
    assert sum(tensor.numel() for tensor in kept if tensor.data_ptr() not in known) == 2 * 2 * 4


# ---- Of all.


LAYERS = {
    "pointwise": (lambda: nn.Conv2d(16, 16, 1), Pointwise),
    "convolution": (lambda: convolution(3, 1, False, 16), GroupConv2d),
    "norm": (lambda: norm(16), NativeGroupNormAct),
    "norm without bias": (lambda: norm(16, False, False), NativeGroupNormAct),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


@every_layer
def test_what_needs_no_gradient_gets_none(name):
    """Frozen parameters, or an input without gradient; the gradients of the others keep their
    bits."""
    make, kind = LAYERS[name]
    layer = ours(make(), kind)
    x = images(2, 16, 5, 3)
    expected = results(layer, x)
    y = layer(x)
    assert same(
        [y, *torch.autograd.grad(y, list(layer.parameters()), images(*y.shape, seed=9))],
        [expected[0], *expected[2:]],
    )
    layer.weight.requires_grad_(False)
    entering = x.detach().requires_grad_()
    y = layer(entering)
    y.backward(images(*y.shape, seed=9))
    assert torch.equal(entering.grad, expected[1])
    assert layer.weight.grad is None
    layer.requires_grad_(False)
    assert layer(x).grad_fn is None
    with torch.inference_mode():
        assert torch.equal(layer(x), expected[0])


@pytest.mark.parametrize("name", ["convolution", "norm"])
def test_a_second_derivative_is_refused(name):
    make, kind = LAYERS[name]
    x = images(1, 16, 2, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(ours(make(), kind)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_which_layers_are_taken():
    for setting in itertools.product((3, 5, 7), (1, 2), (False, True)):
        assert GroupConv2d.replaces(convolution(*setting))
    taken = {
        "in_channels": 32,
        "out_channels": 32,
        "kernel_size": 3,
        "padding": 1,
        "groups": 2,
        "bias": False,
    }
    assert GroupConv2d.replaces(nn.Conv2d(**taken))
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
        {"kernel_size": 9, "padding": 4},
        {"kernel_size": (3, 5)},
        {"kernel_size": 4, "padding": 2},
        {"kernel_size": 5},
        {"padding": 0},
        {"padding": (1, 0)},
        {"padding": "same"},
    ):
        assert not GroupConv2d.replaces(nn.Conv2d(**{**taken, **other})), other
    assert not GroupConv2d.replaces(Conv2dSame(32, 32, 3, dilation=2, groups=2, bias=False))
    assert not GroupConv2d.replaces(ours(convolution(3, 1, False), GroupConv2d))

    assert Pointwise.replaces(nn.Conv2d(3, 5, 1))
    for other in (
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Conv2d(4, 4, 1, stride=2),
        nn.Conv2d(4, 4, 1, padding=1),
        nn.Conv2d(4, 4, (1, 3)),
        nn.Conv1d(4, 4, 1),
        nn.Linear(4, 4),
        ours(nn.Conv2d(4, 4, 1), Pointwise),
    ):
        assert not Pointwise.replaces(other), other

    assert NativeGroupNormAct.replaces(norm(8)) and NativeProxyNormAct.replaces(
        norm(8, kind=ProxyNormAct)
    )
    for other in (nn.GroupNorm(4, 8), BatchNormAct(8, EPS, 0.1), ours(norm(8), NativeGroupNormAct)):
        assert not NativeGroupNormAct.replaces(other) and not NativeProxyNormAct.replaces(other)
    assert not NativeGroupNormAct.replaces(norm(8, kind=ProxyNormAct))

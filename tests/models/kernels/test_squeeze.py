"""Normalisation with squeeze and excitation in one layer, against timm's in float64; without a GPU,
in the interpreter.

Sums of up to a hundred float32 terms pass through two small layers and a sigmoid: 32 eps of the
largest.
"""

import copy

import pytest
import torch
from torch import nn

from models.efficientnet import build
from recipe.config import Model

pytest.importorskip("triton")

from models.kernels import squeeze
from models.kernels.patching import patch
from tests.models.kernels.test_group_norm import FLOAT32, FORMATS, WAYS, assert_close, divide, drawn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Block -> its normalisation; a separable block and one with expansion.
BLOCKS = {"blocks.0.0": "bn1", "blocks.1.0": "bn2"}

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def model_of(**keys):
    section = {
        "name": "efficientnet_b0",
        "width": 0.25,
        "depth": 0.1,
        "image_size": 16,
        "classes": 10,
        **keys,
    }
    return build(Model(**section), seed=0)


@pytest.fixture(params=WAYS)
def tiles(request, monkeypatch):
    divide(monkeypatch, request.param)


class Pair(nn.Module):
    """A block's normalisation and what follows it, with parameters that are like no initial
    ones."""

    def __init__(self, name, dtype=torch.float32):
        super().__init__()
        self.block = model_of().block(name)
        self.norm = BLOCKS[name]
        self.channels = self.block.get_submodule(self.norm).num_channels
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.own():
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
        self.to(DEVICE, dtype)

    def own(self):
        return [*self.block.get_submodule(self.norm).parameters(), *self.block.se.parameters()]

    def forward(self, x):
        return self.block.se(self.block.get_submodule(self.norm)(x))

    def fused(self):
        other = copy.copy(self)
        other._modules = {"block": squeeze.fuse(self.block)}
        return other


def results(pair, x, dy):
    x = x.detach().requires_grad_()
    y = pair(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *pair.own()], dy)]


def exact(pair, x, dy):
    x, dy = (tensor.double().cpu().contiguous() for tensor in (x, dy))
    return results(copy.deepcopy(pair).double().cpu(), x, dy)


@pytest.mark.parametrize(
    "layout", [pytest.param(FORMATS[0], marks=pytest.mark.slow), FORMATS[1]], ids=str
)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("blocks.0.0", (7, 5), marks=pytest.mark.slow),
        pytest.param("blocks.1.0", (7, 5), marks=pytest.mark.slow),
        ("blocks.1.0", (5, 3)),
        pytest.param("blocks.1.0", (1, 1), marks=pytest.mark.slow),
        pytest.param("blocks.1.0", (8, 8), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_the_formula(name, size, layout, tiles):
    """No group has two values alone: these become 1 and -1 whatever they are, and gradients what
    rounding leaves."""
    pair = Pair(name)
    x, dy = (drawn((2, pair.channels, *size), layout=layout, seed=seed) for seed in (1, 2))
    actual = results(pair.fused(), x, dy)
    assert_close(actual, exact(pair, x, dy), 32 * FLOAT32)
    assert actual[0].stride() == actual[1].stride() == x.stride()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [pytest.param(FORMATS[0], marks=pytest.mark.slow), FORMATS[1]], ids=str
)
def test_half_precision_is_rounded_once(layout, tiles):
    """Arithmetic is float32: half an eps, or a hair more. timm's rounds what it pools and every
    layer."""
    pair = Pair("blocks.1.0", torch.float16)
    x, dy = (drawn((2, pair.channels, 5, 4), torch.float16, layout, seed) for seed in (1, 2))
    actual = results(pair.fused(), x, dy)
    assert all(tensor.dtype == torch.float16 for tensor in actual)
    assert_close(actual, exact(pair, x, dy), 0.51 * torch.finfo(torch.float16).eps)


@pytest.mark.slow
def test_gradients_of_any_layout_and_one_image_alone_give_the_same_bits(tiles):
    pair = Pair("blocks.1.0").fused()
    x = drawn((2, pair.channels, 3, 2))
    dy = drawn((2, pair.channels, 1, 1), seed=2).expand(2, pair.channels, 3, 2)
    first = results(pair, x, dy.contiguous())
    for again in (dy, dy.contiguous(memory_format=torch.channels_last)):
        assert all(torch.equal(one, other) for one, other in zip(first, results(pair, x, again)))


def test_only_the_input_is_kept_for_the_backward_pass():
    """Of tensors as large as it."""
    pair = Pair("blocks.1.0").fused()
    kept = []
    x = drawn((1, pair.channels, 9, 9)).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        pair(x)
    assert [tensor.data_ptr() for tensor in kept if tensor.numel() >= x.numel()] == [x.data_ptr()]


def test_a_second_derivative_is_refused():
    pair = Pair("blocks.0.0").fused()
    x = drawn((1, pair.channels, 2, 2)).requires_grad_()
    (gradient,) = torch.autograd.grad(pair(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_blocks_keep_the_names_of_their_parameters_and_others_are_not_replaced():
    model = model_of()
    plain = model_of()
    before = dict(model.named_parameters())
    blocks = [name for name in model.names if name.startswith("blocks.")]
    assert patch(model, ["squeeze"]) == blocks
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(
        after[name] is parameter for name, parameter in before.items()
    )
    assert patch(model, ["squeeze"]) == []
    for other in (model_of(norm="batch"), model_of(proxy_norm=True)):
        assert not any(map(squeeze.replaces, other.modules()))
    block = plain.block("blocks.1.0")
    block.se.gate = nn.Hardsigmoid()
    assert not squeeze.replaces(block) and not squeeze.replaces(plain)


def test_a_copied_model_in_half_precision_uses_its_own_parameters():
    """The layer finds those of `se` although they are not its own."""
    model = model_of()
    patch(model, ["squeeze"])
    other = copy.deepcopy(model).half().block("blocks.1.0")
    assert other.bn2.squeeze is other.se and other.se.conv_reduce.weight.dtype == torch.float16
    assert model.block("blocks.1.0").se.conv_reduce.weight.dtype == torch.float32

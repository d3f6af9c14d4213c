"""The fused group normalisation against its formula in float64; without a GPU, in Triton's
interpreter."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from models.normalization import BatchNormAct, GroupNormAct, ProxyNormAct

pytest.importorskip("triton")

from models.kernels import group_norm
from models.kernels.group_norm import FusedGroupNormAct, replaces

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [torch.contiguous_format, torch.channels_last]
EPS = 1e-3

# Rows of pixels that are no multiple of anything; whole vectors of 8; one pixel; one channel for
# each group.
SHAPES = [(2, 12, 7, 5), (1, 8, 8, 8), (3, 16, 1, 1), (2, 4, 13, 5)]
FLOAT32 = torch.finfo(torch.float32).eps

# NumPy, of which the interpreter is made, warns where a GPU is silent: exp of more than 88 is
# infinite, 1 over that 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


WAYS = [pytest.param("whole", marks=pytest.mark.slow), "divided"]


def divide(monkeypatch, way):
    """Tiles as they are hold an image of these tests whole; those of 64 elements, two of which are
    a strip, divide channels and pixels."""
    if way == "divided":
        sizes = group_norm._Sizes(program=128, tile=64, warps=1)
        monkeypatch.setattr(group_norm, "_SUMMED", sizes)
        monkeypatch.setattr(group_norm, "_MAPPED", sizes)
        monkeypatch.setattr(group_norm, "_ROWS", (8, 4))
        monkeypatch.setattr(group_norm, "_MERGED", 4)


@pytest.fixture(params=WAYS)
def tiles(request, monkeypatch):
    divide(monkeypatch, request.param)


def layer(channels, apply_act=True, shift=True, dtype=torch.float32, groups=4):
    norm = GroupNormAct(channels, groups, EPS, apply_act, shift)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(channels, generator=generator) + 0.5)
        if shift:
            norm.bias.copy_(torch.randn(channels, generator=generator))
    return norm.to(DEVICE, dtype)


def drawn(shape, dtype=torch.float32, layout=torch.contiguous_format, seed=1, mean=0.0):
    """Each image and channel has a mean and a scale of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    means, scales = torch.rand(2, *shape[:2], 1, 1, generator=generator, dtype=torch.float64)
    return (mean + means + (scales + 0.5) * x).to(DEVICE, dtype).contiguous(memory_format=layout)


class Residual(nn.Module):
    """A layer whose output is scaled for each image and added to `residual`."""

    def __init__(self, norm, kept, residual):
        super().__init__()
        self.norm = norm
        self.kept = kept
        self.residual = nn.Parameter(residual)

    def forward(self, x):
        if isinstance(self.norm, FusedGroupNormAct):
            return self.norm.added(x, self.kept, self.residual)
        return self.norm(x) * self.kept.to(x).view(-1, 1, 1, 1) + self.residual


def results(norm, x, dy):
    """Output, and the gradients of x and of the layer's parameters."""
    x = x.detach().requires_grad_()
    parameters = list(norm.parameters())
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], dy)]


def exact(norm, x, dy):
    """The same in float64, by torch's operators, from what the inputs are after rounding to their
    dtype."""
    x, dy = (tensor.double().cpu().contiguous() for tensor in (x, dy))
    return results(copy.deepcopy(norm).double().cpu(), x, dy)


def assert_close(actual, expected, tolerance):
    """Relative to the largest of each tensor."""
    for number, (one, other) in enumerate(zip(actual, expected)):
        difference = (one.double().cpu() - other).abs().max() / other.abs().max()
        assert difference <= tolerance, f"{number}: {difference / tolerance:.2g} of the tolerance"


@pytest.mark.parametrize(
    ("tiles", "shape", "apply_act", "shift"),
    [
        *((way, SHAPES[0], *kind) for way in WAYS[1:] for kind in ((True, True), (False, False))),
        *(("whole", shape, True, True) for shape in SHAPES[:2]),
        *(pytest.param("whole", shape, True, True, marks=pytest.mark.slow) for shape in SHAPES[2:]),
        *(
            pytest.param("divided", shape, True, False, marks=pytest.mark.slow)
            for shape in SHAPES[1:]
        ),
    ],
    indirect=["tiles"],
)
@pytest.mark.parametrize(
    "layout", [pytest.param(FORMATS[0], marks=pytest.mark.slow), FORMATS[1]], ids=str
)
def test_outputs_and_gradients_are_those_of_the_formula(layout, apply_act, shift, shape, tiles):
    """Sums of up to a hundred float32 terms, each rounded some ten times on the way: 16 eps of the
    largest."""
    norm = layer(shape[1], apply_act, shift)
    x = drawn(shape, layout=layout)
    dy = drawn(shape, layout=layout, seed=2)
    actual = results(FusedGroupNormAct.of(norm), x, dy)
    assert_close(actual, exact(norm, x, dy), 16 * FLOAT32)
    assert actual[0].stride() == actual[1].stride() == x.stride()


@pytest.mark.parametrize(
    ("dtype", "layout", "active"),
    [
        (torch.float16, torch.channels_last, True),
        pytest.param(torch.bfloat16, torch.contiguous_format, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_half_precision_is_rounded_once(layout, active, dtype, tiles):
    """All arithmetic is float32, so each result is off by half an eps, or by a hair more where
    float32 tips it over.

    The interpreter does not round to bfloat16 but cuts off: there it is a whole eps.
    """
    cut = dtype == torch.bfloat16 and DEVICE == "cpu"
    norm = layer(SHAPES[3][1], active, active, dtype)
    x, dy = (drawn(SHAPES[3], dtype, layout, seed) for seed in (1, 2))
    actual = results(FusedGroupNormAct.of(norm), x, dy)
    assert all(tensor.dtype == dtype for tensor in actual)
    assert_close(actual, exact(norm, x, dy), (1.01 if cut else 0.51) * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16], ids=str
)
def test_a_residual_is_added_to_what_is_kept_of_each_image(dtype, tiles):
    """As stochastic depth does: one image is dropped.

    One rounding in half precision, where torch has three.
    """
    norm = layer(12, apply_act=False, dtype=dtype)
    kept = torch.tensor([0.0, 1.25], dtype=dtype, device=DEVICE)
    x, residual, dy = (drawn(SHAPES[0], dtype, FORMATS[1], seed) for seed in (1, 2, 3))
    expected = exact(Residual(norm, kept, residual), x, dy)
    actual = results(Residual(FusedGroupNormAct.of(norm), kept, residual), x, dy)
    tolerance = 16 * FLOAT32 if dtype == torch.float32 else 0.51 * torch.finfo(dtype).eps
    assert_close(actual, expected, tolerance)
    assert torch.equal(actual[0][0], residual[0]) and not actual[1][0].any()


def test_a_large_mean_takes_no_more_digits_than_with_torch(tiles):
    """Against torch's own float32 on contiguous input, which merges means and squares too.

    A mean of 1000 is itself only known to 3e-5. A difference of squares would be off by 0.06 in a
    variance of 1.
    """
    norm = layer(8)
    x, dy = (
        drawn((1, 8, 6, 11), layout=torch.channels_last, seed=seed, mean=mean)
        for seed, mean in ((1, 1e3), (2, 0))
    )
    expected = exact(norm, x, dy)
    torchs = results(copy.deepcopy(norm).cpu(), x.cpu().contiguous(), dy.cpu().contiguous())
    for actual, other, correct in zip(results(FusedGroupNormAct.of(norm), x, dy), torchs, expected):
        worst = (other.double() - correct).abs().max() + 16 * FLOAT32 * correct.abs().max()
        assert (actual.double().cpu() - correct).abs().max() < 2 * worst


def test_an_image_has_the_same_bits_every_time_and_in_every_batch(tiles):
    """Whatever the layout of the gradient: the other format, or, as from a mean over pixels, one
    number for many."""
    norm = FusedGroupNormAct.of(layer(2, groups=2))
    x = drawn((2, 2, 7, 5))
    dy = drawn((2, 2, 1, 1), seed=2).expand(2, 2, 7, 5)
    first = results(norm, x, dy.contiguous())
    for again in (dy, dy.contiguous(memory_format=torch.channels_last)):
        assert all(torch.equal(one, other) for one, other in zip(first, results(norm, x, again)))
    alone = results(norm, x[1:], dy[1:])
    assert torch.equal(alone[0], first[0][1:]) and torch.equal(alone[1], first[1][1:])


def test_images_need_no_gradient_and_other_layouts_become_contiguous():
    norm = layer(12)
    x = drawn((2, 12, 7, 10))[..., ::2]
    dy = drawn(SHAPES[0], seed=2)
    y = FusedGroupNormAct.of(norm)(x)
    gradients = torch.autograd.grad(y, [norm.weight, norm.bias], dy)
    expected, _, *others = exact(norm, x, dy)
    assert_close([y.detach(), *gradients], [expected, *others], 16 * FLOAT32)
    assert y.is_contiguous()


def test_only_the_input_is_kept_for_the_backward_pass():
    """Beside it: the parameters, and two numbers for each image and group."""
    norm = layer(12)
    x = drawn(SHAPES[0]).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        FusedGroupNormAct.of(norm)(x)
    known = {tensor.data_ptr() for tensor in (x, norm.weight, norm.bias)}
    assert {tensor.data_ptr() for tensor in kept} >= known
    assert sum(tensor.numel() for tensor in kept if tensor.data_ptr() not in known) == 2 * 2 * 4


def test_a_second_derivative_is_refused():
    norm = FusedGroupNormAct.of(layer(8))
    x = drawn((1, 8, 2, 2)).requires_grad_()
    (gradient,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_proxy_normalisation_is_fused_below_its_proxy(monkeypatch):
    """The proxy's arithmetic is torch's, float32 as well: two more roundings."""
    norm = ProxyNormAct(12, 4, EPS, 0.03).to(DEVICE)
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            parameter.add_(
                0.3 * torch.randn(12, generator=torch.Generator().manual_seed(number)).to(DEVICE)
            )
    x = drawn(SHAPES[0], layout=FORMATS[1])
    dy = drawn(SHAPES[0], seed=2)
    fused = FusedGroupNormAct.of(norm)
    expected = exact(norm, x, dy)
    monkeypatch.setattr(F, "group_norm", None)
    actual = results(fused, x, dy)
    assert isinstance(fused, ProxyNormAct) and list(fused.state_dict()) == list(norm.state_dict())
    assert actual[0].stride() == x.stride()
    assert_close(actual, expected, 32 * FLOAT32)


def test_layers_without_kernels_are_not_replaced():
    assert replaces(GroupNormAct(8, 4, EPS)) and replaces(ProxyNormAct(8, 4, EPS, 0.03))
    others = [
        BatchNormAct(8, EPS, 0.1),
        nn.GroupNorm(4, 8),
        FusedGroupNormAct.of(GroupNormAct(8, 4, EPS)),
    ]
    assert not any(replaces(other) for other in others)


@pytest.mark.gpu
def test_tensors_longer_than_an_int32_reaches():
    """The last image of a batch of 2^31 + 2^22 elements, beside the same image alone; 9 GiB of
    memory."""
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs a CUDA device with 12 GiB")
    norm = FusedGroupNormAct.of(layer(4, dtype=torch.float16))
    last = drawn((1, 4, 1024, 1024), torch.float16)
    for layout in FORMATS:
        x = torch.zeros((513, 4, 1024, 1024), dtype=torch.float16, device=DEVICE).contiguous(
            memory_format=layout
        )
        x[-1:] = last
        with torch.no_grad():
            assert torch.equal(norm(x)[-1:], norm(last.contiguous(memory_format=layout)))
        del x

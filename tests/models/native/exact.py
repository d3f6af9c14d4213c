"""Results of the functions of models/native, of the same formulas by torch's autograd in float64,
and comparisons."""

import statistics
from typing import NamedTuple, Optional

import torch
from torch.nn import functional as F

from models.native import library
from models.native.library import GATED, LINEAR, PLAIN, POOLED, Behind, Gate, Geometry, Norm

EPS = 1e-3
FLOAT32 = torch.finfo(torch.float32).eps


def drawn(*shape, seed=1, mean=0.0, std=1.0):
    """Normal numbers, float32.

    Those of a shape [N, ..., C] have means of their own in each image and channel.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if len(shape) > 2:
        x += torch.rand(
            shape[0], *[1] * (len(shape) - 2), shape[-1], generator=generator, dtype=torch.float64
        )
    return (mean + std * x).float()


class Exact(NamedTuple):
    """A result in float64, and the size that float32's errors in it are relative to."""

    value: torch.Tensor
    size: float

    @classmethod
    def of(cls, value, terms=None):
        """terms: of which value is the sum over images and pixels, and which may cancel: all of
        them count."""
        value = value.detach()
        size = value if terms is None else terms.detach().abs().sum((0, 1, 2))
        return cls(value, size.abs().max().item())


class Operands(NamedTuple):
    """What a normalisation and what is around it take: activations [N, H, W, C], gates [N, C],
    parameters [C]."""

    x: torch.Tensor
    dy: torch.Tensor
    weight: torch.Tensor
    bias: Optional[torch.Tensor]
    kept: Optional[torch.Tensor]  # [N]
    residual: Optional[torch.Tensor]
    gate: torch.Tensor
    dpooled: torch.Tensor  # gradient of the means over pixels, [N, C]

    def double(self):
        return Operands(*(each if each is None else each.double() for each in self))


def operands(images, height, width, channels, bias=True, around=True, seed=1):
    """Random ones. bias, around: with a bias; with `kept`, of which every third is 0, and a
    residual."""
    shape = (images, height, width, channels)
    return Operands(
        x=drawn(*shape, seed=seed),
        dy=drawn(*shape, seed=seed + 1),
        weight=drawn(channels, seed=seed + 2, mean=1.0, std=0.3),
        bias=drawn(channels, seed=seed + 3, std=0.5) if bias else None,
        kept=torch.tensor([0.0, 1.25, 1.25]).repeat(images)[1 : images + 1] if around else None,
        residual=drawn(*shape, seed=seed + 4) if around else None,
        gate=drawn(images, channels, seed=seed + 5).sigmoid(),
        dpooled=drawn(images, channels, seed=seed + 6),
    )


def normalised(x, groups, weight, bias, eps=EPS):
    """Group normalisation of [N, H, W, C], scale and bias."""
    by_group = x.unflatten(-1, (groups, -1))
    variance, mean = torch.var_mean(by_group, (1, 2, 4), correction=0, keepdim=True)
    z = ((by_group - mean) * (variance + eps).rsqrt()).flatten(-2) * weight
    return z if bias is None else z + bias


def form_results(form, given, groups):
    """Outputs and gradients of a normalisation of this form (see library.py), by our functions, as
    {name: tensor}."""
    x, dy, weight, bias, kept, residual, gate, dpooled = given
    norm = Norm(library.group_moments(x, groups, EPS), weight, bias)
    by_pixel = dpooled / (x.shape[1] * x.shape[2])
    found = {}
    if form in (PLAIN, LINEAR):
        found["y"] = library.activated(x, norm, form == PLAIN, kept, residual)
        dz = torch.empty_like(x) if form == PLAIN else None
        sums = library.gradient_sums(form, x, norm, dy=dy, kept=kept, dz=dz)
        dweight, dbias, by_group = library.merged_gradients(form, x, norm, sums)
        if form == PLAIN:
            found["dx"] = library.input_gradient(LINEAR, x, norm, by_group, dz)
        else:
            found["dx"] = library.input_gradient(
                LINEAR, x, norm, by_group=by_group, dy=dy, kept=kept
            )
    elif form == POOLED:
        found["pooled"] = library.pooled(x, norm)
        by_pixel = Gate(None, by_pixel)
        sums = library.gradient_sums(POOLED, x, norm)
        dweight, dbias, by_group = library.merged_gradients(POOLED, x, norm, sums, by_pixel)
        found["dx"] = library.input_gradient(POOLED, x, norm, by_group, gate=by_pixel)
    else:
        gates = Gate(gate, by_pixel)
        found["y"], found["pooled"] = library.activated_and_pooled(x, norm)
        library.multiply_(found["y"], gate)
        sums = library.gradient_sums(GATED, x, norm, dy)
        found["dgate"] = sums[0]
        dweight, dbias, by_group = library.merged_gradients(GATED, x, norm, sums, gates)
        found["dx"] = library.input_gradient(GATED, x, norm, by_group, dy, gate=gates)
    found["dweight"] = dweight
    if bias is not None:
        found["dbias"] = dbias
    return found


def form_exact(form, given, groups):
    """The same in float64."""
    x, dy, weight, bias, kept, residual, gate, dpooled = (
        each if each is None else each.requires_grad_() for each in given.double()
    )
    z = normalised(x, groups, weight, bias)
    found, loss = _behind(form, z, dy, kept=kept, residual=residual, gate=gate, dpooled=dpooled)
    wanted = {
        "dx": x,
        "dweight": weight,
        "dbias": bias,
        **({"dgate": gate} if form == GATED else {}),
    }
    return _with_gradients(found, loss, wanted, z)


def _with_gradients(found, loss, wanted, z):
    """Add the gradients of `wanted`, {name: tensor or None}, to results `found`; z: the normalised
    x, or None."""
    wanted = {name: tensor for name, tensor in wanted.items() if tensor is not None}
    gradients = torch.autograd.grad(loss, [*wanted.values(), *([] if z is None else [z])])
    found = {name: Exact.of(value) for name, value in found.items()}
    for name, gradient in zip(wanted, gradients):
        found[name] = Exact.of(gradient, gradients[-1] if name in ("dweight", "dbias") else None)
    return found


def _behind(form, z, dy, kept, residual, gate, dpooled):
    """Return outputs, and a number whose gradients are those of outputs whose own are dy and
    dpooled."""
    active = z if form == LINEAR else F.silu(z)
    if form in (PLAIN, LINEAR):
        y = active if kept is None else active * kept.view(-1, 1, 1, 1)
        y = y if residual is None else y + residual
        return {"y": y}, (y * dy).sum()
    pooled = active.mean((1, 2))
    if form == POOLED:
        return {"pooled": pooled}, (pooled * dpooled).sum()
    y = active * gate[:, None, None]
    return {"y": y, "pooled": pooled}, (y * dy).sum() + (pooled * dpooled).sum()


def geometry(kernel, stride, same, height, width):
    """A convolution's numbers for images of this size: padding as TensorFlow's "same", or half a
    kernel."""
    out = [-(-side // stride) for side in (height, width)]
    before = [kernel // 2] * 2
    if same:
        before = [
            max((made - 1) * stride + kernel - side, 0) // 2
            for made, side in zip(out, (height, width))
        ]
    return Geometry(kernel, stride, *before, *out)


class Around(NamedTuple):
    """Groups of the normalisations before and behind a convolution, with SiLU; behind also gates.
    0: none."""

    before: int
    behind: int


def convolution_results(given, after, weight, by, around):
    """Outputs and gradients of a convolution with what is around it, by our functions, as {name:
    tensor}.

    given, after: operands of the normalisations before and behind; without these, `given.x` and
    `after.dy` are those of the convolution.
    """
    x = given.x
    found = {}
    before = behind = None
    if around.before:
        before = Norm(library.group_moments(x, around.before, EPS), given.weight, given.bias)
    y, moments = library.convolution(x, weight, by, before=before, groups=around.behind, eps=EPS)
    found["y"] = y
    if around.behind:
        found["moments"] = moments
        norm = Norm(moments, after.weight, after.bias)
        gates = Gate(after.gate, after.dpooled / (y.shape[1] * y.shape[2]))
        sums = library.gradient_sums(GATED, y, norm, after.dy)
        _, _, by_group = library.merged_gradients(GATED, y, norm, sums, gates)
        behind = Behind(y, norm, gates, by_group)
    dx, found["dweights"], sums = library.convolution_gradients(
        x, weight, by, dy=after.dy, before=before, behind=behind
    )
    if around.before:
        found["dz"] = dx
        found["dweight"], dbias, by_group = library.merged_gradients(PLAIN, x, before, sums)
        dx = library.input_gradient(LINEAR, x, before, by_group, dx)
        found.update({} if dbias is None else {"dbias": dbias})
    found["dx"] = dx
    return found


def convolution_exact(given, after, weight, by, around):
    """The same in float64, by torch's convolution of padded images."""
    x, _, *parameters = (each if each is None else each.requires_grad_() for each in given.double())
    weight = weight.double().requires_grad_()
    after = after.double()
    wanted = {"dweights": weight, "dx": x}
    inner = x
    z = None
    if around.before:
        z = normalised(x, around.before, *parameters[:2])
        inner = F.silu(z)
        wanted.update(dz=z, dweight=parameters[0], dbias=parameters[1])
    below = (by.out_height - 1) * by.stride + by.kernel - x.shape[1] - by.top
    right = (by.out_width - 1) * by.stride + by.kernel - x.shape[2] - by.left
    padded = F.pad(inner.permute(0, 3, 1, 2), (by.left, max(right, 0), by.top, max(below, 0)))
    y = F.conv2d(padded, weight, stride=by.stride, groups=len(weight) // 16).permute(0, 2, 3, 1)
    found = {"y": y}
    loss = (y * after.dy).sum()
    if around.behind:
        by_group = y.unflatten(-1, (around.behind, -1))
        variance, mean = torch.var_mean(by_group, (1, 2, 4), correction=0)
        found["moments"] = torch.stack([mean, (variance + EPS).rsqrt()], -1)
        behind = normalised(y, around.behind, after.weight, after.bias)
        _, loss = _behind(
            GATED,
            behind,
            after.dy,
            kept=None,
            residual=None,
            gate=after.gate,
            dpooled=after.dpooled,
        )
    return _with_gradients(found, loss, wanted, z)


def errors(actual, expected):
    """Largest errors of tensors, each relative to its size, in units of float32's eps."""
    assert actual.keys() == expected.keys()
    return {
        name: ((actual[name].double() - exact.value).abs().max() / exact.size / FLOAT32).item()
        for name, exact in expected.items()
    }


def assert_no_worse(ours, torchs, exact):
    """Compare float32 results, {name: tensor}, by our layers and by torch's, with those in float64.

    Errors are relative to the largest number of each tensor. Their median over all tensors must be
    at most three times torch's. Which tensor is off by how much is chance, as what follows
    multiplies roundings: over many batches both had the same worst error, in one batch either had
    fifteen times the other's. So each must be below thirty times torch's worst, which is about a
    thousandth: what is computed wrongly is off by more. Tensors that are 0 but for rounding, as the
    gradient of a bias before batch normalisation, are left out.
    """
    assert ours.keys() == torchs.keys() == exact.keys()
    kept = [name for name, tensor in exact.items() if tensor.abs().max() > 1e-9]
    assert len(kept) >= 0.7 * len(exact)
    by_size = {name: Exact.of(exact[name]) for name in kept}
    own, other = (errors({name: each[name] for name in kept}, by_size) for each in (ours, torchs))
    for name in kept:
        assert own[name] <= 30 * max(*other.values(), 8), f"{name}: {own[name]:.0f} eps"
    medians = [statistics.median(each.values()) for each in (own, other)]
    assert medians[0] <= 3 * medians[1] + 8, "medians of {:.1f} eps, torch's {:.1f}".format(
        *medians
    )

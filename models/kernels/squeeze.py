"""Group normalisation, SiLU, and squeeze and excitation of a block as one layer, whose inner tensors are never stored.

Of tensors as large as x, forward reads x three times and writes y, backward reads x and dy twice and writes dx: 9
passes, where fused normalisation and torch's squeeze and excitation take 21. What is between pooling and gates is
small: torch's operators in float32. Sums are stored for each channel of each tile and merged in a fixed order.
"""

from __future__ import annotations

import copy

import torch
import triton
import triton.language as tl
from timm.layers.activations import Sigmoid
from timm.models._efficientnet_blocks import DepthwiseSeparableConv, InvertedResidual, SqueezeExcite
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.kernels.group_norm import (
    DTYPES,
    FusedGroupNormAct,
    Tiles,
    less_group_means,
    normalised,
    sigmoid,
    statistics,
    tile,
)
from models.normalization import GroupNormAct

_NORMS = {DepthwiseSeparableConv: "bn1", InvertedResidual: "bn2"}  # block -> its layer before squeeze and excitation


def replaces(module: nn.Module) -> bool:
    """Whether `fuse` takes the module: timm's block with a GroupNormAct before squeeze and excitation."""
    if type(module) not in _NORMS or type(module.se) is not SqueezeExcite or type(module.aa) is not nn.Identity:
        return False
    norm, se = getattr(module, _NORMS[type(module)]), module.se
    activations = type(se.act1) is nn.SiLU and type(se.gate) in (Sigmoid, nn.Sigmoid)
    return type(norm) is GroupNormAct and norm.apply_act and activations


def fuse(block: nn.Module) -> nn.Module:
    """The block with the same parameters under the same names: its normalisation does what its `se` did."""
    assert replaces(block), f"no kernels for {type(block).__name__}"
    block, name = copy.copy(block), _NORMS[type(block)]
    block._modules = dict(block._modules)
    block.se = copy.copy(block.se)
    block.se.__class__ = _Squeezed
    norm = copy.copy(getattr(block, name))
    norm.__class__ = _SqueezingGroupNormAct
    norm.__dict__["squeeze"] = block.se  # no module of the norm's: its parameters keep one name
    setattr(block, name, norm)
    return block


class _Squeezed(SqueezeExcite):
    """Holds the parameters for the layer before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _SqueezingGroupNormAct(FusedGroupNormAct):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == self.num_channels, f"{x.shape[1]} channels, not {self.num_channels}"
        reduce, expand = self.squeeze.conv_reduce, self.squeeze.conv_expand
        layers = (reduce.weight, reduce.bias, expand.weight, expand.bias)
        return _SqueezedNorm.apply(x, self.weight, self.bias, *layers, self.num_groups, self.eps)


class _SqueezedNorm(torch.autograd.Function):
    """gates = sigmoid(expand(silu(reduce(pooled)))), [N, C], of the activations' means over pixels."""

    @staticmethod
    def forward(ctx, x, weight, bias, reduce, reduce_bias, expand, expand_bias, groups: int, eps: float):
        assert x.dtype in DTYPES, f"no kernels for {x.dtype}"
        x = x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()
        tiles, y = Tiles(x), torch.empty_like(x)
        mean, scale = statistics(x, tiles, groups, eps)
        given = (x, weight, bias, mean, scale, tiles.channels // groups)
        sums = tiles.partial_sums(1)
        tiles.run(_sum_activations, *given, sums)
        pooled = sums[0].sum(2) / tiles.pixels
        squeezed = F.linear(pooled, reduce.flatten(1).float(), reduce_bias.float())
        gates = F.linear(F.silu(squeezed), expand.flatten(1).float(), expand_bias.float()).sigmoid_()
        tiles.run(_excite, *given, gates, y)
        ctx.save_for_backward(x, weight, bias, mean, scale, reduce, expand, pooled, squeezed, gates)
        ctx.groups = groups
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, mean, scale, reduce, expand, pooled, squeezed, gates = ctx.saved_tensors
        tiles = Tiles(x)
        size = tiles.channels // ctx.groups
        dy = dy.contiguous(memory_format=torch.channels_last if tiles.channels_last else torch.contiguous_format)
        given = (x, weight, bias, mean, scale, size, dy)
        sums = tiles.partial_sums(5)
        tiles.run(_sum_gradients, *given, sums, sums.stride(0))
        sums = sums.sum(3)

        dexpanded = torch.ops.aten.sigmoid_backward(sums[0], gates)
        dsqueezed = torch.ops.aten.silu_backward(dexpanded @ expand.flatten(1).float(), squeezed)
        dpooled = dsqueezed @ reduce.flatten(1).float() / tiles.pixels
        dexpand, dreduce = dexpanded.t() @ F.silu(squeezed), dsqueezed.t() @ pooled
        layers = (dreduce, dsqueezed.sum(0), dexpand, dexpanded.sum(0))

        by_channel = sums[1:3] * gates + sums[3:] * dpooled
        dbias, dweight = by_channel.sum(1)
        dx = torch.empty_like(x)
        by_group = (by_channel * weight).view(2, tiles.images, ctx.groups, size).sum(3)
        tiles.run(_input_gradient, *given, gates, dpooled, by_group[0], by_group[1], dx)
        shapes = (reduce.shape, reduce.shape[:1], expand.shape, expand.shape[:1])
        layers = [each.view(shape).to(weight.dtype) for each, shape in zip(layers, shapes)]
        return dx, dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype), *layers, None, None


@triton.jit
def _sum_activations(
    x, weight, bias, mean, scale, size, sums, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the tile."""
    _, _, mask, _, z, _, known, place, _, _ = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    tl.store(sums + place, tl.sum(tl.where(mask, z * sigmoid(z), 0.0), 1), mask=known)


@triton.jit
def _of_channels(values, channels, pixels, CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    """Numbers of the tile's channels, [ROWS, 1], of values [N, C]."""
    image, _, channel, known, _, _, _, _ = tile(channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    return tl.load(values + image * channels + channel, mask=known, other=0.0)[:, None]


@triton.jit
def _excite(
    x, weight, bias, mean, scale, size, gates, y, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The layer's output, from statistics and gates."""
    start, inside, mask, _, z, _, _, _, _, _ = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    gate = _of_channels(gates, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    tl.store(y + start + inside, (z * sigmoid(z) * gate).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _sum_gradients(
    x, weight, bias, mean, scale, size, dy, sums, stride, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the tile: dy times the activation; dy times its slope, and that times the normalised value;
    the slope, and that times the normalised value. Each `stride` elements after the one before."""
    start, inside, mask, centred, z, _, known, place, own_scale, _ = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    gradient = tl.load(dy + start + inside, mask=mask, other=0.0).to(tl.float32)
    share = sigmoid(z)
    slope = tl.where(mask, share * (1 + z * (1 - share)), 0.0)
    sums += place
    tl.store(sums, tl.sum(gradient * z * share, 1), mask=known)
    tl.store(sums + stride, tl.sum(gradient * slope, 1), mask=known)
    tl.store(sums + 2 * stride, tl.sum(gradient * slope * centred, 1) * own_scale, mask=known)
    tl.store(sums + 3 * stride, tl.sum(slope, 1), mask=known)
    tl.store(sums + 4 * stride, tl.sum(slope * centred, 1) * own_scale, mask=known)


@triton.jit
def _input_gradient(
    x, weight, bias, mean, scale, size, dy, gates, pooled, shifts, scales, dx, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As group_norm's, for the gradient that reaches the activations: dy by the gates, and that of the means."""
    start, inside, mask, centred, z, group, known, _, own_scale, own_weight = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    gate = _of_channels(gates, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    share = sigmoid(z)
    gradient = tl.load(dy + start + inside, mask=mask, other=0.0).to(tl.float32) * gate
    gradient += _of_channels(pooled, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    gradient *= share * (1 + z * (1 - share))
    elements = 1.0 * size * pixels
    gradient = less_group_means(gradient, centred, shifts, scales, group, known, own_scale, own_weight, elements)
    tl.store(dx + start + inside, gradient.to(dx.dtype.element_ty), mask=mask)

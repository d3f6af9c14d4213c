"""Group normalisation, SiLU, and squeeze and excitation of a block as one layer, whose inner tensors are never stored.

Of tensors as large as x, forward reads x three times and writes y, backward reads x and dy twice and writes dx: 9
passes, where fused normalisation and torch's squeeze and excitation take 21; 8 where a convolution has taken x's
statistics. Forward is five kernels, backward four. The kernels are in `squeeze_kernels.py`.
"""

from __future__ import annotations

import copy
from typing import Optional, Sequence

import torch
import triton
from timm.models._efficientnet_blocks import DepthwiseSeparableConv, InvertedResidual, SqueezeExcite
from torch import nn
from torch.autograd.function import once_differentiable

from models.blocks import squeezes
from models.kernels import squeeze_kernels as kernels
from models.kernels.group_norm import DTYPES, FusedGroupNormAct, Tiles, in_place_layout, merge_statistics, statistics
from models.kernels.operators import operator
from models.normalization import GroupNormAct

_BLOCK = 256  # channels that the kernels between pooling and gates take at a time
_SUMMED = 16  # channels, and images at a time, of a program that adds up gradients of parameters
_CHUNKS = 16  # at most that are merged at a time
NORMS = {DepthwiseSeparableConv: "bn1", InvertedResidual: "bn2"}  # block -> its layer before squeeze and excitation


def replaces(module: nn.Module) -> bool:
    """Whether `fuse` takes the module: timm's block with a GroupNormAct before squeeze and excitation."""
    if type(module) not in NORMS or not squeezes(module):
        return False
    norm = getattr(module, NORMS[type(module)])
    return type(norm) is GroupNormAct and norm.apply_act


def fuse(block: nn.Module) -> nn.Module:
    """The block with the same parameters under the same names: its normalisation does what its `se` did."""
    assert replaces(block), f"no kernels for {type(block).__name__}"
    block, name = copy.copy(block), NORMS[type(block)]
    block._modules = dict(block._modules)
    block.se = copy.copy(block.se)
    block.se.__class__ = _Squeezed
    norm = copy.copy(getattr(block, name))
    norm.__class__ = SqueezingGroupNormAct
    norm.__dict__["squeeze"] = block.se  # no module of the norm's: its parameters keep one name
    setattr(block, name, norm)
    return block


class _Squeezed(SqueezeExcite):
    """Holds the parameters for the layer before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SqueezingGroupNormAct(FusedGroupNormAct):
    """GroupNormAct, and the squeeze and excitation behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_parts(x, None, (1, 1))

    def of_parts(self, x: torch.Tensor, partial: Optional[torch.Tensor], part: Sequence[int]) -> torch.Tensor:
        """The layer's output; partial: statistics of parts of x's planes, as `group_norm.merge_statistics` takes them,
        of so many lines and columns each; or None."""
        assert x.shape[1] == self.num_channels, f"{x.shape[1]} channels, not {self.num_channels}"
        reduce, expand = self.squeeze.conv_reduce, self.squeeze.conv_expand
        layers = (reduce.weight, reduce.bias, expand.weight, expand.bias)
        return _SqueezedNorm.apply(x, self.weight, self.bias, *layers, partial, *part, self.num_groups, self.eps)


def _like_output(x, weight, bias, reduce, reduce_bias, expand, expand_bias, partial, lines, columns, groups, eps):
    def small(*shape):
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    rows, channels = x.shape[:2]
    sizes = ((2, rows, groups), (rows, channels), (rows, len(reduce)), (rows, channels))
    return (torch.empty_like(in_place_layout(x)), *(small(*size) for size in sizes))


@operator(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor reduce, Tensor reduce_bias, Tensor expand, Tensor expand_bias, "
    "Tensor? partial, int lines, int columns, int groups, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _like_output,
)
def _output(x, weight, bias, reduce, reduce_bias, expand, expand_bias, partial, lines, columns, groups, eps):
    """The layer's output; moments of groups, [2, N, groups]; means of activations over pixels, [N, C], what `reduce`
    makes of them, [N, rank], and the gates, [N, C]: sigmoid(expand(silu(reduce(pooled))))."""
    x = in_place_layout(x)
    tiles, y = Tiles(x, groups), torch.empty_like(x)
    sums = tiles.sums(1)
    if partial is None:
        moments = statistics(x, tiles, eps)
    else:
        moments = merge_statistics(partial, tiles, eps, x.shape[2:], (lines, columns))
    tiles.sum(kernels.sum_activations, x, weight, bias, *moments, sums)
    pooled, gates = (torch.empty_like(sums[0, :, :, 0]) for _ in range(2))
    squeezed = torch.empty((tiles.images, len(reduce)), dtype=torch.float32, device=x.device)
    layers = (reduce, reduce_bias, expand, expand_bias)
    sizes = (tiles.channels, tiles.pixels, tiles.chunks, len(reduce))
    kernels.gate[(tiles.images,)](sums, *layers, pooled, squeezed, gates, *sizes, **_blocks(tiles, reduce))
    tiles.map(kernels.excite, x, weight, bias, *moments, gates, y)
    return y, moments, pooled, squeezed, gates


def _like_gradients(dy, x, weight, bias, reduce, expand, moments, pooled, squeezed, gates, groups):
    biases = weight if bias is None else bias, reduce.new_empty(len(reduce)), expand.new_empty(len(expand))
    like = weight, biases[0], reduce, biases[1], expand, biases[2]
    return (torch.empty_like(in_place_layout(x)), *map(torch.empty_like, like))


@operator(
    "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor reduce, Tensor expand, Tensor moments, Tensor pooled, "
    "Tensor squeezed, Tensor gates, int groups) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _like_gradients,
)
def _gradients(dy, x, weight, bias, reduce, expand, moments, pooled, squeezed, gates, groups: int):
    """Of x, and of all parameters in their order; that of the bias is undefined where there is none."""
    x = in_place_layout(x)
    tiles = Tiles(x, groups)
    given = (x, weight, bias, *moments, dy.contiguous(memory_format=tiles.memory_format))
    sums = tiles.sums(5)
    tiles.sum(kernels.sum_gradients, *given, sums, sums.stride(0))

    dexpanded, dsqueezed, dpooled = map(torch.empty_like, (gates, squeezed, gates))
    by_channel, by_group = torch.empty((2, *gates.shape), device=x.device), tiles.of_groups()
    sizes = (tiles.images, tiles.size, tiles.channels, tiles.pixels, tiles.chunks, len(reduce))
    small = (weight, reduce, expand, squeezed, gates)
    made = (dexpanded, dsqueezed, dpooled, by_channel, by_group)
    kernels.gate_gradients[(tiles.images,)](sums, sums.stride(0), *small, *made, *sizes, **_blocks(tiles, reduce))

    dweight, dreduce, dexpand = map(torch.empty_like, (weight, reduce, expand))
    dbias = None if bias is None else torch.empty_like(bias)
    dreduce_bias, dexpand_bias = reduce.new_empty(len(reduce)), expand.new_empty(len(expand))
    parameters = (dweight, dbias, dreduce, dreduce_bias, dexpand, dexpand_bias)
    sizes = (tiles.images, tiles.channels, len(reduce))
    kernels.parameter_gradients[(triton.cdiv(tiles.channels, _SUMMED),)](
        by_channel, dexpanded, dsqueezed, pooled, squeezed, *parameters, *sizes,
        RANK=_rank(reduce), BLOCK=_SUMMED, IMAGES=_SUMMED, num_warps=4,
    )  # fmt: skip
    dx = torch.empty_like(x)
    tiles.map(kernels.input_gradient, *given, gates, dpooled, *by_group, dx)
    return (dx, *(torch.empty_like(weight) if each is None else each for each in parameters))


class _SqueezedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, reduce, reduce_bias, expand, expand_bias, partial, lines, columns, groups, eps):
        assert x.dtype in DTYPES, f"no kernels for {x.dtype}"
        layers = (reduce, reduce_bias, expand, expand_bias)
        y, *kept = _output(x, weight, bias, *layers, partial, lines, columns, groups, eps)
        ctx.save_for_backward(x, weight, bias, reduce, expand, *kept)
        ctx.groups = groups
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        dx, dweight, dbias, *others = _gradients(dy, *ctx.saved_tensors, ctx.groups)
        return dx, dweight, None if ctx.saved_tensors[2] is None else dbias, *others, None, None, None, None, None


def _rank(reduce: torch.Tensor) -> int:
    return max(16, triton.next_power_of_2(len(reduce)))


def _blocks(tiles: Tiles, reduce: torch.Tensor) -> dict:
    return {
        "RANK": _rank(reduce),
        "BLOCK": _BLOCK,
        "CHUNKS": min(triton.next_power_of_2(tiles.chunks), _CHUNKS),
        "num_warps": 8,
    }

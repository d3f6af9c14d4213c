"""Group normalisation, SiLU, and squeeze and excitation as one layer: inner tensors are not stored.

Of tensors as large as x, forward reads x three times and writes y, backward reads x and dy twice
and writes dx: 9 passes, where fused normalisation and torch's squeeze and excitation take 21; 8
where a convolution has taken x's statistics. Forward is five kernels, backward four. The kernels
are in `squeeze_kernels.py`.
"""

from __future__ import annotations

import copy
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
import triton
from timm.models._efficientnet_blocks import DepthwiseSeparableConv, InvertedResidual, SqueezeExcite
from torch import nn
from torch.autograd.function import once_differentiable

from models.blocks import squeezes
from models.kernels import squeeze_kernels as kernels
from models.kernels.group_norm import (
    DTYPES,
    FusedGroupNormAct,
    Tiles,
    in_place_layout,
    merge_statistics,
    statistics,
)
from models.kernels.operators import operator
from models.normalization import GroupNormAct

_BLOCK = 256  # channels that the kernels between pooling and gates take at a time
_SUMMED = 16  # channels, and images at a time, of a program that adds up gradients of parameters
_CHUNKS = 16  # at most that are merged at a time
# Block -> its layer before squeeze and excitation.
NORMS = {DepthwiseSeparableConv: "bn1", InvertedResidual: "bn2"}


def replaces(module: nn.Module) -> bool:
    """Return whether `fuse` takes the `module`: timm's block whose gates follow a GroupNormAct."""
    if type(module) not in NORMS or not squeezes(module):
        return False
    norm = getattr(module, NORMS[type(module)])
    return type(norm) is GroupNormAct and norm.apply_act


def fuse(block: nn.Module) -> nn.Module:
    """Return `block` with the same parameters by name; its normalisation does what its `se` did."""
    assert replaces(block), f"no kernels for {type(block).__name__}"
    name = NORMS[type(block)]
    block = copy.copy(block)
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
        """Return `x`, which has been gated already."""
        return x


class SqueezingGroupNormAct(FusedGroupNormAct):
    """GroupNormAct, and the squeeze and excitation behind it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, [N, C, H, W], normalised, activated and gated."""
        return self.of_parts(x, None, (1, 1))

    def of_parts(
        self,
        x: torch.Tensor,
        partial: Optional[torch.Tensor],
        part: Tuple[int, int],
    ) -> torch.Tensor:
        """Return the layer's output from statistics that another kernel has taken.

        Args:
            x: [N, C, H, W].
            partial: statistics of parts of x's planes, as `group_norm.merge_statistics` takes them;
                or None.
            part: lines and columns of such a part.
        """
        assert x.shape[1] == self.num_channels, f"{x.shape[1]} channels, not {self.num_channels}"
        reduce = self.squeeze.conv_reduce
        expand = self.squeeze.conv_expand
        layers = (reduce.weight, reduce.bias, expand.weight, expand.bias)
        settings = _Settings(*part, self.num_groups, self.eps)
        return _SqueezedNorm.apply(x, self.weight, self.bias, *layers, partial, settings)


def _like_output(
    x,
    weight,
    bias,
    reduce,
    reduce_bias,
    expand,
    expand_bias,
    partial,
    lines,
    columns,
    groups,
    eps,
):
    images, channels = x.shape[:2]
    rank = len(reduce)

    def small(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    moments = small(2, images, groups)
    y = torch.empty_like(in_place_layout(x))
    return y, moments, small(images, channels), small(images, rank), small(images, channels)


@operator(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor reduce, Tensor reduce_bias, Tensor expand, "
    "Tensor expand_bias, Tensor? partial, int lines, int columns, int groups, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _like_output,
)
def _output(
    x,
    weight,
    bias,
    reduce,
    reduce_bias,
    expand,
    expand_bias,
    partial,
    lines,
    columns,
    groups,
    eps,
):
    """Return the layer's output and what its gradients need.

    That is moments of groups, [2, N, groups], and what squeeze_kernels.py calls pooled, [N, C],
    squeezed, [N, rank], and gates, [N, C].
    """
    x = in_place_layout(x)
    y = torch.empty_like(x)
    tiles = Tiles(x, groups)
    if partial is None:
        moments = statistics(x, tiles, eps)
    else:
        moments = merge_statistics(partial, tiles, eps, size=x.shape[2:], part=(lines, columns))
    normalised = {"x": x, "weight": weight, "bias": bias, "mean": moments[0], "scale": moments[1]}

    # Sums of activations over strips, and from them the gates.
    sums = tiles.sums(1)
    tiles.sum(kernels.sum_activations, **normalised, sums=sums)
    pooled = torch.empty_like(sums[0, :, :, 0])
    gates = torch.empty_like(pooled)
    squeezed = torch.empty((tiles.images, len(reduce)), dtype=torch.float32, device=x.device)
    kernels.gate[(tiles.images,)](
        sums=sums,
        reduce=reduce,
        reduce_bias=reduce_bias,
        expand=expand,
        expand_bias=expand_bias,
        pooled=pooled,
        squeezed=squeezed,
        gates=gates,
        channels=tiles.channels,
        pixels=tiles.pixels,
        chunks=tiles.chunks,
        rank=len(reduce),
        **_blocks(tiles, reduce),
    )

    tiles.map(kernels.excite, **normalised, gates=gates, y=y)
    return y, moments, pooled, squeezed, gates


def _like_gradients(
    dy,
    x,
    weight,
    bias,
    reduce,
    expand,
    moments,
    pooled,
    squeezed,
    gates,
    groups,
):
    return (
        torch.empty_like(in_place_layout(x)),
        torch.empty_like(weight),
        torch.empty_like(weight if bias is None else bias),
        torch.empty_like(reduce),
        reduce.new_empty(len(reduce)),
        torch.empty_like(expand),
        expand.new_empty(len(expand)),
    )


@operator(
    "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor reduce, Tensor expand, "
    "Tensor moments, Tensor pooled, Tensor squeezed, Tensor gates, int groups)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _like_gradients,
)
def _gradients(
    dy,
    x,
    weight,
    bias,
    reduce,
    expand,
    moments,
    pooled,
    squeezed,
    gates,
    groups: int,
):
    """Return gradients of x and of all parameters, in their order.

    That of the bias is undefined where there is none.
    """
    x = in_place_layout(x)
    tiles = Tiles(x, groups)
    normalised = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "mean": moments[0],
        "scale": moments[1],
        "dy": dy.contiguous(memory_format=tiles.memory_format),
    }
    sums = tiles.sums(5)
    tiles.sum(kernels.sum_gradients, **normalised, sums=sums, stride=sums.stride(0))

    # Back through the gates.
    dexpanded = torch.empty_like(gates)
    dsqueezed = torch.empty_like(squeezed)
    dpooled = torch.empty_like(gates)
    by_channel = torch.empty((2, *gates.shape), device=x.device)
    by_group = tiles.of_groups()
    kernels.gate_gradients[(tiles.images,)](
        sums=sums,
        weight=weight,
        reduce=reduce,
        expand=expand,
        squeezed=squeezed,
        gates=gates,
        dexpanded=dexpanded,
        dsqueezed=dsqueezed,
        dpooled=dpooled,
        by_channel=by_channel,
        by_group=by_group,
        stride=sums.stride(0),
        images=tiles.images,
        size=tiles.size,
        channels=tiles.channels,
        pixels=tiles.pixels,
        chunks=tiles.chunks,
        rank=len(reduce),
        **_blocks(tiles, reduce),
    )

    # Of the parameters.
    dweight = torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    dreduce = torch.empty_like(reduce)
    dreduce_bias = reduce.new_empty(len(reduce))
    dexpand = torch.empty_like(expand)
    dexpand_bias = expand.new_empty(len(expand))
    kernels.parameter_gradients[(triton.cdiv(tiles.channels, _SUMMED),)](
        by_channel=by_channel,
        dexpanded=dexpanded,
        dsqueezed=dsqueezed,
        pooled=pooled,
        squeezed=squeezed,
        dweight=dweight,
        dbias=dbias,
        dreduce=dreduce,
        dreduce_bias=dreduce_bias,
        dexpand=dexpand,
        dexpand_bias=dexpand_bias,
        images=tiles.images,
        channels=tiles.channels,
        rank=len(reduce),
        RANK=_rank(reduce),
        BLOCK=_SUMMED,
        IMAGES=_SUMMED,
        num_warps=4,
    )

    # Of the input.
    dx = torch.empty_like(x)
    tiles.map(
        kernels.input_gradient,
        **normalised,
        gates=gates,
        dpooled=dpooled,
        shifts=by_group[0],
        scales=by_group[1],
        dx=dx,
    )
    if dbias is None:
        dbias = torch.empty_like(weight)
    return dx, dweight, dbias, dreduce, dreduce_bias, dexpand, dexpand_bias


class _Settings(NamedTuple):
    """Arguments of `_SqueezedNorm` that are no tensors. lines, columns: of a part of a plane."""

    lines: int
    columns: int
    groups: int
    eps: float


class _SqueezedNorm(torch.autograd.Function):
    """The layer as a function of x and all parameters.

    partial: see `SqueezingGroupNormAct.of_parts`.
    """

    @staticmethod
    def forward(
        ctx,
        x,
        weight,
        bias,
        reduce,
        reduce_bias,
        expand,
        expand_bias,
        partial,
        settings: _Settings,
    ):
        """Return the layer's output for `x`."""
        assert x.dtype in DTYPES, f"no kernels for {x.dtype}"
        y, moments, pooled, squeezed, gates = _output(
            x=x,
            weight=weight,
            bias=bias,
            reduce=reduce,
            reduce_bias=reduce_bias,
            expand=expand,
            expand_bias=expand_bias,
            partial=partial,
            lines=settings.lines,
            columns=settings.columns,
            groups=settings.groups,
            eps=settings.eps,
        )
        ctx.save_for_backward(x, weight, bias, reduce, expand, moments, pooled, squeezed, gates)
        ctx.groups = settings.groups
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        """Return gradients from that of the output, `dy`."""
        x, weight, bias, reduce, expand, moments, pooled, squeezed, gates = ctx.saved_tensors
        dx, dweight, dbias, *dsqueeze = _gradients(
            dy=dy,
            x=x,
            weight=weight,
            bias=bias,
            reduce=reduce,
            expand=expand,
            moments=moments,
            pooled=pooled,
            squeezed=squeezed,
            gates=gates,
            groups=ctx.groups,
        )
        return dx, dweight, None if bias is None else dbias, *dsqueeze, None, None


def _rank(reduce: torch.Tensor) -> int:
    """Return rows of `reduce` that a program takes: all, and at least 16, which a product needs."""
    return max(16, triton.next_power_of_2(len(reduce)))


def _blocks(tiles: Tiles, reduce: torch.Tensor) -> Dict[str, Any]:
    """Return constants of the kernels with a program for each image."""
    return {
        "RANK": _rank(reduce),
        "BLOCK": _BLOCK,
        "CHUNKS": min(triton.next_power_of_2(tiles.chunks), _CHUNKS),
        "num_warps": 8,
    }

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
    # Copies, so that the given block stays as it is; Parameters are shared.
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
    """GroupNormAct, and the squeeze and excitation behind it.

    squeeze: holds the latter's parameters.
    """

    squeeze: SqueezeExcite

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
        settings = _Settings(*part, groups=self.num_groups, eps=self.eps)
        return _SqueezedNorm.apply(x, self.weight, self.bias, *layers, partial, settings)


class _Inputs(NamedTuple):
    """Arguments of the operator `_output`, in the order of its schema."""

    x: torch.Tensor  # [N, C, H, W]
    # Of the normalisation.
    weight: torch.Tensor  # [C]
    bias: Optional[torch.Tensor]  # [C]
    # Of squeeze and excitation.
    reduce: torch.Tensor  # [rank, C, 1, 1]
    reduce_bias: torch.Tensor  # [rank]
    expand: torch.Tensor  # [C, rank, 1, 1]
    expand_bias: torch.Tensor  # [C]
    # Statistics of parts of x's planes, lines by columns each.
    partial: Optional[torch.Tensor]  # [2, N, C, chunks]
    lines: int
    columns: int
    groups: int
    eps: float


class _Gates(NamedTuple):
    """An image's way to its gates, float32: see squeeze_kernels.py."""

    pooled: torch.Tensor  # [N, C]
    squeezed: torch.Tensor  # [N, rank]
    gates: torch.Tensor  # [N, C]


_Outputs = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _like_output(*arguments: Any) -> _Outputs:
    """Return tensors like the results of `_output`."""
    inputs = _Inputs(*arguments)
    x = inputs.x
    images, channels = x.shape[:2]
    rank = len(inputs.reduce)

    def small(*shape: int) -> torch.Tensor:
        """Return a float32 tensor of a `shape`."""
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    moments = small(2, images, inputs.groups)
    y = torch.empty_like(in_place_layout(x))
    return y, moments, small(images, channels), small(images, rank), small(images, channels)


@operator(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor reduce, Tensor reduce_bias, Tensor expand, "
    "Tensor expand_bias, Tensor? partial, int lines, int columns, int groups, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _like_output,
)
def _output(*arguments: Any) -> _Outputs:
    """Return the layer's output and what its gradients need.

    That is moments of groups, [2, N, groups], and `_Gates`. Arguments: see `_Inputs`.
    """
    inputs = _Inputs(*arguments)
    x = in_place_layout(inputs.x)
    y = torch.empty_like(x)
    tiles = Tiles(x, inputs.groups)
    # The convolution before may have taken statistics of what it wrote: x is read once less then.
    if inputs.partial is None:
        moments = statistics(x, tiles, inputs.eps)
    else:
        part = (inputs.lines, inputs.columns)
        moments = merge_statistics(
            inputs.partial,
            tiles,
            inputs.eps,
            plane=(x.shape[2], x.shape[3]),
            part=part,
        )
    shared = {
        "x": x,
        "norm": (inputs.weight, inputs.bias, *moments),
    }

    # Sums of activations over strips, and from them the gates.
    sums = tiles.sums(1)
    tiles.sum(kernels.sum_activations, **shared, sums=sums)
    gates = _gate(inputs, tiles, sums)

    # Activations are computed again: storing them would be another pass over the memory.
    tiles.map(kernels.excite, **shared, gates=gates.gates, y=y)
    return (y, moments, *gates)


def _gate(inputs: _Inputs, tiles: Tiles, sums: torch.Tensor) -> _Gates:
    """Compute the gates of each image.

    Args:
        inputs: of the layer.
        tiles: of x.
        sums: [1, N, C, chunks], float32, of activations over strips.
    """
    rank = len(inputs.reduce)
    pooled = torch.empty_like(sums[0, :, :, 0])
    result = _Gates(
        pooled=pooled,
        squeezed=torch.empty((tiles.images, rank), dtype=torch.float32, device=sums.device),
        gates=torch.empty_like(pooled),
    )
    # A program for each image: a gate depends on all of its channels.
    kernels.gate[(tiles.images,)](
        sums=sums,
        reduce=inputs.reduce,
        reduce_bias=inputs.reduce_bias,
        expand=inputs.expand,
        expand_bias=inputs.expand_bias,
        **result._asdict(),
        channels=tiles.channels,
        pixels=tiles.pixels,
        chunks=tiles.chunks,
        rank=rank,
        **_blocks(tiles, inputs.reduce),
    )
    return result


class _GradientInputs(NamedTuple):
    """Arguments of the operator `_gradients`, in the order of its schema: see `_Inputs`, `_Gates`.

    moments: [2, N, groups].
    """

    dy: torch.Tensor  # like x
    x: torch.Tensor
    weight: torch.Tensor
    bias: Optional[torch.Tensor]
    reduce: torch.Tensor
    expand: torch.Tensor
    moments: torch.Tensor
    pooled: torch.Tensor
    squeezed: torch.Tensor
    gates: torch.Tensor
    groups: int


class _ParameterGradients(NamedTuple):
    """Gradients of all parameters, each like the parameter.

    That of a bias that there is not is undefined.
    """

    dweight: torch.Tensor
    dbias: torch.Tensor
    dreduce: torch.Tensor
    dreduce_bias: torch.Tensor
    dexpand: torch.Tensor
    dexpand_bias: torch.Tensor

    @classmethod
    def empty(cls, inputs: _GradientInputs) -> _ParameterGradients:
        """Make memory for the gradients of the layer with these `inputs`."""
        weight = inputs.weight
        reduce = inputs.reduce
        expand = inputs.expand
        return cls(
            dweight=torch.empty_like(weight),
            dbias=torch.empty_like(weight if inputs.bias is None else inputs.bias),
            dreduce=torch.empty_like(reduce),
            dreduce_bias=reduce.new_empty(len(reduce)),
            dexpand=torch.empty_like(expand),
            dexpand_bias=expand.new_empty(len(expand)),
        )


def _like_gradients(*arguments: Any) -> Tuple[torch.Tensor, ...]:
    """Return tensors like the results of `_gradients`."""
    inputs = _GradientInputs(*arguments)
    dx = torch.empty_like(in_place_layout(inputs.x))
    return (dx, *_ParameterGradients.empty(inputs))


@operator(
    "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor reduce, Tensor expand, "
    "Tensor moments, Tensor pooled, Tensor squeezed, Tensor gates, int groups)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _like_gradients,
)
def _gradients(*arguments: Any) -> Tuple[torch.Tensor, ...]:
    """Return gradients of x and of all parameters, in their order.

    Arguments: see `_GradientInputs`. Results: see `_ParameterGradients`.
    """
    inputs = _GradientInputs(*arguments)
    x = in_place_layout(inputs.x)
    tiles = Tiles(x, inputs.groups)
    # Tensors that both kernels over strips take.
    shared = {
        "x": x,
        "norm": (inputs.weight, inputs.bias, *inputs.moments),
        "dy": inputs.dy.contiguous(memory_format=tiles.memory_format),
    }

    # A pass over x and dy adds up all that gates, parameters and groups need of them.
    sums = tiles.sums(5)
    tiles.sum(kernels.sum_gradients, **shared, sums=tuple(sums))
    through = _gate_gradients(inputs, tiles, sums)
    gradients = _parameter_gradients(inputs, tiles, through)

    # Another pass computes the input's gradient: now it is known what the groups subtract.
    dx = torch.empty_like(x)
    tiles.map(
        kernels.input_gradient,
        **shared,
        gates=inputs.gates,
        dpooled=through.dpooled,
        group_sums=tuple(through.by_group),
        dx=dx,
    )
    return (dx, *gradients)


class _GateGradients(NamedTuple):
    """Results of `kernels.gate_gradients`, float32."""

    dexpanded: torch.Tensor  # [N, C]: gradient of what `expand` makes
    dsqueezed: torch.Tensor  # [N, rank]: gradient of what `reduce` makes
    dpooled: torch.Tensor  # [N, C]: gradient of a pixel's share in what is pooled
    by_channel: torch.Tensor  # [2, N, C]: each image's share in the gradients of bias and weight
    by_group: torch.Tensor  # [2, N, groups]: their sums over a group times its weights


def _gate_gradients(inputs: _GradientInputs, tiles: Tiles, sums: torch.Tensor) -> _GateGradients:
    """Go back through the gates of each image, to its groups.

    Args:
        inputs: of the layer's gradients.
        tiles: of x.
        sums: [5, N, C, chunks], from `kernels.sum_gradients`.
    """
    gates = inputs.gates
    # Intermediate results are float32, whatever the layer's dtype is.
    result = _GateGradients(
        dexpanded=torch.empty_like(gates),
        dsqueezed=torch.empty_like(inputs.squeezed),
        dpooled=torch.empty_like(gates),
        by_channel=torch.empty((2, *gates.shape), device=gates.device),
        by_group=tiles.of_groups(),
    )
    kernels.gate_gradients[(tiles.images,)](
        sums=sums,
        weight=inputs.weight,
        reduce=inputs.reduce,
        expand=inputs.expand,
        squeezed=inputs.squeezed,
        gates=gates,
        **result._asdict(),
        stride=sums.stride(0),
        images=tiles.images,
        size=tiles.size,
        channels=tiles.channels,
        pixels=tiles.pixels,
        chunks=tiles.chunks,
        rank=len(inputs.reduce),
        **_blocks(tiles, inputs.reduce),
    )
    return result


def _parameter_gradients(
    inputs: _GradientInputs,
    tiles: Tiles,
    through: _GateGradients,
) -> _ParameterGradients:
    """Add up the gradients of all parameters over images.

    Args:
        inputs: of the layer's gradients.
        tiles: of x.
        through: from `_gate_gradients`.
    """
    result = _ParameterGradients.empty(inputs)
    # The kernel leaves out what it is given None for.
    written: Dict[str, Optional[torch.Tensor]] = result._asdict()
    if inputs.bias is None:
        written["dbias"] = None
    kernels.parameter_gradients[(triton.cdiv(tiles.channels, _SUMMED),)](
        by_channel=through.by_channel,
        dexpanded=through.dexpanded,
        dsqueezed=through.dsqueezed,
        pooled=inputs.pooled,
        squeezed=inputs.squeezed,
        **written,
        images=tiles.images,
        channels=tiles.channels,
        rank=len(inputs.reduce),
        RANK=_rank(inputs.reduce),
        BLOCK=_SUMMED,
        IMAGES=_SUMMED,
        num_warps=4,
    )
    return result


class _Settings(NamedTuple):
    """Last arguments of `_output`, which are no tensors. lines, columns: of a part of a plane."""

    lines: int
    columns: int
    groups: int
    eps: float


class _SqueezedNorm(torch.autograd.Function):
    """The layer as a function of x and all parameters.

    partial: see `SqueezingGroupNormAct.of_parts`.
    """

    @staticmethod
    def forward(ctx, x, *rest):
        """Return the layer's output for `x`.

        rest: weight, bias, those of squeeze and excitation, partial, and the _Settings.
        """
        assert x.dtype in DTYPES, f"no kernels for {x.dtype}"
        *parameters, partial, settings = rest
        weight, bias, reduce, _, expand, _ = parameters
        y, moments, *gates = _output(x, *parameters, partial, *settings)
        # Biases of squeeze and excitation have no part in other gradients.
        ctx.save_for_backward(x, weight, bias, reduce, expand, moments, *gates)
        ctx.groups = settings.groups
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        """Return gradients from that of the output, `dy`."""
        # Read once: a block that is recomputed gives them away only once.
        saved = ctx.saved_tensors
        dx, dweight, dbias, *dsqueeze = _gradients(dy, *saved, ctx.groups)
        bias = saved[2]
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

"""timm's blocks by few functions over memory: of activations as wide as the expansion only three are ever stored.

Forward writes what the expansion makes (`wide`), what the group convolution makes of it, normalised and activated as
the convolution reads it, and what the gates leave of that, which the projection takes. Backward writes the gradients of
the last and of the first; that of the second is computed as the convolution's gradients read it.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

import torch
from timm.models._efficientnet_blocks import DepthwiseSeparableConv, InvertedResidual, SqueezeExcite
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.blocks import kept, squeezes
from models.efficientnet import Head
from models.native import library
from models.native.layers import GroupConv2d, NativeGroupNormAct, Pointwise
from models.native.library import (
    GATED,
    LINEAR,
    PLAIN,
    POOLED,
    Behind,
    Gate,
    Geometry,
    Norm,
    channels_first,
    pixels_last,
)
from models.stochastic import DropPath


class NativeSeparable(DepthwiseSeparableConv):
    """timm's block of a group convolution, squeeze and excitation, and a projection."""

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Return whether the class may become that of the module, whose layers are ours already."""
        return type(module) is DepthwiseSeparableConv and _fits(module, module.bn1, module.conv_pw, module.bn2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.conv_pw(_excited(x, None, self.conv_dw, self.bn1, self.se))
        return self.bn2.added(inner, kept(self, x), x) if self.has_skip else self.bn2(inner)


class NativeInverted(InvertedResidual):
    """timm's block of an expansion, a group convolution, squeeze and excitation, and a projection."""

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Return whether the class may become that of the module, whose layers are ours already."""
        if type(module) is not InvertedResidual or not _fits(module, module.bn2, module.conv_pwl, module.bn3):
            return False
        expands = type(module.conv_pw) is Pointwise and module.conv_pw.bias is None
        return expands and type(module.bn1) is NativeGroupNormAct and module.bn1.apply_act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, shortcut = _Expansion.apply(x, self.conv_pw.weight)
        inner = self.conv_pwl(_excited(wide, self.bn1, self.conv_dw, self.bn2, self.se))
        return self.bn3.added(inner, kept(self, x), shortcut) if self.has_skip else self.bn3(inner)


class NativeHead(Head):
    """The head; what it pools is never stored."""

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Return whether the class may become that of the module, whose layers are ours already."""
        return (
            type(module) is Head
            and type(module.conv_head) is Pointwise
            and type(module.bn2) is NativeGroupNormAct
            and module.bn2.apply_act
        )

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.bn2
        return _PooledNormAct.apply(self.conv_head(x), norm.weight, norm.bias, norm.num_groups, norm.eps)


def _fits(block: nn.Module, norm: nn.Module, projection: nn.Module, last: nn.Module) -> bool:
    """Return whether a block's layers behind its convolution are those that `_excited` and `added` compute."""
    return (
        squeezes(block)
        and getattr(block, "conv_s2d", None) is None
        and type(block.drop_path) in (nn.Identity, DropPath)
        and type(norm) is NativeGroupNormAct
        and norm.apply_act
        and type(projection) is Pointwise
        and type(last) is NativeGroupNormAct
    )


def _excited(
    x: torch.Tensor,
    before: Optional[NativeGroupNormAct],
    conv: nn.Module,
    norm: NativeGroupNormAct,
    se: SqueezeExcite,
) -> torch.Tensor:
    """Return se(norm(conv(before(x)))), without what lies between where the convolution is ours."""
    squeeze = _Squeeze(se.conv_reduce.weight, se.conv_reduce.bias, se.conv_expand.weight, se.conv_expand.bias)
    settings = (norm.num_groups, norm.eps)
    if not isinstance(conv, GroupConv2d):
        y = conv(x if before is None else before(x))
        return _ExcitedNorm.apply(y, settings, norm.weight, norm.bias, *squeeze)
    weights = (None, None) if before is None else (before.weight, before.bias)
    settings_before = None if before is None else (before.num_groups, before.eps)
    geometry = conv.geometry(x.shape[2], x.shape[3])
    return _ExcitedConv.apply(
        x, geometry, settings_before, settings, *weights, conv.weight, norm.weight, norm.bias, *squeeze
    )


# ---- Squeeze and excitation. Its small products are torch's.


class _Squeeze(NamedTuple):
    """Parameters of squeeze and excitation: [rank, C, 1, 1], [rank], [C, rank, 1, 1], [C]."""

    reduce: torch.Tensor
    reduce_bias: torch.Tensor
    expand: torch.Tensor
    expand_bias: torch.Tensor


class _Squeezed(NamedTuple):
    """What the gates are made of: means over pixels, [N, C], what `reduce` makes of them, [N, rank], and gates."""

    pooled: torch.Tensor
    reduced: torch.Tensor
    gate: torch.Tensor


def _excite(y: torch.Tensor, norm: Norm, squeeze: _Squeeze) -> Tuple[torch.Tensor, _Squeezed]:
    """Return y normalised, activated and gated, and what its gradients need."""
    excited, pooled = library.activated_and_pooled(y, norm)
    reduced = torch.addmm(squeeze.reduce_bias, pooled, squeeze.reduce.flatten(1).t())
    gate = torch.addmm(squeeze.expand_bias, F.silu(reduced), squeeze.expand.flatten(1).t()).sigmoid_()
    library.multiply_(excited, gate)
    return excited, _Squeezed(pooled, reduced, gate)


def _excite_gradients(
    y: torch.Tensor, norm: Norm, squeeze: _Squeeze, squeezed: _Squeezed, dy: torch.Tensor
) -> Tuple[Behind, Tuple[Optional[torch.Tensor], ...]]:
    """Return what y's gradient is made of, and gradients of the normalisation's and of squeeze's parameters."""
    pooled, reduced, gate = squeezed
    sums = library.gradient_sums(GATED, y, norm, dy)
    # Back through the two small layers, from the gates to the means over pixels.
    dlogits = sums[0] * gate * (1 - gate)
    sigmoid = reduced.sigmoid()
    dreduced = dlogits @ squeeze.expand.flatten(1) * sigmoid * (1 + reduced * (1 - sigmoid))
    pixels = y.shape[1] * y.shape[2]
    gates = Gate(gate, (dreduced @ squeeze.reduce.flatten(1)).div_(pixels))
    dweight, dbias, by_group = library.merged_gradients(GATED, y, norm, sums, gates)
    dsqueeze = _Squeeze(
        reduce=(dreduced.t() @ pooled).view_as(squeeze.reduce),
        reduce_bias=dreduced.sum(0),
        expand=(dlogits.t() @ F.silu(reduced)).view_as(squeeze.expand),
        expand_bias=dlogits.sum(0),
    )
    return Behind(y, norm, gates, by_group), (dweight, dbias, *dsqueeze)


# ---- Functions with gradients.


class _Expansion(torch.autograd.Function):
    """x by a convolution of 1 x 1, and x. The gradient of the second is added within the product for the first's."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return channels_first(F.linear(pixels_last(x), weight.flatten(1))), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dwide, dshortcut):
        x, weight = ctx.saved_tensors
        matrix = weight.flatten(1)  # [out, in]
        rows = pixels_last(dwide).flatten(0, 2)
        x = pixels_last(x)
        if dshortcut is None:
            dx = torch.mm(rows, matrix)
        else:
            dx = torch.addmm(pixels_last(dshortcut).flatten(0, 2), rows, matrix)
        dweight = torch.mm(rows.t(), x.flatten(0, 2))
        return channels_first(dx.view_as(x)), dweight.view_as(weight)


class _ExcitedNorm(torch.autograd.Function):
    """Normalisation, SiLU, squeeze and excitation. settings: groups and eps."""

    @staticmethod
    def forward(ctx, y, settings: Tuple[int, float], weight, bias, *squeeze):
        y = pixels_last(y)
        norm = Norm(library.group_moments(y, *settings), weight, bias)
        excited, squeezed = _excite(y, norm, _Squeeze(*squeeze))
        ctx.save_for_backward(y, *norm, *squeeze, *squeezed)
        return channels_first(excited)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        y, *rest = ctx.saved_tensors
        norm, squeeze, squeezed = Norm(*rest[:3]), _Squeeze(*rest[3:7]), _Squeezed(*rest[7:])
        dy = pixels_last(dy)
        behind, gradients = _excite_gradients(y, norm, squeeze, squeezed, dy)
        dx = library.input_gradient(GATED, y, norm, behind.by_group, dy, gate=behind.gate)
        return (channels_first(dx), None, *gradients)


class _ExcitedConv(torch.autograd.Function):
    """Normalisation and SiLU, if any, a group convolution, normalisation, SiLU, squeeze and excitation.

    settings_before, settings: groups and eps of the two normalisations.
    """

    @staticmethod
    def forward(
        ctx, x, geometry: Geometry, settings_before, settings, weight_before, bias_before, conv, weight, bias, *squeeze
    ):
        x = pixels_last(x)
        before = None
        if settings_before is not None:
            before = Norm(library.group_moments(x, *settings_before), weight_before, bias_before)
        groups, eps = settings
        y, moments = library.convolution(x, conv, geometry, before, groups, eps)
        norm = Norm(moments, weight, bias)
        excited, squeezed = _excite(y, norm, _Squeeze(*squeeze))
        ctx.geometry = geometry
        ctx.save_for_backward(x, conv, y, *(before or (None, None, None)), *norm, *squeeze, *squeezed)
        return channels_first(excited)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, conv, y, *rest = ctx.saved_tensors
        before = None if rest[0] is None else Norm(*rest[:3])
        norm, squeeze, squeezed = Norm(*rest[3:6]), _Squeeze(*rest[6:10]), _Squeezed(*rest[10:])
        dy = pixels_last(dy)
        behind, gradients = _excite_gradients(y, norm, squeeze, squeezed, dy)
        dx, dconv, sums = library.convolution_gradients(x, conv, ctx.geometry, dy, before, behind)
        dweight_before = None
        dbias_before = None
        if before is not None:
            # dx is the gradient before the activation: what is left is a normalisation without one.
            dweight_before, dbias_before, by_group = library.merged_gradients(PLAIN, x, before, sums)
            library.input_gradient(LINEAR, x, before, by_group, dx, out=dx)
        return (channels_first(dx), None, None, None, dweight_before, dbias_before, dconv, *gradients)


class _PooledNormAct(torch.autograd.Function):
    """Means over pixels, [N, C], of the normalised and activated x."""

    @staticmethod
    def forward(ctx, x, weight, bias, groups: int, eps: float):
        x = pixels_last(x)
        norm = Norm(library.group_moments(x, groups, eps), weight, bias)
        ctx.save_for_backward(x, *norm)
        return library.pooled(x, norm)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, *norm = ctx.saved_tensors
        norm = Norm(*norm)
        gate = Gate(None, dy.contiguous() / (x.shape[1] * x.shape[2]))
        sums = library.gradient_sums(POOLED, x, norm)
        dweight, dbias, by_group = library.merged_gradients(POOLED, x, norm, sums, gate)
        dx = library.input_gradient(POOLED, x, norm, by_group, gate=gate)
        return channels_first(dx), dweight, dbias, None, None

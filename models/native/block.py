"""timm's blocks by few functions: of activations as wide as the expansion only three are stored.

Forward writes what the expansion makes (`wide`), what the group convolution makes of it, normalised
and activated as the convolution reads it, and what the gates leave of that, which the projection
takes. Backward writes the gradients of the last and of the first; that of the second is computed as
the convolution's gradients read it.

Tensors of the functions with gradients are channels-last: [N, C, H, W] for autograd, [N, H, W, C]
for `library`.
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
    """timm's block of group convolution, squeeze and excitation, and projection."""

    se: SqueezeExcite

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Return whether the class may become that of the `module`, with layers that are ours."""
        if type(module) is not DepthwiseSeparableConv:
            return False
        return _fits(module, norm=module.bn1, projection=module.conv_pw, last=module.bn2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for `x`, [N, C, H, W]."""
        inner = _excited(x, before=None, conv=self.conv_dw, norm=self.bn1, se=self.se)
        inner = self.conv_pw(inner)
        if not self.has_skip:
            return self.bn2(inner)
        return self.bn2.added(inner, kept(self, x), x)


class NativeInverted(InvertedResidual):
    """timm's block of expansion, group convolution, squeeze and excitation, and projection."""

    se: SqueezeExcite

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Return whether the class may become that of the `module`, with layers that are ours."""
        return (
            type(module) is InvertedResidual
            and _fits(module, norm=module.bn2, projection=module.conv_pwl, last=module.bn3)
            and type(module.conv_pw) is Pointwise
            and module.conv_pw.bias is None
            and type(module.bn1) is NativeGroupNormAct
            and module.bn1.apply_act
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for `x`, [N, C, H, W]."""
        wide, shortcut = _Expansion.apply(x, self.conv_pw.weight)
        inner = _excited(wide, before=self.bn1, conv=self.conv_dw, norm=self.bn2, se=self.se)
        inner = self.conv_pwl(inner)
        if not self.has_skip:
            return self.bn3(inner)
        return self.bn3.added(inner, kept(self, x), shortcut)


class NativeHead(Head):
    """The head; what it pools is never stored."""

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Return whether the class may become that of the `module`, with layers that are ours."""
        return (
            type(module) is Head
            and type(module.conv_head) is Pointwise
            and type(module.bn2) is NativeGroupNormAct
            and module.bn2.apply_act
        )

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        """Return means over pixels, [N, features], of what the convolution makes of `x`."""
        norm = self.bn2
        return _PooledNormAct.apply(self.conv_head(x), norm.weight, norm.bias, _settings(norm))


def _fits(block: nn.Module, norm: nn.Module, projection: nn.Module, last: nn.Module) -> bool:
    """Return whether a block's layers behind its convolution are as our functions compute them."""
    return (
        squeezes(block)
        and getattr(block, "conv_s2d", None) is None
        and type(block.drop_path) in (nn.Identity, DropPath)
        and type(norm) is NativeGroupNormAct
        and norm.apply_act
        and type(projection) is Pointwise
        and type(last) is NativeGroupNormAct
    )


class _Settings(NamedTuple):
    """Numbers of a normalisation, which no gradient reaches."""

    groups: int
    eps: float


def _settings(norm: NativeGroupNormAct) -> _Settings:
    return _Settings(norm.num_groups, norm.eps)


def _excited(
    x: torch.Tensor,
    *,
    before: Optional[NativeGroupNormAct],
    conv: nn.Module,
    norm: NativeGroupNormAct,
    se: SqueezeExcite,
) -> torch.Tensor:
    """Return se(norm(conv(before(x)))), without what lies between where the convolution is ours.

    Args:
        x: [N, C, H, W].
        before: the normalisation of x, or None.
        conv: the convolution.
        norm: the normalisation behind it.
        se: squeeze and excitation behind that.
    """
    squeeze = _Squeeze.of(se)
    # torch's convolutions, of other groups, read and write whole tensors.
    if not isinstance(conv, GroupConv2d):
        y = conv(x if before is None else before(x))
        return _ExcitedNorm.apply(y, _settings(norm), norm.weight, norm.bias, *squeeze)

    # Ours normalises and activates its input as it reads it, and takes statistics of its output.
    settings = _ConvSettings(
        geometry=conv.geometry(x.shape[2], x.shape[3]),
        before=None if before is None else _settings(before),
        behind=_settings(norm),
    )
    weight_before = None if before is None else before.weight
    bias_before = None if before is None else before.bias
    parameters = (weight_before, bias_before, conv.weight, norm.weight, norm.bias, *squeeze)
    return _ExcitedConv.apply(x, settings, *parameters)


# ---- Squeeze and excitation. Its small products are torch's.


class _Squeeze(NamedTuple):
    """Parameters of squeeze and excitation: [rank, C, 1, 1], [rank], [C, rank, 1, 1], [C]."""

    reduce: torch.Tensor
    reduce_bias: torch.Tensor
    expand: torch.Tensor
    expand_bias: torch.Tensor

    @classmethod
    def of(cls, se: SqueezeExcite) -> _Squeeze:
        """Return the parameters of `se`, timm's layer."""
        reduce = se.conv_reduce
        expand = se.conv_expand
        # timm's two convolutions always have them.
        assert reduce.bias is not None and expand.bias is not None
        return cls(reduce.weight, reduce.bias, expand.weight, expand.bias)


class _Squeezed(NamedTuple):
    """Means over pixels, [N, C], what `reduce` makes of them, [N, rank], and the gates, [N, C]."""

    pooled: torch.Tensor
    reduced: torch.Tensor
    gate: torch.Tensor


def _excite(y: torch.Tensor, norm: Norm, squeeze: _Squeeze) -> Tuple[torch.Tensor, _Squeezed]:
    """Return y, [N, H, W, C], normalised, activated and gated, and what its gradients need."""
    # Gates depend on all pixels, so the activations are stored, and gated in place when they are
    # known.
    excited, pooled = library.activated_and_pooled(y, norm)
    reduce = squeeze.reduce.flatten(1)  # [rank, C]
    expand = squeeze.expand.flatten(1)  # [C, rank]
    reduced = torch.addmm(squeeze.reduce_bias, pooled, reduce.t())
    logits = torch.addmm(squeeze.expand_bias, F.silu(reduced), expand.t())
    gate = logits.sigmoid_()
    library.multiply_(excited, gate)
    return excited, _Squeezed(pooled, reduced, gate)


def _excite_gradients(
    y: torch.Tensor, norm: Norm, squeeze: _Squeeze, squeezed: _Squeezed, dy: torch.Tensor
) -> Tuple[Behind, Tuple[Optional[torch.Tensor], ...]]:
    """Compute the gradients of `_excite`, but for that of y: its reader computes it on the way.

    Args:
        y: [N, H, W, C].
        norm: of y.
        squeeze: the parameters.
        squeezed: from `_excite`.
        dy: like y, the gradient of what `_excite` returned.

    Returns:
        What y's gradient is computed from; and gradients of weight and bias of the normalisation
        and of the parameters in `squeeze`, in this order.
    """
    sums = library.gradient_sums(GATED, y, norm, dy=dy)
    dpooled, dsqueeze = _gate_gradients(squeeze, squeezed, dgate=sums[0])
    pixels = y.shape[1] * y.shape[2]
    gates = Gate(squeezed.gate, pooled=dpooled.div_(pixels))

    # Now all that reaches the normalisation is known.
    dweight, dbias, by_group = library.merged_gradients(GATED, y, norm, sums, gate=gates)
    return Behind(y, norm, gates, by_group), (dweight, dbias, *dsqueeze)


def _gate_gradients(
    squeeze: _Squeeze,
    squeezed: _Squeezed,
    dgate: torch.Tensor,
) -> Tuple[torch.Tensor, _Squeeze]:
    """Go back through the two small layers, from the gates to the means over pixels.

    Args:
        squeeze: the parameters.
        squeezed: from `_excite`.
        dgate: [N, C], gradient of the gates.

    Returns:
        Gradients of the means, [N, C], and of the parameters.
    """
    pooled, reduced, gate = squeezed
    dlogits = dgate * gate * (1 - gate)
    # SiLU's slope, s (1 + z (1 - s)).
    sigmoid = reduced.sigmoid()
    dactivated = dlogits @ squeeze.expand.flatten(1)
    dreduced = dactivated * sigmoid * (1 + reduced * (1 - sigmoid))
    dpooled = dreduced @ squeeze.reduce.flatten(1)
    dsqueeze = _Squeeze(
        reduce=(dreduced.t() @ pooled).view_as(squeeze.reduce),
        reduce_bias=dreduced.sum(0),
        expand=(dlogits.t() @ F.silu(reduced)).view_as(squeeze.expand),
        expand_bias=dlogits.sum(0),
    )
    return dpooled, dsqueeze


# ---- Functions with gradients.


class _Expansion(torch.autograd.Function):
    """x by a convolution of 1 x 1, and x.

    The gradient of the second is added within the product for the first's.
    """

    @staticmethod
    def forward(ctx, x, weight):
        """Return the convolution of `x`, and `x`."""
        # Without a residual the second result is not read: its gradient is None then, not zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        wide = F.linear(pixels_last(x), weight.flatten(1))
        return channels_first(wide), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dwide, dshortcut):
        """Return gradients from those of the convolution, `dwide`, and of x itself, `dshortcut`."""
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
    """Normalisation, SiLU, squeeze and excitation."""

    @staticmethod
    def forward(ctx, y, settings: _Settings, weight, bias, *squeeze):
        """Return `y` normalised, activated and gated."""
        y = pixels_last(y)
        norm = Norm(library.group_moments(y, *settings), weight, bias)
        excited, squeezed = _excite(y, norm, _Squeeze(*squeeze))
        ctx.save_for_backward(y, *norm, *squeeze, *squeezed)
        return channels_first(excited)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        """Return gradients from that of the output, `dy`."""
        y, *rest = ctx.saved_tensors
        norm = Norm(*rest[:3])
        squeeze = _Squeeze(*rest[3:7])
        squeezed = _Squeezed(*rest[7:])
        dy = pixels_last(dy)
        behind, gradients = _excite_gradients(y, norm, squeeze, squeezed, dy)
        dx = library.input_gradient(GATED, y, norm, behind.by_group, dy=dy, gate=behind.gate)
        return (channels_first(dx), None, *gradients)


class _ConvSettings(NamedTuple):
    """Numbers of a convolution and of the normalisations around it. The first may be None."""

    geometry: Geometry
    before: Optional[_Settings]
    behind: _Settings


class _ExcitedConv(torch.autograd.Function):
    """Group convolution, normalisation, SiLU, squeeze and excitation.

    parameters: weight and bias of the first normalisation, or None; weights of the convolution;
    weight and bias of the second normalisation; those of squeeze and excitation, as in `_Squeeze`.
    """

    @staticmethod
    def forward(ctx, x, settings: _ConvSettings, *parameters):
        """Return what all layers make of `x`."""
        weight_before, bias_before, conv, weight, bias, *squeeze = parameters
        x = pixels_last(x)
        before = None
        if settings.before is not None:
            before = Norm(library.group_moments(x, *settings.before), weight_before, bias_before)
        y, moments = library.convolution(
            x,
            conv,
            settings.geometry,
            before=before,
            groups=settings.behind.groups,
            eps=settings.behind.eps,
        )
        assert moments is not None  # there are groups
        norm = Norm(moments, weight, bias)
        excited, squeezed = _excite(y, norm, _Squeeze(*squeeze))
        # x and y, as wide as the expansion; the third such tensor is the result. The input's own
        # normalised values are computed again.
        ctx.geometry = settings.geometry
        before_tensors = before or (None, None, None)
        ctx.save_for_backward(x, conv, y, *before_tensors, *norm, *squeeze, *squeezed)
        return channels_first(excited)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        """Return gradients from that of the output, `dy`."""
        x, conv, y, *rest = ctx.saved_tensors
        before = None if rest[0] is None else Norm(*rest[:3])
        norm = Norm(*rest[3:6])
        squeeze = _Squeeze(*rest[6:10])
        squeezed = _Squeezed(*rest[10:])
        dy = pixels_last(dy)
        behind, gradients = _excite_gradients(y, norm, squeeze, squeezed, dy)
        dx, dconv, sums = library.convolution_gradients(
            x,
            conv,
            ctx.geometry,
            dy=dy,
            before=before,
            behind=behind,
        )
        dweight_before = None
        dbias_before = None
        if before is not None:
            assert sums is not None  # with a normalisation before
            # dx is the gradient before the activation: what is left is a normalisation without one.
            merged = library.merged_gradients(PLAIN, x, before, sums)
            dweight_before, dbias_before, by_group = merged
            library.input_gradient(LINEAR, x, before, by_group, dy=dx, out=dx)
        return (channels_first(dx), None, dweight_before, dbias_before, dconv, *gradients)


class _PooledNormAct(torch.autograd.Function):
    """Means over pixels, [N, C], of the normalised and activated x."""

    @staticmethod
    def forward(ctx, x, weight, bias, settings: _Settings):
        """Return means of what the layers make of `x`."""
        x = pixels_last(x)
        norm = Norm(library.group_moments(x, *settings), weight, bias)
        ctx.save_for_backward(x, *norm)
        return library.pooled(x, norm)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        """Return gradients from that of the output, `dy`."""
        x, *norm = ctx.saved_tensors
        norm = Norm(*norm)
        pixels = x.shape[1] * x.shape[2]
        # Each pixel has an equal share in the mean, and so in its gradient.
        gate = Gate(gate=None, pooled=dy.contiguous() / pixels)
        sums = library.gradient_sums(POOLED, x, norm)
        dweight, dbias, by_group = library.merged_gradients(POOLED, x, norm, sums, gate=gate)
        dx = library.input_gradient(POOLED, x, norm, by_group, gate=gate)
        return channels_first(dx), dweight, dbias, None

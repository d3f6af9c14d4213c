"""timm's blocks with fused layers that save each other passes over the memory.

- The residual is added in the kernels of the last normalisation, together with stochastic depth,
  and its gradient in the matrix product of the expansion. Of tensors like the block's output,
  forward moves two less, or four less where images are dropped; backward two less where images are
  dropped, and one less with an expansion.
- The group convolution takes the statistics of large groups for the normalisation behind it, which
  reads its input once less.
"""

from __future__ import annotations

import copy

import torch
from timm.models._efficientnet_blocks import DepthwiseSeparableConv, InvertedResidual
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.blocks import kept
from models.kernels.group_conv import FusedGroupConv2d
from models.kernels.group_norm import FusedGroupNormAct
from models.kernels.squeeze import SqueezingGroupNormAct
from models.stochastic import DropPath

# Block -> its last layer before the addition.
_NORMS = {DepthwiseSeparableConv: "bn2", InvertedResidual: "bn3"}


def replaces(module: nn.Module) -> bool:
    """Return whether `fuse` takes the `module`: timm's block that ends in a FusedGroupNormAct."""
    if type(module) not in _NORMS:
        return False
    last = getattr(module, _NORMS[type(module)])
    return (
        module.conv_s2d is None
        and type(module.drop_path) in (nn.Identity, DropPath)
        and type(last) is FusedGroupNormAct
    )


def fuse(block: nn.Module) -> nn.Module:
    """Return `block` with the same layers under the same names."""
    assert replaces(block), f"no kernels for {type(block).__name__}"
    # A copy with another class: its layers are the same objects, under the same names.
    block = copy.copy(block)
    block.__class__ = _Inverted if isinstance(block, InvertedResidual) else _Separable
    return block


class _Separable(DepthwiseSeparableConv):
    """timm's block without expansion."""

    aa: nn.Module  # timm's type admits None, but there is an identity instead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for `x`, [N, C, H, W]."""
        inner = _normalised(self.conv_dw, self.bn1, x)
        inner = self.conv_pw(self.se(self.aa(inner)))
        if not self.has_skip:
            return self.bn2(inner)
        return self.bn2.added(inner, kept(self, x), x)


class _Inverted(InvertedResidual):
    """timm's block with an expansion."""

    aa: nn.Module  # see _Separable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output for `x`, [N, C, H, W]."""
        # Before a residual, x goes through _Expansion twice, which adds up both gradients in place.
        expansion = self.conv_pw
        plain = expansion.kernel_size == expansion.stride == (1, 1) and expansion.bias is None
        if plain and self.has_skip:
            inner, shortcut = _Expansion.apply(x, expansion.weight)
        else:
            inner = expansion(x)
            shortcut = x
        inner = _normalised(self.conv_dw, self.bn2, self.bn1(inner))
        inner = self.conv_pwl(self.se(self.aa(inner)))
        if not self.has_skip:
            return self.bn3(inner)
        return self.bn3.added(inner, kept(self, x), shortcut, copied=plain)


class _Expansion(torch.autograd.Function):
    """x by a convolution of 1 x 1, and x.

    Its gradient is added up within the matrix product. The gradient of the second result must not
    be shared, because it is overwritten in place.
    """

    @staticmethod
    def forward(ctx, x, weight):
        """Return the convolution of `x` and `x`."""
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dx):
        """Return gradients from that of the convolution, `dy`; that of x is added to `dx`."""
        x, weight = ctx.saved_tensors
        # torch's kernel for the weights' gradient; x's is made below, with the sum in it.
        _, dweight, _ = torch.ops.aten.convolution_backward(
            dy,
            x,
            weight,
            bias_sizes=None,
            stride=[1, 1],
            padding=[0, 0],
            dilation=[1, 1],
            transposed=False,
            output_padding=[0, 0],
            groups=1,
            output_mask=[False, ctx.needs_input_grad[1], False],
        )
        # In both layouts `flatten` gives a view: of a copy the sum would be lost.
        matrix = weight.flatten(1)  # [out, in]
        if dx.is_contiguous():
            # A product for each image: [in, out] by [out, pixels].
            matrices = matrix.t().expand(len(dx), *matrix.t().shape)
            dx.flatten(2).baddbmm_(matrices, dy.contiguous().flatten(2))
        else:
            # One for all images: [pixels, out] by [out, in].
            dy = dy.contiguous(memory_format=torch.channels_last)
            pixels = dy.permute(0, 2, 3, 1).flatten(0, 2)
            dx.permute(0, 2, 3, 1).flatten(0, 2).addmm_(pixels, matrix)
        return dx, dweight


def _normalised(conv: nn.Module, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return norm(conv(x)); where both are ours, the convolution takes the statistics."""
    if not (isinstance(conv, FusedGroupConv2d) and isinstance(norm, SqueezingGroupNormAct)):
        return norm(conv(x))
    y, partial = conv.with_statistics(x)
    return norm.of_parts(y, partial, conv.parts(x))

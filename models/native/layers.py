"""Single layers by our functions, with torch's or timm's parameters: float32, channels-last."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from timm.layers import Conv2dSame
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from models.blocks import geometry
from models.native import library
from models.native.library import LINEAR, PLAIN, Geometry, Norm, channels_first, pixels_last
from models.normalization import GroupNormAct, ProxyNormAct


class Pointwise(nn.Conv2d):
    """A convolution of 1 x 1 as a product of matrices: [N, C, H, W] -> [N, out, H, W]."""

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Return whether the class may become that of the `module`."""
        return (
            isinstance(module, nn.Conv2d)
            and type(module) in (nn.Conv2d, Conv2dSame)  # a subclass may compute something else
            and module.kernel_size == module.stride == (1, 1)
            and module.padding == (0, 0)
            and module.groups == 1
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the convolution of `x`."""
        # Pixels are rows of a matrix, [N x H x W, C], without a copy if x is channels-last.
        y = F.linear(pixels_last(x), self.weight.flatten(1), self.bias)
        return channels_first(y)


class NativeGroupNormAct(GroupNormAct):
    """GroupNormAct: [N, C, H, W] -> [N, C, H, W].

    Only the input is kept. Gradients are not differentiable again.
    """

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Return whether the class may become that of the `module`."""
        return type(module) is GroupNormAct

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised and activated `x`."""
        return self.added(x, None, None)

    def added(
        self,
        x: torch.Tensor,
        kept: Optional[torch.Tensor],
        residual: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """Return the layer's output times `kept`, plus `residual`.

        Args:
            x: [N, C, H, W].
            kept: [N], or None.
            residual: like x, or None.
        """
        settings = _Settings(self.num_groups, self.eps, self.apply_act)
        return _GroupNormAct.apply(x, self.weight, self.bias, kept, residual, settings)


class NativeProxyNormAct(ProxyNormAct, NativeGroupNormAct):
    """The group normalisation that ProxyNormAct calls by `super` is ours."""

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Return whether the class may become that of the `module`."""
        return type(module) is ProxyNormAct


class GroupConv2d(nn.Conv2d):
    """A Conv2d or Conv2dSame in groups of 16 channels.

    Input: [N, C, H, W]; output: [N, C, ceil(H / stride), ceil(W / stride)].
    """

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Return whether the class may become that of the `module`.

        It is a Conv2d that is padded by half its kernel, or a Conv2dSame.
        """
        # Types, not isinstance: a subclass may compute something else.
        if not isinstance(module, nn.Conv2d) or type(module) not in (nn.Conv2d, Conv2dSame):
            return False
        kernel = module.kernel_size[0]
        padding = 0 if isinstance(module, Conv2dSame) else kernel // 2
        return (
            module.in_channels == module.out_channels == module.groups * library.GROUP_SIZE
            and module.kernel_size == (kernel, kernel)
            and kernel % 2 == 1
            and 1 < kernel <= library.LARGEST_KERNEL
            and module.stride[0] == module.stride[1] <= 2
            and module.padding == (padding, padding)
            and module.padding_mode == "zeros"
            and module.dilation == (1, 1)
            and module.bias is None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the convolution of `x`."""
        geometry = self.geometry(height=x.shape[2], width=x.shape[3])
        return _GroupConv.apply(x, self.weight, geometry)

    def geometry(self, height: int, width: int) -> Geometry:
        """Return the convolution's numbers for images of `height` lines and `width` columns."""
        kernel = self.kernel_size[0]
        stride = self.stride[0]
        pads_same = self.padding == (0, 0)  # a Conv2dSame
        out_size, padding = geometry((height, width), kernel, stride, pads_same)
        return Geometry(
            kernel=kernel,
            stride=stride,
            top=padding[0],
            left=padding[1],
            out_height=out_size[0],
            out_width=out_size[1],
        )


class _Settings(NamedTuple):
    """Arguments of `_GroupNormAct` that are no tensors."""

    groups: int
    eps: float
    silu: bool


class _GroupNormAct(torch.autograd.Function):
    """The layer as a function of x, weight, bias, kept and residual."""

    @staticmethod
    def forward(ctx, x, weight, bias, kept, residual, settings: _Settings):
        """Return the layer's output for `x`."""
        x = pixels_last(x)
        norm = Norm(library.group_moments(x, settings.groups, settings.eps), weight, bias)
        # x alone is as large as the output: normalised values are computed again.
        ctx.save_for_backward(x, kept, *norm)
        ctx.form = PLAIN if settings.silu else LINEAR
        if residual is not None:
            residual = pixels_last(residual)
        y = library.activated(x, norm, settings.silu, kept=kept, residual=residual)
        return channels_first(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        """Return gradients from that of the output, `dy`."""
        x, kept, *norm = ctx.saved_tensors
        norm = Norm(*norm)
        # The addition comes last: the residual's gradient is that of the output, unchanged.
        dresidual = dy if ctx.needs_input_grad[4] else None
        dy = pixels_last(dy)
        if ctx.form == PLAIN:
            # The gradient before the activation is stored: what is left is a normalisation without
            # one.
            dx = torch.empty_like(x)
            sums = library.gradient_sums(PLAIN, x, norm, dy=dy, kept=kept, dz=dx)
            dweight, dbias, by_group = library.merged_gradients(PLAIN, x, norm, sums)
            library.input_gradient(LINEAR, x, norm, by_group, dy=dx, out=dx)
        else:
            sums = library.gradient_sums(LINEAR, x, norm, dy=dy, kept=kept)
            dweight, dbias, by_group = library.merged_gradients(LINEAR, x, norm, sums)
            dx = library.input_gradient(LINEAR, x, norm, by_group, dy=dy, kept=kept)
        return channels_first(dx), dweight, dbias, None, dresidual, None


class _GroupConv(torch.autograd.Function):
    """The layer as a function of x and weight."""

    @staticmethod
    def forward(ctx, x, weight, geometry: Geometry):
        """Return the convolution of `x`."""
        x = pixels_last(x)
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        y, _ = library.convolution(x, weight, geometry)
        return channels_first(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        """Return gradients from that of the output, `dy`."""
        x, weight = ctx.saved_tensors
        dx, dweight, _ = library.convolution_gradients(x, weight, ctx.geometry, pixels_last(dy))
        return channels_first(dx), dweight, None

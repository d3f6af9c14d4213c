"""Group normalisation with SiLU as Triton kernels, contiguous and channels-last.

Forward reads x twice and writes y, backward reads x and dy twice and writes dx; only x is kept.
Three kernels forward and three backward: sums, what they are over a group, and the result. They are
in `group_norm_kernels.py`.
"""

from __future__ import annotations

import copy as copying
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
import triton
from torch import nn
from torch.autograd.function import once_differentiable

from models.kernels import group_norm_kernels as kernels
from models.kernels.operators import operator
from models.normalization import GroupNormAct, ProxyNormAct

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class _Sizes(NamedTuple):
    """Elements of a program and of each of its tiles, one after the other, and warps."""

    program: int
    tile: int
    warps: int


# The fastest of those tried on an H200 (docs/gpu.md). With smaller tiles more warps fit; in longer
# programs what is done once for each channel weighs less.
_SUMMED = _Sizes(program=2**15, tile=2**10, warps=4)  # elements that are added up
_MAPPED = _Sizes(program=2**14, tile=2**12, warps=8)  # elements each of which gives one
# Neighbouring channels of a channels-last tile: 128 bytes in half precision, a line of the cache,
# or half of that where fewer lanes have no channel then.
_ROWS = (64, 32)
_MERGED = 4096  # partial sums that are merged at a time
_WARPS = 8  # of what merges


def replaces(module: nn.Module) -> bool:
    """Return whether `fuse` takes the `module`."""
    return type(module) in (GroupNormAct, ProxyNormAct)


class FusedGroupNormAct(GroupNormAct):
    """GroupNormAct by our kernels: [N, C, H, W], float16, bfloat16 or float32.

    Output in x's dtype and memory format.

    Mean and variance are merged from those of tiles (Chan, Golub and LeVeque, 1979). Other layouts
    of x become contiguous. Gradients are not differentiable again.
    """

    @classmethod
    def of(cls, norm: GroupNormAct) -> FusedGroupNormAct:
        """Return a layer with the Parameters, buffers and settings of `norm`."""
        assert replaces(norm), f"no kernels for {type(norm).__name__}"
        # A copy with another class: it shares Parameters and buffers, and keeps hooks.
        fused = copying.copy(norm)
        fused.__class__ = _FusedProxyNormAct if isinstance(norm, ProxyNormAct) else cls
        assert isinstance(fused, FusedGroupNormAct)
        return fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised and activated `x`, [N, C, H, W]."""
        assert x.shape[1] == self.num_channels, f"{x.shape[1]} channels, not {self.num_channels}"
        return self.added(x, None, None)

    def added(
        self,
        x: torch.Tensor,
        kept: Optional[torch.Tensor],
        residual: Optional[torch.Tensor],
        copied: bool = False,
    ) -> torch.Tensor:
        """Return the layer's output times `kept`, plus `residual`, rounded once.

        Args:
            x: [N, C, H, W].
            kept: [N], or None.
            residual: of x's shape, dtype and layout, or None.
            copied: whether the residual's gradient is a copy, which its reader may overwrite.
        """
        settings = _Settings(self.num_groups, self.eps, self.apply_act, copied)
        return _GroupNormAct.apply(x, self.weight, self.bias, kept, residual, settings)


fuse = FusedGroupNormAct.of


class _FusedProxyNormAct(ProxyNormAct, FusedGroupNormAct):
    """The group normalisation that ProxyNormAct calls by `super` is the fused one."""


class Tiles:
    """How x is divided among programs, and launches of kernels over it.

    A strip, `rows` channels by some pixels, is a program's, which takes tile after tile. Kernels that
    sum have strips of `strip` pixels, `chunks` of which are an image's plane. aligned: a power of
    two, up to 8, that divides the contiguous length: elements that a thread loads at once.

    Args:
        x: [N, C, H, W], in one of the two layouts.
        groups: of the normalisation.
    """

    def __init__(self, x: torch.Tensor, groups: int):
        self.images, self.channels, height, width = x.shape
        self.groups = groups
        self.size = self.channels // groups
        self.pixels = height * width
        self.device = x.device
        self.channels_last = x.is_contiguous(memory_format=torch.channels_last)
        self.memory_format = torch.channels_last if self.channels_last else torch.contiguous_format

        # Neighbours in memory are loaded together: channels of a pixel, or pixels of a channel.
        channels_power = triton.next_power_of_2(self.channels)
        if self.channels_last:
            rows = min(_ROWS, key=lambda rows: triton.cdiv(self.channels, rows) * rows)
            self.rows = min(rows, channels_power)
            contiguous = self.channels
        else:
            self.rows = min(channels_power, max(1, _SUMMED.tile // self._pixels_power))
            contiguous = self.pixels
        self.strip = self._strip(_SUMMED)
        self.chunks = triton.cdiv(self.pixels, self.strip)
        # The largest power of two that divides it; 8 numbers of half precision are 16 bytes, the
        # most that a thread of a GPU loads at once.
        self.aligned = min(contiguous & -contiguous, 8)

    @property
    def _pixels_power(self) -> int:
        return triton.next_power_of_2(self.pixels)

    def _strip(self, sizes: _Sizes) -> int:
        """Return the pixels of a program."""
        return min(self._pixels_power, sizes.program // self.rows)

    def sums(self, numbers: int) -> torch.Tensor:
        """Make memory for so many `numbers` of each channel and strip: [numbers, N, C, chunks]."""
        shape = (numbers, self.images, self.channels, self.chunks)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def of_groups(self) -> torch.Tensor:
        """Make memory for two numbers of each image and group: [2, N, groups], float32."""
        return torch.empty((2, self.images, self.groups), dtype=torch.float32, device=self.device)

    def sum(self, kernel: triton.JITFunction, **arguments: Any) -> None:
        """Launch a kernel that adds up what is in a strip.

        Args:
            kernel: of group_norm_kernels.py or squeeze_kernels.py.
            **arguments: the kernel's tensors, strides and own constants; not what `_run` gives it.
        """
        self._run(kernel, _SUMMED, arguments)

    def map(self, kernel: triton.JITFunction, **arguments: Any) -> None:
        """Launch a kernel that writes a tensor like x.

        Args:
            kernel: of group_norm_kernels.py or squeeze_kernels.py.
            **arguments: the kernel's tensors, strides and own constants; not what `_run` gives it.
        """
        self._run(kernel, _MAPPED, arguments)

    def _run(
        self,
        kernel: triton.JITFunction,
        sizes: _Sizes,
        arguments: Dict[str, Any],
    ) -> None:
        """Launch a kernel with a program for each strip, and give it sizes and constants."""
        strip = self._strip(sizes)
        columns = min(strip, sizes.tile // self.rows)
        blocks = triton.cdiv(self.channels, self.rows)
        strips = triton.cdiv(self.pixels, strip)
        # The grid has one dimension, the only one that may be longer than 65,535.
        kernel[(self.images * blocks * strips,)](
            **arguments,
            shape=(self.size, self.channels, self.pixels),
            LAYOUT=(self.channels_last, self.aligned),
            TILE=(self.rows, columns),
            PIXELS=strip,
            num_warps=sizes.warps,
        )


def statistics(x: torch.Tensor, tiles: Tiles, eps: float) -> torch.Tensor:
    """Compute moments of each image's groups, from those of tiles.

    Args:
        x: [N, C, H, W].
        tiles: of x.
        eps: added to the variance.

    Returns:
        [2, N, groups], float32: mean, and one over the standard deviation.
    """
    partial = tiles.sums(2)
    tiles.sum(kernels.strip_statistics, x=x, means=partial[0], squares=partial[1])
    return merge_statistics(partial, tiles, eps, plane=(1, tiles.pixels), part=(1, tiles.strip))


def merge_statistics(
    partial: torch.Tensor,
    tiles: Tiles,
    eps: float,
    plane: Tuple[int, int],
    part: Tuple[int, int],
) -> torch.Tensor:
    """Merge the moments of parts of an image to those of its groups.

    Args:
        partial: [2, N, C, chunks], float32: mean, and sum of squared differences from it, of each
            part of a channel's plane.
        tiles: of the images.
        eps: added to the variance.
        plane: its lines and columns.
        part: lines and columns of its parts.

    Returns:
        [2, N, groups], float32: mean, and one over the standard deviation.
    """
    # A program for each group of each image. It merges as many parts at a time as there are, within
    # what its registers hold.
    result = tiles.of_groups()
    kernels.merge_statistics[(tiles.images * tiles.groups,)](
        partial=tuple(partial),
        mean=result[0],
        scale=result[1],
        size=tiles.size,
        plane=plane,
        eps=eps,
        PART=part,
        BLOCK=min(triton.next_power_of_2(tiles.size * partial.shape[-1]), _MERGED),
        num_warps=_WARPS,
    )
    return result


def _merge_gradients(
    sums: torch.Tensor,
    tiles: Tiles,
    weight: torch.Tensor,
    *,
    by_group: Optional[torch.Tensor],
    dweight: torch.Tensor,
    dbias: Optional[torch.Tensor],
) -> None:
    """Write gradients of weight and bias, and what the gradient of the input needs of each group.

    Args:
        sums: [2, N, C, chunks], as `kernels.sum_gradients` writes them.
        tiles: of the images.
        weight: [C].
        by_group: [2, N, groups], written: sums over a group's channels times their weights; or
            None.
        dweight, dbias: [C], written: sums over images; dbias or None.
    """
    # Numbers of a channel over images, or of an image's group over channels.
    numbers = max(tiles.images, tiles.size) * tiles.chunks
    block = min(triton.next_power_of_2(numbers), _MERGED)
    programs = tiles.channels
    if by_group is not None:
        programs += tiles.images * tiles.groups
    kernels.merge_gradients[(programs,)](
        sums=tuple(sums),
        weight=weight,
        by_group=by_group,
        dweight=dweight,
        dbias=dbias,
        sizes=(tiles.images, tiles.size, tiles.channels, tiles.chunks),
        BLOCK=block,
        num_warps=min(_WARPS, max(1, block // 256)),
    )


def in_place_layout(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in a layout that kernels take: contiguous unless it is channels-last."""
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


class _Inputs(NamedTuple):
    """Arguments of the operator `_output`, in the order of its schema."""

    x: torch.Tensor  # [N, C, H, W]
    weight: torch.Tensor  # [C]
    bias: Optional[torch.Tensor]  # [C]
    kept: Optional[torch.Tensor]  # [N]
    residual: Optional[torch.Tensor]  # like x
    groups: int
    eps: float
    apply_act: bool


def _like_output(*arguments: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return tensors like the results of `_output`."""
    inputs = _Inputs(*arguments)
    x = inputs.x
    shape = (2, len(x), inputs.groups)
    moments = torch.empty(shape, dtype=torch.float32, device=x.device)
    return torch.empty_like(in_place_layout(x)), moments


@operator(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? kept, Tensor? residual, "
    "int groups, float eps, bool apply_act) -> (Tensor, Tensor)",
    _like_output,
)
def _output(*arguments: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's output, and its groups' moments: [2, N, groups].

    Arguments: see `_Inputs`.
    """
    inputs = _Inputs(*arguments)
    x = in_place_layout(inputs.x)
    y = torch.empty_like(x)
    tiles = Tiles(x, inputs.groups)
    residual = inputs.residual
    if residual is not None:
        # The kernel finds its elements where those of x are, so it must lie in memory alike.
        residual = residual.contiguous(memory_format=tiles.memory_format)
    moments = statistics(x, tiles, inputs.eps)
    tiles.map(
        kernels.normalise,
        x=x,
        y=y,
        norm=(inputs.weight, inputs.bias, *moments),
        kept=inputs.kept,
        residual=residual,
        SILU=inputs.apply_act,
    )
    return y, moments


class _GradientInputs(NamedTuple):
    """Arguments of the operator `_gradients`, in the order of its schema."""

    dy: torch.Tensor  # like x
    x: torch.Tensor  # [N, C, H, W]
    weight: torch.Tensor  # [C]
    bias: Optional[torch.Tensor]  # [C]
    kept: Optional[torch.Tensor]  # [N]
    moments: torch.Tensor  # [2, N, groups]
    groups: int
    apply_act: bool
    wanted: bool  # x's gradient
    copied: bool  # a copy of dy, with x's gradient


_Gradients = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _like_gradients(*arguments: Any) -> _Gradients:
    """Return tensors like the results of `_gradients`."""
    inputs = _GradientInputs(*arguments)
    x = inputs.x
    weight = inputs.weight
    dx = x.new_empty(0)
    copy = x.new_empty(0)
    if inputs.wanted:
        dx = torch.empty_like(in_place_layout(x))
        if inputs.copied:
            copy = torch.empty_like(dx)
    dbias = torch.empty_like(weight if inputs.bias is None else inputs.bias)
    return dx, torch.empty_like(weight), dbias, copy


@operator(
    "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? kept, Tensor moments, "
    "int groups, bool apply_act, bool wanted, bool copied) -> (Tensor, Tensor, Tensor, Tensor)",
    _like_gradients,
)
def _gradients(*arguments: Any) -> _Gradients:
    """Return gradients of x, empty unless it is wanted, of weight and of bias, and a copy of dy.

    That of the bias is undefined where there is none. The copy is empty unless it and x's gradient
    are wanted. Arguments: see `_GradientInputs`.
    """
    inputs = _GradientInputs(*arguments)
    x = in_place_layout(inputs.x)
    weight = inputs.weight
    tiles = Tiles(x, inputs.groups)
    shared = _shared_arguments(inputs, x, tiles)

    # Sums over strips, then over images and over groups.
    sums = tiles.sums(2)
    tiles.sum(kernels.sum_gradients, **shared, sums=tuple(sums))
    dweight = torch.empty_like(weight)
    dbias = None if inputs.bias is None else torch.empty_like(inputs.bias)
    by_group = tiles.of_groups() if inputs.wanted else None
    _merge_gradients(sums, tiles, weight, by_group=by_group, dweight=dweight, dbias=dbias)

    # An operator returns tensors only: empty or undefined ones for None.
    dx = x.new_empty(0)
    copy = x.new_empty(0)
    if by_group is not None:
        dx = torch.empty_like(x)
        copy = torch.empty_like(x) if inputs.copied else copy
        tiles.map(
            kernels.input_gradient,
            **shared,
            group_sums=tuple(by_group),
            dx=dx,
            dresidual=copy if inputs.copied else None,
        )
    if dbias is None:
        dbias = torch.empty_like(weight)
    return dx, dweight, dbias, copy


def _shared_arguments(inputs: _GradientInputs, x: torch.Tensor, tiles: Tiles) -> Dict[str, Any]:
    """Return the tensors and constants that both kernels over strips of `x` take."""
    return {
        "x": x,
        "dy": inputs.dy.contiguous(memory_format=tiles.memory_format),
        "norm": (inputs.weight, inputs.bias, *inputs.moments),
        "kept": inputs.kept,
        "SILU": inputs.apply_act,
    }


class _Settings(NamedTuple):
    """Arguments of `_GroupNormAct` that are no tensors; copied: see `FusedGroupNormAct.added`."""

    groups: int
    eps: float
    apply_act: bool
    copied: bool


class _GroupNormAct(torch.autograd.Function):
    """The layer as a function of x, weight, bias, kept and residual."""

    @staticmethod
    def forward(ctx, x, weight, bias, kept, residual, settings: _Settings):
        """Return the layer's output for `x`."""
        assert x.dtype in DTYPES, f"no kernels for {x.dtype}"
        inputs = _Inputs(
            x=x,
            weight=weight,
            bias=bias,
            kept=kept,
            residual=residual,
            groups=settings.groups,
            eps=settings.eps,
            apply_act=settings.apply_act,
        )
        y, moments = _output(*inputs)
        # Only x is as large as the output: what lies between is computed again.
        ctx.save_for_backward(x, weight, bias, kept, moments)
        ctx.settings = settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        """Return gradients from that of the output, `dy`."""
        x, weight, bias, kept, moments = ctx.saved_tensors
        copied = ctx.settings.copied
        wanted = ctx.needs_input_grad[0]
        inputs = _GradientInputs(
            dy=dy,
            x=x,
            weight=weight,
            bias=bias,
            kept=kept,
            moments=moments,
            groups=ctx.settings.groups,
            apply_act=ctx.settings.apply_act,
            wanted=wanted,
            copied=copied,
        )
        dx, dweight, dbias, copy = _gradients(*inputs)

        # The residual's gradient is dy. A copy is made by the kernel, which reads dy anyway.
        dresidual = None
        if ctx.needs_input_grad[4]:
            dresidual = dy
            if copied:
                dresidual = copy if wanted else dy.clone()
        dx = dx if wanted else None
        dbias = None if bias is None else dbias
        return dx, dweight, dbias, None, dresidual, None

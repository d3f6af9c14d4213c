"""Group normalisation with SiLU as Triton kernels, for contiguous and for channels-last activations.

Forward reads x twice and writes y, backward reads x and dy twice and writes dx; only x is kept. Three kernels forward
and three backward: sums, what they are over a group, and the result. They are in `group_norm_kernels.py`.
"""

from __future__ import annotations

import copy as copying
from typing import Optional, Tuple

import torch
import triton
from torch import nn
from torch.autograd.function import once_differentiable

from models.kernels import group_norm_kernels as kernels
from models.kernels.operators import operator
from models.normalization import GroupNormAct, ProxyNormAct

# Elements of a program and of each of its tiles, one after the other, and warps: the fastest of those tried on an H200
# (docs/gpu.md). With smaller tiles more warps fit; in longer programs what is done once for each channel weighs less.
_SUMMED = (2**15, 2**10, 4)  # that are added up
_MAPPED = (2**14, 2**12, 8)  # each of which gives one
# Neighbouring channels of a channels-last tile: 128 bytes in half precision, a line of the cache, or half of that where
# fewer lanes have no channel then.
_ROWS = (64, 32)
_MERGED = 4096  # partial sums that are merged at a time
_WARPS = 8  # of what merges
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def replaces(module: nn.Module) -> bool:
    """Whether `FusedGroupNormAct.of` takes the module."""
    return type(module) in (GroupNormAct, ProxyNormAct)


class FusedGroupNormAct(GroupNormAct):
    """GroupNormAct by our kernels: [N, C, H, W], float16, bfloat16 or float32; output in x's dtype and memory format.

    Mean and variance are merged from those of tiles (Chan, Golub and LeVeque, 1979). Other layouts of x become
    contiguous. Gradients are not differentiable again.
    """

    @classmethod
    def of(cls, norm: GroupNormAct) -> FusedGroupNormAct:
        """A layer with the Parameters, buffers and settings of `norm`."""
        assert replaces(norm), f"no kernels for {type(norm).__name__}"
        fused = copying.copy(norm)
        fused.__class__ = _FusedProxyNormAct if isinstance(norm, ProxyNormAct) else cls
        return fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == self.num_channels, f"{x.shape[1]} channels, not {self.num_channels}"
        return self.added(x, None, None)

    def added(
        self, x: torch.Tensor, kept: Optional[torch.Tensor], residual: Optional[torch.Tensor], copied: bool = False
    ) -> torch.Tensor:
        """The layer's output times `kept`, [N], plus `residual`, of x's shape, dtype and layout, rounded once. copied:
        the residual's gradient is a tensor that nobody else has."""
        settings = (self.num_groups, self.eps, self.apply_act, copied)
        return GroupNormActFunction.apply(x, self.weight, self.bias, kept, residual, *settings)


fuse = FusedGroupNormAct.of


class _FusedProxyNormAct(ProxyNormAct, FusedGroupNormAct):
    """The group normalisation that ProxyNormAct calls by `super` is the fused one."""


class Tiles:
    """How x, [N, C, H, W], is divided: `rows` channels by `strip` pixels are a program's, which takes tile after tile;
    `chunks` strips are an image's plane.

    aligned: a power of two, up to 8, that divides the contiguous length: elements that a thread loads at once.
    """

    def __init__(self, x: torch.Tensor, groups: int):
        self.images, self.channels, height, width = x.shape
        self.groups, self.size, self.pixels = groups, self.channels // groups, height * width
        self.device = x.device
        self.channels_last = x.is_contiguous(memory_format=torch.channels_last)
        self.memory_format = torch.channels_last if self.channels_last else torch.contiguous_format
        if self.channels_last:
            self.rows = min(_ROWS, key=lambda rows: triton.cdiv(self.channels, rows) * rows)
            self.rows = min(self.rows, triton.next_power_of_2(self.channels))
        else:
            self.rows = min(triton.next_power_of_2(self.channels), max(1, _SUMMED[1] // self._pixels))
        self.strip = self._strip(_SUMMED)
        self.chunks = triton.cdiv(self.pixels, self.strip)
        length = self.channels if self.channels_last else self.pixels
        self.aligned = min(length & -length, 8)

    @property
    def _pixels(self) -> int:
        return triton.next_power_of_2(self.pixels)

    def _strip(self, sizes: Tuple[int, int, int]) -> int:
        """Pixels of a program."""
        return min(self._pixels, sizes[0] // self.rows)

    def sums(self, numbers: int) -> torch.Tensor:
        """Memory for so many numbers of each channel, of each tile: [numbers, N, C, chunks], float32."""
        shape = (numbers, self.images, self.channels, self.chunks)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def of_groups(self) -> torch.Tensor:
        """Memory for two numbers of each image and group: [2, N, groups], float32."""
        return torch.empty((2, self.images, self.groups), dtype=torch.float32, device=self.device)

    def sum(self, kernel, *arguments, **constants) -> None:
        """For kernels that add up what is in a strip."""
        self._run(kernel, _SUMMED, *arguments, **constants)

    def map(self, kernel, *arguments, **constants) -> None:
        """For kernels that write a tensor like x."""
        self._run(kernel, _MAPPED, *arguments, **constants)

    def _run(self, kernel, sizes: Tuple[int, int, int], *arguments, **constants) -> None:
        """The grid has one dimension, the only one that may be longer than 65,535."""
        strip = self._strip(sizes)
        columns = min(strip, sizes[1] // self.rows)
        programs = self.images * triton.cdiv(self.channels, self.rows) * triton.cdiv(self.pixels, strip)
        kernel[(programs,)](
            *arguments, size=self.size, channels=self.channels, pixels=self.pixels, CHANNELS_LAST=self.channels_last,
            ALIGNED=self.aligned, ROWS=self.rows, COLUMNS=columns, STEPS=strip // columns, num_warps=sizes[2],
            **constants,
        )  # fmt: skip


def statistics(x: torch.Tensor, tiles: Tiles, eps: float) -> torch.Tensor:
    """Mean, and one over the standard deviation, of each image's groups, from those of tiles: [2, N, groups]."""
    partial = tiles.sums(2)
    tiles.sum(kernels.tile_statistics, x, partial[0], partial[1])
    return merge_statistics(partial, tiles, eps, (1, tiles.pixels), (1, tiles.strip))


def merge_statistics(
    partial: torch.Tensor, tiles: Tiles, eps: float, size: Tuple[int, int], part: Tuple[int, int]
) -> torch.Tensor:
    """The same from partial, [2, N, C, chunks]: mean, and sum of squared differences from it, of each part of a
    channel's plane. Args: size, part: lines and columns of the plane, and of its parts."""
    result = tiles.of_groups()
    block = min(triton.next_power_of_2(tiles.size * partial.shape[-1]), _MERGED)
    kernels.merge_statistics[(tiles.images * tiles.groups,)](
        partial[0], partial[1], *result, tiles.size, *size, eps, *part, block, num_warps=_WARPS
    )
    return result


def merge_gradients(sums, tiles: Tiles, weight, by_group, dweight, dbias) -> None:
    """Of sums, [2, N, C, chunks]: dbias and dweight, [C], the sums over images, and by_group, [2, N, groups] or None,
    those over a group's channels times their weights."""
    block = min(triton.next_power_of_2(max(tiles.images, tiles.size) * tiles.chunks), _MERGED)
    programs = tiles.channels + (0 if by_group is None else tiles.images * tiles.groups)
    kernels.merge_gradients[(programs,)](
        sums, sums.stride(0), weight, by_group, dweight, dbias, tiles.images, tiles.size, tiles.channels, tiles.chunks,
        BLOCK=block, num_warps=min(_WARPS, max(1, block // 256)),
    )  # fmt: skip


def in_place_layout(x: torch.Tensor) -> torch.Tensor:
    """x in one of the two layouts that kernels take: contiguous unless it is channels-last."""
    return x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()


def _like_output(x, weight, bias, kept, residual, groups, eps, apply_act):
    moments = torch.empty((2, len(x), groups), dtype=torch.float32, device=x.device)
    return torch.empty_like(in_place_layout(x)), moments


@operator(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? kept, Tensor? residual, int groups, float eps, bool apply_act) "
    "-> (Tensor, Tensor)",
    _like_output,
)
def _output(x, weight, bias, kept, residual, groups: int, eps: float, apply_act: bool):
    """The layer's output, and its groups' moments: [2, N, groups]."""
    x = in_place_layout(x)
    tiles, y = Tiles(x, groups), torch.empty_like(x)
    if residual is not None:
        residual = residual.contiguous(memory_format=tiles.memory_format)
    mean, scale = moments = statistics(x, tiles, eps)
    tiles.map(kernels.normalise, x, y, weight, bias, mean, scale, kept, residual, SILU=apply_act)
    return y, moments


def _like_gradients(dy, x, weight, bias, kept, moments, groups, apply_act, wanted, copied):
    dx, dy = (
        torch.empty_like(in_place_layout(x)) if there else x.new_empty(0) for there in (wanted, wanted and copied)
    )
    return dx, torch.empty_like(weight), torch.empty_like(weight if bias is None else bias), dy


@operator(
    "(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? kept, Tensor moments, int groups, bool apply_act, "
    "bool wanted, bool copied) -> (Tensor, Tensor, Tensor, Tensor)",
    _like_gradients,
)
def _gradients(dy, x, weight, bias, kept, moments, groups: int, apply_act: bool, wanted: bool, copied: bool):
    """Of x, empty unless it is wanted, of weight and of bias, which is undefined where there is none; and a copy of dy,
    empty unless both are wanted."""
    x = in_place_layout(x)
    tiles = Tiles(x, groups)
    given, sums = (x, dy.contiguous(memory_format=tiles.memory_format), weight, bias, *moments, kept), tiles.sums(2)
    dx, dweight = torch.empty_like(x) if wanted else None, torch.empty_like(weight)
    copy = torch.empty_like(x) if wanted and copied else None
    dbias = None if bias is None else torch.empty_like(bias)
    tiles.sum(kernels.sum_gradients, *given, sums, sums.stride(0), SILU=apply_act)
    by_group = tiles.of_groups() if wanted else None
    merge_gradients(sums, tiles, weight, by_group, dweight, dbias)
    if wanted:
        tiles.map(kernels.input_gradient, *given, *by_group, dx, copy, SILU=apply_act)
    dx, copy = (x.new_empty(0) if each is None else each for each in (dx, copy))
    return dx, dweight, torch.empty_like(weight) if dbias is None else dbias, copy


class GroupNormActFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, kept, residual, groups: int, eps: float, apply_act: bool, copied: bool):
        assert x.dtype in DTYPES, f"no kernels for {x.dtype}"
        y, moments = _output(x, weight, bias, kept, residual, groups, eps, apply_act)
        ctx.save_for_backward(x, weight, bias, kept, moments)
        ctx.groups, ctx.apply_act, ctx.copied = groups, apply_act, copied
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, kept, moments = ctx.saved_tensors
        wanted, settings = ctx.needs_input_grad[0], (ctx.groups, ctx.apply_act)
        dx, dweight, dbias, copy = _gradients(dy, x, weight, bias, kept, moments, *settings, wanted, ctx.copied)
        dresidual = None
        if ctx.needs_input_grad[4]:
            dresidual = copy if wanted and ctx.copied else dy.clone() if ctx.copied else dy
        dbias = None if bias is None else dbias
        return dx if wanted else None, dweight, dbias, None, dresidual, None, None, None, None

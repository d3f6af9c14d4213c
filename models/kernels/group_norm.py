"""Group normalisation with SiLU as Triton kernels, for contiguous and for channels-last activations.

Tensors of x's size that move between memory and processor:

|          | here                                | torch's group_norm, then its silu                  |
| forward  | read x; read x, write y: 3          | read x; read x, write z; read z, write y: 5        |
| backward | read x, dy; read x, dy, write dx: 5 | read z, dy, write dz; then the five with dz: 8     |
| kept     | x                                   | x and z                                            |

One program computes one tile, [channels, pixels] of one image in either layout. Its sums are stored for each channel
and merged in a fixed order, without atomics, so results repeat bit for bit. All arithmetic is float32.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, Tuple

import torch
import triton
import triton.language as tl
from torch import nn
from torch.autograd.function import once_differentiable

from models.normalization import GroupNormAct, ProxyNormAct

_TILE = 8192  # elements, 32 for each thread: with fewer, what is done once for each channel weighs too much
_ROW = 64  # neighbouring channels of a channels-last tile: 128 bytes in half precision, a line of the cache
_MERGED = 4096  # partial statistics that are merged at a time
_WARPS = 8
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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
        fused = copy.copy(norm)
        fused.__class__ = _FusedProxyNormAct if isinstance(norm, ProxyNormAct) else cls
        return fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == self.num_channels, f"{x.shape[1]} channels, not {self.num_channels}"
        return _GroupNormAct.apply(x, self.weight, self.bias, self.num_groups, self.eps, self.apply_act)


fuse = FusedGroupNormAct.of


class _FusedProxyNormAct(ProxyNormAct, FusedGroupNormAct):
    """The group normalisation that ProxyNormAct calls by `super` is the fused one."""


class _Tiles(NamedTuple):
    """How [N, C, H, W] is divided: `rows` channels by `columns` pixels are a tile, `chunks` tiles an image's plane."""

    images: int
    channels: int
    pixels: int
    channels_last: bool
    rows: int
    columns: int
    aligned: int  # a power of two, up to 8, that divides the contiguous length: elements that a thread loads at once

    @classmethod
    def of(cls, x: torch.Tensor) -> _Tiles:
        images, channels, height, width = x.shape
        pixels = height * width
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        if channels_last:
            rows = min(_power_of_two(channels), max(_ROW, _TILE // _power_of_two(pixels)))
            columns = min(_power_of_two(pixels), _TILE // rows)
        else:
            columns = min(_power_of_two(pixels), _TILE)
            rows = min(_power_of_two(channels), _TILE // columns)
        length = channels if channels_last else pixels
        return cls(images, channels, pixels, channels_last, rows, columns, min(length & -length, 8))

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.pixels, self.columns)

    def partial_sums(self, x: torch.Tensor) -> torch.Tensor:
        """Memory for two numbers of each channel of each tile: [2, N, C, chunks], float32."""
        return torch.empty((2, self.images, self.channels, self.chunks), dtype=torch.float32, device=x.device)

    def run(self, kernel, *arguments, **constants) -> None:
        """One program a tile. The grid has one dimension, the only one that may be longer than 65,535."""
        grid = (self.images * triton.cdiv(self.channels, self.rows) * self.chunks,)
        layout = {"CHANNELS_LAST": self.channels_last, "ALIGNED": self.aligned, "num_warps": _WARPS}
        tile = {"ROWS": self.rows, "COLUMNS": self.columns}
        kernel[grid](*arguments, channels=self.channels, pixels=self.pixels, **layout, **tile, **constants)


class _GroupNormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, groups: int, eps: float, apply_act: bool):
        assert x.dtype in _DTYPES, f"no kernels for {x.dtype}"
        x = x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()
        tiles = _Tiles.of(x)
        size = tiles.channels // groups
        mean, scale = _statistics(x, tiles, groups, eps)
        y = torch.empty_like(x)
        tiles.run(_normalise, x, y, weight, bias, mean, scale, size, SILU=apply_act)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.groups, ctx.apply_act = groups, apply_act
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, mean, scale = ctx.saved_tensors
        tiles = _Tiles.of(x)
        size = tiles.channels // ctx.groups
        dy = dy.contiguous(memory_format=torch.channels_last if tiles.channels_last else torch.contiguous_format)
        given = (x, dy, weight, bias, mean, scale, size)
        partial = tiles.partial_sums(x)
        tiles.run(_sum_gradients, *given, partial[0], partial[1], SILU=ctx.apply_act)
        by_channel = partial.sum(3)
        dbias, dweight = by_channel.sum(1)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            by_group = (by_channel * weight).view(2, tiles.images, ctx.groups, size).sum(3)
            tiles.run(_input_gradient, *given, by_group[0], by_group[1], dx, SILU=ctx.apply_act)
        return dx, dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype), None, None, None


def _statistics(x: torch.Tensor, tiles: _Tiles, groups: int, eps: float) -> Tuple[torch.Tensor, torch.Tensor]:
    """Mean, and one over the standard deviation, of each image's groups: [N, groups] each, float32."""
    partial = tiles.partial_sums(x)
    tiles.run(_tile_statistics, x, partial[0], partial[1])
    mean, scale = torch.empty((2, tiles.images, groups), dtype=torch.float32, device=x.device)
    size = tiles.channels // groups
    block = min(_power_of_two(size * tiles.chunks), _MERGED)
    _merge_statistics[(tiles.images * groups,)](
        partial[0], partial[1], mean, scale, size, tiles.pixels, eps, tiles.columns, block, num_warps=_WARPS
    )
    return mean, scale


def _power_of_two(number: int) -> int:
    """The smallest that is not below the number."""
    return 1 << (number - 1).bit_length()


@triton.jit
def _tile(
    channels, pixels, CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The program's tile: image, channels [ROWS], first pixel, chunk; where it starts, and from there its offsets.

    Offsets, and the mask of those that exist, are [ROWS, COLUMNS]. Only the start may need an int64.
    """
    chunks = tl.cdiv(pixels, COLUMNS)
    blocks = tl.cdiv(channels, ROWS)
    program = tl.program_id(0)
    chunk = program % chunks
    first_channel = program // chunks % blocks * ROWS
    image = (program // chunks // blocks).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    first_pixel = chunk * COLUMNS
    # So the compiler knows of the factor.
    if CHANNELS_LAST:
        channels = channels // ALIGNED * ALIGNED
        start = (image * pixels + first_pixel) * channels + first_channel
        inside = rows[:, None] + columns[None, :] * channels
    else:
        pixels = pixels // ALIGNED * ALIGNED
        start = (image * channels + first_channel) * pixels + first_pixel
        inside = rows[:, None] * pixels + columns[None, :]
    mask = (first_channel + rows < channels)[:, None] & (first_pixel + columns < pixels)[None, :]
    return image, first_channel + rows, first_pixel, chunk, start, inside, mask


@triton.jit
def _store_by_channel(values, to, image, channel, channels, chunk, pixels, COLUMNS: tl.constexpr):
    """Into [N, C, chunks]."""
    chunks = tl.cdiv(pixels, COLUMNS)
    tl.store(to + (image * channels + channel) * chunks + chunk, values, mask=channel < channels)


@triton.jit
def _tile_statistics(
    x, means, squares,
    channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the tile: the mean, and the sum of squared differences from it."""
    image, channel, first_pixel, chunk, start, inside, mask = _tile(
        channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    values = tl.load(x + start + inside, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(values, 1) / tl.minimum(COLUMNS, pixels - first_pixel)
    centred = tl.where(mask, values - mean[:, None], 0.0)
    _store_by_channel(mean, means, image, channel, channels, chunk, pixels, COLUMNS)
    _store_by_channel(tl.sum(centred * centred, 1), squares, image, channel, channels, chunk, pixels, COLUMNS)


@triton.jit
def _merge_statistics(means, squares, mean, scale, size, pixels, eps, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Of one image and group: its partial statistics, `size` channels of each chunk, are neighbours in memory."""
    group = tl.program_id(0).to(tl.int64)
    chunks = tl.cdiv(pixels, COLUMNS)
    parts = size * chunks
    means += group * parts
    squares += group * parts
    elements = 1.0 * size * pixels
    # Differences from any of the means keep the digits that a large mean would take.
    origin = tl.load(means)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        count = tl.minimum(COLUMNS, pixels - part % chunks * COLUMNS)
        sums += tl.where(part < parts, count * (tl.load(means + part, mask=part < parts, other=0.0) - origin), 0.0)
    from_origin = tl.sum(sums, 0) / elements
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        count = tl.minimum(COLUMNS, pixels - part % chunks * COLUMNS)
        centred = tl.load(means + part, mask=part < parts, other=0.0) - origin - from_origin
        square = tl.load(squares + part, mask=part < parts, other=0.0)
        sums += tl.where(part < parts, square + count * centred * centred, 0.0)
    tl.store(mean + group, origin + from_origin)
    tl.store(scale + group, tl.rsqrt(tl.sum(sums, 0) / elements + eps))


@triton.jit
def _by_group(values, image, channel, channels, size):
    """Each channel's number of [N, groups]: [ROWS]."""
    return tl.load(values + image * (channels // size) + channel // size, mask=channel < channels, other=0.0)


@triton.jit
def _by_channel(values, channel, channels):
    """Each channel's number of [C]: [ROWS], float32."""
    return tl.load(values + channel, mask=channel < channels, other=0.0).to(tl.float32)


@triton.jit
def _normalise(
    x, y, weight, bias, mean, scale, size,
    channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The layer's output, from the statistics of its groups."""
    image, channel, _, _, start, inside, mask = _tile(channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    values = tl.load(x + start + inside, mask=mask, other=0.0).to(tl.float32)
    centred = values - _by_group(mean, image, channel, channels, size)[:, None]
    factor = _by_group(scale, image, channel, channels, size) * _by_channel(weight, channel, channels)
    z = centred * factor[:, None]
    if bias is not None:
        z += _by_channel(bias, channel, channels)[:, None]
    if SILU:
        z *= tl.sigmoid(z)
    tl.store(y + start + inside, z.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gradient(
    x, dy, weight, bias, mean, own_scale, image, channel, channels, size, start, inside, mask, SILU: tl.constexpr
):
    """x less its group's mean, and the gradient of what SiLU is given: both [ROWS, COLUMNS], 0 outside the mask."""
    values = tl.load(x + start + inside, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.load(dy + start + inside, mask=mask, other=0.0).to(tl.float32)
    centred = values - _by_group(mean, image, channel, channels, size)[:, None]
    if SILU:
        z = centred * (own_scale * _by_channel(weight, channel, channels))[:, None]
        if bias is not None:
            z += _by_channel(bias, channel, channels)[:, None]
        share = tl.sigmoid(z)
        gradient *= share * (1 + z * (1 - share))
    return centred, gradient


@triton.jit
def _sum_gradients(
    x, dy, weight, bias, mean, scale, size, shifts, scales,
    channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the tile: what it adds to the gradient of the bias, and to that of the weight."""
    image, channel, _, chunk, start, inside, mask = _tile(channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    own_scale = _by_group(scale, image, channel, channels, size)
    centred, gradient = _gradient(
        x, dy, weight, bias, mean, own_scale, image, channel, channels, size, start, inside, mask, SILU
    )
    along = tl.sum(gradient * centred, 1) * own_scale
    _store_by_channel(tl.sum(gradient, 1), shifts, image, channel, channels, chunk, pixels, COLUMNS)
    _store_by_channel(along, scales, image, channel, channels, chunk, pixels, COLUMNS)


@triton.jit
def _input_gradient(
    x, dy, weight, bias, mean, scale, size, shifts, scales, dx,
    channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of a group's normalised values, less its mean and its share along them; in standard deviations.

    shifts, scales: [N, groups], sums over the group of that gradient, and of it times the normalised values.
    """
    image, channel, _, _, start, inside, mask = _tile(channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    own_scale = _by_group(scale, image, channel, channels, size)
    centred, gradient = _gradient(
        x, dy, weight, bias, mean, own_scale, image, channel, channels, size, start, inside, mask, SILU
    )
    elements = 1.0 * size * pixels
    shift = _by_group(shifts, image, channel, channels, size) / elements * own_scale
    along = _by_group(scales, image, channel, channels, size) / elements * own_scale * own_scale
    factor = _by_channel(weight, channel, channels) * own_scale
    gradient = gradient * factor[:, None] - shift[:, None] - centred * along[:, None]
    tl.store(dx + start + inside, gradient.to(dx.dtype.element_ty), mask=mask)

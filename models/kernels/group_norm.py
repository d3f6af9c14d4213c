"""Group normalisation with SiLU as Triton kernels, for contiguous and for channels-last activations.

Forward reads x twice and writes y, backward reads x and dy twice and writes dx; only x is kept. One program computes
one tile, [channels, pixels] of one image in either layout. Its sums are stored for each channel and merged in a fixed
order, without atomics, so results repeat bit for bit. All arithmetic is float32.
"""

from __future__ import annotations

import copy

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
# The interpreter knows no instruction of a GPU.
_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
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
        fused = copy.copy(norm)
        fused.__class__ = _FusedProxyNormAct if isinstance(norm, ProxyNormAct) else cls
        return fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == self.num_channels, f"{x.shape[1]} channels, not {self.num_channels}"
        return _GroupNormAct.apply(x, self.weight, self.bias, self.num_groups, self.eps, self.apply_act)


fuse = FusedGroupNormAct.of


class _FusedProxyNormAct(ProxyNormAct, FusedGroupNormAct):
    """The group normalisation that ProxyNormAct calls by `super` is the fused one."""


class Tiles:
    """How x, [N, C, H, W], is divided: `rows` channels by `columns` pixels are a tile, `chunks` tiles an image's plane.

    aligned: a power of two, up to 8, that divides the contiguous length: elements that a thread loads at once.
    """

    def __init__(self, x: torch.Tensor):
        self.images, self.channels, height, width = x.shape
        self.device = x.device
        self.pixels = height * width
        self.channels_last = x.is_contiguous(memory_format=torch.channels_last)
        channels, pixels = triton.next_power_of_2(self.channels), triton.next_power_of_2(self.pixels)
        if self.channels_last:
            self.rows = min(channels, max(_ROW, _TILE // pixels))
            self.columns = min(pixels, _TILE // self.rows)
        else:
            self.columns = min(pixels, _TILE)
            self.rows = min(channels, _TILE // self.columns)
        self.chunks = triton.cdiv(self.pixels, self.columns)
        length = self.channels if self.channels_last else self.pixels
        self.aligned = min(length & -length, 8)

    def partial_sums(self, numbers: int) -> torch.Tensor:
        """Memory for so many numbers of each channel of each tile: [numbers, N, C, chunks], float32."""
        shape = (numbers, self.images, self.channels, self.chunks)
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def run(self, kernel, *arguments, **constants) -> None:
        """One program a tile. The grid has one dimension, the only one that may be longer than 65,535."""
        grid = (self.images * triton.cdiv(self.channels, self.rows) * self.chunks,)
        layout = {"CHANNELS_LAST": self.channels_last, "ALIGNED": self.aligned, "num_warps": _WARPS}
        tile = {"ROWS": self.rows, "COLUMNS": self.columns}
        kernel[grid](*arguments, channels=self.channels, pixels=self.pixels, **layout, **tile, **constants)


def statistics(x: torch.Tensor, tiles: Tiles, groups: int, eps: float) -> torch.Tensor:
    """Mean, and one over the standard deviation, of each image's groups: [2, N, groups]."""
    partial, size = tiles.partial_sums(2), tiles.channels // groups
    tiles.run(_tile_statistics, x, partial[0], partial[1])
    result = torch.empty((2, tiles.images, groups), dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(size * tiles.chunks), _MERGED)
    _merge_statistics[(tiles.images * groups,)](
        partial[0], partial[1], *result, size, tiles.pixels, eps, tiles.columns, block, num_warps=_WARPS
    )
    return result


class _GroupNormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, groups: int, eps: float, apply_act: bool):
        assert x.dtype in DTYPES, f"no kernels for {x.dtype}"
        x = x if x.is_contiguous(memory_format=torch.channels_last) else x.contiguous()
        tiles = Tiles(x)
        size, y = tiles.channels // groups, torch.empty_like(x)
        mean, scale = statistics(x, tiles, groups, eps)
        tiles.run(_normalise, x, y, weight, bias, mean, scale, size, SILU=apply_act)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.groups, ctx.apply_act = groups, apply_act
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, bias, mean, scale = ctx.saved_tensors
        tiles = Tiles(x)
        size = tiles.channels // ctx.groups
        dy = dy.contiguous(memory_format=torch.channels_last if tiles.channels_last else torch.contiguous_format)
        given = (x, dy, weight, bias, mean, scale, size)
        partial = tiles.partial_sums(2)
        tiles.run(_sum_gradients, *given, partial[0], partial[1], SILU=ctx.apply_act)
        by_channel = partial.sum(3)
        dbias, dweight = by_channel.sum(1)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            by_group = (by_channel * weight).view(2, tiles.images, ctx.groups, size).sum(3)
            tiles.run(_input_gradient, *given, by_group[0], by_group[1], dx, SILU=ctx.apply_act)
        return dx, dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype), None, None, None


@triton.jit
def tile(
    channels, pixels, CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The program's tile: its image and first pixel; its channels, whether there are such, and their places in
    [N, C, chunks], all [ROWS]; where it starts, and from there its offsets and the mask of those that exist, both
    [ROWS, COLUMNS]. Only the start may need an int64."""
    chunks = tl.cdiv(pixels, COLUMNS)
    blocks = tl.cdiv(channels, ROWS)
    program = tl.program_id(0)
    chunk = program % chunks
    first_channel = program // chunks % blocks * ROWS
    image = (program // chunks // blocks).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    first_pixel = chunk * COLUMNS
    channel = first_channel + rows
    known = channel < channels
    place = (image * channels + channel) * chunks + chunk
    # So the compiler knows of the factor.
    if CHANNELS_LAST:
        channels = channels // ALIGNED * ALIGNED
        start = (image * pixels + first_pixel) * channels + first_channel
        inside = rows[:, None] + columns[None, :] * channels
    else:
        pixels = pixels // ALIGNED * ALIGNED
        start = (image * channels + first_channel) * pixels + first_pixel
        inside = rows[:, None] * pixels + columns[None, :]
    mask = known[:, None] & (first_pixel + columns < pixels)[None, :]
    return image, first_pixel, channel, known, place, start, inside, mask


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)): compiled with a reciprocal that is off by 1 ulp at most (PTX), where a division takes more
    instructions for numbers beyond 2^126, and is off by 2."""
    if _COMPILED:
        below = 1 + tl.exp(-z)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], tl.float32, True, 1)
    else:
        return tl.sigmoid(z)


@triton.jit
def _tile_statistics(
    x, means, squares,
    channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the tile: the mean, and the sum of squared differences from it."""
    _, first_pixel, _, known, place, start, inside, mask = tile(channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    values = tl.load(x + start + inside, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(values, 1) / tl.minimum(COLUMNS, pixels - first_pixel)
    centred = tl.where(mask, values - mean[:, None], 0.0)
    tl.store(means + place, mean, mask=known)
    tl.store(squares + place, tl.sum(centred * centred, 1), mask=known)


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
def normalised(
    x, weight, bias, mean, scale, size, channels, pixels,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Start, offsets and mask of the tile. x less its group's mean, and what SiLU is given, both [ROWS, COLUMNS]. Of
    each channel, [ROWS]: its group's place in [N, groups], whether it exists, and its place in [N, C, chunks]; the
    scale of its group, and its weight."""
    image, _, channel, known, place, start, inside, mask = tile(channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS)
    group = image * (channels // size) + channel // size
    own_scale = tl.load(scale + group, mask=known, other=0.0)
    own_weight = tl.load(weight + channel, mask=known, other=0.0).to(tl.float32)
    values = tl.load(x + start + inside, mask=mask, other=0.0).to(tl.float32)
    centred = values - tl.load(mean + group, mask=known, other=0.0)[:, None]
    z = centred * (own_scale * own_weight)[:, None]
    if bias is not None:
        z += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[:, None]
    return start, inside, mask, centred, z, group, known, place, own_scale, own_weight


@triton.jit
def _normalise(
    x, y, weight, bias, mean, scale, size, channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The layer's output, from the statistics of its groups."""
    start, inside, mask, _, z, _, _, _, _, _ = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    if SILU:
        z *= sigmoid(z)
    tl.store(y + start + inside, z.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gradient(dy, z, mask, SILU: tl.constexpr):
    """The gradient of what SiLU is given, 0 outside the mask. dy: pointers to the tile."""
    gradient = tl.load(dy, mask=mask, other=0.0).to(tl.float32)
    if SILU:
        share = sigmoid(z)
        gradient *= share * (1 + z * (1 - share))
    return gradient


@triton.jit
def _sum_gradients(
    x, dy, weight, bias, mean, scale, size, shifts, scales, channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each channel of the tile: what it adds to the gradient of the bias, and to that of the weight."""
    start, inside, mask, centred, z, _, known, place, own_scale, _ = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    gradient = _gradient(dy + start + inside, z, mask, SILU)
    tl.store(shifts + place, tl.sum(gradient, 1), mask=known)
    tl.store(scales + place, tl.sum(gradient * centred, 1) * own_scale, mask=known)


@triton.jit
def _input_gradient(
    x, dy, weight, bias, mean, scale, size, shifts, scales, dx, channels, pixels, SILU: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of a group's normalised values, less its mean and its share along them; in standard deviations.

    shifts, scales: [N, groups], sums over the group of that gradient, and of it times the normalised values.
    """
    start, inside, mask, centred, z, group, known, _, own_scale, own_weight = normalised(
        x, weight, bias, mean, scale, size, channels, pixels, CHANNELS_LAST, ALIGNED, ROWS, COLUMNS
    )
    gradient = _gradient(dy + start + inside, z, mask, SILU)
    elements = 1.0 * size * pixels
    gradient = less_group_means(gradient, centred, shifts, scales, group, known, own_scale, own_weight, elements)
    tl.store(dx + start + inside, gradient.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def less_group_means(gradient, centred, shifts, scales, group, known, own_scale, own_weight, elements):
    """x's gradient from that of weight times normalised values plus bias: see _input_gradient."""
    shift = tl.load(shifts + group, mask=known, other=0.0) / elements * own_scale
    along = tl.load(scales + group, mask=known, other=0.0) / elements * own_scale * own_scale
    return gradient * (own_weight * own_scale)[:, None] - shift[:, None] - centred * along[:, None]

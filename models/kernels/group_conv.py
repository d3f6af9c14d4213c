"""Grouped convolution with small groups as Triton kernels, for contiguous and for channels-last activations.

With groups of 16 channels and a kernel of k x k, an output element takes 72 (k = 3) or 200 (k = 5) operations a byte:
too many for a GPU's vector units (20 a byte on an H100, by its data sheet), few for its tensor cores (300). So each
group is a product for tensor cores, [pixels, 16] x [16, 16], at every point of the kernel, and pixels are read up to
k^2 times, from the cache. Padding is masked, where timm's Conv2dSame copies its input. Sums are float32; those of the
weights' gradient are stored in parts and added in a fixed order, without atomics, so results repeat bit for bit.
"""

from __future__ import annotations

import copy
import math
from typing import List

import torch
import triton
import triton.language as tl
from timm.layers import Conv2dSame
from torch import nn
from torch.autograd.function import once_differentiable

_GROUP_SIZES = (16, 32)  # tensor cores need 16 channels
# Pixels of a tile of output, or of the input's gradient. In planes each takes a register for its address.
_PIXELS = {torch.contiguous_format: 64, torch.channels_last: 128}
_SUMMED_PIXELS = 32  # of a tile that is added to the weights' gradient
_PRODUCT_COLUMNS = 256  # of a product that is added to it: points of the kernel x channels of a group
# Programs that sum the weights' gradient, about. The same for every device: sums depend on shapes alone.
_PROGRAMS = 1024
_LEAST_TILES = 4  # of a program: with fewer, partial sums would be more bytes than the pixels
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def replaces(module: nn.Module) -> bool:
    """Whether `FusedGroupConv2d.of` takes the module: a Conv2d padded by half its kernel, or timm's Conv2dSame."""
    if type(module) not in (nn.Conv2d, Conv2dSame):
        return False
    kernel = module.kernel_size
    padding = 0 if isinstance(module, Conv2dSame) else kernel[0] // 2
    return (
        module.groups > 1
        and module.in_channels == module.out_channels
        and module.in_channels // module.groups in _GROUP_SIZES
        and kernel in ((3, 3), (5, 5))
        and module.stride in ((1, 1), (2, 2))
        and module.padding == (padding, padding)
        and module.padding_mode == "zeros"
        and module.dilation == (1, 1)
        and module.bias is None
    )


class FusedGroupConv2d(nn.Conv2d):
    """A grouped Conv2d or Conv2dSame by our kernels: [N, C, H, W] -> [N, C, ceil(H / stride), ceil(W / stride)].

    float16, bfloat16 or float32; input, weights and output have one dtype. Output in x's memory format; other layouts
    become contiguous. Gradients are not differentiable again.
    """

    @classmethod
    def of(cls, conv: nn.Conv2d) -> FusedGroupConv2d:
        """A layer with the Parameter and settings of `conv`."""
        assert replaces(conv), f"no kernels for {conv}"
        fused = copy.copy(conv)
        fused.__class__ = cls
        fused.pads_same = isinstance(conv, Conv2dSame)
        return fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == self.in_channels, f"{x.shape[1]} channels, not {self.in_channels}"
        return _GroupConv.apply(x, self.weight, self.stride[0], self.pads_same)


fuse = FusedGroupConv2d.of


class _GroupConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, stride, pads_same):
        assert x.dtype == weight.dtype and x.dtype in _DTYPES, f"input {x.dtype}, weights {weight.dtype}"
        x = x.contiguous(memory_format=_format(x))
        ctx.launches = _Launches(x, weight, stride, pads_same)
        x_wanted, weight_wanted = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if weight_wanted else None, weight if x_wanted else None)
        return ctx.launches.output(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=ctx.launches.format)
        dx = None if weight is None else ctx.launches.input_gradient(dy, weight)
        return dx, None if x is None else ctx.launches.weight_gradient(x, dy), None, None


def _format(x: torch.Tensor) -> torch.memory_format:
    """Contiguous where x is both, as an image of one pixel is."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


class _Launches:
    """The kernels of one call. Grids have one dimension: CUDA's others end at 65,535."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, stride: int, pads_same: bool):
        self.format = _format(x)
        self.images, self.channels, *self.size = x.shape
        self.group, self.kernel, self.stride = weight.shape[1], weight.shape[2], stride
        self.groups = self.channels // self.group
        self.out_size = [-(-side // stride) for side in self.size]
        self.out_pixels = self.images * math.prod(self.out_size)
        padding = [self.kernel // 2] * 2  # above and left of the image
        if pads_same:  # TensorFlow's total is the least; its odd one goes to the end
            sides = zip(self.size, self.out_size)
            padding = [max((out - 1) * stride + self.kernel - side, 0) // 2 for side, out in sides]
        self.sizes = (self.channels, *self.size, *self.out_size, *padding)
        assert self.images * math.prod(self.size) < 2**31 - max(_PIXELS.values()), "pixels are counted in 32 bits"

    def output(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = self._empty(x, self.out_size)
        tiles = triton.cdiv(self.out_pixels, _PIXELS[self.format])
        self._run(_output, tiles, x, _by_point(weight), y, tiles, self.out_pixels)
        return y

    def input_gradient(self, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """One program's pixels (in a contiguous image its rows) lie `stride` apart: the same points reach all."""
        dx = self._empty(dy, self.size)
        step = self.stride if self.format is torch.channels_last else 1
        pixels = self.images * self.out_size[0] * -(-self.size[1] // step)
        tiles = triton.cdiv(pixels, _PIXELS[self.format])
        programs = tiles * self.stride * step
        self._run(_input_gradient, programs, dy, _by_point(weight), dx, tiles, pixels, COLUMN_STEP=step)
        return dx

    def weight_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        points = _PRODUCT_COLUMNS // self.group
        chunks = triton.cdiv(self.kernel**2, points)
        tiles = triton.cdiv(self.out_pixels, _SUMMED_PIXELS)
        parts = max(1, min(triton.cdiv(_PROGRAMS, self.groups * chunks), tiles // _LEAST_TILES))
        shape = (parts, self.groups, self.kernel, self.kernel, self.group, self.group)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        each, constants = triton.cdiv(tiles, parts), {"POINTS": points, "PIXELS": _SUMMED_PIXELS}
        self._run(_weight_gradient, parts * chunks, x, dy, sums, each, self.out_pixels, **constants)
        return sums.sum(0).permute(0, 3, 4, 1, 2).reshape(self.channels, self.group, *shape[2:4]).to(x.dtype)

    def _empty(self, like: torch.Tensor, size: List[int]) -> torch.Tensor:
        shape = (self.images, self.channels, *size)
        return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=self.format)

    def _run(self, kernel, programs: int, *arguments, **constants: int) -> None:
        """programs: for each group."""
        layout = {"PIXELS": _PIXELS[self.format], "CHANNELS_LAST": self.format is torch.channels_last}
        shape = {"GROUP": self.group, "KERNEL": self.kernel, "STRIDE": self.stride, "num_warps": self.group // 4}
        # One stage: Triton's pipelining of loads goes past the cache that neighbouring pixels are to be found in.
        kernel[(programs * self.groups,)](*arguments, *self.sizes, **{**layout, **shape, "num_stages": 1, **constants})


def _by_point(weight: torch.Tensor) -> torch.Tensor:
    """[groups, k, k, out, in], contiguous: each group's matrix at each point of the kernel."""
    channels, group, kernel, _ = weight.shape
    return weight.reshape(channels // group, group, group, kernel, kernel).permute(0, 3, 4, 1, 2).contiguous()


# In the kernels a tile is [pixels, channels] where channels lie together, and else [channels, pixels], so that threads
# read neighbours in memory. Pixels are counted over all images. They are compiled once whatever the sizes are: of
# `channels` alone it is worth knowing that 16 divides them.
_SIZES = ["tiles", "pixels", "height", "width", "out_height", "out_width", "top", "left"]


@triton.jit(do_not_specialize=_SIZES)
def _output(
    x, weight, y, tiles, pixels, channels, height, width, out_height, out_width, top, left,
    PIXELS: tl.constexpr, GROUP: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """y for one group and PIXELS pixels."""
    group, tile = _group_and_tile(tl.program_id(0), channels // GROUP, tiles, CHANNELS_LAST)
    image, row, column, inside = _pixels(tile, pixels, out_height, out_width, PIXELS)
    first_row, first_column = row * STRIDE - top, column * STRIDE - left
    channel = group * GROUP + tl.arange(0, GROUP)
    first = x + _offsets(image, channel, first_row, first_column, channels, height, width, CHANNELS_LAST)
    matrix = _matrix(weight, group, GROUP, KERNEL)
    total = tl.zeros((PIXELS, GROUP), tl.float32)
    for ky in range(KERNEL):
        in_rows = inside & (first_row + ky >= 0) & (first_row + ky < height)
        for kx in tl.static_range(KERNEL):
            valid = in_rows & (first_column + kx >= 0) & (first_column + kx < width)
            shift = tl.cast(ky * width + kx, tl.int64) * (channels if CHANNELS_LAST else 1)
            values = tl.load(first + shift, mask=_by_pixel(valid, CHANNELS_LAST), other=0.0)
            weights = tl.load(matrix + (ky * KERNEL + kx) * GROUP * GROUP)
            total = tl.dot(_turned(values, CHANNELS_LAST), tl.trans(weights), total, input_precision="ieee")
    where = _offsets(image, channel, row, column, channels, out_height, out_width, CHANNELS_LAST)
    result = _turned(total.to(y.dtype.element_ty), CHANNELS_LAST)
    tl.store(y + where, result, mask=_by_pixel(inside, CHANNELS_LAST))


@triton.jit(do_not_specialize=_SIZES)
def _input_gradient(
    dy, weight, dx, tiles, pixels, channels, height, width, out_height, out_width, top, left,
    COLUMN_STEP: tl.constexpr, PIXELS: tl.constexpr, GROUP: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """dx for one group and PIXELS pixels, STRIDE rows and COLUMN_STEP columns apart.

    Row r of x is under row ky of the kernel for row (r + top - ky) / STRIDE of y, where that is whole.
    """
    phase = tl.program_id(0) % (STRIDE * COLUMN_STEP)
    first_row, first_column = phase // COLUMN_STEP, phase % COLUMN_STEP
    group, tile = _group_and_tile(tl.program_id(0) // (STRIDE * COLUMN_STEP), channels // GROUP, tiles, CHANNELS_LAST)
    rows, columns = tl.cdiv(height, STRIDE), tl.cdiv(width, COLUMN_STEP)
    image, row, column, inside = _pixels(tile, pixels, rows, columns, PIXELS)
    row, column = row * STRIDE + first_row, column * COLUMN_STEP + first_column
    inside = inside & (row < height) & (column < width)
    channel = group * GROUP + tl.arange(0, GROUP)
    matrix = _matrix(weight, group, GROUP, KERNEL)
    total = tl.zeros((PIXELS, GROUP), tl.float32)
    for ky in range((first_row + top) % STRIDE, KERNEL, STRIDE):
        below = row + top - ky
        y_row = below // STRIDE
        in_rows = inside & (below >= 0) & (y_row < out_height)
        first = dy + _offsets(image, channel, y_row, 0, channels, out_height, out_width, CHANNELS_LAST)
        for step in tl.static_range((KERNEL + COLUMN_STEP - 1) // COLUMN_STEP):
            kx = (first_column + left) % COLUMN_STEP + step * COLUMN_STEP
            right = column + left - kx
            y_column = right // STRIDE
            valid = in_rows & (right >= 0) & (y_column < out_width) & (right % STRIDE == 0) & (kx < KERNEL)
            shift = y_column.to(tl.int64) * (channels if CHANNELS_LAST else 1)
            values = tl.load(first + _by_pixel(shift, CHANNELS_LAST), mask=_by_pixel(valid, CHANNELS_LAST), other=0.0)
            # In some phases the last step is beyond the kernel: then it adds nothing.
            weights = tl.load(matrix + (ky * KERNEL + tl.minimum(kx, KERNEL - 1)) * GROUP * GROUP)
            total = tl.dot(_turned(values, CHANNELS_LAST), weights, total, input_precision="ieee")
    where = _offsets(image, channel, row, column, channels, height, width, CHANNELS_LAST)
    result = _turned(total.to(dx.dtype.element_ty), CHANNELS_LAST)
    tl.store(dx + where, result, mask=_by_pixel(inside, CHANNELS_LAST))


@triton.jit(do_not_specialize=_SIZES)
def _weight_gradient(
    x, dy, sums, tiles, pixels, channels, height, width, out_height, out_width, top, left,
    POINTS: tl.constexpr, PIXELS: tl.constexpr, GROUP: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """Sums over `tiles` tiles of PIXELS pixels for one group and POINTS points of the kernel, row by row.

    All points are one product, [GROUP, PIXELS] x [PIXELS, POINTS GROUP]: a power of two, so some are beyond the kernel.
    """
    chunks = (KERNEL * KERNEL + POINTS - 1) // POINTS
    chunk, group = tl.program_id(0) % chunks, tl.program_id(0) // chunks % (channels // GROUP)
    part = tl.program_id(0) // chunks // (channels // GROUP)
    out_channel = group * GROUP + tl.arange(0, GROUP)
    place = tl.arange(0, POINTS * GROUP)
    channel, point = group * GROUP + place % GROUP, chunk * POINTS + place // GROUP
    ky, kx = point // KERNEL, point % KERNEL
    shift = tl.cast(ky * width + kx, tl.int64) * (channels if CHANNELS_LAST else 1)
    total = tl.zeros((GROUP, POINTS * GROUP), tl.float32)
    for tile in range(part * tiles, tl.minimum((part + 1) * tiles, tl.cdiv(pixels, PIXELS))):
        image, row, column, inside = _pixels(tile, pixels, out_height, out_width, PIXELS)
        where = _offsets(image, out_channel, row, column, channels, out_height, out_width, CHANNELS_LAST)
        gradient = tl.load(dy + where, mask=_by_pixel(inside, CHANNELS_LAST), other=0.0)
        row, column = row * STRIDE - top, column * STRIDE - left
        x_row = _by_pixel(row, CHANNELS_LAST) + _by_channel(ky, CHANNELS_LAST)
        x_column = _by_pixel(column, CHANNELS_LAST) + _by_channel(kx, CHANNELS_LAST)
        valid = (x_row >= 0) & (x_row < height) & (x_column >= 0) & (x_column < width)
        valid = valid & _by_pixel(inside, CHANNELS_LAST) & _by_channel(ky < KERNEL, CHANNELS_LAST)
        where = _offsets(image, channel, row, column, channels, height, width, CHANNELS_LAST)
        values = tl.load(x + where + _by_channel(shift, CHANNELS_LAST), mask=valid, other=0.0)
        gradient, values = _turned(gradient, CHANNELS_LAST), _turned(values, CHANNELS_LAST)
        total = tl.dot(tl.trans(gradient), values, total, input_precision="ieee")
    sums += (part * (channels // GROUP) + group).to(tl.int64) * KERNEL * KERNEL * GROUP * GROUP
    where = point * GROUP * GROUP + place % GROUP
    tl.store(sums + where[None, :] + tl.arange(0, GROUP)[:, None] * GROUP, total, mask=ky[None, :] < KERNEL)


@triton.jit
def _group_and_tile(program, groups, tiles, CHANNELS_LAST: tl.constexpr):
    """A program's group and tile: programs that run together read what lies together."""
    if CHANNELS_LAST:
        return program % groups, program // groups
    else:
        return program // tiles, program % tiles


@triton.jit
def _pixels(tile, pixels, height, width, PIXELS: tl.constexpr):
    """Image, row and column of each pixel of a tile [PIXELS], and whether there is such a pixel."""
    pixel = tile * PIXELS + tl.arange(0, PIXELS)
    return pixel // (height * width), pixel // width % height, pixel % width, pixel < pixels


@triton.jit
def _matrix(weight, group, GROUP: tl.constexpr, KERNEL: tl.constexpr):
    """Pointers to a group's weights [out, in] at the first point of the kernel."""
    weight += group.to(tl.int64) * KERNEL * KERNEL * GROUP * GROUP
    return weight + tl.arange(0, GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _offsets(image, channel, row, column, channels, height, width, CHANNELS_LAST: tl.constexpr):
    """Elements from the start of [N, C, H, W] to each of a tile, 64 bits."""
    image, channel = image.to(tl.int64), channel.to(tl.int64)
    if CHANNELS_LAST:
        return (((image * height + row) * width + column) * channels)[:, None] + channel[None, :]
    else:
        return (image * channels * height * width + row * width + column)[None, :] + (channel * height * width)[:, None]


@triton.jit
def _by_pixel(values, CHANNELS_LAST: tl.constexpr):
    return values[:, None] if CHANNELS_LAST else values[None, :]


@triton.jit
def _by_channel(values, CHANNELS_LAST: tl.constexpr):
    return values[None, :] if CHANNELS_LAST else values[:, None]


@triton.jit
def _turned(tile, CHANNELS_LAST: tl.constexpr):
    """A tile as [pixels, channels], and back."""
    return tile if CHANNELS_LAST else tl.trans(tile)

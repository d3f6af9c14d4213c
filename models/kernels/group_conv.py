"""Grouped convolution with small groups as Triton kernels, for contiguous and for channels-last activations.

With groups of 16 channels and a kernel of k x k, an output element takes 72 (k = 3) or 200 (k = 5) operations a byte:
too many for a GPU's vector units (20 a byte on an H100, by its data sheet), few for its tensor cores (300). So each
group is a product for tensor cores, [pixels, 16] x [16, 16], at every point of the kernel. A program takes some columns
of some lines. Each line that it loads serves all lines of the result that the kernel reaches from there, so pixels
are read some k times and not k^2, from the cache. Padding is masked, where timm's Conv2dSame copies its input. Sums are
float32; those of the weights' gradient are stored in parts and added in a fixed order, without atomics, so results
repeat bit for bit.
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
_PACKS = (4, 2, 1)  # groups of a program, a warp each: four are a line of the cache in half precision and channels-last
_COLUMNS = (32, 16)  # of a program; 16 is the least that fills a tensor core
_SUMMED_COLUMNS = 16  # that are added to the weights' gradient at a time
# Warps that sum the weights' gradient, about: 12 on each of an H100's multiprocessors. The same for every device: sums
# depend on shapes alone.
_WARPS = 1536
_LEAST_TILES = 4  # of a program, of all its lines: with fewer, partial sums would be more bytes than the pixels
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
        self.pack = next(pack for pack in _PACKS if self.groups % pack == 0)
        self.out_size = [-(-side // stride) for side in self.size]
        self.padding = [self.kernel // 2] * 2  # above and left of the image
        if pads_same:  # TensorFlow's total is the least; its odd one goes to the end
            sides = zip(self.size, self.out_size)
            self.padding = [max((out - 1) * stride + self.kernel - side, 0) // 2 for side, out in sides]
        # Without tensor cores a product takes 16 times the instructions, and groups of 32 take twice the registers.
        self.lines = 1 if x.dtype == torch.float32 else 64 // self.group
        assert self.channels * math.prod(self.size) < 2**31, "elements of an image are counted in 32 bits"

    def output(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = self._empty(x, self.out_size)
        operands = (x, self._by_point(weight, "in", "out"), y)
        self._run(_output, operands, self.out_size, self.lines, self._columns(self.out_size[1]), direction=1)
        return y

    def input_gradient(self, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """With stride 1 the convolution by the reversed kernel. Else a program's columns and lines are `stride` apart,
        and it computes those between them, too."""
        dx = self._empty(dy, self.size)
        ends = [side - 1 + padding for side, padding in zip(self.size, self.padding)]
        size = [end // self.stride - padding // self.stride + 1 for end, padding in zip(ends, self.padding)]
        lines, columns = max(1, self.lines // self.stride), self._columns(size[1])
        operands = (dy, self._by_point(weight, "out", "in"), dx)
        if self.stride == 1:
            self._run(_output, operands, size, lines, columns, direction=-1)
        else:
            self._run(_input_gradient, operands, size, lines, columns)
        return dx

    def weight_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """A program adds up one column of the kernel, or all three if there are registers for their sums."""
        columns = 3 if self.kernel == 3 and self.lines == 4 else 1
        lines = min(self.lines, 3 if columns == 3 else 4, 4 if self.format is torch.channels_last else 2)
        chunks, blocks = self.kernel // columns, self.images * triton.cdiv(self.out_size[0], lines)
        tiles = blocks * triton.cdiv(self.out_size[1], _SUMMED_COLUMNS)
        parts = max(1, min(triton.cdiv(_WARPS, self.groups * chunks), tiles // _LEAST_TILES))
        shape = (parts, self.groups, self.kernel, self.kernel, self.group, self.group)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        rest = {"all_blocks": blocks, "blocks_each": triton.cdiv(blocks, parts), "COLUMNS": columns}
        self._run(_weight_gradient, (x, dy, sums), self.out_size, lines, _SUMMED_COLUMNS, parts * chunks, **rest)
        return sums.sum(0).permute(0, 3, 4, 1, 2).reshape(self.channels, self.group, *shape[2:4]).to(x.dtype)

    def _empty(self, like: torch.Tensor, size: List[int]) -> torch.Tensor:
        shape = (self.images, self.channels, *size)
        return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=self.format)

    def _by_point(self, weight: torch.Tensor, *order: str) -> torch.Tensor:
        """[groups, k, k, *order], contiguous: each group's matrix at each point of the kernel."""
        points = weight.reshape(self.groups, self.group, self.group, self.kernel, self.kernel)
        matrix = {"out": 1, "in": 2}
        return points.permute(0, 3, 4, *(matrix[side] for side in order)).contiguous()

    def _columns(self, width: int) -> int:
        """Of a program: of those that waste the fewest, the most."""
        if self.format is torch.contiguous_format or self.lines == 1:
            return min(_COLUMNS)
        return min(_COLUMNS, key=lambda columns: triton.cdiv(width, columns) * columns)

    def _run(self, kernel, operands, size: List[int], lines: int, pixels: int, programs: int = 0, **rest: int) -> None:
        """programs: for each pack of groups; by default one for each `lines` x `pixels` of images of `size`."""
        blocks, tiles = triton.cdiv(size[0], lines), triton.cdiv(size[1], pixels)
        grid = ((programs or self.images * blocks * tiles) * (self.groups // self.pack),)
        tile = {"LINES": lines, "PIXELS": pixels, "GROUPS": self.pack, "GROUP": self.group}
        shape = {"KERNEL": self.kernel, "STRIDE": self.stride, "CHANNELS_LAST": self.format is torch.channels_last}
        sizes = (blocks, tiles, self.channels, *self.size, *self.out_size, *self.padding)
        # One stage: Triton's pipelining of loads goes past the cache that neighbouring pixels are to be found in.
        kernel[grid](*operands, *sizes, **tile, **shape, **rest, num_warps=self.pack, num_stages=1)


# In the kernels a tile is [groups, pixels, channels of a group]: pixels of one line of an image. Lines are scalars, so
# what concerns them is computed once a tile. The kernels are compiled once whatever the sizes are: of `channels` alone
# it is worth knowing that 16 divides them.
_SIZES = ["blocks", "tiles", "height", "width", "out_height", "out_width", "top", "left"]
_SIZES += ["direction", "all_blocks", "blocks_each"]


@triton.jit(do_not_specialize=_SIZES)
def _output(
    x, weight, y, blocks, tiles, channels, height, width, out_height, out_width, top, left, direction,
    LINES: tl.constexpr, PIXELS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """y for some groups, PIXELS columns and LINES lines. A line of x is read KERNEL times, not KERNEL^2.

    direction: 1, or -1 where the kernel is to be taken from its last point to its first.
    """
    program, group, channel = _channels(tl.program_id(0), channels, GROUPS, GROUP)
    tile, row, image = _tile(program, tiles, blocks)
    column, row = tile * PIXELS + tl.arange(0, PIXELS), row * LINES
    first_row, first_column = row * STRIDE - top, column * STRIDE - left
    at = x + _places(image, channel, first_row, first_column, channels, height, width, CHANNELS_LAST)
    row_step, column_step = _steps(channels, width, CHANNELS_LAST)
    extents = _extents(first_row, height, width, (LINES - 1) * STRIDE + KERNEL)
    sums = (tl.zeros((GROUPS, PIXELS, GROUP), tl.float32),) * LINES
    step = direction * (GROUP * GROUP)
    matrix = _matrix(weight, group, KERNEL, GROUP) + (1 - direction) // 2 * ((KERNEL * KERNEL - 1) * GROUP * GROUP)
    for kx in range(KERNEL):
        weights = ()
        for ky in tl.static_range(KERNEL):
            weights += (tl.load(matrix + step * (ky * KERNEL)),)
        lines = _load(at, first_column + kx, row_step, extents)
        totals = ()
        for line in tl.static_range(LINES):
            total = sums[line]
            for ky in tl.static_range(KERNEL):
                total = tl.dot(lines[line * STRIDE + ky], weights[ky], total, input_precision="ieee")
            totals += (total,)
        sums = totals
        at += column_step
        matrix += step
    at = y + _places(image, channel, row, column, channels, out_height, out_width, CHANNELS_LAST)
    row_step, _ = _steps(channels, out_width, CHANNELS_LAST)
    extents = _extents(row, out_height, out_width, LINES)
    for line in tl.static_range(LINES):
        tl.store(at, sums[line].to(y.dtype.element_ty), mask=_inside(column, extents[line]))
        at += row_step


@triton.jit(do_not_specialize=_SIZES)
def _input_gradient(
    dy, weight, dx, blocks, tiles, channels, height, width, out_height, out_width, top, left,
    LINES: tl.constexpr, PIXELS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """dx for some groups, STRIDE PIXELS columns and STRIDE LINES lines.

    Row r of x is under row ky of the kernel for row (r + top - ky) / STRIDE of y, where that is whole: with
    r + top = STRIDE m + phase and ky = STRIDE tap + phase it is m - tap. So all phases read the same lines of dy.
    """
    TAPS: tl.constexpr = (KERNEL + STRIDE - 1) // STRIDE
    program, group, channel = _channels(tl.program_id(0), channels, GROUPS, GROUP)
    tile, row, image = _tile(program, tiles, blocks)
    column, row = left // STRIDE + tile * PIXELS + tl.arange(0, PIXELS), top // STRIDE + row * LINES
    first_row, first_column = row - (TAPS - 1), column - (TAPS - 1)
    at = dy + _places(image, channel, first_row, first_column, channels, out_height, out_width, CHANNELS_LAST)
    row_step, column_step = _steps(channels, out_width, CHANNELS_LAST)
    extents = _extents(first_row, out_height, out_width, LINES + TAPS - 1)
    sums = (tl.zeros((GROUPS, PIXELS, GROUP), tl.float32),) * (LINES * STRIDE * STRIDE)
    matrix = _matrix(weight, group, KERNEL, GROUP)
    for step in tl.static_range(TAPS):
        weights = ()
        for ky in tl.static_range(KERNEL):
            for phase in tl.static_range(STRIDE):
                if (TAPS - 1 - step) * STRIDE + phase < KERNEL:
                    shift = (ky * KERNEL + (TAPS - 1 - step) * STRIDE + phase) * GROUP * GROUP
                    weights += (tl.load(matrix + shift),)
                else:  # not used: beyond the kernel
                    weights += (0,)
        lines = _load(at, first_column + step, row_step, extents)
        totals = ()
        for line in tl.static_range(LINES):
            for above in tl.static_range(STRIDE):
                for before in tl.static_range(STRIDE):
                    total = sums[(line * STRIDE + above) * STRIDE + before]
                    for tap in tl.static_range(TAPS):
                        if tap * STRIDE + above < KERNEL and (TAPS - 1 - step) * STRIDE + before < KERNEL:
                            values = lines[line - tap + TAPS - 1]
                            matrices = weights[(tap * STRIDE + above) * STRIDE + before]
                            total = tl.dot(values, matrices, total, input_precision="ieee")
                    totals += (total,)
        sums = totals
        at += column_step
    row, column = row * STRIDE - top, column * STRIDE - left
    at = dx + _places(image, channel, row, column, channels, height, width, CHANNELS_LAST)
    row_step, column_step = _steps(channels, width, CHANNELS_LAST)
    extents = _extents(row, height, width, LINES * STRIDE)
    for line in tl.static_range(LINES * STRIDE):
        for phase in tl.static_range(STRIDE):
            result = sums[line * STRIDE + phase].to(dx.dtype.element_ty)
            tl.store(at + phase * column_step, result, mask=_inside(column + phase, extents[line]))
        at += row_step


@triton.jit(do_not_specialize=_SIZES)
def _weight_gradient(
    x, dy, sums, blocks, tiles, channels, height, width, out_height, out_width, top, left, all_blocks, blocks_each,
    COLUMNS: tl.constexpr,
    LINES: tl.constexpr, PIXELS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KERNEL: tl.constexpr,
    STRIDE: tl.constexpr, CHANNELS_LAST: tl.constexpr,
):  # fmt: skip
    """Sums over `blocks_each` blocks of LINES lines for some groups and COLUMNS columns of the kernel."""
    program, group, channel = _channels(tl.program_id(0), channels, GROUPS, GROUP)
    program = program.to(tl.int32)
    kx, part = program % (KERNEL // COLUMNS) * COLUMNS, program // (KERNEL // COLUMNS)
    first = part * blocks_each
    image, row = first // blocks, first % blocks * LINES
    y_step, _ = _steps(channels, out_width, CHANNELS_LAST)
    x_step, column_step = _steps(channels, width, CHANNELS_LAST)
    products = (tl.zeros((GROUPS, GROUP, GROUP), tl.float32),) * (COLUMNS * KERNEL)
    for _ in range(first, tl.minimum(first + blocks_each, all_blocks)):
        y_extents = _extents(row, out_height, out_width, LINES)
        x_extents = _extents(row * STRIDE - top, height, width, (LINES - 1) * STRIDE + KERNEL)
        for tile in range(tiles):
            column = tile * PIXELS + tl.arange(0, PIXELS)
            at = dy + _places(image, channel, row, column, channels, out_height, out_width, CHANNELS_LAST)
            gradients = _load(at, column, y_step, y_extents)
            column = column * STRIDE - left + kx
            at = x + _places(image, channel, row * STRIDE - top, column, channels, height, width, CHANNELS_LAST)
            totals = ()
            for step in tl.static_range(COLUMNS):
                lines = _load(at + step * column_step, column + step, x_step, x_extents)
                for ky in tl.static_range(KERNEL):
                    total = products[step * KERNEL + ky]
                    for line in tl.static_range(LINES):
                        gradient = tl.trans(gradients[line], 0, 2, 1)
                        total = tl.dot(gradient, lines[line * STRIDE + ky], total, input_precision="ieee")
                    totals += (total,)
            products = totals
        row += LINES
        image += (row >= out_height).to(tl.int32)
        row = tl.where(row >= out_height, 0, row)
    at = _matrix(sums + part.to(tl.int64) * channels * GROUP * KERNEL * KERNEL, group, KERNEL, GROUP)
    for step in tl.static_range(COLUMNS):
        for ky in tl.static_range(KERNEL):
            tl.store(at + (ky * KERNEL + kx + step) * GROUP * GROUP, products[step * KERNEL + ky])


@triton.jit
def _channels(program, channels, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """What remains of a program's number, and its channels, [GROUPS, GROUP]: programs that run together read what lies
    together in a channels-last tensor."""
    packs = (channels // (GROUPS * GROUP)).to(tl.uint32)
    program = program.to(tl.uint32)
    group = (program % packs).to(tl.int32) * GROUPS + tl.arange(0, GROUPS)
    return program // packs, group, group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _tile(program, tiles, blocks):
    """Number of a program's tile in its line, of its block of lines, and of its image."""
    tiles, blocks = tiles.to(tl.uint32), blocks.to(tl.uint32)
    block = program // tiles
    return (program % tiles).to(tl.int32), (block % blocks).to(tl.int32), (block // blocks).to(tl.int32)


@triton.jit
def _places(image, channel, row, column, channels, height, width, CHANNELS_LAST: tl.constexpr):
    """Elements from the start of [N, C, H, W] to each of a tile, 64 bits."""
    start = image.to(tl.int64) * (channels * height * width)
    channel, column = channel[:, None, :], column[None, :, None]
    if CHANNELS_LAST:
        return start + ((row * width + column) * channels + channel)
    else:
        return start + ((channel * height + row) * width + column)


@triton.jit
def _steps(channels, width, CHANNELS_LAST: tl.constexpr):
    """Elements from a line to the next, and from a pixel to the next."""
    if CHANNELS_LAST:
        return width * channels, channels
    else:
        return width, 1


@triton.jit
def _extents(row, height, width, LINES: tl.constexpr):
    """Columns that each line from `row` on has: none outside the image."""
    extents = ()
    for line in tl.static_range(LINES):
        extents += (tl.where((row + line >= 0) & (row + line < height), width, 0),)
    return extents


@triton.jit
def _inside(column, extent):
    return (column.to(tl.uint32) < extent.to(tl.uint32))[None, :, None]


@triton.jit
def _load(at, column, row_step, extents):
    """Tiles of neighbouring lines, 0 outside the image. All are under way before the first is needed."""
    lines = ()
    for line in tl.static_range(len(extents)):
        lines += (tl.load(at, mask=_inside(column, extents[line]), other=0.0),)
        at += row_step
    return lines


@triton.jit
def _matrix(weight, group, KERNEL: tl.constexpr, GROUP: tl.constexpr):
    """Pointers to the groups' weights at the first point of the kernel: [groups, GROUP, GROUP]."""
    outer, inner = tl.arange(0, GROUP)[None, :, None], tl.arange(0, GROUP)[None, None, :]
    return weight + (group[:, None, None] * (KERNEL * KERNEL * GROUP) + outer) * GROUP + inner

"""Grouped convolution with small groups as Triton kernels, for contiguous and for channels-last activations.

With groups of 16 channels and a kernel of k x k, an output element takes 72 (k = 3) or 200 (k = 5) operations a byte:
too many for a GPU's vector units (20 a byte on an H100, by its data sheet), few for its tensor cores (300). So each
group is a product for tensor cores, [pixels, 16] x [16, 16], at every point of the kernel. A program takes some columns
of some lines. Each line that it loads serves all lines of the result that the kernel reaches from there, so pixels
are read some k times and not k^2, from the cache. Padding is masked, where timm's Conv2dSame copies its input. Sums are
float32; those of the weights' gradient are stored in parts and added in a fixed order, without atomics, so results
repeat bit for bit.

Forward is two kernels: one packs the weights, for backward as well, one convolves. Backward is three: one for the
input's gradient, two for the weights'. Those in Triton are in `group_conv_kernels.py`.
"""

from __future__ import annotations

import copy
import math
from typing import List, Optional, Tuple

import torch
import triton
from timm.layers import Conv2dSame
from torch import nn
from torch.autograd.function import once_differentiable

from models.blocks import geometry
from models.kernels import group_conv_kernels as kernels
from models.kernels.operators import operator

_GROUP_SIZES = (16, 32)  # tensor cores need 16 channels
_PACKS = (4, 2, 1)  # groups of a program, a warp each: four are a line of the cache in half precision and channels-last
_COLUMNS = (32, 16)  # of a program; 16 is the least that fills a tensor core
_SUMMED_COLUMNS = 16  # that are added to the weights' gradient at a time
# Warps that sum the weights' gradient, about. The same for every device: sums depend on shapes alone.
_WARPS = 8192
_LEAST_TILES = 4  # of a program, of all its lines: with fewer, partial sums would be more bytes than the pixels
# Parts by elements that a program adds at a time. Layers with many parts have few weights, and want many programs.
_ADDED = ((16, 256), (64, 64))
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
        return _GroupConv.apply(x, self.weight, self.stride[0], self.pads_same, False)[0]

    def with_statistics(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """The output, and [2, N, C, chunks]: mean, and sum of squared differences from it, of parts of its planes."""
        return _GroupConv.apply(x, self.weight, self.stride[0], self.pads_same, True)

    def parts(self, x: torch.Tensor) -> Tuple[int, int]:
        """Lines and columns of these parts."""
        return _Launches(x, self.weight, self.stride[0], self.pads_same).part


fuse = FusedGroupConv2d.of


def _like_output(x, weight, stride, pads_same, statistics):
    launches = _Launches(x, weight, stride, pads_same)
    return launches.empty(x, launches.out_size), launches.packed(weight), launches.partial(x, statistics)


@operator(
    "(Tensor x, Tensor weight, int stride, bool pads_same, bool statistics) -> (Tensor, Tensor, Tensor)", _like_output
)
def _output(x, weight, stride: int, pads_same: bool, statistics: bool):
    """The layer's output, the packed weights, and its statistics, or an empty tensor."""
    x = x.contiguous(memory_format=_format(x))
    launches = _Launches(x, weight, stride, pads_same)
    packed, partial = launches.packed(weight), launches.partial(x, statistics)
    return launches.output(x, packed, partial), packed, partial


def _like_gradients(dy, x, weight, packed, stride, pads_same, x_wanted, weight_wanted):
    launches = _Launches(x, weight, stride, pads_same)
    dx = launches.empty(x, launches.size) if x_wanted else x.new_empty(0)
    return dx, launches.like_weight(weight) if weight_wanted else weight.new_empty(0)


@operator(
    "(Tensor dy, Tensor x, Tensor weight, Tensor packed, int stride, bool pads_same, bool x_wanted, bool weight_wanted)"
    " -> (Tensor, Tensor)",
    _like_gradients,
)
def _gradients(dy, x, weight, packed, stride: int, pads_same: bool, x_wanted: bool, weight_wanted: bool):
    """Of x and of the weights; empty unless wanted."""
    launches = _Launches(x, weight, stride, pads_same)
    x, dy = (each.contiguous(memory_format=launches.format) for each in (x, dy))
    dx = launches.input_gradient(dy, packed) if x_wanted else x.new_empty(0)
    return dx, launches.weight_gradient(x, dy) if weight_wanted else weight.new_empty(0)


class _GroupConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, stride: int, pads_same: bool, statistics: bool):
        assert x.dtype == weight.dtype and x.dtype in _DTYPES, f"input {x.dtype}, weights {weight.dtype}"
        y, packed, partial = _output(x, weight, stride, pads_same, statistics)
        ctx.save_for_backward(x, weight, packed)
        ctx.mark_non_differentiable(partial)
        ctx.stride, ctx.pads_same = stride, pads_same
        return y, partial

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        wanted = ctx.needs_input_grad[:2]
        found = _gradients(dy, *ctx.saved_tensors, ctx.stride, ctx.pads_same, *wanted)
        return (*(each if want else None for each, want in zip(found, wanted)), None, None, None)


def _format(x: torch.Tensor) -> torch.memory_format:
    """Contiguous where x is both, as an image of one pixel is."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


class _Launches:
    """The kernels of one call. Grids have one dimension: CUDA's others end at 65,535."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, stride: int, pads_same: bool):
        self.format, self.weight_format = _format(x), _format(weight)
        self.images, self.channels, *self.size = x.shape
        self.group, self.kernel, self.stride = weight.shape[1], weight.shape[2], stride
        self.groups = self.channels // self.group
        self.pack = next(pack for pack in _PACKS if self.groups % pack == 0)
        self.out_size, self.padding = geometry(self.size, self.kernel, stride, pads_same)
        # Without tensor cores a product takes 16 times the instructions, and groups of 32 take twice the registers.
        self.lines = 1 if x.dtype == torch.float32 else 64 // self.group
        assert self.channels * math.prod(self.size) < 2**31, "elements of an image are counted in 32 bits"

    def packed(self, weight: torch.Tensor) -> torch.Tensor:
        """[groups, k, k, out, in], contiguous: each group's matrix at each point of the kernel."""
        points = weight.reshape(self.groups, self.group, self.group, self.kernel, self.kernel)
        return points.permute(0, 3, 4, 1, 2).contiguous()

    @property
    def part(self) -> Tuple[int, int]:
        """Lines and columns of the output that a program computes."""
        spills = self.stride == 2 and self.kernel == 3 and self.format is torch.channels_last  # with four lines
        return min(self.lines, 3) if spills else self.lines, self._columns(self.out_size[1])

    def partial(self, like: torch.Tensor, wanted: bool) -> torch.Tensor:
        """Memory for statistics of parts of the output: [2, N, C, chunks], float32; empty unless wanted."""
        chunks = math.prod(triton.cdiv(size, part) for size, part in zip(self.out_size, self.part))
        shape = (2, self.images, self.channels, chunks) if wanted else (0,)
        return torch.empty(shape, dtype=torch.float32, device=like.device)

    def output(self, x: torch.Tensor, packed: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
        y, statistics = self.empty(x, self.out_size), partial if len(partial) else (None, None)
        self._run(kernels.output, (x, packed, y, *statistics), self.out_size, *self.part, REVERSED=False)
        return y

    def input_gradient(self, dy: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """With stride 1 the convolution by the reversed kernel. Else a program's columns and lines are `stride` apart,
        and it computes those between them, too."""
        dx = self.empty(dy, self.size)
        ends = [side - 1 + padding for side, padding in zip(self.size, self.padding)]
        size = [end // self.stride - padding // self.stride + 1 for end, padding in zip(ends, self.padding)]
        lines, columns = max(1, self.lines // self.stride), self._columns(size[1])
        if self.stride == 2 and self.kernel == 5 and self.format is torch.contiguous_format:
            lines = 1  # with two, registers are spilled
        if self.stride == 2 and self.kernel == 3 and self.format is torch.channels_last and lines > 1:
            columns = max(_COLUMNS)  # with 16, registers are spilled
        if self.stride == 1:
            self._run(kernels.output, (dy, packed, dx, None, None), size, lines, columns, REVERSED=True)
        else:
            self._run(kernels.strided_input_gradient, (dy, packed, dx), size, lines, columns)
        return dx

    def weight_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """A program adds up one column of the kernel."""
        # Of the numbers that are fast those with which no register is spilled.
        lines = 2 if self.format is torch.contiguous_format else 3
        if lines == 3 and self.stride == 2 and self.kernel == 3:
            lines = 4 if self.pack == 4 else 2
        lines = min(self.lines, lines)
        blocks = self.images * triton.cdiv(self.out_size[0], lines)
        tiles = blocks * triton.cdiv(self.out_size[1], _SUMMED_COLUMNS)
        parts = max(1, min(round(_WARPS / (self.groups * self.kernel)), tiles // _LEAST_TILES, blocks))
        each = triton.cdiv(blocks, parts)
        parts = triton.cdiv(blocks, each)
        shape = (parts, self.groups, self.kernel, self.kernel, self.group, self.group)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        rest, programs = {"all_blocks": blocks, "blocks_each": each}, parts * self.kernel
        self._run(kernels.weight_gradient, (x, dy, sums), self.out_size, lines, _SUMMED_COLUMNS, programs, **rest)
        return self._added(sums, x.dtype)

    def _added(self, sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """sums, [parts, groups, k, k, out, in], over parts: [C, C / groups, k, k], laid out as the weights are."""
        result = self.like_weight(sums, dtype)
        parts, elements = next(tile for tile in _ADDED if tile[0] >= sums.shape[0] or tile is _ADDED[-1])
        kernels.add_parts[(triton.cdiv(result.numel(), elements),)](
            sums, result, sums.shape[0], result.numel(), PARTS=parts, ELEMENTS=elements, POINTS=self.kernel**2,
            GROUP=self.group, CHANNELS_LAST=self.weight_format is torch.channels_last,
        )  # fmt: skip
        return result

    def like_weight(self, like: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        shape = (self.channels, self.group, self.kernel, self.kernel)
        return torch.empty(shape, dtype=dtype or like.dtype, device=like.device, memory_format=self.weight_format)

    def empty(self, like: torch.Tensor, size: List[int]) -> torch.Tensor:
        shape = (self.images, self.channels, *size)
        return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=self.format)

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

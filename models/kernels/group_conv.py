"""Grouped convolution with small groups as Triton kernels, contiguous and channels-last.

With groups of 16 channels and a kernel of k x k, an output element takes 72 (k = 3) or 200 (k = 5)
operations a byte: too many for a GPU's vector units (20 a byte on an H100, by its data sheet), few
for its tensor cores (300). So each group is a product for tensor cores, [pixels, 16] x [16, 16], at
every point of the kernel. A program takes some columns of some lines. Each line that it loads
serves all lines of the result that the kernel reaches from there, so pixels are read some k times
and not k^2, from the cache. Padding is masked, where timm's Conv2dSame copies its input. Sums are
float32; those of the weights' gradient are stored in parts and added in a fixed order, without
atomics, so results repeat bit for bit.

Forward is two kernels: one packs the weights, for backward as well, one convolves. Backward is
three: one for the input's gradient, two for the weights'. Those in Triton are in
`group_conv_kernels.py`.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import triton
from timm.layers import Conv2dSame
from torch import nn
from torch.autograd.function import once_differentiable

from models.blocks import geometry
from models.kernels import group_conv_kernels as kernels
from models.kernels.operators import operator

_GROUP_SIZES = (16, 32)  # tensor cores need 16 channels
# Groups of a program, a warp each: channels-last in half precision four are a line of the cache.
_PACKS = (4, 2, 1)
_COLUMNS = (32, 16)  # of a program; 16 is the least that fills a tensor core
_SUMMED_COLUMNS = 16  # that are added to the weights' gradient at a time
# Warps that sum the weights' gradient, about. The same for every device: sums depend on shapes
# alone.
_WARPS = 8192
# Of a program, of all its lines: with fewer, partial sums would be more bytes than the pixels.
_LEAST_TILES = 4
# Parts by elements that a program adds at a time. Layers with many parts have few weights, and want
# many programs.
_ADDED = ((16, 256), (64, 64))
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def replaces(module: nn.Module) -> bool:
    """Return whether `fuse` takes the `module`.

    It is a Conv2d that is padded by half its kernel, or timm's Conv2dSame.
    """
    # Types, not isinstance: a subclass may compute something else than our kernels do.
    if not isinstance(module, nn.Conv2d) or type(module) not in (nn.Conv2d, Conv2dSame):
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
    """A grouped Conv2d or Conv2dSame by our kernels.

    Input: [N, C, H, W]; output: [N, C, ceil(H / stride), ceil(W / stride)].

    float16, bfloat16 or float32; input, weights and output have one dtype. Output in x's memory
    format; other layouts become contiguous. Gradients are not differentiable again.

    pads_same: padded as TensorFlow does, else by half the kernel.
    language: of the kernels, in LANGUAGES.
    """

    pads_same: bool
    language = "triton"

    @classmethod
    def of(cls, conv: nn.Conv2d) -> FusedGroupConv2d:
        """Return a layer with the Parameter and settings of `conv`."""
        assert replaces(conv), f"no kernels for {conv}"
        # A copy with another class: hooks and whatever users have set stay, and no weight is drawn.
        fused = copy.copy(conv)
        fused.__class__ = cls
        assert isinstance(fused, cls)
        fused.pads_same = isinstance(conv, Conv2dSame)
        return fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the convolution of `x`, [N, C, H, W]."""
        assert x.shape[1] == self.in_channels, f"{x.shape[1]} channels, not {self.in_channels}"
        y, _ = self._applied(x, statistics=False)
        return y

    def with_statistics(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the convolution of `x`, [N, C, H, W], and statistics of it.

        Returns:
            The output; and [2, N, C, chunks], float32: mean, and sum of squared differences from
            it, of parts of its planes.
        """
        return self._applied(x, statistics=True)

    def _applied(self, x: torch.Tensor, statistics: bool) -> Tuple[torch.Tensor, torch.Tensor]:
        return _GroupConv.apply(
            x,
            self.weight,
            self.stride[0],
            self.pads_same,
            statistics,
            self.language,
        )

    def parts(self, x: torch.Tensor) -> Tuple[int, int]:
        """Return lines and columns of the parts of x's planes that `with_statistics` describes."""
        return LANGUAGES[self.language](x, self.weight, self.stride[0], self.pads_same).part


fuse = FusedGroupConv2d.of


def _like_output(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: int,
    pads_same: bool,
    statistics: bool,
    language: str,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tensors like the results of `_output`."""
    launches = LANGUAGES[language](x, weight, stride, pads_same)
    y = launches.empty(x, launches.out_size)
    return y, launches.packed(weight), launches.partial(x, statistics)


@operator(
    "(Tensor x, Tensor weight, int stride, bool pads_same, bool statistics, str language) "
    "-> (Tensor, Tensor, Tensor)",
    _like_output,
)
def _output(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: int,
    pads_same: bool,
    statistics: bool,
    language: str,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the layer's output, the packed weights, and its statistics, or an empty tensor."""
    x = x.contiguous(memory_format=_format(x))
    launches = LANGUAGES[language](x, weight, stride, pads_same)
    packed = launches.packed(weight)
    partial = launches.partial(x, statistics)
    return launches.output(x, packed, partial), packed, partial


def _like_gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    packed: torch.Tensor,
    stride: int,
    pads_same: bool,
    wanted: Sequence[bool],
    language: str,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return tensors like the results of `_gradients`."""
    launches = LANGUAGES[language](x, weight, stride, pads_same)
    x_wanted, weight_wanted = wanted
    dx = launches.empty(x, launches.size) if x_wanted else x.new_empty(0)
    dweight = launches.like_weight(weight) if weight_wanted else weight.new_empty(0)
    return dx, dweight


@operator(
    "(Tensor dy, Tensor x, Tensor weight, Tensor packed, int stride, bool pads_same, "
    "bool[2] wanted, str language) -> (Tensor, Tensor)",
    _like_gradients,
)
def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    packed: torch.Tensor,
    stride: int,
    pads_same: bool,
    wanted: Sequence[bool],
    language: str,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of x and of the weights; empty unless `wanted`."""
    launches = LANGUAGES[language](x, weight, stride, pads_same)
    x = x.contiguous(memory_format=launches.format)
    dy = dy.contiguous(memory_format=launches.format)
    x_wanted, weight_wanted = wanted
    dx = launches.input_gradient(dy, packed) if x_wanted else x.new_empty(0)
    dweight = launches.weight_gradient(x, dy) if weight_wanted else weight.new_empty(0)
    return dx, dweight


class _GroupConv(torch.autograd.Function):
    """The convolution and its statistics as a function of x and weight."""

    @staticmethod
    def forward(ctx, x, weight, stride: int, pads_same: bool, statistics: bool, language: str):
        """Return the convolution of `x`, and its statistics, or an empty tensor."""
        known = x.dtype == weight.dtype and x.dtype in _DTYPES
        assert known, f"input {x.dtype}, weights {weight.dtype}"
        y, packed, partial = _output(x, weight, stride, pads_same, statistics, language)
        ctx.save_for_backward(x, weight, packed)
        # The normalisation's gradient goes through its input, not through these statistics of it.
        ctx.mark_non_differentiable(partial)
        ctx.stride = stride
        ctx.pads_same = pads_same
        ctx.language = language
        return y, partial

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        """Return gradients from that of the output, `dy`."""
        x, weight, packed = ctx.saved_tensors
        x_wanted, weight_wanted = ctx.needs_input_grad[:2]
        dx, dweight = _gradients(
            dy=dy,
            x=x,
            weight=weight,
            packed=packed,
            stride=ctx.stride,
            pads_same=ctx.pads_same,
            wanted=[x_wanted, weight_wanted],
            language=ctx.language,
        )
        return dx if x_wanted else None, dweight if weight_wanted else None, None, None, None, None


def _format(x: torch.Tensor) -> torch.memory_format:
    """Return x's layout: contiguous where it is both, as an image of one pixel is."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


class _Area(NamedTuple):
    """Lines and columns that programs divide among them, and that one of them takes."""

    size: Sequence[int]  # of an image
    lines: int  # of a program
    columns: int  # of a program


class _Parts(NamedTuple):
    """How blocks of lines are divided into parts, each of which is added up by itself."""

    blocks: int  # of all images
    blocks_each: int  # of a part, but for the last
    parts: int


class Launches:
    """The kernels of one call. Grids have one dimension: CUDA's others end at 65,535."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, stride: int, pads_same: bool):
        self.format = _format(x)
        self.weight_format = _format(weight)
        self.images, self.channels, *self.size = x.shape
        self.group = weight.shape[1]
        self.kernel = weight.shape[2]
        self.stride = stride
        self.groups = self.channels // self.group
        self.pack = next(pack for pack in _PACKS if self.groups % pack == 0)
        self.out_size, self.padding = geometry(self.size, self.kernel, stride, pads_same)
        # Without tensor cores a product takes 16 times the instructions, and groups of 32 take
        # twice the registers.
        self.lines = 1 if x.dtype == torch.float32 else 64 // self.group
        elements = self.channels * math.prod(self.size)
        assert elements < 2**31, "elements of an image are counted in 32 bits"

    # ---- Memory.

    def packed(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `weight` as [groups, k, k, out, in]: a matrix at each point of the kernel."""
        points = weight.reshape(self.groups, self.group, self.group, self.kernel, self.kernel)
        return points.permute(0, 3, 4, 1, 2).contiguous()

    def partial(self, like: torch.Tensor, wanted: bool) -> torch.Tensor:
        """Make memory for statistics of parts of the output, [2, N, C, chunks], if `wanted`."""
        lines, columns = self.part
        blocks = triton.cdiv(self.out_size[0], lines)
        tiles = triton.cdiv(self.out_size[1], columns)
        chunks = blocks * tiles
        shape = (2, self.images, self.channels, chunks) if wanted else (0,)
        return torch.empty(shape, dtype=torch.float32, device=like.device)

    def like_weight(self, like: torch.Tensor, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """Make memory for the weights' gradient, in the dtype of `like` unless `dtype` is given."""
        return torch.empty(
            (self.channels, self.group, self.kernel, self.kernel),
            dtype=dtype or like.dtype,
            device=like.device,
            memory_format=self.weight_format,
        )

    def empty(self, like: torch.Tensor, size: List[int]) -> torch.Tensor:
        """Make memory for images of `size` lines and columns, in the dtype of `like`."""
        return torch.empty(
            (self.images, self.channels, *size),
            dtype=like.dtype,
            device=like.device,
            memory_format=self.format,
        )

    # ---- Launches.

    @property
    def part(self) -> Tuple[int, int]:
        """Lines and columns of the output that a program computes."""
        lines = self.lines
        if self.stride == 2 and self.kernel == 3 and self.format is torch.channels_last:
            lines = min(lines, 3)  # with four, registers are spilled
        return lines, self._columns(self.out_size[1])

    def output(self, x: torch.Tensor, packed: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
        """Compute the output, and its statistics unless `partial` is empty."""
        y = self.empty(x, self.out_size)
        self._run(
            kernels.output,
            _Area(self.out_size, *self.part),
            x=x,
            weight=packed,
            y=y,
            means=partial[0] if len(partial) else None,
            squares=partial[1] if len(partial) else None,
            REVERSED=False,
        )
        return y

    def input_gradient(self, dy: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """Compute the input's gradient from that of the output, `dy`.

        With stride 1 it is the convolution by the reversed kernel. Else a program's columns and
        lines are `stride` apart, and it computes those between them, too.
        """
        dx = self.empty(dy, self.size)
        area = self._input_gradient_area()
        if self.stride == 1:
            self._run(
                kernels.output,
                area,
                x=dy,
                weight=packed,
                y=dx,
                means=None,
                squares=None,
                REVERSED=True,
            )
        else:
            self._run(kernels.strided_input_gradient, area, dy=dy, weight=packed, dx=dx)
        return dx

    def _input_gradient_area(self) -> _Area:
        """Return how the input's gradient is divided among programs."""
        # Of every `stride` lines and columns, padding among them, those that hold one of x.
        size = []
        for side, padding in zip(self.size, self.padding):
            last = side - 1 + padding
            size.append(last // self.stride - padding // self.stride + 1)

        # A program computes stride^2 as many pixels as it has columns and lines, in registers.
        lines = max(1, self.lines // self.stride)
        columns = self._columns(size[1])
        channels_last = self.format is torch.channels_last
        if self.stride == 2 and self.kernel == 5 and not channels_last:
            lines = 1  # with two, registers are spilled
        if self.stride == 2 and self.kernel == 3 and channels_last and lines > 1:
            columns = max(_COLUMNS)  # with 16, registers are spilled
        return _Area(size, lines, columns)

    def weight_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """Compute the weights' gradient.

        A program adds up one column of the kernel, over a part of the pixels.

        Args:
            x: the input, [N, C, H, W].
            dy: gradient of the output.
        """
        lines = self._summed_lines()
        division = self._divide(lines)
        shape = (division.parts, self.groups, self.kernel, self.kernel, self.group, self.group)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        self._run(
            kernels.weight_gradient,
            _Area(self.out_size, lines, _SUMMED_COLUMNS),
            programs=division.parts * self.kernel,
            x=x,
            dy=dy,
            sums=sums,
            all_blocks=division.blocks,
            blocks_each=division.blocks_each,
        )
        return self._added(sums, x.dtype)

    def _summed_lines(self) -> int:
        """Return lines of the output that are added to the weights' gradient at a time."""
        # Of the numbers that are fast those with which no register is spilled.
        lines = 2 if self.format is torch.contiguous_format else 3
        if lines == 3 and self.stride == 2 and self.kernel == 3:
            lines = 4 if self.pack == 4 else 2
        return min(self.lines, lines)

    def _divide(self, lines: int) -> _Parts:
        """Divide all images' pixels among programs that add up the weights' gradient.

        Args:
            lines: of a block.
        """
        # As many parts as there are warps, but none with too few tiles; all of them alike but for
        # the last.
        blocks = self.images * triton.cdiv(self.out_size[0], lines)
        tiles = blocks * triton.cdiv(self.out_size[1], _SUMMED_COLUMNS)
        wanted_parts = round(_WARPS / (self.groups * self.kernel))
        most_parts = max(1, min(wanted_parts, tiles // _LEAST_TILES, blocks))
        blocks_each = triton.cdiv(blocks, most_parts)
        return _Parts(blocks, blocks_each, parts=triton.cdiv(blocks, blocks_each))

    def _added(self, sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return sums over parts, laid out as the weights.

        Args:
            sums: [parts, groups, k, k, out, in].
            dtype: of the result, [C, C / groups, k, k].
        """
        result = self.like_weight(sums, dtype)
        # The first that takes all parts at once, or the one that takes most.
        enough = [tile for tile in _ADDED if tile[0] >= len(sums)]
        parts, elements = enough[0] if enough else _ADDED[-1]
        kernels.add_parts[(triton.cdiv(result.numel(), elements),)](
            sums=sums,
            gradient=result,
            parts=sums.shape[0],
            elements=result.numel(),
            PARTS=parts,
            ELEMENTS=elements,
            POINTS=self.kernel**2,
            GROUP=self.group,
            CHANNELS_LAST=self.weight_format is torch.channels_last,
        )
        return result

    def _columns(self, width: int) -> int:
        """Return columns of a program: of those that waste the fewest, the most."""
        if self.format is torch.contiguous_format or self.lines == 1:
            return min(_COLUMNS)
        return min(_COLUMNS, key=lambda columns: triton.cdiv(width, columns) * columns)

    def _run(
        self,
        kernel: triton.JITFunction,
        area: _Area,
        programs: Optional[int] = None,
        **arguments: Any,
    ) -> None:
        """Launch a kernel over `area`.

        Args:
            kernel: of group_conv_kernels.py.
            area: what is divided among programs.
            programs: for each pack of groups; by default one for each part of the area.
            **arguments: the kernel's own, without sizes.
        """
        blocks = triton.cdiv(area.size[0], area.lines)
        tiles = triton.cdiv(area.size[1], area.columns)
        if programs is None:
            programs = self.images * blocks * tiles
        kernel[(programs * (self.groups // self.pack),)](
            **arguments,
            **self._sizes(),
            blocks=blocks,
            tiles=tiles,
            LINES=area.lines,
            PIXELS=area.columns,
            GROUPS=self.pack,
            GROUP=self.group,
            KERNEL=self.kernel,
            STRIDE=self.stride,
            CHANNELS_LAST=self.format is torch.channels_last,
            num_warps=self.pack,
            # One stage: Triton's pipelining of loads goes past the cache that neighbouring pixels
            # are to be found in.
            num_stages=1,
        )

    def _sizes(self) -> Dict[str, int]:
        """Return what all kernels over images are given."""
        return {
            "channels": self.channels,
            "height": self.size[0],
            "width": self.size[1],
            "out_height": self.out_size[0],
            "out_width": self.out_size[1],
            "top": self.padding[0],
            "left": self.padding[1],
        }


# Language -> kernels of one call, of (x, weight, stride, pads_same).
LANGUAGES: Dict[str, Callable[[torch.Tensor, torch.Tensor, int, bool], Launches]] = {
    "triton": Launches
}

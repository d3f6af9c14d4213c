"""Grouped convolution by `group_conv.cu` where that has kernels for it, else by Triton.

They are for channels-last activations in half precision, in groups of 16. They were compiled, and
tested in a simulator, but have not run on a GPU: only a recipe that names them has them.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Protocol, Sequence, Tuple

import torch

from common.errors import first_line
from common.text import printable
from models.kernels import group_conv
from models.kernels.cuda import compiler, driver
from models.kernels.group_conv import FusedGroupConv2d, Launches, replaces

__all__ = ["CudaGroupConv2d", "fuse", "replaces"]

LANGUAGE = "cuda"
SOURCE = Path(__file__).parent / "group_conv.cu"
_GROUP = 16  # channels
_DTYPES = (torch.float16, torch.bfloat16)
_PACKS = (4, 3, 2, 1)  # groups of a block: with four it reads whole lines of the cache

# Not measured: lines of a strip, about. Fewer make more blocks, which read lines at their edges
# twice.
_STRIP_LINES = 24
# Not measured: blocks that sum the weights' gradient, about; two or more rounds of the largest
# GPUs. The same for every device: sums depend on shapes alone.
_SUMMING_BLOCKS = 512

# Constants of group_conv.cu.
_SEGMENTS = 16  # of a tile
_CHUNK = 16  # bytes that are copied at once
_ADDED = 32  # elements of a block of add_parts
_ADDERS = 8  # threads of an element
_PLACE = 4  # bytes of a pixel's place


class Segments(NamedTuple):
    """Lengths that are compiled into a program for one kernel and stride: pixels of segments, and stages.

    output: pixels of y.
    gradient: pixels of dy, for the input's gradient.
    summed: pixels of dy, for the weights' gradient.
    stages: steps of lines for which shared memory has place.
    """

    output: int
    gradient: int
    summed: int
    stages: int


# (kernel, stride) -> the most pixels with which no kernel has more registers than two blocks of a
# multiprocessor leave it; the weights' gradient of 5 x 5 has one block.
_SEGMENTS_OF = {
    (3, 1): Segments(output=4, gradient=4, summed=2, stages=4),
    (3, 2): Segments(output=2, gradient=2, summed=2, stages=3),
    (5, 1): Segments(output=2, gradient=2, summed=2, stages=4),
    (5, 2): Segments(output=2, gradient=1, summed=2, stages=3),
}


class Variant(NamedTuple):
    """Layers that one program computes: kernel, stride, groups of a block, dtype."""

    kernel: int
    stride: int
    pack: int
    dtype: torch.dtype

    @property
    def segments(self) -> Segments:
        """Pixels of its segments."""
        return _SEGMENTS_OF[self.kernel, self.stride]

    @property
    def macros(self) -> Dict[str, int]:
        """Definitions that group_conv.cu wants on the compiler's command line."""
        segments = self.segments
        return {
            "KERNEL": self.kernel,
            "STRIDE": self.stride,
            "BFLOAT16": int(self.dtype == torch.bfloat16),
            "PACK": self.pack,
            "PIXELS": segments.output,
            "GRADIENT_PIXELS": segments.gradient,
            "SUMMED_PIXELS": segments.summed,
            "STAGES": segments.stages,
        }


class Program(Protocol):
    """The kernels of one variant."""

    def launch(
        self,
        kernel: str,
        blocks: int,
        threads: int,
        shared_bytes: int,
        arguments: ctypes.Structure,
    ) -> None:
        """Start a kernel.

        Args:
            kernel: its name.
            blocks: of the grid.
            threads: of a block.
            shared_bytes: of a block.
            arguments: the kernel's one argument.
        """


# ---- The structs of group_conv.cu.


def _integers(*names: str) -> List[Tuple[str, type]]:
    """Return fields of 32 bits."""
    return [(name, ctypes.c_int) for name in names]


def _pointers(*names: str) -> List[Tuple[str, type]]:
    """Return fields that are addresses."""
    return [(name, ctypes.c_void_p) for name in names]


class _Sizes(ctypes.Structure):
    _fields_ = _integers(
        "images",
        "channels",
        "in_height",
        "in_width",
        "out_height",
        "out_width",
        "top",
        "left",
    )


class _Division(ctypes.Structure):
    _fields_ = _integers(
        "segments",
        "units",
        "strips",
        "strip_steps",
        "first_step",
        "end_step",
    )


class _Convolving(ctypes.Structure):
    _fields_ = [
        *_pointers("input", "weight", "output", "means", "squares"),
        ("sizes", _Sizes),
        ("division", _Division),
    ]


class _Summing(ctypes.Structure):
    _fields_ = [
        *_pointers("x", "dy", "sums"),
        ("sizes", _Sizes),
        ("division", _Division),
        *_integers("works", "works_each"),
    ]


class _Adding(ctypes.Structure):
    _fields_ = [*_pointers("sums", "gradient"), *_integers("parts", "elements", "channels_last")]


# ---- Launches.


class CudaLaunches(Launches):
    """The kernels of one call, of a program."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        stride: int,
        pads_same: bool,
        program: Program,
    ):
        super().__init__(x, weight, stride, pads_same)
        self._variant = variant_of(x, weight, stride)
        self._program = program

    @property
    def part(self) -> Tuple[int, int]:
        """Lines and columns of the output of which statistics are taken: a segment's strip."""
        return self._strip_steps(self.out_size[0]), self._variant.segments.output

    def output(self, x: torch.Tensor, packed: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
        """Compute the output, and its statistics unless `partial` is empty."""
        x = _aligned(x)
        y = self.empty(x, self.out_size)
        pixels = self._variant.segments.output
        in_step = pixels * self.stride
        reached = (pixels - 1) * self.stride + self.kernel
        division = self._division(
            columns=self.out_size[1],
            pixels=pixels,
            steps=range(self.out_size[0]),
            halo=(reached - 1) // in_step,
        )
        stages = self._variant.segments.stages * self.stride
        self._convolve(
            "output_with_statistics" if len(partial) else "output",
            _Convolving(
                input=x.data_ptr(),
                weight=packed.data_ptr(),
                output=y.data_ptr(),
                means=partial[0].data_ptr() if len(partial) else None,
                squares=partial[1].data_ptr() if len(partial) else None,
                sizes=self._sizes_between(self.size, self.out_size),
                division=division,
            ),
            shared_bytes=stages * self._line(in_step, division.units)
            + 2 * self._line(pixels, _SEGMENTS)
            + _PLACE * (in_step * division.units + pixels * _SEGMENTS),
        )
        return y

    def input_gradient(self, dy: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """Compute the input's gradient from that of the output, `dy`."""
        dy = _aligned(dy)
        dx = self.empty(dy, self.size)
        pixels = self._variant.segments.gradient
        out_step = pixels * self.stride
        # Of every `stride` lines and columns, padding among them, those that hold one of x.
        steps, columns = (
            range(padding // self.stride, (side - 1 + padding) // self.stride + 1)
            for side, padding in zip(self.size, self.padding)
        )
        lag = (self.kernel + self.stride - 1) // self.stride - 1
        division = self._division(
            columns=len(columns),
            pixels=pixels,
            steps=steps,
            halo=(pixels + lag - 1) // pixels,
        )
        self._convolve(
            "input_gradient",
            _Convolving(
                input=dy.data_ptr(),
                weight=packed.data_ptr(),
                output=dx.data_ptr(),
                sizes=self._sizes_between(self.out_size, self.size),
                division=division,
            ),
            shared_bytes=self._variant.segments.stages * self._line(pixels, division.units)
            + 2 * self.stride * self._line(out_step, _SEGMENTS)
            + _PLACE * (pixels * division.units + out_step * _SEGMENTS),
        )
        return dx

    def weight_gradient(self, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        """Compute the weights' gradient: parts of it, and their sum."""
        x = _aligned(x)
        dy = _aligned(dy)
        pixels = self._variant.segments.summed
        x_step = pixels * self.stride
        reached = (pixels - 1) * self.stride + self.kernel
        division = self._division(
            columns=self.out_size[1],
            pixels=pixels,
            steps=range(self.out_size[0]),
            halo=(reached - 1) // x_step,
        )
        # As many parts as there are to be blocks, all alike but for the last.
        works = self._works(division)
        packs = self.groups // self._variant.pack
        most_parts = max(1, min(round(_SUMMING_BLOCKS / packs), works))
        works_each = -(-works // most_parts)
        parts = -(-works // works_each)

        shape = (parts, self.groups, self.kernel, self.kernel, self.group, self.group)
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
        line_bytes = self.stride * self._line(x_step, division.units) + self._line(
            pixels, _SEGMENTS
        )
        self._program.launch(
            "weight_gradient",
            blocks=packs * parts,
            threads=64 * self._variant.pack,
            shared_bytes=self._variant.segments.stages * line_bytes
            + _PLACE * (x_step * division.units + pixels * _SEGMENTS),
            arguments=_Summing(
                x=x.data_ptr(),
                dy=dy.data_ptr(),
                sums=sums.data_ptr(),
                sizes=self._sizes_between(self.size, self.out_size),
                division=division,
                works=works,
                works_each=works_each,
            ),
        )
        return self._added(sums, x.dtype)

    def _added(self, sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return sums over parts, laid out as the weights."""
        gradient = self.like_weight(sums, dtype)
        self._program.launch(
            "add_parts",
            blocks=-(-gradient.numel() // _ADDED),
            threads=_ADDED * _ADDERS,
            shared_bytes=4 * _ADDED * _ADDERS,
            arguments=_Adding(
                sums=sums.data_ptr(),
                gradient=gradient.data_ptr(),
                parts=len(sums),
                elements=gradient.numel(),
                channels_last=self.weight_format is torch.channels_last,
            ),
        )
        return gradient

    # ---- Division of the work.

    def _strip_steps(self, steps: int) -> int:
        """Return steps of a strip, of so many of an image: strips are about alike."""
        strips = -(-steps // _STRIP_LINES)
        return -(-steps // strips)

    def _division(self, columns: int, pixels: int, steps: range, halo: int) -> _Division:
        """Return how a tensor is divided among blocks.

        Args:
            columns: of a line, in the unit of `pixels`.
            pixels: of a segment.
            steps: of an image.
            halo: units of shared memory behind the last segment of a line.
        """
        segments = -(-columns // pixels)
        images_more = -(-(_SEGMENTS - 1) // segments)  # in which a tile may go on
        strip_steps = self._strip_steps(len(steps))
        return _Division(
            segments=segments,
            units=_SEGMENTS + halo * (1 + images_more),
            strips=-(-len(steps) // strip_steps),
            strip_steps=strip_steps,
            first_step=steps.start,
            end_step=steps.stop,
        )

    def _works(self, division: _Division) -> int:
        """Return the number of strips of all tiles."""
        tiles = -(-self.images * division.segments // _SEGMENTS)
        return tiles * division.strips

    def _line(self, pixels: int, units: int) -> int:
        """Return bytes of a line in shared memory: `Line` of group_conv.cu."""
        chunks = units * (2 * pixels + 1)
        return self._variant.pack * ((chunks + 5) // 8 * 8 + 2) * _CHUNK

    def _sizes_between(self, read: Sequence[int], written: Sequence[int]) -> _Sizes:
        """Return sizes of a kernel that reads and writes images of these lines and columns."""
        return _Sizes(
            images=self.images,
            channels=self.channels,
            in_height=read[0],
            in_width=read[1],
            out_height=written[0],
            out_width=written[1],
            top=self.padding[0],
            left=self.padding[1],
        )

    def _convolve(self, kernel: str, arguments: _Convolving, shared_bytes: int) -> None:
        """Launch one of the kernels that write images."""
        self._program.launch(
            kernel,
            blocks=self.groups // self._variant.pack * self._works(arguments.division),
            threads=64 * self._variant.pack,
            shared_bytes=shared_bytes,
            arguments=arguments,
        )


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a copy where its memory does not begin at a chunk, as that of a view may."""
    return x if x.data_ptr() % _CHUNK == 0 else x.clone()


def variant_of(x: torch.Tensor, weight: torch.Tensor, stride: int) -> Variant:
    """Return the variant that convolves `x`."""
    groups = x.shape[1] // weight.shape[1]
    pack = next(pack for pack in _PACKS if groups % pack == 0)
    return Variant(int(weight.shape[2]), stride, pack, x.dtype)


class CudaGroupConv2d(FusedGroupConv2d):
    """A grouped Conv2d or Conv2dSame by CUDA C++, or by Triton what that does not take."""

    language = LANGUAGE


fuse = CudaGroupConv2d.of


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether there is a variant for these: channels-last, half precision, groups of 16."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last)
    return channels_last and x.dtype in _DTYPES and weight.shape[1] == _GROUP


def _launches(x: torch.Tensor, weight: torch.Tensor, stride: int, pads_same: bool) -> Launches:
    """Return the kernels of one call: of CUDA C++, or else of Triton."""
    program = None
    if takes(x, weight):
        program = program_of(variant_of(x, weight, stride), x.device)
    if program is None:
        return Launches(x, weight, stride, pads_same)
    return CudaLaunches(x, weight, stride, pads_same, program)


group_conv.LANGUAGES[LANGUAGE] = _launches


@functools.lru_cache(maxsize=None)
def program_of(variant: Variant, device: torch.device) -> Optional[Program]:
    """Return the kernels of a variant, compiled if they are not in the cache.

    None, with a line for the user, where they cannot be compiled or loaded: Triton's compute then.
    """
    if device.type != "cuda":  # where Triton has its interpreter
        return None
    try:
        binary = compiler.binary(SOURCE, variant.macros, torch.cuda.get_device_capability(device))
        return driver.Program(binary, device)
    except (OSError, compiler.CompilerError, driver.DriverError) as error:
        layer = f"{variant.kernel} x {variant.kernel} / {variant.stride}"
        line = printable(first_line(error))
        print(
            f"engine.kernels cuda: {layer} convolutions are computed by Triton's kernels: {line}",
            file=sys.stderr,
            flush=True,
        )
        return None

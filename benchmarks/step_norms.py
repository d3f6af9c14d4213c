"""GroupNorm and SiLU on one thread beside a copy of their input: ours, and torch's, forward and backward.

A copy reads and writes its tensor once. Forward has to read its input twice, for the moments and
for the output, and to write once: 1.5 copies. Backward reads input and gradient twice and writes
once: 2.5 copies. A tensor that fits in a cache is copied at the cache's rate, and then arithmetic
is the limit.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn import functional as F

from benchmarks import claims, processes, ranks
from models.native import library
from models.native.library import LINEAR, PLAIN, Norm

ROUNDS = 15
GROUPS = 4
EPS = 1e-3
COPY = "copy"
OUR_FORWARD = "ours, forward"
OUR_BACKWARD = "ours, backward"
TORCH_FORWARD = "torch, forward"
TORCH_BACKWARD = "torch, backward"
_BYTES_OF_A_TURN = 1 << 26  # that a turn reads at least, so that clocks are exact
_FLOAT32 = 4  # bytes


class Shape(NamedTuple):
    """A micro batch that a normalisation with SiLU gets, float32 [images, size, size, channels].

    model: that has this normalisation.
    size: pixels a side.
    """

    model: str
    images: int
    size: int
    channels: int

    @property
    def bytes(self) -> int:
        """Return the size of the tensor in memory."""
        pixels = self.images * self.size**2
        return _FLOAT32 * pixels * self.channels

    def __str__(self) -> str:
        side = self.size
        return f"{self.model} [{self.images}, {self.channels}, {side}, {side}]"


# Images, size, channels: from the largest of each model, 53, 37 and 8 MiB, down to 0.4 MiB.
SHAPES = (
    Shape("B0 64 px", 32, 32, 64),
    Shape("B0 64 px", 32, 16, 96),
    Shape("B0 64 px", 32, 4, 320),
    Shape("B0 64 px", 32, 2, 768),
    Shape("B4 224 px", 8, 112, 96),
    Shape("B4 224 px", 8, 112, 48),
    Shape("B4 224 px", 8, 56, 128),
    Shape("B4 224 px", 8, 28, 224),
    Shape("B4 224 px", 8, 14, 640),
    Shape("B4 380 px", 4, 190, 96),
)
_BEYOND_CACHES = 32 * 2**20  # bytes

Seconds = Dict[str, List[float]]  # of calls, by side


def measure() -> Tuple[List[dict], List[dict]]:
    """Measure all shapes; return rows and claims."""
    # In a process of its own, because it changes how memory is allocated.
    (times,) = ranks.run(1, _times)
    all_rows = []
    for shape, seconds in times.items():
        all_rows.extend(rows(shape, seconds))
    return all_rows, norm_claims(times)


def norm_claims(times: Dict[Shape, Seconds]) -> List[dict]:
    """Return claims about time over a copy, of the shape where its median is worst.

    Args:
        times: of all shapes. Only those count that no cache holds: elsewhere a copy does not take
            the time of memory, and e^x is the limit.
    """
    large = []
    for shape, seconds in times.items():
        if shape.bytes > _BEYOND_CACHES:
            large.append(seconds)
    return [
        _worst_claim("norm_time_over_copy", large, OUR_FORWARD, goal="<= 2.5"),
        _worst_claim("norm_time_over_copy_backward", large, OUR_BACKWARD, goal="<= 4"),
    ]


def _worst_claim(name: str, times: List[Seconds], side: str, *, goal: str) -> dict:
    """Return the claim about a side over a copy, of the worst of some shapes."""
    over_copy = [claims.ratios(seconds[side], seconds[COPY]) for seconds in times]
    worst = max(over_copy, key=statistics.median)
    return claims.claim(name, worst, "times", goal)


def rows(shape: Shape, times: Seconds) -> List[dict]:
    """Return a row for each side; the limit is a copy.

    Args:
        shape: of the input.
        times: of all sides.
    """
    copy = times[COPY]
    limit = statistics.median(copy)
    rows_of_shape = []
    for side, seconds in times.items():
        rows_of_shape.append(
            {
                "part": f"norm, {shape}",
                "side": side,
                "threads": 1,
                "workers": 0,
                **claims.milliseconds(seconds),
                "mebibytes": shape.bytes / 2**20,
                "limit_ms": 1e3 * limit,
                "time_over_limit": claims.median_ratio(seconds, copy),
            }
        )
    return rows_of_shape


class _Noise(NamedTuple):
    """The input of a normalisation, and the gradient of its output.

    x, dy: [N, H, W, C].
    weight, bias: [C].
    """

    x: torch.Tensor
    dy: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor


class _Passes(NamedTuple):
    """The two passes of a normalisation with SiLU; backward uses what forward has computed."""

    forward: Callable[[], object]
    backward: Callable[[], object]


def sides(shape: Shape) -> Dict[str, Callable[[], object]]:
    """Return the functions that take turns, on noise.

    Args:
        shape: of the input.
    """
    noise = _noise(shape)
    ours = _our_passes(noise)
    torchs = _torchs_passes(noise)
    copied = torch.empty_like(noise.x)
    return {
        COPY: lambda: copied.copy_(noise.x),
        OUR_FORWARD: ours.forward,
        OUR_BACKWARD: ours.backward,
        TORCH_FORWARD: torchs.forward,
        TORCH_BACKWARD: torchs.backward,
    }


def _noise(shape: Shape) -> _Noise:
    """Return the noise of a shape, the same for all sides."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.images, shape.size, shape.size, shape.channels)
    x = torch.randn(size, generator=generator)
    dy = torch.randn(size, generator=generator)
    weight = torch.rand(shape.channels, generator=generator)
    bias = torch.rand(shape.channels, generator=generator)
    return _Noise(x, dy, weight, bias)


def _our_passes(noise: _Noise) -> _Passes:
    """Return our functions, which take and return [N, H, W, C]."""
    x, dy, weight, bias = noise
    norm = Norm(library.group_moments(x, GROUPS, EPS), weight, bias)

    def forward() -> torch.Tensor:
        """Return the output."""
        moments = library.group_moments(x, GROUPS, EPS)
        return library.activated(x, Norm(moments, weight, bias), silu=True)

    def backward() -> Sequence[Optional[torch.Tensor]]:
        """Return the gradients of input, weight and bias."""
        dx = torch.empty_like(x)
        sums = library.gradient_sums(PLAIN, x, norm, dy=dy, dz=dx)
        dweight, dbias, by_group = library.merged_gradients(PLAIN, x, norm, sums)
        # In place: until here `dx` is the gradient before the activation.
        library.input_gradient(LINEAR, x, norm, by_group, dy=dx, out=dx)
        return dx, dweight, dbias

    return _Passes(forward, backward)


def _torchs_passes(noise: _Noise) -> _Passes:
    """Return torch's functions, which take and return [N, C, H, W]."""
    # They are faster in torch's own layout.
    x = noise.x.permute(0, 3, 1, 2).contiguous()
    dy = noise.dy.permute(0, 3, 1, 2).contiguous()
    # Copies, because ours must not build graphs.
    weight = noise.weight.clone()
    bias = noise.bias.clone()
    inputs = (x, weight, bias)
    for tensor in inputs:
        tensor.requires_grad_()

    def output() -> torch.Tensor:
        """Return the output, with a graph where gradients are enabled."""
        normalised = F.group_norm(x, GROUPS, weight, bias=bias, eps=EPS)
        return F.silu(normalised)

    # Every backward pass runs through the graph of this one output.
    y = output()

    def forward() -> torch.Tensor:
        """Return the output."""
        with torch.no_grad():
            return output()

    def backward() -> Sequence[torch.Tensor]:
        """Return the gradients of input, weight and bias."""
        return torch.autograd.grad(y, inputs, dy, retain_graph=True)

    return _Passes(forward, backward)


def _times(rank: int) -> Dict[Shape, Seconds]:
    """Return the seconds of each shape's sides."""
    # In a training step other tensors keep the memory. Where this has no effect, the largest shape
    # takes three times as long.
    processes.keep_freed_memory()
    shapes = claims.less(SHAPES, SHAPES[1::4])
    times = {}
    for shape in claims.progress(shapes, "norm, shape"):
        call_seconds = functools.partial(_call_seconds, shape)
        times[shape] = claims.in_turn(sides(shape), ROUNDS, call_seconds, what=None)
    return times


def _call_seconds(shape: Shape, side: Callable[[], object], turn: int) -> float:
    """Return the seconds of a call, the mean of so many that clocks are exact."""
    # Once before, to bring the tensors to the caches.
    side()
    calls = math.ceil(_BYTES_OF_A_TURN / shape.bytes)
    start = time.perf_counter()
    for _ in range(calls):
        side()
    return (time.perf_counter() - start) / calls

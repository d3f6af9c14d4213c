"""GroupNorm and SiLU on one thread beside a copy of their input: ours, and torch's, forward and backward.

A copy reads and writes its tensor once. Forward has to read its input twice, for the moments and for the output, and to
write once: 1.5 copies. Backward reads input and gradient twice and writes once: 2.5 copies. A tensor that fits in a
cache is copied at the cache's rate, and then arithmetic is the limit.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from typing import Callable, Dict, List, NamedTuple, Tuple

import torch
from torch.nn import functional as F

from benchmarks import claims, ranks
from models.native import library
from models.native.library import LINEAR, PLAIN, Norm

ROUNDS = 15
GROUPS, EPS = 4, 1e-3
COPY = "copy"
FORWARD, BACKWARD = "forward", "backward"
OURS, TORCH = "ours", "torch"
_BYTES_OF_A_TURN = 1 << 26  # that a turn reads at least, so that clocks are exact
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h


class Shape(NamedTuple):
    """A micro batch that a normalisation with SiLU gets. size: pixels a side."""

    model: str
    images: int
    size: int
    channels: int

    @property
    def bytes(self) -> int:
        return 4 * self.images * self.size**2 * self.channels

    def __str__(self) -> str:
        return f"{self.model} [{self.images}, {self.channels}, {self.size}, {self.size}]"


# From the largest of each model, 53, 37 and 8 MiB, down to 0.4 MiB.
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
    """Rows and claims. In a process of its own, because it changes how memory is allocated."""
    (times,) = ranks.run(1, _times)
    return [each for shape, found in times.items() for each in rows(shape, found)], norm_claims(times)


def norm_claims(times: Dict[Shape, Seconds]) -> List[dict]:
    """Claims about the worst median of time over a copy, of shapes that no cache holds: elsewhere a copy does not take
    the time of memory, and e^x is the limit."""
    made = []
    for name, side, goal in (("", FORWARD, "<= 2.5"), ("_backward", BACKWARD, "<= 4")):
        large = [found for shape, found in times.items() if shape.bytes > _BEYOND_CACHES]
        over = [claims.ratios(found[f"{OURS}, {side}"], found[COPY]) for found in large]
        made.append(claims.claim(f"norm_time_over_copy{name}", max(over, key=statistics.median), "times", goal))
    return made


def rows(shape: Shape, times: Seconds) -> List[dict]:
    """Rows of a shape; the limit is a copy."""
    copy = times[COPY]
    return [
        {
            "part": f"norm, {shape}",
            "side": name,
            "threads": 1,
            "workers": 0,
            **claims.milliseconds(values),
            "mebibytes": shape.bytes / 2**20,
            "limit_ms": 1e3 * statistics.median(copy),
            "time_over_limit": claims.median_ratio(values, copy),
        }
        for name, values in times.items()
    ]


def sides(shape: Shape) -> Dict[str, Callable[[], object]]:
    """Functions that take turns, on noise."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape.images, shape.size, shape.size, shape.channels, generator=generator) for _ in range(2))
    weight, bias = (torch.rand(shape.channels, generator=generator) for _ in range(2))
    norm = Norm(library.group_moments(x, GROUPS, EPS), weight, bias)
    y = torch.empty_like(x)

    def forward() -> torch.Tensor:
        moments = library.group_moments(x, GROUPS, EPS)
        return library.activated(x, Norm(moments, weight, bias), silu=True)

    def backward() -> Tuple[torch.Tensor, ...]:
        dx = torch.empty_like(x)
        sums = library.gradient_sums(PLAIN, x, norm, dy, dz=dx)
        dweight, dbias, by_group = library.merged_gradients(PLAIN, x, norm, sums)
        return library.input_gradient(LINEAR, x, norm, by_group, dx, out=dx), dweight, dbias

    # torch's are faster in torch's own layout.
    inputs = [x.permute(0, 3, 1, 2).contiguous(), weight.clone(), bias.clone()]
    theirs = [tensor.requires_grad_() for tensor in inputs]
    made = F.silu(F.group_norm(theirs[0], GROUPS, *theirs[1:], EPS))
    dmade = dy.permute(0, 3, 1, 2).contiguous()

    def torch_forward() -> torch.Tensor:
        with torch.no_grad():
            return F.silu(F.group_norm(theirs[0], GROUPS, *theirs[1:], EPS))

    return {
        COPY: lambda: y.copy_(x),
        f"{OURS}, {FORWARD}": forward,
        f"{OURS}, {BACKWARD}": backward,
        f"{TORCH}, {FORWARD}": torch_forward,
        f"{TORCH}, {BACKWARD}": lambda: torch.autograd.grad(made, theirs, dmade, retain_graph=True),
    }


def _times(rank: int) -> Dict[Shape, Seconds]:
    """Seconds of each shape's sides."""
    _keep_memory()
    found = {}
    for shape in claims.progress(claims.less(SHAPES, SHAPES[1::4]), "norm, shape"):
        found[shape] = claims.in_turn(sides(shape), ROUNDS, functools.partial(_seconds, shape), what=None)
    return found


def _seconds(shape: Shape, side: Callable[[], object], _: int) -> float:
    """Seconds of a call, the mean of so many that clocks are exact, after one that brings the tensors to the caches."""
    calls = -(-_BYTES_OF_A_TURN // shape.bytes)
    side()
    start = time.perf_counter()
    for _ in range(calls):
        side()
    return (time.perf_counter() - start) / calls


def _keep_memory() -> None:
    """Have this process keep the memory of tensors that are freed.

    By default glibc returns blocks of 32 MiB and more to the kernel at once, and getting them again costs more than a
    copy. In a training step other tensors keep that from happening. Relies on mallopt(3) of glibc, which torch's
    allocator calls; tried with glibc 2.36. Where it has no effect, the largest shape takes three times as long.
    """
    libc = ctypes.CDLL(None)
    for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1)):
        assert libc.mallopt(option, value) == 1, option

"""Where the time of our step goes on one thread, and how far each part is from what its arithmetic or memory allows.

Times are those of torch's profiler, which lengthens a step by about four percent; functions of ours get a name in it.
The limit of a call is the larger of two times: its multiply-adds at the rate of a product of 1024 x 1024 matrices, and
the bytes of what it reads and writes at the rate of a copy of as many. The rates are measured in the same turns. A
part's limit adds up those of its calls as they are made: a call that is superfluous is within its limit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple
from unittest import mock

import torch
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import FunctionEvent

from benchmarks import claims, ranks
from models.native import library
from recipe.config import Recipe

ROUNDS = 5
PRODUCTS = "products, 1 x 1"
CONVOLUTIONS = "group convolutions"
NORMS = "normalisation, SiLU"
SQUEEZE = "squeeze, gates"
STEM = "stem"
UPDATE = "update"
REST = "rest"
ALL = "all"
PARTS = (PRODUCTS, CONVOLUTIONS, NORMS, SQUEEZE, STEM, UPDATE, REST)

# Functions of models/native/library.py. What a convolution normalises as it reads is its own.
_LIBRARY = {
    "convolution": CONVOLUTIONS,
    "convolution_gradients": CONVOLUTIONS,
    "group_moments": NORMS,
    "activated": NORMS,
    "activated_and_pooled": NORMS,
    "pooled": NORMS,
    "gradient_sums": NORMS,
    "merged_gradients": NORMS,
    "input_gradient": NORMS,
    "multiply_": SQUEEZE,
}
_CONVOLUTION_PASSES = {"convolution": 1, "convolution_gradients": 2}
_IN_PLACE = ("multiply_",)
_EXCITED = "_Excited"  # how the autograd functions with squeeze and excitation are named; the rest of their time is its
_PRODUCTS = ("aten::linear", "aten::mm", "aten::addmm")
_COLORS = 3  # channels by which the stem's convolution is known
_UPDATE_BYTES = 20  # a parameter: gradient read, weight and momentum read and written, in float32
_SIZE = 1024  # of the product whose rate is the limit
_COPIES = tuple(4**power for power in range(8, 14))  # bytes of copies, 64 KiB to 64 MiB


class Call(NamedTuple):
    """A part's call: multiply-adds, and bytes read and written."""

    part: str
    multiply_adds: int
    bytes: int


class Rates(NamedTuple):
    """multiply_adds: a second. bytes: read and written a second, by the bytes that a copy reads and writes."""

    multiply_adds: float
    bytes: Dict[int, float]

    def limit(self, call: Call) -> float:
        """Return the seconds that a call takes at least."""
        if not call.bytes:
            return call.multiply_adds / self.multiply_adds
        nearest = min(self.bytes, key=lambda size: abs(math.log(size / call.bytes)))
        return max(call.multiply_adds / self.multiply_adds, call.bytes / self.bytes[nearest])


def measure(plans: Mapping[str, Recipe]) -> List[dict]:
    """Rows of each step. In a process of its own, whose profiler prints nothing."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    (found,) = ranks.run(1, _rows, dict(plans))
    return found


def _rows(rank: int, plans: Dict[str, Recipe]) -> List[dict]:
    return [row for name, plan in plans.items() for row in rows_of(name, plan)]


def rows_of(name: str, plan: Recipe) -> List[dict]:
    """Rows of one step, and of all of it. Args: plan: names native kernels."""
    ours = ranks.Ours(plan, steps_per_epoch=1)
    calls = counted(ours)
    left, right = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
    product = torch.empty(_SIZE, _SIZE)
    sides: Dict[Any, Callable[[], Any]] = {
        "step": lambda: profiled(ours),
        "product": lambda: claims.seconds(lambda: torch.mm(left, right, out=product)),
        **{size: functools.partial(_copy_seconds, *torch.ones(2, size, dtype=torch.uint8)) for size in _COPIES},
    }
    turns = claims.in_turn(sides, ROUNDS, lambda side, _: side(), what=f"parts, {name}, turn")
    copies = {2 * size: 2 * size / statistics.median(turns[size]) for size in _COPIES}
    rates = Rates(_SIZE**3 / statistics.median(turns["product"]), copies)
    return rows(f"parts, {name}", turns["step"], calls, rates)


def rows(name: str, steps: Sequence[Dict[str, float]], calls: Sequence[Call], rates: Rates) -> List[dict]:
    """Rows of a step's parts. Args: steps: seconds by part of some steps. calls: of a step."""
    whole = [sum(step.values()) for step in steps]
    made = []
    for part in (*PARTS, ALL):
        seconds = whole if part == ALL else [step[part] for step in steps]
        own = [call for call in calls if part in (call.part, ALL)]
        limit = sum(map(rates.limit, own))
        median = statistics.median(seconds)
        made.append(
            {
                "part": name,
                "side": part,
                "threads": 1,
                "workers": 0,
                **claims.milliseconds(seconds),
                "share": claims.median_ratio(seconds, whole),
                "million_multiply_adds": sum(call.multiply_adds for call in own) / 1e6 if own else None,
                "mebibytes": sum(call.bytes for call in own) / 2**20 if own else None,
                "limit_ms": 1e3 * limit if own else None,
                "time_over_limit": median / limit if own else None,
            }
        )
    return made


def profiled(ours: ranks.Ours) -> Dict[str, float]:
    """Seconds of each part in a step."""
    found = dict.fromkeys(PARTS, 0.0)
    for event in _events(ours):
        found[part_of(event)] += 1e-6 * event.self_cpu_time_total
    return found


def counted(ours: ranks.Ours) -> List[Call]:
    """Calls of all parts but the rest in a step."""
    calls: List[Call] = []
    for event in _events(ours, calls):
        part = part_of(event)
        if part not in (UPDATE, REST):
            calls.extend(Call(part, *work) for work in _work(event.name, event.input_shapes))
    return [*calls, Call(UPDATE, 0, _UPDATE_BYTES * ours.engine.weights.flat.numel())]


def _events(ours: ranks.Ours, calls: Optional[List[Call]] = None) -> Sequence[FunctionEvent]:
    """Events of a step. Args: calls: where to add those of our functions."""
    ours.engine.recorder.named = True
    with contextlib.ExitStack() as stack:
        for name, part in _LIBRARY.items():
            stack.enter_context(mock.patch.object(library, name, _named(name, part, calls)))
        with torch.autograd.profiler.profile(record_shapes=True) as profile, record_function("step"):
            ours.update()
    return profile.function_events


def _named(name: str, part: str, calls: Optional[List[Call]]) -> Callable:
    """One of our functions with its part's name in the profile."""
    function = getattr(library, name)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        with record_function(part):
            made = function(*given, **named)
        if calls is not None:
            read = [value for key, value in named.items() if key != "out"]  # which is what is made
            written = given[0] if name in _IN_PLACE else made
            moved = sum(4 * tensor.numel() for tensor in _tensors((given, *read, written)))
            multiply_adds = 0
            if name in _CONVOLUTION_PASSES:
                x, weight, geometry = given[:3]
                pixels = len(x) * geometry.out_height * geometry.out_width
                multiply_adds = _CONVOLUTION_PASSES[name] * pixels * weight.numel()
            calls.append(Call(part, multiply_adds, moved))
        return made

    return call


def _tensors(of: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples."""
    if isinstance(of, torch.Tensor):
        yield of
    elif isinstance(of, tuple):
        for each in of:
            yield from _tensors(each)


def part_of(event: FunctionEvent) -> str:
    """The part whose time an event's own is, without that of the events within it."""
    found = None
    above: Optional[FunctionEvent] = event
    while above is not None:
        if above.name in PARTS:  # a function of ours, or the engine's span "update"
            return above.name
        if above.name.startswith(_EXCITED):
            return SQUEEZE
        found = found or _part_of_torch(above.name, above.input_shapes)
        above = above.cpu_parent
    return found or REST


def _part_of_torch(name: str, shapes: Sequence[Sequence[int]]) -> Optional[str]:
    """The part of one of torch's functions outside squeeze and excitation; None if it is none of its own."""
    if name in _PRODUCTS:
        return PRODUCTS
    channels = {"aten::pad": 0, "aten::conv2d": 1, "aten::convolution_backward": 2}.get(name)  # whose tensor has them
    if channels is None:
        return None
    return STEM if shapes[channels][1] == _COLORS else CONVOLUTIONS


def _work(name: str, shapes: Sequence[Sequence[int]]) -> Iterator[Tuple[int, int]]:
    """Yield multiply-adds and bytes of one of torch's functions; those of a convolution with its gradients."""
    if name in ("aten::mm", "aten::addmm"):
        *added, (rows, inner), (_, columns) = [shape for shape in shapes if shape]
        elements = rows * inner + inner * columns + rows * columns + sum(map(math.prod, added))
        yield rows * inner * columns, 4 * elements
    elif name == "aten::convolution_backward":
        y, x, weight = shapes[:3]
        stem = weight[1] == _COLORS  # its input, the images, needs no gradient
        multiply_adds = y[0] * math.prod(y[2:]) * math.prod(weight)
        yield multiply_adds * (2 if stem else 3), 4 * (2 * math.prod(y) + (2 if stem else 3) * math.prod(x))


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds of a copy, the mean of so many that clocks are exact."""
    calls = max(1, _COPIES[-1] // source.numel())
    return claims.seconds(lambda: [target.copy_(source) for _ in range(calls)]) / calls

"""Where the time of our step goes on one thread, and how far each part is from what its arithmetic or memory allows.

Times are those of torch's profiler, which lengthens a step by about four percent; functions of ours
get a name in it. The limit of a call is the larger of two times: its multiply-adds at the rate of a
product of 1024 x 1024 matrices, and the bytes of what it reads and writes at the rate of a copy of
as many. The rates are measured in the same turns. A part's limit adds up those of its calls as they
are made: a call that is superfluous is within its limit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import statistics
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)
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
# How the autograd functions with squeeze and excitation are named; the rest of their time is its.
_EXCITED = "_Excited"
_PRODUCTS = ("aten::linear", "aten::mm", "aten::addmm")
# Torch's functions of a convolution, and which of their inputs has its channels.
_CHANNELS_OF = {"aten::pad": 0, "aten::conv2d": 1, "aten::convolution_backward": 2}
_COLORS = 3  # channels by which the stem's convolution is known
_FLOAT32 = 4  # bytes
# For a parameter: gradient read, weight and momentum read and written.
_UPDATE_BYTES = 5 * _FLOAT32
_SIZE = 1024  # of the product whose rate is the limit
_COPIES = tuple(4**power for power in range(8, 14))  # bytes of copies, 64 KiB to 64 MiB

_STEP = "step"
_PRODUCT = "product"
_Side = Union[str, int]  # the step, the product, or the bytes of a copy

Shapes = Sequence[Sequence[int]]  # of a function's inputs; () for one that is no tensor


class Call(NamedTuple):
    """A call of a function.

    part: of the step.
    multiply_adds: that it computes.
    bytes: that it reads and writes.
    """

    part: str
    multiply_adds: int
    bytes: int


class Rates(NamedTuple):
    """The work that the machine does in a second.

    multiply_adds: of a large product.
    bytes: read and written by a copy, by the bytes that this copy reads and writes.
    """

    multiply_adds: float
    bytes: Dict[int, float]

    def limit(self, call: Call) -> float:
        """Return the seconds that a `call` takes at least."""
        arithmetic = call.multiply_adds / self.multiply_adds
        if not call.bytes:
            return arithmetic
        # The rate of the copy that is nearest in size: what fits in a cache moves faster.
        distances = {size: abs(math.log(size / call.bytes)) for size in self.bytes}
        nearest = min(distances, key=distances.__getitem__)
        memory = call.bytes / self.bytes[nearest]
        return max(arithmetic, memory)


def measure(plans: Mapping[str, Recipe]) -> List[dict]:
    """Measure the parts of steps; return rows.

    Args:
        plans: recipe of each step by name, with native kernels.
    """
    # In a process of its own, whose profiler prints nothing.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    (all_rows,) = ranks.run(1, _rows, dict(plans))
    return all_rows


def _rows(rank: int, plans: Dict[str, Recipe]) -> List[dict]:
    """Return the rows of all steps."""
    all_rows = []
    for name, plan in plans.items():
        all_rows.extend(rows_of(name, plan))
    return all_rows


def rows_of(name: str, plan: Recipe) -> List[dict]:
    """Measure the parts of one step; return rows of them and of the whole.

    Args:
        name: of the step.
        plan: its recipe, with native kernels.
    """
    ours = ranks.Ours(plan, steps_per_epoch=1)
    calls = counted(ours)
    # Steps take turns with a product and with copies, whose rates are the limits.
    sides: Dict[_Side, Callable[[], Any]] = {
        _STEP: functools.partial(profiled, ours),
        _PRODUCT: functools.partial(claims.seconds, _product()),
    }
    for size in _COPIES:
        # Written once before the first turn, so that all pages are there.
        source, target = torch.ones(2, size, dtype=torch.uint8)
        sides[size] = functools.partial(_copy_seconds, source, target)
    turns = claims.in_turn(sides, ROUNDS, lambda side, _: side(), what=f"parts, {name}, turn")
    return rows(f"parts, {name}", turns[_STEP], calls, rates=_rates(turns))


def _product() -> Callable[[], object]:
    """Return a function that multiplies two matrices."""
    size = (_SIZE, _SIZE)
    left = torch.randn(size)
    right = torch.randn(size)
    product = torch.empty(size)
    return functools.partial(torch.mm, left, right, out=product)


def _rates(turns: Mapping[_Side, Sequence[Any]]) -> Rates:
    """Return the rates of the product and the copies."""
    multiply_adds = _SIZE**3 / statistics.median(turns[_PRODUCT])
    rates = Rates(multiply_adds, bytes={})
    for size in _COPIES:
        moved = 2 * size  # read and written
        rates.bytes[moved] = moved / statistics.median(turns[size])
    return rates


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    """Return the seconds of a copy, the mean of so many that clocks are exact."""
    calls = max(1, _COPIES[-1] // source.numel())

    def copy() -> None:
        for _ in range(calls):
            target.copy_(source)

    return claims.seconds(copy) / calls


def rows(
    name: str,
    steps: Sequence[Dict[str, float]],
    calls: Sequence[Call],
    rates: Rates,
) -> List[dict]:
    """Return rows of a step's parts, and of the whole.

    Args:
        name: of the step.
        steps: seconds by part of some steps.
        calls: of a step.
        rates: by which their limits are computed.
    """
    whole = [sum(step.values()) for step in steps]
    rows_of_step = []
    for part in (*PARTS, ALL):
        seconds = whole
        part_calls = calls
        if part != ALL:
            seconds = [step[part] for step in steps]
            part_calls = [call for call in calls if call.part == part]
        rows_of_step.append(
            {
                "part": name,
                "side": part,
                "threads": 1,
                "workers": 0,
                **claims.milliseconds(seconds),
                "share": claims.median_ratio(seconds, whole),
                **_limit_columns(part_calls, rates, statistics.median(seconds)),
            }
        )
    return rows_of_step


def _limit_columns(calls: Sequence[Call], rates: Rates, seconds: float) -> Dict[str, Any]:
    """Return the columns on the work of some calls, which took so long; None without calls."""
    if not calls:
        columns = ("million_multiply_adds", "mebibytes", "limit_ms", "time_over_limit")
        return dict.fromkeys(columns)
    multiply_adds = sum(call.multiply_adds for call in calls)
    moved = sum(call.bytes for call in calls)
    limit = sum(rates.limit(call) for call in calls)
    return {
        "million_multiply_adds": multiply_adds / 1e6,
        "mebibytes": moved / 2**20,
        "limit_ms": 1e3 * limit,
        "time_over_limit": seconds / limit,
    }


# What the profiler sees ---------------------------------------------------------------------------


def profiled(ours: ranks.Ours) -> Dict[str, float]:
    """Make a step; return the seconds of each part.

    Args:
        ours: our engine.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    for event in _events(ours):
        seconds[part_of(event)] += 1e-6 * event.self_cpu_time_total
    return seconds


def counted(ours: ranks.Ours) -> List[Call]:
    """Make a step; return the calls of all parts but the rest.

    Args:
        ours: our engine.
    """
    calls: List[Call] = []
    # Calls of our own functions are added while the step is made.
    events = _events(ours, calls)
    for event in events:
        part = part_of(event)
        if part in (UPDATE, REST):
            continue
        call = _torchs_call(part, event.name, _shapes(event))
        if call is not None:
            calls.append(call)
    # The update is a single pass over all parameters.
    parameters = ours.engine.weights.flat.numel()
    calls.append(Call(UPDATE, multiply_adds=0, bytes=_UPDATE_BYTES * parameters))
    return calls


def _events(ours: ranks.Ours, calls: Optional[List[Call]] = None) -> Sequence[FunctionEvent]:
    """Make a step; return its events, and add the calls of our functions to `calls`."""
    recorder = ours.engine.recorder
    assert recorder is not None, "TorchEngine has one"
    recorder.named = True
    with contextlib.ExitStack() as stack:
        for name, part in _LIBRARY.items():
            named = _named(name, part, calls)
            stack.enter_context(mock.patch.object(library, name, named))
        profile = stack.enter_context(torch.autograd.profiler.profile(record_shapes=True))
        stack.enter_context(record_function("step"))
        ours.update()
    return profile.function_events


def _named(name: str, part: str, calls: Optional[List[Call]]) -> Callable:
    """Return a function of ours that has its part's name in the profile, and adds its calls."""
    function = getattr(library, name)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with record_function(part):
            result = function(*arguments, **keywords)
        if calls is not None:
            moved = _moved_bytes(name, arguments, keywords, result)
            calls.append(Call(part, _multiply_adds(name, arguments), moved))
        return result

    return call


def _multiply_adds(name: str, arguments: Sequence[Any]) -> int:
    """Return the multiply-adds of a call of ours. Only those of convolutions count."""
    if name not in _CONVOLUTION_PASSES:
        return 0
    x, weight, geometry = arguments[:3]
    passes = _CONVOLUTION_PASSES[name]
    pixels = geometry.out_height * geometry.out_width
    return passes * len(x) * pixels * weight.numel()


def _moved_bytes(
    name: str,
    arguments: Tuple[Any, ...],
    keywords: Mapping[str, Any],
    result: Any,
) -> int:
    """Return the bytes that a call of ours reads and writes."""
    read: List[Any] = list(arguments)
    for keyword, value in keywords.items():
        # Memory for the result, which is not read.
        if keyword != "out":
            read.append(value)
    written = arguments[0] if name in _IN_PLACE else result
    tensors = _tensors((*read, written))
    elements = sum(tensor.numel() for tensor in tensors)
    return _FLOAT32 * elements


def _tensors(nested: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested tuples."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, tuple):
        for value in nested:
            yield from _tensors(value)


def _shapes(event: FunctionEvent) -> Shapes:
    """Return the shapes of an event's inputs."""
    shapes: Any = event.input_shapes  # annotated as a single one in torch 2.14
    return shapes


def part_of(event: FunctionEvent) -> str:
    """Return the part that an event's own time belongs to, which is without that of events within.

    Args:
        event: of the profile.
    """
    part = None
    above: Optional[FunctionEvent] = event
    while above is not None:
        # A function of ours, or the engine's span "update".
        if above.name in PARTS:
            return above.name
        if above.name.startswith(_EXCITED):
            return SQUEEZE
        # Of torch's functions the innermost counts, if none of ours is around it.
        if part is None:
            part = _part_of_torch(above.name, _shapes(above))
        above = above.cpu_parent
    return REST if part is None else part


def _part_of_torch(name: str, shapes: Shapes) -> Optional[str]:
    """Return the part of a function of torch's, or None.

    Within squeeze and excitation it is another one.
    """
    if name in _PRODUCTS:
        return PRODUCTS
    if name not in _CHANNELS_OF:
        return None
    channels = shapes[_CHANNELS_OF[name]][1]
    return STEM if channels == _COLORS else CONVOLUTIONS


def _torchs_call(part: str, name: str, shapes: Shapes) -> Optional[Call]:
    """Return the work of a function of torch's; a convolution's is all in its backward pass."""
    if name in ("aten::mm", "aten::addmm"):
        return _product_call(part, shapes)
    if name == "aten::convolution_backward":
        return _convolution_call(part, shapes)
    return None


def _product_call(part: str, shapes: Shapes) -> Call:
    """Return the work of a product of two matrices, to which something may be added."""
    tensors = [shape for shape in shapes if shape]
    left, right = tensors[-2:]
    rows, inner = left
    _, columns = right
    # All are read, and the product is written.
    elements = rows * columns
    for shape in tensors:
        elements += math.prod(shape)
    return Call(part, rows * inner * columns, _FLOAT32 * elements)


def _convolution_call(part: str, shapes: Shapes) -> Call:
    """Return the work of a convolution's forward pass and of its gradients."""
    y, x, weight = shapes[:3]
    # Forward, the weights' gradient, and the input's. The stem's input, the images, needs none.
    is_stem = weight[1] == _COLORS
    passes = 2 if is_stem else 3
    channels = y[1]
    pixels = math.prod(y) // channels
    multiply_adds = passes * pixels * math.prod(weight)
    # Forward writes the output, and backward reads its gradient; each pass moves an input.
    elements = 2 * math.prod(y) + passes * math.prod(x)
    return Call(part, multiply_adds, _FLOAT32 * elements)

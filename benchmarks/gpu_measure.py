"""Shared by the sections of benchmarks/gpu_suite.py: sizes, rows, and sides that take turns."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import statistics
import time
from dataclasses import dataclass
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
    TypeVar,
)

import torch

from benchmarks import ROOT
from common.errors import first_line
from engines.devices import synchronize
from recipe import loading
from recipe.config import Recipe

NOT_MEASURED = "not measured: "
LEAST_TURNS = 2  # also where no time is left: one figure has no spread
WARMING = "a warming call, no turn yet"  # note of a row until its turns are over
_SHARE_OF_TURNS = 0.2  # of a section's time that is kept from warming up

Side = Callable[[], object]
# Makes a side; leaves in the stack what must be done in the end.
Maker = Callable[[contextlib.ExitStack], Side]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Plan:
    """Sizes of everything that is measured."""

    device: str
    total: float  # seconds, after which what still runs is ended
    overrides: Tuple[str, ...]  # of every recipe
    model: str
    micro: int  # images of a micro batch
    micros: Tuple[int, ...]  # others that are tried
    layout: str  # as engine.memory_format
    size: Optional[int]  # pixels a side; None: the model's own
    turns: int
    steps: int  # of training in a turn
    queued: int  # updates in a turn
    tensors: Optional[int]  # of the model that they update; None: all
    values: int  # of a selection
    norm: Tuple[int, int, int, int]  # [N, C, H, W] of what the norm's kernels are checked on
    conv: Tuple[int, int, int, int]  # the same of the convolution's
    convolutions: Tuple[Tuple[int, int], ...]  # (kernel, stride)
    halves: Tuple[str, ...]  # dtypes of the checks
    layers: int  # of a kind whose kernels are measured
    kernels: Tuple[str, ...]  # of which memory is measured
    most_images: int  # of the largest micro batch that is tried for memory
    loaded: int  # updates in a turn from files
    workers: int  # that read files
    trained: Tuple[str, ...]  # overrides of the short training whose accuracy is compared


REAL = Plan(
    device="cuda",
    total=570,
    overrides=(),
    model="efficientnet_b4",
    micro=128,
    micros=(256, 64, 32),
    layout="channels_last",
    size=None,
    turns=9,
    steps=3,
    queued=50,
    tensors=None,
    values=19_328_168,
    norm=(8, 96, 45, 45),
    conv=(4, 96, 45, 45),
    convolutions=((3, 1), (3, 2), (5, 1), (5, 2)),
    halves=("float16", "bfloat16"),
    layers=6,
    kernels=("triton", "torch"),
    most_images=1024,
    loaded=20,
    workers=12,
    trained=(
        "run.epochs=6",
        "model.width=0.5",
        "model.image_size=32",
        "data.glyph_size=32",
        "data.train_images=12288",
        "data.validation_images=4096",
        "batch.global=192",
        "batch.micro=192",
        "schedule.peak=1",
        "precision.compute=auto",
        "schedule.warmup_epochs=1",
    ),
)
# Everything runs, on a CPU, and no figure is worth knowing.
DRY_PASS = Plan(
    device="cpu",
    total=570,
    overrides=("model.width=0.25", "model.depth=0.1", "model.classes=10"),
    model="efficientnet_b0",
    micro=2,
    micros=(4,),
    layout="contiguous",
    size=32,
    turns=2,
    steps=1,
    queued=1,
    tensors=4,
    values=4000,
    norm=(2, 16, 5, 5),
    conv=(1, 32, 5, 5),
    convolutions=((3, 2),),
    halves=("float16",),  # Triton's interpreter cannot multiply bfloat16
    layers=1,
    kernels=("torch",),
    most_images=8,
    loaded=1,
    workers=1,
    trained=(
        "run.epochs=1",
        "data.train_images=256",
        "data.validation_images=64",
        "batch.global=64",
        "batch.micro=64",
        "schedule.warmup_epochs=0",
        "engine.compile=false",
    ),
)


class Row(NamedTuple):
    """One figure, the median of some repetitions.

    section: that measured it.
    what: name of the figure.
    repetitions: empty where it could not be measured.
    unit: of the repetitions.
    limit: the bound of a check, or what a figure cannot pass.
    note: for the reader.
    """

    section: str
    what: str
    repetitions: Tuple[float, ...]
    unit: str = ""
    limit: Optional[float] = None
    note: str = ""

    @property
    def value(self) -> Optional[float]:
        """Return the median of the repetitions; None where there are none."""
        return statistics.median(self.repetitions) if self.repetitions else None

    def columns(self) -> Dict[str, Any]:
        """Return the row as it is in the tables and in JSON.

        JSON knows no NaN and no infinity: there a check that found one has no error.
        """
        all_finite = all(math.isfinite(value) for value in self.repetitions)
        finite = self.repetitions if all_finite else ()
        return {
            "section": self.section,
            "what": self.what,
            "value": self.value if finite else None,
            "unit": self.unit,
            "lowest": min(finite, default=None),
            "highest": max(finite, default=None),
            "limit": self.limit,
            "note": self.note,
        }


def latest(rows: Iterable[Row]) -> List[Row]:
    """Return the last row of each name, in the order in which the names first came.

    Args:
        rows: of which a later one takes the place of an earlier one of its section and name.
    """
    by_name = {(row.section, row.what): row for row in rows}
    return list(by_name.values())


def missing(section: str, what: str, why: str) -> Row:
    """Return the row of a figure that could not be measured.

    Args:
        section: of the row.
        what: name of the figure.
        why: it is missing.
    """
    return Row(section, what, (), note=NOT_MEASURED + why)


def reason(error: BaseException) -> str:
    """Return why a measurement failed, in a line for a table, from its `error`."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return first_line(error)[:160]


class Session:
    """Sizes and time that a section is given.

    section: its name.
    plan: the sizes.
    device: that of the plan.
    """

    def __init__(self, section: str, plan: Plan, seconds: float):
        """
        Args:
            section: its name.
            plan: the sizes.
            seconds: its time, which begins now.
        """
        self.section = section
        self.plan = plan
        self.device = torch.device(plan.device)
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def over(self, kept: float = 0.0) -> bool:
        """Return whether the section's time has passed.

        Args:
            kept: share of it that need not have passed.
        """
        return self._end - time.monotonic() <= kept * self._seconds

    def left(self) -> float:
        """Return the seconds that are left of the section's time."""
        return max(0.0, self._end - time.monotonic())

    def attempts(self, measures: Mapping[str, Callable[[], Row]]) -> Iterator[Row]:
        """Yield rows one after the other; where a measurement raises, one with the reason.

        Args:
            measures: by name of the figure, what returns its row.
        """
        for what, measure in measures.items():
            row, fault = _attempt(measure, self.device)
            yield missing(self.section, what, fault) if row is None else row

    def compare(
        self,
        makers: Mapping[str, Maker],
        figure: Callable[[float], float],
        unit: str,
        calls: int = 1,
        warm_up: int = 1,
        limit: Optional[float] = None,
        note: str = "",
    ) -> Iterator[Row]:
        """Let sides take turns, and yield their rows.

        A row of each side comes as soon as it is warm; after all turns a second one of each side
        that took them, then one of each that failed. All sides exist at once. The last ones are
        left out where time runs out.

        Args:
            makers: of the sides, by name.
            figure: of the seconds of a call.
            unit: of the figure.
            calls: of a turn.
            warm_up: calls of each side before the turns.
            limit: of the rows.
            note: of the rows.
        """
        sides = _Sides(self.device)
        try:
            for name, maker in makers.items():
                if sides.names() and self.over(_SHARE_OF_TURNS):
                    sides.faults[name] = "no time was left"
                    continue
                sides.attempt(functools.partial(sides.open, name, maker, warm_up), name)
                # A section may be cut off before its turns end: this figure is all there is then.
                if name in sides.warm:
                    value = figure(sides.warm[name])
                    warm_note = f"{note}; {WARMING}" if note else WARMING
                    yield Row(self.section, name, (value,), unit, limit=limit, note=warm_note)
            self._take_turns(sides, calls)
        finally:
            sides.close_all()

        # These take the place of the rows above.
        for name, times in sides.times().items():
            values = tuple(figure(seconds) for seconds in times)
            yield Row(self.section, name, values, unit, limit=limit, note=note)
        for name, fault in sides.faults.items():
            yield missing(self.section, name, fault)

    def _take_turns(self, sides: _Sides, calls: int) -> None:
        """Let sides take the plan's turns, or as many as there is time for."""
        for turn in range(self.plan.turns):
            if turn >= LEAST_TURNS and self.over():
                break
            names = sides.names()
            # From either end, so that no side always comes after the same other one.
            if turn % 2:
                names.reverse()
            for name in names:
                sides.attempt(functools.partial(sides.take_turn, name, calls), name)


class _Opened(NamedTuple):
    """A side that exists, and the stack of what must be done in the end."""

    side: Side
    stack: contextlib.ExitStack


class _Sides:
    """Sides that take turns on a device.

    Others hold their names only: a side that fails must leave the memory at once.

    warm: by name, seconds of the last warming call of each side that opened.
    faults: by name, why a side takes no turns any more.
    """

    def __init__(self, device: torch.device):
        """
        Args:
            device: on which they compute.
        """
        self.warm: Dict[str, float] = {}
        self.faults: Dict[str, str] = {}
        self._device = device
        self._opened: Dict[str, _Opened] = {}
        self._times: Dict[str, List[float]] = {}

    def names(self) -> List[str]:
        """Return the names of the sides that exist, in the order in which they were opened."""
        return list(self._opened)

    def times(self) -> Dict[str, List[float]]:
        """Return seconds of a call in each turn, by name of the sides that did not fail."""
        return {name: times for name, times in self._times.items() if name not in self.faults}

    def open(self, name: str, maker: Maker, warm_up: int) -> None:
        """Make a side, and call it until it is warm.

        Args:
            name: of the side.
            maker: of the side.
            warm_up: calls.
        """
        warm = None
        # Whatever the side leaves in the stack is done at once if a call fails.
        with contextlib.ExitStack() as stack:
            side = maker(stack)
            for _ in range(warm_up):
                warm = seconds_of(side, 1, self._device)
            self._opened[name] = _Opened(side, stack.pop_all())
        self._times[name] = []
        if warm is not None:
            self.warm[name] = warm

    def take_turn(self, name: str, calls: int) -> None:
        """Call a side so many times, and note the seconds of a call.

        Args:
            name: of the side.
            calls: of the turn.
        """
        seconds = seconds_of(self._opened[name].side, calls, self._device)
        self._times[name].append(seconds)

    def attempt(self, act: Callable[[], None], name: str) -> None:
        """Do something with a side; where that raises, note the fault and close the side.

        Args:
            act: what is done.
            name: of the side.

        Raises:
            RuntimeError: after an error that CUDA does not survive.
        """
        _, fault = _attempt(act, self._device, functools.partial(self._close, name))
        if fault:
            self.faults[name] = fault

    def close_all(self) -> None:
        """Close the sides, the last one first, and return their memory to the device."""
        for name in reversed(self.names()):
            self._close(name)
        free(self._device)

    def _close(self, name: str) -> None:
        """Close a side if it exists."""
        if name in self._opened:
            self._opened.pop(name).stack.close()


def _attempt(
    act: Callable[[], _Result],
    device: torch.device,
    close: Optional[Callable[[], None]] = None,
) -> Tuple[Optional[_Result], str]:
    """Return what act() returns, or why it failed; then memory is free again.

    Args:
        act: what is attempted.
        device: on which it computes.
        close: is called where it fails, before memory is free.

    Returns:
        The result, None where it failed; and the reason, empty where it did not.

    Raises:
        RuntimeError: after an error that CUDA does not survive.
    """
    try:
        return act(), ""
    except Exception as error:  # whatever is wrong with one figure, others are wanted
        fault = reason(error)
    # Not within the handler, whose error holds what did not fit.
    if close is not None:
        close()
    free(device)
    synchronize(device)
    return None, fault


def free(device: torch.device) -> None:
    """Return memory that is no longer used to the `device`."""
    gc.collect()
    if device.type == "cuda":
        # A device that is lost raises.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def seconds_of(function: Side, calls: int, device: torch.device) -> float:
    """Return the seconds of a call, of so many that are queued one behind the other.

    Args:
        function: is called.
        calls: how many.
        device: that computes; the last call ends when it is done.
    """
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def recipe(plan: Plan, micro: int, *overrides: str) -> Recipe:
    """Return configs/gpu.yaml with updates of one micro batch of images that are not mixed.

    Args:
        plan: device, model and size of the images, and overrides of its own.
        micro: images of the micro batch.
        *overrides: texts such as "section.key=value", which come last.
    """
    size = [f"model.image_size={plan.size}"] if plan.size else []
    all_overrides = [
        f"run.device={plan.device}",
        f"model.name={plan.model}",
        *size,
        f"batch.micro={micro}",
        f"batch.global={micro}",
        "data.mixup=0",
        "data.cutmix=null",
        "average.epoch_decay=null",
        "data.train_images=null",
        "data.validation_images=null",
        *plan.overrides,
        *overrides,
    ]
    return loading.load(ROOT / "configs" / "gpu.yaml", all_overrides)

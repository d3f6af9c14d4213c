"""Shared by the sections of benchmarks/gpu_suite.py: sizes, a clock, rows, and taking turns."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import statistics
import time
from dataclasses import dataclass
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Type

import torch

from benchmarks import ROOT
from engines.devices import synchronize
from recipe import loading
from recipe.config import Recipe
from recipe.errors import first_line

NOT_MEASURED = "not measured: "
_LEAST_TURNS = 2  # also where no time is left: one figure has no spread
_SHARE_OF_TURNS = 0.3  # of a section's time that is kept from warming up


@dataclass(frozen=True)
class Plan:
    """Sizes of everything that is measured."""

    device: str
    total: float  # seconds, after which what still runs is ended
    overrides: Tuple[str, ...]  # of every recipe
    small: str  # names of models
    large: str
    micro: Dict[str, int]  # images of a micro batch of each
    size: Optional[int]  # pixels a side; None: the models' own
    turns: int
    steps: int  # of training in a turn
    queued: int  # updates in a turn
    tensors: Optional[int]  # of the model that they update; None: all
    copied: int  # bytes
    matrix: int  # rows and columns
    values: int  # of a selection
    norm: Tuple[int, int, int, int]  # [N, C, H, W] of what the kernels are checked on
    conv: Tuple[int, int, int, int]
    convolutions: Tuple[Tuple[int, int], ...]  # (kernel, stride)
    halves: Tuple[str, ...]  # dtypes of the checks
    fed_size: int  # pixels a side of images from the loader
    fed: int  # micro batches of them in a turn
    workers: int
    kernels: Tuple[str, ...]  # of which memory is measured
    most_images: int  # of the largest micro batch that is tried


REAL = Plan(
    device="cuda", total=460, overrides=(), small="efficientnet_b0", large="efficientnet_b4",
    micro={"efficientnet_b0": 256, "efficientnet_b4": 64}, size=None, turns=9, steps=3, queued=50, tensors=None,
    copied=1 << 30, matrix=8192, values=19_328_168, norm=(8, 96, 45, 45), conv=(4, 96, 45, 45),
    convolutions=((3, 1), (3, 2), (5, 1), (5, 2)), halves=("float16", "bfloat16"), fed_size=128, fed=12, workers=12,
    kernels=("triton", "torch"), most_images=1024,
)  # fmt: skip
# Everything runs, on a CPU, and no figure is worth knowing. Triton's interpreter cannot multiply bfloat16.
DRY_PASS = Plan(
    device="cpu", total=60, overrides=("model.width=0.25", "model.depth=0.1", "model.classes=10"),
    small="efficientnet_b0", large="efficientnet_b0", micro={"efficientnet_b0": 2}, size=32, turns=2, steps=1, queued=1,
    tensors=4, copied=1 << 12, matrix=16, values=4000, norm=(2, 16, 5, 5), conv=(1, 32, 5, 5), convolutions=((3, 2),),
    halves=("float16",), fed_size=32, fed=2, workers=0, kernels=("torch",), most_images=8,
)  # fmt: skip


class Row(NamedTuple):
    """One figure: the median of `repetitions`. `limit`: the bound of a check, or what a figure cannot pass."""

    section: str
    what: str
    repetitions: Tuple[float, ...]
    unit: str = ""
    limit: Optional[float] = None
    note: str = ""

    @classmethod
    def missing(cls, section: str, what: str, why: str) -> Row:
        return cls(section, what, (), note=NOT_MEASURED + why)

    @property
    def value(self) -> Optional[float]:
        return statistics.median(self.repetitions) if self.repetitions else None

    def columns(self) -> dict:
        """As in the tables and in JSON, which knows no NaN and no infinity: there a failed check has no error."""
        finite = self.repetitions and all(map(math.isfinite, self.repetitions))
        low, high = (min(self.repetitions), max(self.repetitions)) if finite else (None, None)
        return {
            "section": self.section,
            "what": self.what,
            "value": self.value if finite else None,
            "unit": self.unit,
            "lowest": low,
            "highest": high,
            "limit": self.limit,
            "note": self.note,
        }


class DeviceLost(Exception):
    """After an error from which CUDA does not recover in this process. what: was computed; why: the first error."""

    def __init__(self, what: str, why: str):
        super().__init__(f"{what}: {why}")
        self.what, self.why = what, why


class Clock:
    """The time of one section."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self._now, self._seconds = now, seconds
        self._end = now() + seconds

    def over(self, kept: float = 0.0) -> bool:
        """Whether all time is gone but a share `kept`."""
        return self._end - self._now() <= kept * self._seconds


Side = Callable[[], object]
# Makes a side; what must be done in the end is left in the stack.
Maker = Callable[[contextlib.ExitStack], Side]


class Session:
    """Input of a section: sizes, its clock, earlier rows, and a function that reports its progress.

    A section leaves out what has a row already: it is begun anew where its process was lost.
    """

    def __init__(
        self,
        section: str,
        plan: Plan,
        clock: Clock,
        before: Sequence[Row] = (),
        tell: Callable[[str], None] = lambda what: None,
    ):
        self.section, self.plan, self.clock, self.before, self.tell = section, plan, clock, tuple(before), tell
        self.device = torch.device(plan.device)

    def is_done(self, what: str) -> bool:
        return self.found(self.section, what) is not None

    def found(self, section: str, what: str) -> Optional[Row]:
        """A row of this section or of one before it."""
        return next((row for row in self.before if (row.section, row.what) == (section, what)), None)

    def row(self, what: str, repetitions: Iterable[float], unit: str, **more) -> Row:
        return Row(self.section, what, tuple(repetitions), unit, **more)

    def missing(self, what: str, why: str) -> Row:
        return Row.missing(self.section, what, why)

    def attempt(self, what: str, measure: Callable[[], Row]) -> Row:
        """The row, or one that says why there is none. Raises DeviceLost."""
        self.tell(what)
        try:
            return measure()
        except Exception as error:  # whatever is wrong with one figure, others are wanted
            why = reason(error)
        self._look_after(what, why)
        return self.missing(what, why)

    def attempts(self, measures: Dict[str, Callable[[], Row]]) -> Iterator[Row]:
        """The rows of what has none yet, one after the other. Raises DeviceLost."""
        for what, measure in measures.items():
            if not self.is_done(what):
                yield self.attempt(what, measure)

    def take_turns(
        self,
        makers: Dict[str, Maker],
        calls: int = 1,
        turns: Optional[int] = None,
        warm_up: int = 1,
        passed_on: Tuple[Type[Exception], ...] = (),
    ) -> Tuple[Dict[str, List[float]], Dict[str, Exception]]:
        """Seconds of a call of each side, turn by turn, and what those that failed raised. All are there at once.

        A turn is `calls` calls; before the turns each side is called `warm_up` times. Sides that are done already are
        left out, and the last ones where time runs out. Raises DeviceLost, and errors of the kinds `passed_on`.
        """
        sides: Dict[str, Side] = {}
        times: Dict[str, List[float]] = {}
        faults: Dict[str, Exception] = {}

        def guarded(name: str, function: Side) -> None:
            self.tell(name)
            try:
                function()
                return
            except passed_on:
                raise
            except Exception as error:
                # Without its traceback, whose frames may hold the memory that ran out.
                faults[name] = error.with_traceback(None)
            sides.pop(name, None)
            times.pop(name, None)
            self._look_after(name, reason(faults[name]))

        def warm(name: str, make: Maker) -> None:
            side = make(stack)
            for _ in range(warm_up):
                seconds_of(side, 1, self.device)
            sides[name], times[name] = side, []

        def once(name: str) -> None:
            times[name].append(seconds_of(sides[name], calls, self.device))

        with contextlib.ExitStack() as stack:
            stack.callback(free, self.device)
            stack.callback(sides.clear)
            for name, make in makers.items():
                if self.is_done(name):
                    continue
                if sides and self.clock.over(_SHARE_OF_TURNS):
                    faults[name] = TimeoutError("no time was left")
                    continue
                guarded(name, functools.partial(warm, name, make))
            for turn in range(turns or self.plan.turns):
                if turn >= _LEAST_TURNS and self.clock.over():
                    break
                for name in list(sides)[:: -1 if turn % 2 else 1]:
                    guarded(name, functools.partial(once, name))
        return times, faults

    def compare(
        self,
        makers: Dict[str, Maker],
        figure: Callable[[float], float],
        unit: str,
        calls: int = 1,
        limit: Optional[float] = None,
        note: str = "",
        **options,
    ) -> Iterator[Row]:
        """A row for each side that took its turns (see take_turns), then for each that failed.

        Args:
            figure: of the seconds of a call.
        """
        times, faults = self.take_turns(makers, calls, **options)
        for name, seconds in times.items():
            yield self.row(name, map(figure, seconds), unit, limit=limit, note=note)
        for name, error in faults.items():
            yield self.missing(name, reason(error))

    def _look_after(self, what: str, why: str) -> None:
        """The device after a failure."""
        free(self.device)
        if is_lost(self.device):
            raise DeviceLost(what, why)


def reason(error: BaseException) -> str:
    """One line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return first_line(error)[:160]


def is_lost(device: torch.device) -> bool:
    """Whether CUDA has met an error that it does not recover from."""
    try:
        synchronize(device)
    except RuntimeError:
        return True
    return False


def free(device: torch.device) -> None:
    """Gives back what nobody holds."""
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # of a device that is lost
            torch.cuda.empty_cache()


def seconds_of(function: Side, calls: int, device: torch.device) -> float:
    """Seconds of a call, of so many that are queued one behind the other; on CUDA by the device's clock."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        synchronize(device)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / calls
    began = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - began) / calls


def ready(side: Side) -> Maker:
    """The maker of a side that is there."""
    return lambda stack: side


def model_overrides(plan: Plan, name: str, micro: int) -> List[str]:
    """Overrides of configs/gpu.yaml for a step of one micro batch of images that are not mixed."""
    size = [f"model.image_size={plan.size}"] if plan.size else []
    return [
        f"run.device={plan.device}", f"model.name={name}", *size, f"batch.micro={micro}", f"batch.global={micro}",
        "data.mixup=0", "data.cutmix=null", "average.epoch_decay=null", "data.train_images=null",
        "data.validation_images=null", *plan.overrides,
    ]  # fmt: skip


def of_gpu_recipe(overrides: Sequence[str]) -> Recipe:
    """configs/gpu.yaml with other values."""
    return loading.load(ROOT / "configs" / "gpu.yaml", list(overrides))

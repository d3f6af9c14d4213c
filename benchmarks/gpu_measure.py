"""Shared by the sections of benchmarks/gpu_suite.py: sizes, rows, and sides that take turns."""

import contextlib
import gc
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

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
    norm: Tuple[int, int, int, int]  # [N, C, H, W] of what the kernels are checked on
    conv: Tuple[int, int, int, int]
    convolutions: Tuple[Tuple[int, int], ...]  # (kernel, stride)
    halves: Tuple[str, ...]  # dtypes of the checks
    layers: int  # of a kind whose kernels are measured
    kernels: Tuple[str, ...]  # of which memory is measured
    most_images: int  # of the largest micro batch that is tried for memory
    loaded: int  # updates in a turn from files
    workers: int  # that read files
    trained: Tuple[str, ...]  # overrides of the short training whose accuracy is compared


REAL = Plan(
    device="cuda", total=570, overrides=(), model="efficientnet_b4", micro=128, micros=(256, 64, 32),
    layout="channels_last", size=None, turns=9, steps=3, queued=50, tensors=None, values=19_328_168,
    norm=(8, 96, 45, 45), conv=(4, 96, 45, 45), convolutions=((3, 1), (3, 2), (5, 1), (5, 2)),
    halves=("float16", "bfloat16"), layers=6, kernels=("triton", "torch"), most_images=1024, loaded=20, workers=12,
    trained=(
        "run.epochs=6", "model.width=0.5", "model.image_size=32", "data.glyph_size=32", "data.train_images=12288",
        "data.validation_images=4096", "batch.global=192", "batch.micro=192", "schedule.peak=1",
        "precision.compute=auto", "schedule.warmup_epochs=1",
    ),
)  # fmt: skip
# Everything runs, on a CPU, and no figure is worth knowing. Triton's interpreter cannot multiply bfloat16.
DRY_PASS = Plan(
    device="cpu", total=570, overrides=("model.width=0.25", "model.depth=0.1", "model.classes=10"),
    model="efficientnet_b0", micro=2, micros=(4,), layout="contiguous", size=32, turns=2, steps=1, queued=1,
    tensors=4, values=4000, norm=(2, 16, 5, 5), conv=(1, 32, 5, 5), convolutions=((3, 2),), halves=("float16",),
    layers=1, kernels=("torch",), most_images=8, loaded=1, workers=1,
    trained=(
        "run.epochs=1", "data.train_images=256", "data.validation_images=64", "batch.global=64", "batch.micro=64",
        "schedule.warmup_epochs=0", "engine.compile=false",
    ),
)  # fmt: skip


class Row(NamedTuple):
    """One figure: the median of `repetitions`. `limit`: the bound of a check, or what a figure cannot pass."""

    section: str
    what: str
    repetitions: Tuple[float, ...]
    unit: str = ""
    limit: Optional[float] = None
    note: str = ""

    @property
    def value(self) -> Optional[float]:
        return statistics.median(self.repetitions) if self.repetitions else None

    def columns(self) -> dict:
        """As in the tables and in JSON, which knows no NaN and no infinity: there a failed check has no error."""
        finite = self.repetitions and all(map(math.isfinite, self.repetitions))
        return {
            "section": self.section,
            "what": self.what,
            "value": self.value if finite else None,
            "unit": self.unit,
            "lowest": min(self.repetitions) if finite else None,
            "highest": max(self.repetitions) if finite else None,
            "limit": self.limit,
            "note": self.note,
        }


def latest(rows: Iterable[Row]) -> List[Row]:
    """The last row of each name, as each takes the place of an earlier one; in the order of the first."""
    return list({(row.section, row.what): row for row in rows}.values())


def missing(section: str, what: str, why: str) -> Row:
    return Row(section, what, (), note=NOT_MEASURED + why)


def reason(error: BaseException) -> str:
    return "out of memory" if isinstance(error, torch.OutOfMemoryError) else first_line(error)[:160]


Side = Callable[[], object]
Maker = Callable[[contextlib.ExitStack], Side]  # makes a side; leaves in the stack what must be done in the end


class Session:
    """What a section is given: sizes, and its time."""

    def __init__(self, section: str, plan: Plan, seconds: float):
        self.section, self.plan = section, plan
        self.device = torch.device(plan.device)
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def over(self, kept: float = 0.0) -> bool:
        """Whether all of the section's time has passed but a share `kept`."""
        return self._end - time.monotonic() <= kept * self._seconds

    def left(self) -> float:
        """Seconds of the section's time."""
        return max(0.0, self._end - time.monotonic())

    def attempts(self, measures: Mapping[str, Callable[[], Row]]) -> Iterator[Row]:
        """The rows one after the other; where a measurement raises, one with the reason."""
        for what, measure in measures.items():
            row, why = self._attempt(measure)
            yield missing(self.section, what, why) if why else row

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
        """A row for each side as it is warm, then again for each that took its turns, then for each that failed.

        All sides exist at once. A turn is `calls` calls; before the turns each side is called `warm_up` times. The last
        sides are left out where time runs out.

        Args: figure: of the seconds of a call.
        """
        sides: Dict[str, Tuple[Side, contextlib.ExitStack]] = {}
        times: Dict[str, List[float]] = {}
        faults: Dict[str, str] = {}
        warm: Dict[str, float] = {}  # seconds of the last warming call

        def opened(name: str) -> None:
            with contextlib.ExitStack() as own:
                side = makers[name](own)
                for _ in range(warm_up):
                    warm[name] = seconds_of(side, 1, self.device)
                sides[name], times[name] = (side, own.pop_all()), []

        def turned(name: str) -> None:
            times[name].append(seconds_of(sides[name][0], calls, self.device))

        def attempt(act: Callable[[str], None], name: str) -> None:
            _, fault = self._attempt(lambda: act(name), lambda: sides.pop(name)[1].close() if name in sides else None)
            if fault:
                faults[name] = fault

        try:
            for name in makers:
                if sides and self.over(_SHARE_OF_TURNS):
                    faults[name] = "no time was left"
                else:
                    attempt(opened, name)
                if name in sides and warm_up:
                    yield Row(self.section, name, (figure(warm[name]),), unit, limit, f"{note}; {WARMING}".lstrip("; "))
            for turn in range(self.plan.turns):
                if turn >= LEAST_TURNS and self.over():
                    break
                for name in list(sides)[:: -1 if turn % 2 else 1]:
                    attempt(turned, name)
        finally:
            while sides:
                sides.popitem()[1][1].close()
            free(self.device)
        done = {name: tuple(map(figure, seconds)) for name, seconds in times.items() if name not in faults}
        yield from (Row(self.section, name, values, unit, limit, note) for name, values in done.items())
        yield from (missing(self.section, name, why) for name, why in faults.items())

    def _attempt(self, act: Callable[[], Any], close: Callable[[], object] = lambda: None) -> Tuple[Any, str]:
        """What act() returns, and why it failed (empty if it did not); then memory is free again.

        Raises RuntimeError after an error that CUDA does not survive.
        """
        try:
            return act(), ""
        except Exception as error:  # whatever is wrong with one figure, others are wanted
            why = reason(error)
        close()  # not within the handler, whose error holds what did not fit
        free(self.device)
        synchronize(self.device)
        return None, why


def free(device: torch.device) -> None:
    """Return memory that is no longer used to the device."""
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # of a device that is lost
            torch.cuda.empty_cache()


def seconds_of(function: Side, calls: int, device: torch.device) -> float:
    """Seconds of a call, of so many that are queued one behind the other, until the device is done."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize(device)
    return (time.perf_counter() - began) / calls


def recipe(plan: Plan, micro: int, *overrides: str) -> Recipe:
    """configs/gpu.yaml with updates of one micro batch of images that are not mixed."""
    size = [f"model.image_size={plan.size}"] if plan.size else []
    return loading.load(ROOT / "configs" / "gpu.yaml", [
        f"run.device={plan.device}", f"model.name={plan.model}", *size, f"batch.micro={micro}", f"batch.global={micro}",
        "data.mixup=0", "data.cutmix=null", "average.epoch_decay=null", "data.train_images=null",
        "data.validation_images=null", *plan.overrides, *overrides,
    ])  # fmt: skip

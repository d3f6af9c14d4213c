"""The suite's sections on whole steps: our engine beside timm's loop.

Both get the same micro batch, which lies on the device, and make an update from each. Ours: the engine as a recipe
makes it, weights and momentum in float16 with stochastic rounding; it takes uint8 images and normalises them. timm's:
the body of the loop in its train.py, with float32 weights, autocast (and its scaler in float16) and its Lars; its
images are normalised already. All in channels_last, and with cuDNN's search for the fastest kernels.

Models: G16 has groups of 16 channels, expansion 4 and GroupNorm, in our code and in timm's; the other is timm's
own of the name, depthwise with BatchNorm, and ours like it.
"""

import contextlib
import functools
import itertools
import operator
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Dict, Iterator, NamedTuple, Tuple

import torch

from benchmarks import ranks
from benchmarks.gpu_measure import Maker, Plan, Row, Session, Side, missing, reason, recipe
from benchmarks.timm_peer import Loop
from data.batches import MicroBatch
from engines import factory, micro_batch
from engines.base import one_step
from engines.devices import synchronize
from parallel.topology import Topology
from recipe.batch import divide
from recipe.config import Recipe

FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
OURS, TIMM, COMPILED = "ours", "timm", ", compiled"
_DEPTHWISE = ("model.group_size=1", "model.expansion=6", "model.norm=batch")
_WARM_UP = 6  # steps; in the first ones cuDNN searches, Triton compiles, and passes are recorded
_LR = 0.01  # in so few steps nothing is learned: what counts is that nothing overflows
_MEMORY = 0.9  # the share of the device's for all processes that compile ahead


class Contender(NamedTuple):
    """A side of a comparison. kernels: of ours, as engine.kernels; empty: timm's."""

    kernels: str = ""
    compiled: bool = False
    depthwise: bool = False

    def name(self, plan: Plan) -> str:
        model = plan.model if self.depthwise else "G16"
        owner = f"{OURS}, {model}, {self.kernels}" if self.kernels else f"{TIMM}, {model}"
        return owner + COMPILED * self.compiled


class Comparison(NamedTuple):
    """Contenders that take turns. dtype: of the arithmetic."""

    name: str
    dtype: str
    contenders: Tuple[Contender, ...]


# If time runs out the last ones are left out. Without the second there is no claim. The first compiles for a minute,
# the second for two to three. Ours compiled was slower than ours (docs/gpu.md).
_CLAIMED = (Contender("triton"), Contender(compiled=True, depthwise=True), Contender(depthwise=True))
CLAIMED = (Comparison("B4, bfloat16", "bfloat16", _CLAIMED),)
MICROS = Comparison("B4, other micro batches", "bfloat16", (Contender("triton"),))
AUTO = Comparison("B4, micro batch auto", "bfloat16", (Contender("triton"),))
EAGER = Comparison(
    "B4, eager", "bfloat16",
    (
        *(Contender("triton"), Contender("cuda"), Contender()),
        *(Contender("torch"), Contender("torch", depthwise=True)),
    ),
)  # fmt: skip
VARIANTS = Comparison(
    "B4, engine.compile", "float16",
    (Contender("triton"), *(Contender(kernels, compiled=True) for kernels in ("torch", "group_norm", "triton"))),
)  # fmt: skip


def training(session: Session, comparison: Comparison) -> Iterator[Row]:
    """Images a second of each contender, with the plan's micro batch."""
    plan = session.plan
    sides = {each.name(plan): _maker(plan, comparison, each, plan.micro) for each in comparison.contenders}
    return _compared(session, sides, plan.micro)


def micro_batches(session: Session, comparison: Comparison) -> Iterator[Row]:
    """The same with the plan's other micro batches, the largest first."""
    plan = session.plan
    for each, micro in itertools.product(comparison.contenders, plan.micros):
        if session.over():
            yield missing(session.section, f"{each.name(plan)}, {micro} images", "no time was left")
        else:
            side = {f"{each.name(plan)}, {micro} images": _maker(plan, comparison, each, micro)}
            yield from _compared(session, side, micro)


def automatic(session: Session, comparison: Comparison) -> Iterator[Row]:
    """The same with the micro batch that `batch.micro: auto` finds, by trying."""
    plan = session.plan
    for each in comparison.contenders:
        compute = (f"precision.compute={comparison.dtype}", f"engine.kernels={each.kernels}")
        layout = f"engine.memory_format={plan.layout}"
        wanted = recipe(plan, plan.micro, *compute, layout, "batch.micro=auto", f"batch.global={plan.most_images}")
        processes = factory.connect(wanted, Topology())
        settled = micro_batch.settle(wanted, divide(wanted, 1), processes, functools.partial(print, file=sys.stderr))
        micro = settled.batch.micro
        assert micro is not None, "settled"
        side = {f"{each.name(plan)}, auto: {micro} images": _maker(plan, comparison, each, micro)}
        yield from _compared(session, side, micro)


def _compared(session: Session, sides: Dict[str, Maker], micro: int) -> Iterator[Row]:
    note = f"{recipe(session.plan, micro).model.image_size} px, micro batch {micro}"
    images = functools.partial(operator.truediv, micro)
    return session.compare(sides, images, "images/s", calls=session.plan.steps, warm_up=_WARM_UP, note=note)


def compile_ahead(session: Session, comparisons: Tuple[Comparison, ...]) -> Iterator[Row]:
    """Seconds to compile each contender, all at once in a process each. What compilers keep on the disk makes the
    comparisons short, which compile one contender after the other."""
    plan, until = session.plan, time.monotonic() + session.left()
    work = [(each, side) for each in comparisons for side in each.contenders if side.compiled or side.kernels]
    with ThreadPoolExecutor(len(work)) as pool:
        given = (session.section, until, plan)
        begun = [pool.submit(_seconds_to_compile, *given, *each, _MEMORY / len(work)) for each in work]
        yield from (each.result() for each in as_completed(begun))


def _seconds_to_compile(
    section: str, until: float, plan: Plan, comparison: Comparison, contender: Contender, memory: float
) -> Row:
    what = f"{contender.name(plan)}, {comparison.dtype}"
    try:
        given = (plan, comparison, contender, memory)
        (seconds,) = ranks.stream(max(0.0, until - time.monotonic()), first_step, *given)
    except (RuntimeError, TimeoutError) as error:
        return missing(section, what, reason(error))
    return Row(section, what, (seconds,), "s", note="to compile, beside the others")


def first_step(plan: Plan, comparison: Comparison, contender: Contender, memory: float) -> Iterator[float]:
    """Seconds of the first step. Args: memory: the share of the device that this process may take. Where a step does
    not fit, it is compiled nonetheless."""
    device = torch.device(plan.device)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(memory)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(torch.OutOfMemoryError):
            _maker(plan, comparison, contender, plan.micro)(stack)()
            synchronize(device)
        yield time.perf_counter() - began


# Sides ----------------------------------------------------------------------------------------------------------------


def _maker(plan: Plan, comparison: Comparison, contender: Contender, micro: int) -> Maker:
    overrides = [f"precision.compute={comparison.dtype}", *(_DEPTHWISE if contender.depthwise else ())]
    if not contender.kernels:
        return functools.partial(_timms, recipe(plan, micro, *overrides), plan, comparison.dtype, contender.compiled)
    compiling = f"engine.compile={contender.compiled}".lower()
    engine = (f"engine.memory_format={plan.layout}", f"engine.kernels={contender.kernels}", compiling)
    return functools.partial(ours, recipe(plan, micro, *overrides, *engine))


def on_device(plan: Recipe, device: torch.device) -> MicroBatch:
    """A micro batch of the recipe's size as the prefetcher leaves it: images on the device, labels page-locked."""
    images, labels = ranks.images_and_labels(plan, plan.batch.micro)
    if device.type == "cuda":
        labels = labels.pin_memory()
    images = images.to(device).contiguous(memory_format=torch.channels_last)
    return MicroBatch(images, labels, labels, plan.batch.micro, 0, 0, ())


def ours(plan: Recipe, stack: contextlib.ExitStack) -> Side:
    """The engine of a recipe, closed with the stack; a call is an update from the same images."""
    engine = factory.create(plan, divide(plan, 1), steps_per_epoch=1)
    stack.callback(engine.close)
    uncompiled = [note for note in engine.notes if "uncompiled" in note]
    if plan.engine.compile and uncompiled:
        raise RuntimeError(uncompiled[0])
    batches, numbers = itertools.repeat(on_device(plan, engine.device)), itertools.count()
    return lambda: engine.train_step(batches, one_step(next(numbers)), lr=_LR)


def _timms(made: Recipe, plan: Plan, dtype: str, compiled: bool, stack: contextlib.ExitStack) -> Side:
    torch.backends.cudnn.benchmark = True
    device, layout = torch.device(plan.device), FORMATS[plan.layout]
    loop = Loop(made.model, _LR, device.type, getattr(torch, dtype), layout, compiled)
    batch = on_device(made, device)
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (made.model.mean, made.model.std))
    images = ((batch.images / 255 - mean) / std).contiguous(memory_format=layout)
    batches = [(images, batch.labels.to(device))]
    return lambda: loop.update(batches)

"""The suite's sections on whole steps: our engine beside timm's loop.

Both get the same micro batch, which lies on the device, and make an update from each. Ours: the
engine as a recipe makes it, weights and momentum in float16 with stochastic rounding; it takes
uint8 images and normalises them. timm's: the body of the loop in its train.py, with float32
weights, autocast (and its scaler in float16) and its Lars; its images are normalised already. All
in channels_last, and with cuDNN's search for the fastest kernels.

Models: G16 has groups of 16 channels, expansion 4 and GroupNorm, in our code and in timm's; the
other is timm's own of the name, depthwise with BatchNorm, and ours like it.
"""

import contextlib
import functools
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Dict, Iterator, NamedTuple, Tuple

import torch

from benchmarks import ranks
from benchmarks.gpu_measure import Maker, Plan, Row, Session, Side, missing, reason, recipe
from benchmarks.timm_peer import Loop
from data.batches import MicroBatch
from engines import factory
from engines.base import one_step
from engines.devices import synchronize
from engines.micro_batch import settle
from parallel.topology import Topology
from recipe.batch import divide
from recipe.config import Recipe
from recipe.settled import micro_batch

FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
OURS = "ours"
TIMM = "timm"
COMPILED = ", compiled"
_DEPTHWISE = ("model.group_size=1", "model.expansion=6", "model.norm=batch")
_WARM_UP = 6  # steps; in the first ones cuDNN searches, Triton compiles, and passes are recorded
_LR = 0.01  # in so few steps nothing is learned: what counts is that nothing overflows
_MEMORY = 0.9  # the share of the device's for all processes that compile ahead


class Contender(NamedTuple):
    """A side of a comparison.

    kernels: of our engine, as engine.kernels; empty: the side is timm's loop.
    compiled: by torch.compile.
    depthwise: timm's own model of the plan's name, or ours like it; else the G16.
    """

    kernels: str = ""
    compiled: bool = False
    depthwise: bool = False

    def name(self, plan: Plan) -> str:
        """Return the name of the side in tables.

        Args:
            plan: whose model is named.
        """
        model = plan.model if self.depthwise else "G16"
        owner = f"{OURS}, {model}, {self.kernels}" if self.kernels else f"{TIMM}, {model}"
        return f"{owner}{COMPILED}" if self.compiled else owner


class Comparison(NamedTuple):
    """Contenders that take turns.

    name: of the section.
    dtype: of the arithmetic.
    """

    name: str
    dtype: str
    contenders: Tuple[Contender, ...]


CLAIMED = (
    Comparison(
        name="B4, bfloat16",
        dtype="bfloat16",
        # If time runs out the last ones are left out. Without the second there is no claim. The
        # first compiles for a minute, the second for two to three. Ours compiled was slower than
        # ours (docs/gpu.md).
        contenders=(
            Contender("triton"),
            Contender(compiled=True, depthwise=True),
            Contender(depthwise=True),
        ),
    ),
)
MICROS = Comparison(
    name="B4, other micro batches",
    dtype="bfloat16",
    contenders=(Contender("triton"),),
)
AUTO = Comparison(
    name="B4, micro batch auto",
    dtype="bfloat16",
    contenders=(Contender("triton"),),
)
EAGER = Comparison(
    name="B4, eager",
    dtype="bfloat16",
    contenders=(
        Contender("triton"),
        Contender("cuda"),
        Contender(),
        Contender("torch"),
        Contender("torch", depthwise=True),
    ),
)
VARIANTS = Comparison(
    name="B4, engine.compile",
    dtype="float16",
    contenders=(
        Contender("triton"),
        Contender("torch", compiled=True),
        Contender("group_norm", compiled=True),
        Contender("triton", compiled=True),
    ),
)


# Sections -----------------------------------------------------------------------------------------


def training(session: Session, comparison: Comparison) -> Iterator[Row]:
    """Measure the images a second of each contender, with the plan's micro batch.

    Args:
        session: of the section.
        comparison: of the contenders that take turns.

    Returns:
        The rows as they are measured: see `Session.compare`.
    """
    plan = session.plan
    sides = {}
    for contender in comparison.contenders:
        sides[contender.name(plan)] = _maker(plan, comparison, contender, plan.micro)
    return _compared(session, sides, plan.micro)


def micro_batches(session: Session, comparison: Comparison) -> Iterator[Row]:
    """Measure the images a second with the plan's other micro batches, the largest first.

    Args:
        session: of the section.
        comparison: of contenders, each by itself.

    Yields:
        The rows of each micro batch: see `Session.compare`.
    """
    plan = session.plan
    for contender, micro in itertools.product(comparison.contenders, plan.micros):
        name = f"{contender.name(plan)}, {micro} images"
        if session.over():
            yield missing(session.section, name, "no time was left")
        else:
            side = {name: _maker(plan, comparison, contender, micro)}
            yield from _compared(session, side, micro)


def automatic(session: Session, comparison: Comparison) -> Iterator[Row]:
    """Measure the images a second with the micro batch that `batch.micro: auto` finds, by trying.

    Args:
        session: of the section.
        comparison: of contenders of ours, each by itself.

    Yields:
        The rows of each: see `Session.compare`.
    """
    plan = session.plan
    for contender in comparison.contenders:
        overrides = [
            f"precision.compute={comparison.dtype}",
            f"engine.kernels={contender.kernels}",
            f"engine.memory_format={plan.layout}",
            "batch.micro=auto",
            f"batch.global={plan.most_images}",
        ]
        wanted = recipe(plan, plan.micro, *overrides)
        processes = factory.connect(wanted, Topology())
        settled = settle(wanted, divide(wanted, 1), processes, report=_to_stderr)
        micro = micro_batch(settled)
        name = f"{contender.name(plan)}, auto: {micro} images"
        side = {name: _maker(plan, comparison, contender, micro)}
        yield from _compared(session, side, micro)


def _to_stderr(line: str) -> None:
    """Print a line for the user."""
    print(line, file=sys.stderr)


def _compared(session: Session, sides: Dict[str, Maker], micro: int) -> Iterator[Row]:
    """Measure the images a second of sides that take turns.

    Args:
        session: of the section.
        sides: what makes each, by name.
        micro: images of a call.
    """
    size = recipe(session.plan, micro).model.image_size

    def images_a_second(seconds: float) -> float:
        """Return the rate of a call that took so many `seconds`."""
        return micro / seconds

    return session.compare(
        sides,
        images_a_second,
        "images/s",
        calls=session.plan.steps,
        warm_up=_WARM_UP,
        note=f"{size} px, micro batch {micro}",
    )


# Compiling ahead ----------------------------------------------------------------------------------


def compile_ahead(session: Session, comparisons: Tuple[Comparison, ...]) -> Iterator[Row]:
    """Measure the seconds to compile each contender, all at once in a process each.

    What compilers keep on the disk makes the comparisons short, which compile one contender after
    the other.

    Args:
        session: of the section.
        comparisons: whose contenders are compiled.

    Yields:
        A row for each contender that compiles anything, in the order in which they are done.
    """
    until = time.monotonic() + session.left()
    work = []
    for comparison in comparisons:
        for contender in comparison.contenders:
            # timm's loop has nothing to compile but by torch.compile.
            if contender.compiled or contender.kernels:
                work.append((comparison, contender))
    memory = _MEMORY / len(work)
    # The threads only wait for their processes.
    with ThreadPoolExecutor(len(work)) as pool:
        begun = []
        for comparison, contender in work:
            future = pool.submit(
                _seconds_to_compile,
                session,
                until,
                comparison=comparison,
                contender=contender,
                memory=memory,
            )
            begun.append(future)
        for future in as_completed(begun):
            yield future.result()


def _seconds_to_compile(
    session: Session,
    until: float,
    comparison: Comparison,
    contender: Contender,
    memory: float,
) -> Row:
    """Measure the seconds of a contender's first step, in a process that ends in time.

    Args:
        session: of the section.
        until: the end of its time, by time.monotonic().
        comparison: of the contender.
        contender: whose step it is.
        memory: the share of the device for the process.

    Returns:
        A row of one figure; without it, where the step failed or took too long.
    """
    what = f"{contender.name(session.plan)}, {comparison.dtype}"
    # Pickled for the process.
    work = functools.partial(
        first_step,
        session.plan,
        comparison,
        contender,
        memory=memory,
    )
    try:
        left = max(0.0, until - time.monotonic())
        (seconds,) = ranks.stream(left, work)
    except (RuntimeError, TimeoutError) as error:
        return missing(session.section, what, reason(error))
    return Row(session.section, what, (seconds,), "s", note="to compile, beside the others")


def first_step(
    plan: Plan,
    comparison: Comparison,
    contender: Contender,
    memory: float,
) -> Iterator[float]:
    """Measure the seconds of a contender's first step.

    Where the step does not fit into memory, it is compiled nonetheless.

    Args:
        plan: the sizes.
        comparison: of the contender.
        contender: whose step it is.
        memory: the share of the device that this process may take.

    Yields:
        The seconds, with those in which the side is made.
    """
    device = torch.device(plan.device)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(memory)
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(torch.OutOfMemoryError):
            # No name for the side, which ends with the step.
            make = _maker(plan, comparison, contender, plan.micro)
            make(stack)()
            synchronize(device)
        # Before the stack closes the side.
        yield time.perf_counter() - began


# Sides --------------------------------------------------------------------------------------------


def _maker(plan: Plan, comparison: Comparison, contender: Contender, micro: int) -> Maker:
    """Return the function that makes a contender's side.

    Args:
        plan: the sizes.
        comparison: of the contender.
        contender: whose side it is.
        micro: images of an update.
    """
    overrides = [f"precision.compute={comparison.dtype}"]
    if contender.depthwise:
        overrides.extend(_DEPTHWISE)
    if not contender.kernels:
        peer = recipe(plan, micro, *overrides)
        return functools.partial(
            _timms,
            peer,
            plan,
            comparison.dtype,
            contender.compiled,
        )
    compiles = "true" if contender.compiled else "false"
    overrides.append(f"engine.memory_format={plan.layout}")
    overrides.append(f"engine.kernels={contender.kernels}")
    overrides.append(f"engine.compile={compiles}")
    return functools.partial(ours, recipe(plan, micro, *overrides))


def on_device(plan: Recipe, device: torch.device) -> MicroBatch:
    """Return a micro batch as the prefetcher leaves it.

    Args:
        plan: whose micro batch and image size it has.
        device: of the images.

    Returns:
        Images uint8 [micro, 3, size, size] on the device, channels last; labels int64 [micro] on
        the CPU, page-locked where the device is a GPU.
    """
    micro = micro_batch(plan)
    images, labels = ranks.images_and_labels(plan, micro)
    if device.type == "cuda":
        labels = labels.pin_memory()
    return MicroBatch(
        images=images.to(device).contiguous(memory_format=torch.channels_last),
        labels=labels,
        indices=labels,
        valid=micro,
        number=0,
        step=0,
        unreadable=(),
    )


def ours(plan: Recipe, stack: contextlib.ExitStack) -> Side:
    """Create the engine of a recipe.

    Args:
        plan: the recipe.
        stack: closes the engine.

    Returns:
        A function whose call is an update, always from the same images.

    Raises:
        RuntimeError: the engine was to be compiled, and was not.
    """
    engine = factory.create(plan, divide(plan, 1), steps_per_epoch=1)
    stack.callback(engine.close)
    uncompiled = [note for note in engine.notes if "uncompiled" in note]
    if plan.engine.compile and uncompiled:
        raise RuntimeError(uncompiled[0])
    batches = itertools.repeat(on_device(plan, engine.device))
    numbers = itertools.count()

    def step() -> object:
        """Make the next update."""
        return engine.train_step(batches, one_step(next(numbers)), lr=_LR)

    return step


def _timms(
    peer: Recipe,
    plan: Plan,
    dtype: str,
    compiled: bool,
    stack: contextlib.ExitStack,
) -> Side:
    """Create timm's loop; return a function whose call is an update, always from the same images.

    Args:
        peer: the recipe, of which timm takes the model and the micro batch.
        plan: the sizes.
        dtype: of autocast.
        compiled: by torch.compile.
        stack: not used: nothing has to be closed.
    """
    torch.backends.cudnn.benchmark = True
    device = torch.device(plan.device)
    layout = FORMATS[plan.layout]
    model = peer.model
    loop = Loop(
        model,
        _LR,
        device.type,
        dtype=getattr(torch, dtype),
        layout=layout,
        compile=compiled,
    )
    batch = on_device(peer, device)
    mean = torch.tensor(model.mean, device=device).view(3, 1, 1)
    std = torch.tensor(model.std, device=device).view(3, 1, 1)
    images = ((batch.images / 255 - mean) / std).contiguous(memory_format=layout)
    batches = [(images, batch.labels.to(device))]
    return lambda: loop.update(batches)

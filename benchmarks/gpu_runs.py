"""The suite's sections on feeding, determinism and memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Callable, Iterator, Optional, Tuple

import torch

from benchmarks.gpu_measure import Row, Session, Side, free, model_overrides, of_gpu_recipe, reason
from benchmarks.gpu_training import made, on_device, stepping
from data.batches import MicroBatch
from data.prefetch import Prefetcher
from data.sources import open_source
from engines.base import Engine
from engines.devices import set_determinism, synchronize
from recipe.config import Recipe

FEED, DETERMINISM, MEMORY = "feed", "determinism", "memory"
_CLASSES = 10
_AHEAD = 2  # micro batches that are copied ahead
_WARM_UP = 3
_PLAIN = ("precision.compute=float16", "engine.memory_format=contiguous")


# Feed -----------------------------------------------------------------------------------------------------------------


def feed(session: Session) -> Iterator[Row]:
    """Images a second of the small model, and in the note for which share of its time the device waited for images.

    Each side has its turns alone: what is loaded ahead in another's turns would count for nothing.
    """
    plan = session.plan
    recipe = of_gpu_recipe(
        [
            *model_overrides(plan, plan.small, plan.micro[plan.small]), *_PLAIN, "engine.kernels=torch",
            f"model.image_size={plan.fed_size}", f"model.classes={_CLASSES}", "data.source=glyphs",
            f"data.glyph_size={plan.fed_size}", f"data.workers={plan.workers}", f"data.prefetch={_AHEAD}",
        ]
    )  # fmt: skip
    sides = {
        "on the device already": lambda engine: itertools.repeat(on_device(recipe, engine.device)),
        "copied ahead": lambda engine: Prefetcher(_on_host(recipe), engine.device, _AHEAD),
        "copied when asked for": lambda engine: Prefetcher(_on_host(recipe), engine.device, 0),
        f"glyphs from the loader, {plan.workers} workers": lambda engine: engine.training_batches(
            open_source(recipe.data, _CLASSES, "train"), range(10**6)
        ),
    }
    return session.attempts(
        {what: functools.partial(_fed, session, what, recipe, each) for what, each in sides.items()}
    )


def _fed(session: Session, what: str, recipe: Recipe, batches: Callable[[Engine], Iterator[MicroBatch]]) -> Row:
    calls, micro, waits = session.plan.fed, recipe.batch.micro, _Waits()
    make = functools.partial(_feeding, recipe, batches, waits)
    times, faults = session.take_turns({what: make}, calls=calls, warm_up=_WARM_UP)
    if what in faults:
        raise faults[what]
    share = waits.seconds / (sum(times[what]) * calls)
    note = f"waited {100 * share:.2g} % of the time, micro batch {micro} at {session.plan.fed_size} px"
    return session.row(what, [micro / each for each in times[what]], "images/s", note=note)


class _Waits:
    """Seconds that the device waited, but for the steps that warm up."""

    def __init__(self) -> None:
        self.seconds = 0.0


def _feeding(
    recipe: Recipe, batches: Callable[[Engine], Iterator[MicroBatch]], waits: _Waits, stack: contextlib.ExitStack
) -> Side:
    engine = made(recipe, stack)
    source = batches(engine)
    waited: Callable[[], float] = float
    if isinstance(source, Prefetcher):
        stack.callback(source.close)
        waited = source.waited
    step, numbers = stepping(engine, source), itertools.count()

    def counted() -> None:
        if next(numbers) == _WARM_UP:
            waits.seconds = -waited()
        step()

    def end() -> None:
        synchronize(engine.device)
        waits.seconds += waited()

    stack.callback(end)
    return counted


def _on_host(recipe: Recipe) -> Iterator[MicroBatch]:
    """Different images each time, so that none is in a cache, as the loader gives them."""
    batches = [on_device(recipe, torch.device("cpu")) for _ in range(4)]
    yield from itertools.cycle(batches)


# Determinism ----------------------------------------------------------------------------------------------------------


def determinism(session: Session) -> Iterator[Row]:
    """Images a second of the small model with run.deterministic and without, contiguous, by torch's kernels."""
    plan = session.plan
    micro = plan.micro[plan.small]
    makers = {
        f"run.deterministic={wanted}".lower(): functools.partial(_repeatable, session, wanted)
        for wanted in (False, True)
    }
    try:
        options = {"calls": plan.steps, "note": f"micro batch {micro}", "warm_up": _WARM_UP}
        rows = list(session.compare(makers, lambda each: micro / each, "images/s", **options))
    finally:
        _switch(False)
    yield from rows


def _repeatable(session: Session, wanted: bool, stack: contextlib.ExitStack) -> Side:
    plan = session.plan
    overrides = model_overrides(plan, plan.small, plan.micro[plan.small])
    deterministic = f"run.deterministic={wanted}".lower()
    recipe = of_gpu_recipe([*overrides, *_PLAIN, "engine.kernels=torch", deterministic])
    _switch(wanted)
    engine = made(recipe, stack)
    step = stepping(engine, itertools.repeat(on_device(recipe, engine.device)))

    def switched() -> None:
        _switch(wanted)
        step()

    return switched


def _switch(deterministic: bool) -> None:
    """Torch's switches are the process's, and the sides take turns."""
    set_determinism(deterministic)
    torch.use_deterministic_algorithms(deterministic)


# Memory ---------------------------------------------------------------------------------------------------------------


def memory(session: Session) -> Iterator[Row]:
    """GB at most during a step of the large model, and the largest micro batch. Without cuDNN's search, which would
    take long for each size."""
    plan = session.plan
    micro = plan.micro[plan.large]
    measures = {}
    for kernels, recompute in itertools.product(plan.kernels, (False, True)):
        what = f"peak, {kernels}, recompute {recompute}".lower()
        measures[what] = functools.partial(_peak, session, what, micro, kernels, recompute)
    for recompute in (False, True):
        what = f"largest micro batch, {plan.kernels[0]}, recompute {recompute}".lower()
        measures[what] = functools.partial(_largest_micro, session, what, plan.kernels[0], recompute)
    return session.attempts(measures)


def _peak(session: Session, what: str, micro: int, kernels: str, recompute: bool) -> Row:
    device = session.device
    free(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    _two_steps(session, micro, kernels, recompute)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return session.row(what, [peak / 1e9], "GB", note=f"micro batch {micro}, allocated by tensors")


def _two_steps(session: Session, micro: int, kernels: str, recompute: bool) -> None:
    plan = session.plan
    recipe = of_gpu_recipe(
        [
            *model_overrides(plan, plan.large, micro), *_PLAIN, f"engine.kernels={kernels}",
            f"parallel.recompute={recompute}".lower(),
        ]
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        engine = made(recipe, stack)
        torch.backends.cudnn.benchmark = False
        step = stepping(engine, itertools.repeat(on_device(recipe, engine.device)))
        step()
        step()
        synchronize(engine.device)


def _largest_micro(session: Session, what: str, kernels: str, recompute: bool) -> Row:
    plan, faults = session.plan, {}

    def fits(micro: int) -> bool:
        try:
            _two_steps(session, micro, kernels, recompute)
            return True
        except Exception as error:
            faults[micro] = reason(error)
        finally:
            free(session.device)
        free(session.device)  # once more: the error held what did not fit
        return False

    fitting, beyond = largest_fitting(fits, plan.micro[plan.large], plan.most_images, session.clock.over)
    if not fitting:
        raise RuntimeError(f"not even the smallest fits: {faults[min(faults)]}")
    note = f"{beyond} does not fit: {faults[beyond]}" if beyond else "larger ones were not tried"
    return session.row(what, [fitting], "images", note=note)


def largest_fitting(
    fits: Callable[[int], bool], start: int, most: int, over: Callable[[], bool]
) -> Tuple[int, Optional[int]]:
    """The largest number found to fit, 0 if none, and the smallest found not to, None if all fit.

    Doubles or halves from `start`, then bisects down to a sixteenth; not above `most`, and not when time is `over`.
    """
    fitting, beyond, number = 0, None, start
    while number and number <= most and not over():
        if fits(number):
            fitting = number
        else:
            beyond = number
        if fitting and beyond and beyond - fitting <= max(fitting // 16, 1):
            break
        if fitting and beyond:
            number = (fitting + beyond) // 2
        else:
            number = fitting * 2 if fitting else number // 2
    return fitting, beyond

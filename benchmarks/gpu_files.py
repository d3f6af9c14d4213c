"""The suite's section from JPEG files to updates: our engine with each of its readers, beside images in memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Callable, Dict, Iterator, List, Tuple

from benchmarks import packages
from benchmarks.gpu_measure import LEAST_TURNS, Row, Session, missing, recipe, seconds_of
from benchmarks.gpu_training import ours
from data.base import Source
from engines import factory
from engines.base import one_step
from recipe.batch import divide
from recipe.config import Recipe

FILES = "JPEG to update"
MEMORY = "images on the device"
# What each reader needs: module -> what installs it.
_NEEDED = {"simplejpeg": "simplejpeg", "safetensors": "safetensors"}
_READERS: Dict[str, Dict[str, str]] = {
    "torch": _NEEDED,
    "dali": {**_NEEDED, "nvidia.dali": "nvidia-dali-cuda130"},
}
_SETTLING = 2  # turns until no image is left that workers had ready before


def files(session: Session) -> Iterator[Row]:
    """Yield images a second from class folders of JPEG files.

    The plan's workers decode, crop and flip them.

    Args:
        session: of the section.
    """
    if packages.missing(["skimage"]):
        why = "scikit-image, which has the photographs, is not installed"
        yield missing(session.section, "all", why)
        return
    from benchmarks.drawn_photographs import CLASSES, FOLDER, photographs

    photographs()
    place = (
        f"model.classes={len(CLASSES)}",
        f"data.root={FOLDER.parent}",
        f"data.train_folder={FOLDER.name}",
    )
    measures: Dict[str, Callable[[], Row]] = {
        MEMORY: functools.partial(_from_memory, session, place)
    }
    for reader in _READERS:
        measures[f"{reader} reader"] = functools.partial(_from_files, session, place, reader)
    yield from session.attempts(measures)


def _recipe(session: Session, place: Tuple[str, ...], *overrides: str) -> Recipe:
    """Return the recipe of the engine that is measured.

    Args:
        session: of the section.
        place: overrides that name the files.
        *overrides: others.
    """
    plan = session.plan
    kernels = "triton" if session.device.type == "cuda" else "torch"
    engine = [
        f"engine.memory_format={plan.layout}",
        f"engine.kernels={kernels}",
        f"data.workers={plan.workers}",
    ]
    return recipe(plan, plan.micro, *place, *engine, *overrides)


def _from_memory(session: Session, place: Tuple[str, ...]) -> Row:
    """Measure updates from images that lie on the device."""
    with contextlib.ExitStack() as stack:
        step = ours(_recipe(session, place), stack)
        return _row(session, MEMORY, step, settling_turns=1)


def _from_files(session: Session, place: Tuple[str, ...], reader: str) -> Row:
    """Measure updates from files.

    Args:
        session: of the section.
        place: overrides that name the files.
        reader: as data.reader.
    """
    installs = _READERS[reader]
    absent = [installs[module] for module in packages.missing(list(installs))]
    if absent:
        raise ImportError(f"not installed: {', '.join(absent)}")
    # Where simplejpeg is missing, this cannot be imported.
    from data.sources import open_source

    engine_recipe = _recipe(session, place, f"data.reader={reader}")
    source: Source = open_source(engine_recipe.data, engine_recipe.model.classes, "train")
    steps = len(source) // engine_recipe.batch.global_
    with contextlib.ExitStack() as stack:
        engine = factory.create(engine_recipe, divide(engine_recipe, 1), steps_per_epoch=steps)
        stack.callback(engine.close)
        batches = engine.training_batches(source, range(10**6))  # more than there is time for
        stack.callback(batches.close)
        numbers = itertools.count()

        def step() -> object:
            """Make the next update."""
            return engine.train_step(batches, one_step(next(numbers)), lr=0.01)

        return _row(session, f"{reader} reader", step, settling_turns=_SETTLING)


def _row(session: Session, what: str, step: Callable[[], object], *, settling_turns: int) -> Row:
    """Return images a second of the plan's turns, or of as many as there is time for.

    Args:
        session: of the section.
        what: name of the figure.
        step: makes an update.
        settling_turns: that come before and do not count.
    """
    plan = session.plan
    rates: List[float] = []
    for turn in range(settling_turns + plan.turns):
        if len(rates) >= LEAST_TURNS and session.over():
            break
        seconds = seconds_of(step, plan.loaded, session.device)
        if turn >= settling_turns:
            rates.append(plan.micro / seconds)
    note = f"micro batch {plan.micro}, {plan.workers} workers"
    return Row(session.section, what, tuple(rates), "images/s", note=note)

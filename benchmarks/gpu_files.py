"""The suite's section from JPEG files to updates: our engine with each of its readers, beside images in memory."""

import contextlib
import functools
import itertools
from typing import Callable, Dict, Iterator, Tuple

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
_NEEDED = {"simplejpeg": "simplejpeg", "safetensors": "safetensors"}  # module -> what installs it
_READERS: Dict[str, Dict[str, str]] = {"torch": _NEEDED, "dali": {**_NEEDED, "nvidia.dali": "nvidia-dali-cuda130"}}
_SETTLING = 2  # turns until no image is left that workers had ready before


def files(session: Session) -> Iterator[Row]:
    """Images a second from class folders of JPEG files, decoded, cropped and flipped by the plan's workers."""
    if packages.missing(["skimage"]):
        yield missing(session.section, "all", "scikit-image, which has the photographs, is not installed")
        return
    from benchmarks.drawn_photographs import CLASSES, FOLDER, photographs

    photographs()
    place = (f"model.classes={len(CLASSES)}", f"data.root={FOLDER.parent}", f"data.train_folder={FOLDER.name}")
    measures = {MEMORY: functools.partial(_from_memory, session, place)}
    measures.update({f"{reader} reader": functools.partial(_from_files, session, place, reader) for reader in _READERS})
    yield from session.attempts(measures)


def _plan(session: Session, place: Tuple[str, ...], *overrides: str) -> Recipe:
    plan = session.plan
    kernels = "triton" if session.device.type == "cuda" else "torch"
    engine = (f"engine.memory_format={plan.layout}", f"engine.kernels={kernels}", f"data.workers={plan.workers}")
    return recipe(plan, plan.micro, *place, *engine, *overrides)


def _from_memory(session: Session, place: Tuple[str, ...]) -> Row:
    with contextlib.ExitStack() as stack:
        step = ours(_plan(session, place), stack)
        return _row(session, MEMORY, step, 1)


def _from_files(session: Session, place: Tuple[str, ...], reader: str) -> Row:
    absent = [_READERS[reader][name] for name in packages.missing(list(_READERS[reader]))]
    if absent:
        raise ImportError(f"not installed: {', '.join(absent)}")
    from data.sources import open_source

    plan = _plan(session, place, f"data.reader={reader}")
    source: Source = open_source(plan.data, plan.model.classes, "train")
    engine = factory.create(plan, divide(plan, 1), steps_per_epoch=len(source) // plan.batch.global_)
    batches, numbers = engine.training_batches(source, range(10**6)), itertools.count()
    try:
        return _row(
            session, f"{reader} reader", lambda: engine.train_step(batches, one_step(next(numbers)), lr=0.01), _SETTLING
        )
    finally:
        batches.close()
        engine.close()


def _row(session: Session, what: str, step: Callable[[], object], settling: int) -> Row:
    """Args: settling: turns that do not count."""
    plan, rates = session.plan, []
    for turn in range(settling + plan.turns):
        if len(rates) >= LEAST_TURNS and session.over():
            break
        seconds = seconds_of(step, plan.loaded, session.device)
        if turn >= settling:
            rates.append(plan.micro / seconds)
    return Row(
        session.section, what, tuple(rates), "images/s", note=f"micro batch {plan.micro}, {plan.workers} workers"
    )

"""The suite's sections on what a run does beside computing: it is fed, it may have to repeat bit for bit, it needs memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import torch

from benchmarks.gpu_measure import Clock, Maker, Row, Session, Side, free, model_overrides, of_gpu_recipe, reason
from benchmarks.gpu_training import made, on_device, stepping
from data.batches import MicroBatch
from data.prefetch import Prefetcher
from data.sources import open_source
from engines.devices import set_determinism
from recipe.config import Recipe

FEED, DETERMINISM, MEMORY = "feed", "determinism", "memory"
_CLASSES = 10
_WARM_UP = 3


# Feed -----------------------------------------------------------------------------------------------------------------


def feed(session: Session) -> Iterator[Row]:
    """Images a second of the small model, and in the note for which share of its time the device waited for images."""
    plan = session.plan
    micro = plan.micro[plan.small]
    recipe = of_gpu_recipe(
        [
            *model_overrides(plan, plan.small, micro), f"model.image_size={plan.fed_size}", f"model.classes={_CLASSES}",
            "precision.compute=float16", "engine.memory_format=contiguous", "engine.kernels=torch",
            "data.source=glyphs", f"data.glyph_size={plan.fed_size}", f"data.workers={plan.workers}",
        ]
    )  # fmt: skip
    waits: Dict[str, List[float]] = {}
    sides: Dict[str, Maker] = {
        "on the device already": functools.partial(_resident, recipe),
        "copied ahead": functools.partial(_copied, recipe, session, recipe.data.prefetch, waits),
        "copied when asked for": functools.partial(_copied, recipe, session, 0, waits),
        f"loader, {plan.workers} workers": functools.partial(_loaded, recipe, session, waits),
    }
    for what, make in sides.items():
        if not session.is_done(what):
            yield session.attempt(what, functools.partial(_fed, session, what, make, micro, waits))


def _fed(session: Session, what: str, make: Maker, micro: int, waits: Dict[str, Callable[[], float]]) -> Row:
    raise NotImplementedError

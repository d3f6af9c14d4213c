"""Exact evaluation: every validation image once, whatever the batch size."""

from __future__ import annotations

from typing import Iterable, List, NamedTuple

from data.loader import MicroBatch
from engines.base import Engine
from recipe.errors import DataError


class Scores(NamedTuple):
    """Shares in [0, 1] and the mean cross entropy (nats) over `images` readable images."""

    top1: float
    top5: float
    loss: float
    images: int
    unreadable: int


def evaluate(engine: Engine, batches: Iterable[MicroBatch]) -> Scores:
    """Scores of the engine's current weights. Waits for the device once, at the end."""
    counts = []
    unreadable: List[str] = []
    for batch in batches:
        unreadable.extend(batch.unreadable)
        if batch.valid:
            counts.append(engine.evaluate_step(batch))
    images = sum(count.images for count in counts)
    if not images:
        raise DataError(f"no validation image can be read; the first: {unreadable[0]}")
    return Scores(
        top1=sum(count.top1 for count in counts).item() / images,
        top5=sum(count.top5 for count in counts).item() / images,
        loss=sum(count.loss for count in counts).item() / images,
        images=images,
        unreadable=len(unreadable),
    )

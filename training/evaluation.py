"""Exact evaluation: every validation image once, whatever the batch size."""

from __future__ import annotations

from typing import Iterable, List, NamedTuple, Optional

from data.batches import MicroBatch
from engines import base
from engines.base import Engine
from recipe.errors import DataError


class Scores(NamedTuple):
    """Shares in [0, 1] and the mean cross entropy (nats) over `images` readable images."""

    top1: float
    top5: float
    loss: float
    images: int
    unreadable: int


def evaluate(engine: Engine, batches: Iterable[Optional[MicroBatch]]) -> Scores:
    """Scores of the engine's current weights, over all replicas. Waits for the device once, at the end.

    Args: batches: of this replica; where images do not enter, as many times None.
    """
    counts = []
    unreadable: List[str] = []
    for batch in batches:
        if batch is not None:
            unreadable.extend(batch.unreadable)
        counts.append(engine.evaluate_step(batch))
    total, messages = base.total(counts, unreadable, engine.processes, engine.device)
    if not total.images:
        first = f"no validation image can be read; the first: {messages[0]}"
        raise DataError(first if engine.topology.is_main else "")  # all ranks find it, one prints it
    top1, top5, loss = (each.item() / total.images for each in (total.top1, total.top5, total.loss))
    return Scores(top1, top5, loss, total.images, len(messages))

"""What a run would cost with other batches, from its gradient noise scale.

Source: McCandless et al., 1812.06162, section 2.2: where the noise scale is N, an update with a batch of B does
1 / (1 + N / B) of what an update with all images would do, and an image 1 / (1 + B / N) of what one by itself would.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence

from recipe.config import Recipe
from recipe.errors import UserError
from tools.planning import scaling, workload
from tools.planning.machine import Machine


class Interval(NamedTuple):
    """Updates between two lines of a log. epoch: at their end. noise: the noise scale in images; error: its standard
    error, both of the line."""

    epoch: float
    updates: int
    noise: float
    error: float


class Cost(NamedTuple):
    """A run to the same point. updates_range: with the noise scale less and more by its standard error. seconds,
    images_per_device: on a machine."""

    batch: int
    updates: float
    updates_range: List[float]
    images: float
    replicas: Optional[int] = None
    seconds: Optional[float] = None
    images_per_device: Optional[float] = None


def intervals(train: Sequence[dict]) -> List[Interval]:
    """Of the `train` events of a run. Updates before the first line with a noise scale count as if they had it.

    Raises UserError where none has one.
    """
    found, before, last = [], 0, None
    known = [event for event in train if isinstance(event.get("noise_scale"), dict)]
    if not known:
        raise UserError(
            "no line of its log has a noise scale; train with log.noise_scale=true, which says what is in the way"
        )
    for event in train:
        last = event if event in known else last
        scale = (last or known[0])["noise_scale"]
        found.append(Interval(event["epoch"], event["step"] - before, scale["images"], scale["error"]))
        before = event["step"]
    return found


def critical(run: Sequence[Interval], batch: int) -> float:
    """The critical batch of a whole run: the fewest images that it could have taken over the fewest updates."""
    updates = sum(each.updates / (1 + each.noise / batch) for each in run)
    images = sum(each.updates * batch / (1 + batch / each.noise) for each in run)
    return images / updates


def updates(run: Sequence[Interval], batch: int, other: int, errors: float = 0.0) -> float:
    """Updates with another batch to where the run came with its own. Args: errors: standard errors that are added to
    each noise scale."""
    total = 0.0
    for each in run:
        noise = max(0.0, each.noise + errors * each.error)
        total += each.updates * (1 + noise / other) / (1 + noise / batch)
    return total


def cost(
    run: Sequence[Interval], recipe: Recipe, other: int, machine: Optional[Machine] = None, replicas: int = 1
) -> Cost:
    """What the run of `recipe` would cost with another batch, and on `replicas` of a machine how long it would take."""
    own = recipe.batch.global_
    needed = updates(run, own, other)
    span = sorted(updates(run, own, other, errors) for errors in (-1.0, 1.0))
    found = Cost(other, needed, span, needed * other)
    if machine is None:
        return found
    plan = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"global_": other})})
    row = scaling.predict(plan, machine, replicas, workload.of(plan))
    # A batch that so many replicas cannot share exactly is computed as the next larger one that they can.
    return found._replace(
        replicas=replicas,
        seconds=needed * row.seconds,
        images_per_device=found.images * len(workload.of(plan).stages) / row.devices,
    )

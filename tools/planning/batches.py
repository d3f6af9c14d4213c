"""What a run would cost with other batches, from its gradient noise scale.

Source: McCandless et al., 1812.06162, section 2.2: where the noise scale is N, an update with a batch of B does
1 / (1 + N / B) of what an update with all images would do, and an image 1 / (1 + B / N) of what one by itself would.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence

from common.errors import ConfigError
from recipe.config import Recipe
from recipe.course import is_known
from tools.planning import scaling, workload
from tools.planning.machine import Machine

# docs/results/ladder2.md: the errors at 4, 8 and 16 times the batch; larger ones were not tried.
BIAS = (
    "In the one test of such predictions, a batch 4 to 16 times as large took far fewer updates: the predictions were "
    "70 to 96 % too high. Treat the updates of larger batches as upper bounds (docs/batch.md)"
)


class Interval(NamedTuple):
    """Updates between two lines of a log. epoch: at their end. noise: the noise scale in images; error: its error."""

    epoch: float
    updates: float
    batch: int
    noise: float
    error: float

    @property
    def known(self) -> bool:
        """Whether the noise scale is told from zero."""
        return is_known(self.noise, self.error)


class Cost(NamedTuple):
    """A run to the same point. updates_range: with the noise scale less and more by its standard error. upper_bound:
    whether the batch is larger than the run's, for which predictions are known to be too high (`BIAS`)."""

    batch: int
    updates: float
    updates_range: List[float]
    images: float
    upper_bound: bool
    replicas: Optional[int] = None
    seconds: Optional[float] = None


def intervals(train: Sequence[dict], size: int) -> List[Interval]:
    """Return the intervals of a run's `train` events. Those before the first noise scale take that one.

    Args: size: images of a step. Raises ConfigError if no event has a noise scale.
    """
    scales = [event["noise_scale"] for event in train if isinstance(event.get("noise_scale"), dict)]
    if not scales:
        raise ConfigError("no noise scale in its log; train with log.noise_scale=true, which says what is in the way")
    found, before, scale = [], 0, scales[0]
    for event in train:
        scale = event["noise_scale"] if isinstance(event.get("noise_scale"), dict) else scale
        batch = event.get("batch", size)  # of a batch that grows, that of the line
        updates = (event["step"] - before) * size / batch
        found.append(Interval(event["epoch"], updates, batch, scale["images"], scale["error"]))
        before = event["step"]
    return found


def is_predictable(run: Sequence[Interval]) -> bool:
    """Return whether the noise scale is known for at least half of the updates."""
    known = sum(each.updates for each in run if each.known)
    return known >= sum(each.updates for each in run) / 2


def critical(run: Sequence[Interval]) -> float:
    """Critical batch of a whole run: the fewest images that it could have taken over the fewest updates."""
    fewest_updates = sum(each.updates / (1 + each.noise / each.batch) for each in run)
    fewest_images = sum(each.updates * each.batch / (1 + each.batch / each.noise) for each in run)
    return fewest_images / fewest_updates


def updates(run: Sequence[Interval], other: int, errors: float = 0.0) -> float:
    """Updates with another batch to where the run came with its own, each noise scale plus `errors` standard errors."""
    noise = [max(0.0, each.noise + errors * each.error) for each in run]
    return sum(each.updates * (1 + scale / other) / (1 + scale / each.batch) for each, scale in zip(run, noise))


def cost(
    run: Sequence[Interval], recipe: Recipe, other: int, machine: Optional[Machine] = None, replicas: int = 1
) -> Cost:
    """What the run of `recipe` would cost with another batch, and on `replicas` of a machine how long it would take."""
    needed = updates(run, other)
    span = sorted(updates(run, other, errors) for errors in (-1.0, 1.0))
    larger = other > max(each.batch for each in run)
    found = Cost(other, needed, span, needed * other, larger)
    if machine is None:
        return found
    plan = workload.changed(recipe, "batch", global_=other, schedule=None)
    # A batch that so many replicas cannot share exactly is computed as the next larger one that they can.
    row = scaling.predict(plan, machine, replicas, workload.of(plan))
    return found._replace(replicas=replicas, seconds=needed * row.seconds)

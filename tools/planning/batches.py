"""Costs of a run with other batches, predicted from its gradient noise scale.

Source: McCandless et al., 1812.06162, section 2.2: where the noise scale is N, an update with a
batch of B does 1 / (1 + N / B) of what an update with all images would do, and an image
1 / (1 + B / N) of what one by itself would.
"""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Sequence

from common.errors import ConfigError
from recipe.batch import training_image_sizes
from recipe.config import Recipe
from recipe.course import is_known
from recipe.settled import image_size
from tools import log_updates
from tools.log_updates import LogLine
from tools.planning import scaling, workload
from tools.planning.machine import Machine

# docs/results/ladder2.md: the errors at 4, 8 and 16 times the batch; larger ones were not tried.
BIAS = (
    "In the one test of such predictions, a batch 4 to 16 times as large took far fewer updates: "
    "the predictions were 70 to 96 % too high. Treat the updates of larger batches as upper bounds "
    "(docs/batch.md)"
)


class Interval(NamedTuple):
    """Updates between two lines of a log.

    epoch: at their end.
    updates: with `batch` images each, in the mean.
    noise: the noise scale in images.
    error: its standard error; infinite where the gradient was lost in its noise.
    """

    epoch: float
    updates: float
    batch: float
    noise: float
    error: float

    @property
    def known(self) -> bool:
        """Return whether the noise scale is told from zero."""
        return is_known(self.noise, self.error)


class Cost(NamedTuple):
    """Costs of a run to the same point with another batch.

    batch: images of an update.
    updates: how many are needed.
    images: in all of these.
    updates_range: with the noise scale less and more by its standard error.
    upper_bound: whether the batch is larger than the run's, for which predictions are known to be
        too high (`BIAS`).
    replicas, seconds: on a machine, if one is given.
    """

    batch: int
    updates: float
    updates_range: List[float]
    images: float
    upper_bound: bool
    replicas: Optional[int] = None
    seconds: Optional[float] = None


def intervals(train: Sequence[dict], recipe: Recipe) -> List[Interval]:
    """Return the intervals of a run. Those before the first noise scale take that one.

    A later line without one says that the gradient is lost in its noise: its interval has the one
    before, with an error that makes it unknown.

    Args:
        train: the run's `train` events.
        recipe: of the run.

    Raises:
        ConfigError: no event has a noise scale.
    """
    scales = [event.get("noise_scale") for event in train]
    scale = next((scale for scale in scales if isinstance(scale, dict)), None)
    if scale is None:
        raise ConfigError(
            "no noise scale in its log; train with log.noise_scale=true, for more than the forty updates "
            "that it takes; the run's first lines say what else is in the way"
        )
    parts = []
    before = 0
    measured = False
    counts = log_updates.between([_line(event) for event in train], recipe)
    for event, count in zip(train, counts):
        lost = measured
        if isinstance(event.get("noise_scale"), dict):
            scale = event["noise_scale"]
            measured = True
            lost = False
        # Steps count images of the recipe's batch.
        size = recipe.batch.global_
        images = (event["step"] - before) * size
        interval = Interval(
            epoch=event["epoch"],
            updates=count,
            batch=images / count if count else size,
            noise=scale["images"],
            error=math.inf if lost else scale["error"],
        )
        parts.append(interval)
        before = event["step"]
    return parts


def _line(event: dict) -> LogLine:
    """Return what a `train` event says about updates."""
    numbers = {}
    for name in LogLine._fields:
        number = event.get(name)
        numbers[name] = math.nan if number is None else number
    return LogLine(**numbers)


def is_predictable(run: Sequence[Interval]) -> bool:
    """Return whether the noise scale of a `run` is known for at least half of the updates."""
    known = sum(part.updates for part in run if part.known)
    return known >= sum(part.updates for part in run) / 2


def critical(run: Sequence[Interval]) -> float:
    """Return the critical batch of a whole `run`.

    It is the fewest images that it could have taken over the fewest updates.
    """
    fewest_updates = [part.updates / (1 + part.noise / part.batch) for part in run]
    fewest_images = [part.updates * part.batch / (1 + part.batch / part.noise) for part in run]
    return sum(fewest_images) / sum(fewest_updates)


def updates(run: Sequence[Interval], other: int, errors: float = 0.0) -> float:
    """Return the updates to where a run came if its batch were another.

    Args:
        run: its intervals.
        other: the batch, in images.
        errors: standard errors by which each noise scale is taken to be larger.
    """
    needed = []
    for part in run:
        noise = part.noise
        if errors:  # none of an infinite error would be no number
            noise += errors * part.error
        # Estimates of a noise scale near zero may be negative.
        needed.append(part.updates * _slower(max(0.0, noise), part.batch, other))
    return sum(needed)


def _slower(noise: float, batch: float, other: int) -> float:
    """Return how many updates with another batch do as much as one with a batch.

    Args:
        noise: noise scale, in images; may be infinite.
        batch: in images.
        other: the other one.
    """
    if noise == math.inf:
        return batch / other  # each image does as much as any
    return (1 + noise / other) / (1 + noise / batch)


def cost(
    run: Sequence[Interval],
    recipe: Recipe,
    other: int,
    machine: Optional[Machine] = None,
    replicas: int = 1,
) -> Cost:
    """Predict the cost of a run with another batch.

    Args:
        run: its intervals.
        recipe: of the run.
        other: the batch, in images.
        machine: on which the seconds are predicted; None: they are not.
        replicas: on that machine.
    """
    needed = updates(run, other)
    # Whether more noise means more updates depends on whether the batch is smaller or larger.
    bounds = [updates(run, other, errors) for errors in (-1.0, 1.0)]
    prediction = Cost(
        batch=other,
        updates=needed,
        updates_range=sorted(bounds),
        images=needed * other,
        upper_bound=other > max(part.batch for part in run),
    )
    if machine is None:
        return prediction
    plan = workload.changed(recipe, "batch", global_=other, schedule=None)
    # A batch that so many replicas cannot share is computed as the next larger one that they can.
    # The model is cut as for the run's own batch: another one need not be a multiple of its micro
    # batch.
    by_size = {}
    for size in training_image_sizes(recipe):
        row = scaling.predict(plan, machine, replicas, workload.of(recipe, size))
        by_size[size] = row.seconds
    seconds = _seconds(run, recipe, other, by_size)
    return prediction._replace(replicas=replicas, seconds=seconds)


def _seconds(
    run: Sequence[Interval],
    recipe: Recipe,
    other: int,
    by_size: Dict[int, float],
) -> float:
    """Return the seconds of all updates with another batch.

    Args:
        run: its intervals.
        recipe: of the run.
        other: the batch, in images.
        by_size: seconds of an update, by the size of its images.
    """
    # Each size is shown from its first epoch on, until the next one is.
    sizes = recipe.data.image_sizes or [[0, image_size(recipe.model)]]
    ends = [*(epoch for epoch, _ in sizes[1:]), math.inf]
    seconds = 0.0
    before = 0.0
    for part in run:
        length = part.epoch - before
        needed = updates([part], other)
        for (first, pixels), end in zip(sizes, ends):
            epochs = min(end, part.epoch) - max(first, before)
            # A log that was put together by hand may have two lines of an epoch.
            if epochs > 0:
                seconds += needed * epochs / length * by_size[pixels]
        before = part.epoch
    return seconds

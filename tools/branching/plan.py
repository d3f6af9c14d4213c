"""The branches of a run that are trained, and what they cost.

They follow from its checkpoints and the share of the run to be spent.

Source: Merrill et al., "Critical batch size revisited", 2505.23971, branched training. Its smoothed
training loss is replaced here: see docs/batch.md.
"""

from __future__ import annotations

from typing import List, NamedTuple, Sequence

from common.errors import ConfigError
from common.text import count

RULES = ("sqrt", "linear")  # by which the rate follows the batch: values of batch.rate_rule
# Branches with the run's own batch, each with other draws: their difference is the spread.
ORDERS = 2
_UPDATES = 8  # of a branch with the largest batch, at least
# Of the largest batch, at least: the last update of an epoch may be smaller.
_UPDATES_PER_EPOCH = 4


class Branch(NamedTuple):
    """A short run from a checkpoint.

    step: of the checkpoint, in steps of `batch.global` images.
    multiple: its batch over the run's.
    rule: one of RULES; empty with the run's own batch, where both are the same.
    order: 0 has the run's own draws (order of images, augmentation, dropout), each other number
        others.
    """

    step: int
    multiple: int
    rule: str = ""
    order: int = 0

    @property
    def name(self) -> str:
        """Return the name of the branch's run and folder."""
        kind = f"x{self.multiple}-{self.rule}" if self.rule else f"order-{self.order}"
        return f"step-{self.step:08d}-{kind}"


class Plan(NamedTuple):
    """All branches of a run.

    batch: images of a step.
    per_epoch, total: steps of an epoch and of the run.
    points: steps of the checkpoints, ascending.
    largest: the largest multiple of the batch, a power of two.
    steps: of each branch.
    """

    batch: int
    per_epoch: int
    total: int
    points: List[int]
    largest: int
    steps: int

    @property
    def multiples(self) -> List[int]:
        """Return the multiples of the batch that are tried: 2, 4, 8 ... up to the largest."""
        return _multiples(self.largest)

    @property
    def is_bound_by_epoch(self) -> bool:
        """Return whether an epoch is too short for a larger multiple, whatever the share."""
        return not _fits_an_epoch(2 * self.largest, self.per_epoch)

    def branches(self) -> List[Branch]:
        """Return all branches in the order in which they are trained.

        At each checkpoint the spread comes first.
        """
        branches = []
        for step in self.points:
            branches += self.first_branches(step)
            for multiple in self.multiples:
                branches += [Branch(step, multiple, rule) for rule in RULES]
        return branches

    def first_branches(self, step: int) -> List[Branch]:
        """Return the branches with the run's own batch, in several orders.

        Args:
            step: of the checkpoint.
        """
        return [Branch(step, 1, order=order) for order in range(ORDERS)]

    @property
    def images(self) -> int:
        """Return the training images of all branches."""
        return len(self.branches()) * self.steps * self.batch

    @property
    def share(self) -> float:
        """Return the training images of all branches over those of the run."""
        return self.images / (self.total * self.batch)


def make(
    saved: Sequence[int],
    *,
    points: int,
    share: float,
    batch: int,
    per_epoch: int,
    total: int,
) -> Plan:
    """Plan branches.

    They have as large multiples of the batch as the share of the run allows, and then are as long
    as it allows.

    Args:
        saved: steps of the run's checkpoints, ascending.
        points: how many of them to branch from; they are spread over those that there are.
        share: of the run's images that all branches may take.
        batch: images of a step.
        per_epoch: steps of an epoch.
        total: steps of the whole run.

    Raises:
        ConfigError: too few checkpoints, or too short a run.
    """
    chosen = _choose(saved, points, total)
    # As large a multiple as the share allows with the shortest branches; the rest makes them longer.
    largest = 1
    steps = 0
    while _fits_an_epoch(2 * largest, per_epoch):
        # Larger multiples make more branches, and all of them longer.
        affordable = _steps_of_each(2 * largest, points, share * total)
        if affordable < 2 * largest * _UPDATES:
            break
        largest *= 2
        steps = affordable
    if largest == 1:
        raise ConfigError(_too_short(points, share, per_epoch, total))
    return Plan(
        batch=batch,
        per_epoch=per_epoch,
        total=total,
        points=chosen,
        largest=largest,
        steps=steps,
    )


def _fits_an_epoch(multiple: int, per_epoch: int) -> bool:
    """Return whether an epoch has as many updates as a branch needs.

    Args:
        multiple: of the batch.
        per_epoch: steps of an epoch.
    """
    return multiple * _UPDATES_PER_EPOCH <= per_epoch


def _choose(saved: Sequence[int], points: int, total: int) -> List[int]:
    """Return the steps of the checkpoints to branch from."""
    usable = [step for step in saved if 0 < step < total]  # at the last step the schedule has ended
    if len(usable) < points:
        there = f"{count(len(usable), 'checkpoint')} before the run's end, but --points is {points}"
        remedy = "train with checkpoint.keep_last=1000, which keeps all (it may be given when a run resumes)"
        fewer = f", or give --points {len(usable)}" if usable else ""
        raise ConfigError(f"{there}; {remedy}{fewer}")
    # The middle one of each of as many equal stretches.
    return [usable[int((number + 0.5) / points * len(usable))] for number in range(points)]


def share_for(plan: Plan, largest: int) -> float:
    """Return the share of the run that the shortest branches take.

    Args:
        plan: with as many checkpoints.
        largest: multiple of the batch up to which they go.
    """
    return _branches(largest, len(plan.points)) * largest * _UPDATES / plan.total


def _multiples(largest: int) -> List[int]:
    """Return the powers of two from 2 to the largest."""
    return [2**power for power in range(1, largest.bit_length())]


def _branches(largest: int, points: int) -> int:
    """Return the number of branches from so many checkpoints."""
    return points * (ORDERS + len(RULES) * len(_multiples(largest)))


def _steps_of_each(largest: int, points: int, budget: float) -> int:
    """Return the steps of each branch that a budget of steps allows: a multiple of `largest`."""
    # A multiple, so that branches with any batch see as many images.
    return int(budget / _branches(largest, points)) // largest * largest


def _too_short(points: int, share: float, per_epoch: int, total: int) -> str:
    """Return why not even twice the batch can be tried, and the remedy.

    Args:
        points: checkpoints to branch from.
        share: of the run's images that all branches may take.
        per_epoch: steps of an epoch.
        total: steps of the whole run.
    """
    # No share of the run helps where an epoch is too short.
    if not _fits_an_epoch(2, per_epoch):
        steps = count(per_epoch, "step")
        return (
            f"an epoch has {steps}, too few for twice the batch; branch a run with a smaller batch"
        )
    needed = _branches(2, points) * 2 * _UPDATES
    checkpoints = count(points, "checkpoint")
    return (
        f"a share of {share:g} of the run is {share * total:,.0f} steps, but the shortest branches "
        f"from {checkpoints} take {needed:,}; "
        f"give --share {needed / total + 0.005:.2f} or fewer --points"
    )

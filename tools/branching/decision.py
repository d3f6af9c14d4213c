"""The critical batch at each checkpoint, and the batch.schedule that follows.

Both follow from the losses of the branches. A branch has recovered if its loss is that of the first
branch within the tolerance. The critical batch is the largest up to which all batches have, by
either rule of the rate.

Source: Merrill et al., 2505.23971, branched training.
"""

from __future__ import annotations

import math
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from common.errors import UserError
from recipe.config import Recipe
from recipe.course import Course
from tools.branching.plan import RULES, Branch, Plan
from tools.planning import workload

LEAST_TOLERANCE = 0.04  # of the loss: see docs/batch.md
_SPREADS = 2.0  # in a tolerance


class Result(NamedTuple):
    """One branch at its end.

    excess: of its loss over that of the first branch, relative to it.
    recovered: whether the excess is within the tolerance.
    """

    branch: Branch
    loss: float
    excess: float
    recovered: bool


class Point(NamedTuple):
    """A checkpoint.

    loss: of the first branch.
    spread: the largest difference of its loss to that of another order, relative to it.
    tolerance: of an excess.
    results: by rule, by rising batch.
    multiples: the largest that recovered, by rule.
    """

    step: int
    loss: float
    spread: float
    tolerance: float
    results: Dict[str, List[Result]]
    multiples: Dict[str, int]

    @property
    def multiple(self) -> int:
        """Return the critical batch over the run's batch."""
        return max(self.multiples.values())


class Growth(NamedTuple):
    """A batch that grows along the curve.

    rule: of the rate.
    pairs: of batch.schedule.
    updates: of a whole run.
    """

    rule: str
    pairs: List[Tuple[int, int]]
    updates: int


def judge(plan: Plan, losses: Mapping[Branch, float]) -> List[Point]:
    """Return what the branches have shown at each checkpoint.

    Args:
        plan: of the branches.
        losses: validation loss of each branch at its end; NaN or infinite where it diverged.

    Raises:
        UserError: a branch with the run's own batch diverged.
    """
    return [_judge_point(plan, step, losses) for step in plan.points]


def _judge_point(plan: Plan, step: int, losses: Mapping[Branch, float]) -> Point:
    """Return what the branches from one checkpoint have shown."""
    # Branches with the run's own batch differ by chance alone: their spread sets the tolerance.
    first, *others = [losses[branch] for branch in plan.first_branches(step)]
    if not all(map(math.isfinite, (first, *others))):
        raise UserError(
            f"a branch with the run's own batch from step {step} has no finite loss; "
            "branch a run with a lower schedule.peak"
        )
    spread = max(abs(other / first - 1) for other in others)
    tolerance = max(LEAST_TOLERANCE, _SPREADS * spread)
    results = {}
    multiples = {}
    for rule in RULES:
        of_rule = []
        for multiple in plan.multiples:
            branch = Branch(step, multiple, rule)
            of_rule.append(_result(branch, losses[branch], first, tolerance))
        results[rule] = of_rule
        multiples[rule] = _largest_recovered(of_rule)
    return Point(
        step=step,
        loss=first,
        spread=spread,
        tolerance=tolerance,
        results=results,
        multiples=multiples,
    )


def _result(branch: Branch, loss: float, first: float, tolerance: float) -> Result:
    """Return how a branch ended.

    Args:
        branch: with a larger batch.
        loss: at its end.
        first: loss of the first branch from its checkpoint.
        tolerance: of the excess.
    """
    excess = math.inf
    if math.isfinite(loss):
        excess = loss / first - 1
    return Result(branch, loss, excess, recovered=excess <= tolerance)


def _largest_recovered(results: Sequence[Result]) -> int:
    """Return the multiple up to which all have recovered; 1 if the first has not."""
    largest = 1
    for result in results:
        # A larger batch that recovers after one that has not does so by chance.
        if not result.recovered:
            break
        largest = result.branch.multiple
    return largest


def critical(plan: Plan, points: Sequence[Point]) -> float:
    """Return the critical batch of the whole run, in images.

    It is the geometric mean over the checkpoints.

    Args:
        plan: of the branches.
        points: all checkpoints.
    """
    logarithms = [math.log(point.multiple) for point in points]
    return plan.batch * math.exp(sum(logarithms) / len(logarithms))


def is_bound(plan: Plan, points: Sequence[Point]) -> bool:
    """Return whether the critical batch may be larger than `critical` says.

    It may if the largest multiple that was tried has recovered at a checkpoint.

    Args:
        plan: of the branches.
        points: all checkpoints.
    """
    return any(point.multiple == plan.largest for point in points)


def growth(plan: Plan, points: Sequence[Point], recipe: Recipe) -> Optional[Growth]:
    """Return the schedule with the fewest updates, by either rule.

    From each checkpoint on it has the critical batch there, but nowhere a larger one than later:
    batches do not shrink.

    Args:
        plan: of the branches.
        points: all checkpoints.
        recipe: of the run.

    Returns:
        The schedule; None where no batch recovered all along.
    """
    candidates = []
    for rule in RULES:
        pairs = _pairs(plan.batch, points, rule)
        # Updates also end where epochs end, so they are counted.
        schedule = [list(pair) for pair in pairs]
        changed = workload.changed(recipe, "batch", schedule=schedule)
        updates = sum(1 for _ in Course(changed, plan.per_epoch, plan.total).updates())
        candidates.append(Growth(rule, pairs, updates))
    best = min(candidates, key=lambda candidate: candidate.updates)
    # A schedule of one pair is the batch that the run has.
    return best if len(best.pairs) > 1 else None


def _pairs(batch: int, points: Sequence[Point], rule: str) -> List[Tuple[int, int]]:
    """Return (images, batch) for each checkpoint from which on a larger batch recovers."""
    pairs = [(0, batch)]
    for number, point in enumerate(points):
        # Batches do not shrink, so the smallest of all later ones is the limit.
        multiple = min(later.multiples[rule] for later in points[number:])
        if batch * multiple > pairs[-1][1]:
            pairs.append((point.step * batch, batch * multiple))
    return pairs

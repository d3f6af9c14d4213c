"""A branched run as lines, as JSON and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence

from common.text import count, duration
from recipe.batch import rate_factor
from recipe.section import as_yaml
from tools import output
from tools.branching import decision
from tools.branching.decision import Growth, Point
from tools.branching.plan import RULES, Plan, share_for
from tools.branching.source import Source
from tools.formats import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_DRAWN = 0.5  # of an excess: larger ones are drawn there
_STYLES = dict(zip(RULES, ("o-", "s--")))


def announcement(source: Source, plan: Plan) -> Iterator[str]:
    """Yield the lines that tell, before anything is trained, what will be and what it costs.

    Args:
        source: the run.
        plan: of its branches.
    """
    branches = len(plan.branches())
    checkpoints = count(len(plan.points), "checkpoint")
    images = plan.steps * plan.batch
    largest = f"{plan.largest} x {plan.batch:,}"
    yield (
        f"branches   {branches} from {checkpoints}, of {images:,} images each, "
        f"with up to {largest} images an update"
    )
    share = percent(plan.share, 1)
    time = duration(source.seconds(plan))
    # A run without evaluations shows no time that they take.
    scored = "" if source.pause is None else " and evaluations"
    yield (
        f"cost       {plan.images:,} images, {share} of the run's; "
        f"about {time} at its {source.images_per_second:,.0f} images a second{scored}, "
        f"without the starts of {branches} processes"
    )


def lines(plan: Plan, points: Sequence[Point], growth: Optional[Growth]) -> Iterator[str]:
    """Yield a table of all branches, the critical batch of the run, and the schedule to be pasted.

    Args:
        plan: of the branches.
        points: all checkpoints.
        growth: the schedule; None where there is none.
    """
    yield from _table(plan, points)
    critical = decision.critical(plan, points)
    # Where the largest batch that was tried has recovered, a larger one might.
    bound = ">= " if decision.is_bound(plan, points) else ""
    yield f"critical   {bound}{critical:,.0f} images over the whole run"
    if bound:
        yield f"           {plan.largest} x recovered; {_next(plan)}"
    if growth is None:
        yield "schedule   none: at the last checkpoint twice the batch has not recovered"
        return
    yield f"schedule   {growth.updates:,} updates instead of {plan.total:,}; to be pasted into the recipe:"
    pairs = [list(pair) for pair in growth.pairs]
    yield "batch:"
    yield f"  schedule: {as_yaml(pairs)}"
    yield f"  rate_rule: {growth.rule}"


def _next(plan: Plan) -> str:
    """Return how twice the largest batch can be tried."""
    more = 2 * plan.largest
    if plan.is_bound_by_epoch:
        steps = count(plan.per_epoch, "step")
        return f"an epoch of {steps} is too short for {more} x: branch a run with a smaller batch"
    # Rounded up, so that the share that is named suffices.
    share = share_for(plan, more) + 0.005
    return f"--share {share:.2f} --output FOLDER tries {more} x"


def _table(plan: Plan, points: Sequence[Point]) -> Iterator[str]:
    """Yield a head, and a row for each checkpoint and rule."""
    batches = "".join(f"{multiple} x".rjust(9) for multiple in plan.multiples)
    yield f"{'step':>9} {'epoch':>7} {'spread':>7} {'tolerance':>9}  {'rate by':<7}{batches}  critical"
    for point in points:
        epoch = point.step / plan.per_epoch
        place = f"{point.step:9,} {epoch:7.3g}"
        limits = f"{percent(point.spread, 1):>7} {percent(point.tolerance, 1):>9}"
        for rule in RULES:
            excesses = [_excess(result.excess).rjust(9) for result in point.results[rule]]
            multiple = point.multiples[rule]
            # All batches that were tried have recovered.
            bound = ">= " if multiple == plan.largest else ""
            critical = f"{bound}{plan.batch * multiple:,}"
            yield f"{place} {limits}  {rule:<7}{''.join(excesses)}  {critical}"


def _excess(value: float) -> str:
    """Return an excess as percentage."""
    return f"{100 * value:+.1f} %" if math.isfinite(value) else "diverged"


def as_data(
    source: Source,
    plan: Plan,
    points: Sequence[Point],
    growth: Optional[Growth],
) -> Dict[str, Any]:
    """Return everything as one object, which depends on the run and its branches alone.

    Args:
        source: the run.
        plan: of the branches.
        points: all checkpoints.
        growth: the schedule; None where there is none.
    """
    # No times of this command: the same branches give the same bytes.
    return {
        "batch": plan.batch,
        "cost": {
            "branches": len(plan.branches()),
            "images": plan.images,
            "share": plan.share,
            "seconds": source.seconds(plan),
        },
        "critical_batch": decision.critical(plan, points),
        "is_bound": decision.is_bound(plan, points),
        "points": [_point_data(source.rate(point.step), plan, point) for point in points],
        "schedule": None if growth is None else growth._asdict(),
    }


def _point_data(rate: float, plan: Plan, point: Point) -> Dict[str, Any]:
    """Return a checkpoint as data. rate: the run's learning rate there."""
    rules: Dict[str, Any] = {}
    for rule in RULES:
        # By rule, as a rule may recover where the other does not.
        rules[rule] = {
            "critical_batch": plan.batch * point.multiples[rule],
            "branches": _branch_data(rate, plan.batch, rule, point),
        }
    return {
        "step": point.step,
        "images": point.step * plan.batch,
        "epoch": point.step / plan.per_epoch,
        "rate": rate,
        "loss": point.loss,
        "spread": point.spread,
        "tolerance": point.tolerance,
        "critical_batch": plan.batch * point.multiple,
        "rules": rules,
    }


def _branch_data(rate: float, batch: int, rule: str, point: Point) -> List[Dict[str, Any]]:
    """Return the branches from a checkpoint by one rule as data.

    Args:
        rate: the run's learning rate at the checkpoint.
        batch: images of the run's update.
        rule: by which rates follow the batch.
        point: the checkpoint.
    """
    branches = []
    for result in point.results[rule]:
        # JSON has no infinity: losses of branches that diverged become null.
        multiple = result.branch.multiple
        branch = {
            "multiple": multiple,
            "batch": multiple * batch,
            "rate": rate * rate_factor(rule, multiple),
            "loss": result.loss,
            "excess": result.excess,
            "recovered": result.recovered,
        }
        branches.append(branch)
    return branches


def draw(plan: Plan, points: Sequence[Point], growth: Optional[Growth], path: Path) -> None:
    """Draw the critical batch along the run, and the losses of all branches by their batch.

    Args:
        plan: of the branches.
        points: all checkpoints.
        growth: the schedule; None where there is none.
        path: of the picture.

    Raises:
        ConfigError: `path` names no kind of picture.
    """
    figure = output.figure(path, (10, 4.2))
    left, right = figure.subplots(1, 2)
    _draw_curve(left, plan, points, growth)
    _draw_losses(right, plan, points)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    output.save(figure, path)


def _draw_curve(
    axis: Axes,
    plan: Plan,
    points: Sequence[Point],
    growth: Optional[Growth],
) -> None:
    """Draw the critical batch along the run."""
    epochs = [point.step / plan.per_epoch for point in points]
    for number, rule in enumerate(RULES):
        batches = [plan.batch * point.multiples[rule] for point in points]
        axis.plot(epochs, batches, _STYLES[rule], color=f"C{number}", label=f"rate by {rule}")
    if growth is not None:
        _draw_growth(axis, plan, growth)
    axis.axhline(plan.batch, color="grey", ls="--", lw=0.8)
    axis.set(xlabel="epoch", ylabel="images", title="critical batch; dashed: the run's batch")
    # Batches are the run's times a power of two.
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.legend(fontsize=8)


def _draw_growth(axis: Axes, plan: Plan, growth: Growth) -> None:
    """Draw the schedule of the batch over epochs."""
    images_per_epoch = plan.batch * plan.per_epoch
    starts = [first / images_per_epoch for first, _ in growth.pairs]
    batches = [batch for _, batch in growth.pairs]
    # The last batch of the schedule holds up to the end of the run.
    starts.append(plan.total / plan.per_epoch)
    batches.append(batches[-1])
    axis.step(starts, batches, where="post", color="grey", label="schedule")


def _draw_losses(axis: Axes, plan: Plan, points: Sequence[Point]) -> None:
    """Draw the excess of all branches by their batch."""
    batches = [plan.batch * multiple for multiple in plan.multiples]
    for number, point in enumerate(points):
        epoch = point.step / plan.per_epoch
        colour = f"C{number}"
        for rule, style in _STYLES.items():
            # A branch that diverged has an infinite excess.
            drawn = [100 * min(result.excess, _MOST_DRAWN) for result in point.results[rule]]
            label = f"epoch {epoch:.3g}, {rule}"
            axis.plot(batches, drawn, style, color=colour, label=label)
        axis.axhline(100 * point.tolerance, color=colour, ls=":", lw=0.8)
    axis.set(
        xlabel="images in an update",
        ylabel="%",
        title="loss above the first branch's; dotted: tolerances",
    )
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axis.legend(fontsize=7)

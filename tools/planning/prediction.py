"""Predicted costs of a run with other batches, as lines, as JSON and as a picture."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, NamedTuple, Optional, Sequence

from common.text import count
from tools import output
from tools.formats import duration
from tools.planning import batches
from tools.planning.batches import Cost, Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 100  # of a line of text


class Prediction(NamedTuple):
    """Costs of a run with other batches.

    run: its intervals.
    batch: its own.
    replicas: on which seconds are predicted.
    critical: the critical batch; None where it cannot be predicted, then there are no costs.
    costs: by batch.
    """

    run: Sequence[Interval]
    batch: int
    replicas: int
    critical: Optional[float]
    costs: Sequence[Cost]


def lines(prediction: Prediction) -> Iterator[str]:
    """Yield the noise scale and the critical batch, and a table of the costs of a `prediction`."""
    run = prediction.run
    updates = sum(part.updates for part in run)
    images = sum(part.updates * part.batch for part in run)
    scales = _scales(run)
    yield f"run        {updates:,.0f} updates of {images / updates:,.0f} images"
    if prediction.critical is None:
        yield f"critical   unknown; noise scale {scales}"
        yield from textwrap.wrap(
            "For most updates the gradient is lost in its noise, or zero is within two standard "
            "errors of the noise scale, so nothing is predicted from it. A longer run measures it "
            "better, and so does one with more micro batches in an update.",
            _WIDTH,
        )
        return
    critical = f"{prediction.critical:,.0f} images over the whole run"
    yield f"critical   {critical}; noise scale {scales}"
    yield from _table(prediction.costs, images)
    # Times depend on the replicas, which are the same for all batches.
    if prediction.costs[0].seconds is not None:
        yield f"times on {count(prediction.replicas, 'replica')}"


def _table(costs: Sequence[Cost], images: float) -> Iterator[str]:
    """Yield a row for each batch, and how far to trust them. images: of the run."""
    head = (
        f"{'batch':>9} {'updates':>10} {'(range)':>19} {'images':>13} {'x images':>9} {'time':>12}"
    )
    yield head
    for cost in costs:
        yield _row(cost, images)
    # Where predictions were tested, they were too high.
    if any(cost.upper_bound for cost in costs):
        yield from textwrap.wrap(f"{batches.BIAS}.", _WIDTH)


def _scales(run: Sequence[Interval]) -> str:
    """Return the noise scale at the beginning, the middle and the end, as it changes along a run."""
    shown = run
    if len(run) > 2:
        shown = [run[0], run[len(run) // 2], run[-1]]
    return ", ".join(f"{_scale(part)} by epoch {part.epoch:.3g}" for part in shown)


def _row(cost: Cost, images: float) -> str:
    """Return a row of the table. images: of the run."""
    low, high = cost.updates_range
    span = f"{low:,.0f}-{high:,.0f}"
    bound = "<= " if cost.upper_bound else ""
    updates = f"{bound}{cost.updates:,.0f}"
    ratio = cost.images / images
    # In the columns of the head: see `_table`.
    cells = [
        f"{cost.batch:9,}",
        f"{updates:>10}",
        f"{span:>19}",
        f"{cost.images:13,.0f}",
        f"{ratio:9.2f}",
    ]
    if cost.seconds is not None:
        cells.append(f"{duration(cost.seconds):>12}")
    return " ".join(cells)


def _scale(interval: Interval) -> str:
    """Return a noise scale with its error; no figure where zero is within two of it."""
    if not interval.known:
        return "unknown"
    return f"{interval.noise:,.0f} ± {interval.error:,.0f}"


def as_data(prediction: Prediction) -> Dict[str, Any]:
    """Return a `prediction` as one object."""
    run = []
    for part in prediction.run:
        run.append({**part._asdict(), "known": part.known})
    biased = any(cost.upper_bound for cost in prediction.costs)
    # Other programs read these keys.
    return {
        "batch": prediction.batch,
        "critical_batch": prediction.critical,
        "run": run,
        "costs": [cost._asdict() for cost in prediction.costs],
        "bias": batches.BIAS if biased else None,
    }


def draw(prediction: Prediction, path: Path) -> None:
    """Draw the noise scale along the run, and updates over images by batch.

    Args:
        prediction: of a run.
        path: of the picture.

    Raises:
        ConfigError: `path` names no kind of picture.
    """
    figure = output.figure(path, (10, 4.2))
    left, right = figure.subplots(1, 2)
    _draw_noise(left, prediction)
    _draw_costs(right, prediction.costs)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    output.save(figure, path)


def _draw_noise(axis: Axes, prediction: Prediction) -> None:
    """Draw the noise scale along the run, where it is known."""
    axis.set(xlabel="epoch", ylabel="images", title="noise scale; dashed: the run's batch")
    axis.axhline(prediction.batch, color="grey", ls="--", lw=0.8)
    known = [part for part in prediction.run if part.known]
    # A logarithmic axis without a point would have no limits.
    if known:
        epochs = [part.epoch for part in known]
        noise = [part.noise for part in known]
        errors = [part.error for part in known]
        axis.errorbar(epochs, noise, errors, fmt="o", ms=3, color="C0")
        axis.set_yscale("log")
        output.few_ticks(axis.yaxis)


def _draw_costs(axis: Axes, costs: Sequence[Cost]) -> None:
    """Draw the updates over the images to the same point, with a label for each batch."""
    title = "to the same point, by batch" if costs else "updates: unknown"
    axis.set(xlabel="images", ylabel="updates", title=title)
    if not costs:
        return
    # Where nothing is predicted, the panel has a title alone.
    images: List[float] = [cost.images for cost in costs]
    updates: List[float] = [cost.updates for cost in costs]
    axis.plot(images, updates, "o-", color="C1")
    axis.set(xscale="log", yscale="log")
    output.few_ticks(axis.xaxis)
    output.few_ticks(axis.yaxis)
    for cost in costs:
        bound = ", at most" if cost.upper_bound else ""
        place = (cost.images, cost.updates)
        axis.annotate(f"{cost.batch:,}{bound}", place, fontsize=8)

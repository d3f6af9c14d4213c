"""Trials of a sweep: their records in the study, and the progress that a metrics.jsonl shows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from recipe.config import Recipe
from tools.reporting.run import Run, epoch_and_seconds, read_metrics, total_steps, validation_sets
from tools.sweeping.candidates import Parameters
from training.metrics import NAME

COMPLETE = "complete"
PRUNED = "pruned"
IMPOSSIBLE = "impossible"
FAILED = "failed"
RUNNING = "running"
STATES = (COMPLETE, PRUNED, IMPOSSIBLE, FAILED, RUNNING)


class Record(NamedTuple):
    """A trial in the study.

    trial: its number.
    state: one of STATES.
    value: of the metric; if not complete, that of its last evaluation.
    parameters: that it has drawn.
    epochs, seconds: of training.
    reason: why it is not complete.
    """

    trial: int
    state: str
    value: Optional[float]
    parameters: Parameters
    epochs: Optional[float]
    seconds: Optional[float]
    reason: Optional[str]


class Progress(NamedTuple):
    """A run so far.

    values: of the metric at each evaluation; NaN: not finite, or not there yet.
    last_is_final: the last of them is that of the run's end.
    ended: the run has written its end.
    epochs, seconds: of training, over all its sessions.
    """

    values: Sequence[float] = ()
    last_is_final: bool = False
    ended: bool = False
    epochs: Optional[float] = None
    seconds: Optional[float] = None


def progress(run_folder: Path, metric: str, recipe: Recipe) -> Progress:
    """Read the progress of a run.

    Args:
        run_folder: of the run; it may not be there yet.
        metric: best_top1 (the largest top-1 up to each evaluation), or a value of `eval` events; of
            an average after a dot.
        recipe: of the run.
    """
    # Only events matter here, which are read again and again: starts are left out.
    run = Run(run_folder, recipe, "", read_metrics(run_folder / NAME), [])
    events = run.metrics.evaluation
    values: Sequence[float]
    if metric == "best_top1":
        values = _best_so_far(events["top1"], validation_sets(events))
    else:
        # Values within an average are columns with a slash.
        values = events[metric.replace(".", "/")]
    total = total_steps(run)
    epochs, seconds = epoch_and_seconds(run.metrics)
    # A run may have been evaluated at its last step and not have ended yet.
    return Progress(
        values=tuple(values),
        last_is_final=bool(events) and total is not None and events["step"][-1] >= total,
        ended=bool(run.metrics.end),
        epochs=epochs,
        seconds=seconds,
    )


def _best_so_far(values: Sequence[float], sets: Sequence[float]) -> List[float]:
    """Return the largest value of the same set up to each one; NaN until there is a number."""
    best = math.nan
    bests = []
    newest = None
    for value, number in zip(values, sets):
        # Scores of other validation images are not compared.
        if number != newest:
            best = math.nan
            newest = number
        # No number is larger than NaN, so the first one has to be let through.
        if value > best or math.isnan(best):
            best = value
        bests.append(best)
    return bests

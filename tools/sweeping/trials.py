"""Trials of a sweep: their records in the study, and the progress that a metrics.jsonl shows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple, Optional, Sequence

from recipe.config import Recipe
from tools.reporting.run import Run, epoch_and_seconds, read_metrics, total_steps
from tools.sweeping.candidates import Parameters
from training.metrics import NAME

COMPLETE, PRUNED, IMPOSSIBLE, FAILED, RUNNING = "complete", "pruned", "impossible", "failed", "running"
STATES = (COMPLETE, PRUNED, IMPOSSIBLE, FAILED, RUNNING)


class Record(NamedTuple):
    """A trial in the study."""

    trial: int  # its number
    state: str  # one of STATES
    value: Optional[float]  # of the metric; if not complete, that of its last evaluation
    parameters: Parameters
    epochs: Optional[float]
    seconds: Optional[float]  # of training
    reason: Optional[str]  # why it is not complete


class Progress(NamedTuple):
    """A run so far."""

    values: Sequence[float] = ()  # of the metric at each evaluation; NaN: not finite, or not there yet
    last_is_final: bool = False  # the last of them is that of the run's end
    ended: bool = False
    epochs: Optional[float] = None
    seconds: Optional[float] = None  # of training, over all its sessions


def progress(run_folder: Path, metric: str, recipe: Recipe) -> Progress:
    """Progress of the run of `recipe` in a folder, which may not be there yet.

    metric: best_top1 (the largest top-1 up to each evaluation), or a value of `eval` events; of an average after a dot.
    """
    run = Run(run_folder, recipe, "", read_metrics(run_folder / NAME), [])
    events, total = run.metrics.evaluation, total_steps(run)
    values = events["top1" if metric == "best_top1" else metric.replace(".", "/")]
    if metric == "best_top1":
        values = itertools.accumulate(values, lambda best, value: best if best >= value or value != value else value)
    final = bool(events) and total is not None and events["step"][-1] >= total
    return Progress(tuple(values), final, bool(run.metrics.end), *epoch_and_seconds(run))

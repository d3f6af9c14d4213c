"""Trials of a sweep: their records in the study, and the progress that a metrics.jsonl shows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from recipe.batch import in_steps
from recipe.config import Recipe
from tools.sweeping.candidates import Parameters
from training.metrics import read_events

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

    values: Sequence[Optional[float]] = ()  # of the metric at each evaluation; None: not finite, or not there yet
    last_is_final: bool = False  # the last of them is that of the run's end
    ended: bool = False
    epochs: Optional[float] = None
    seconds: Optional[float] = None  # of training, over all its sessions


def progress(run_folder: Path, metric: str, recipe: Recipe) -> Progress:
    """Progress of the run of `recipe` in a folder, which may not be there yet.

    Args:
        metric: best_top1 (the largest top-1 up to each evaluation), or a value of `eval` events, of an average after
            its name and a dot.

    Raises:
        UserError: metrics.jsonl is damaged.
    """
    if not (run_folder / "metrics.jsonl").exists():
        return Progress()
    events = read_events(run_folder)
    train, evaluations, end = (events.get(kind, []) for kind in ("train", "eval", "end"))
    timed = [*train, *end]
    return Progress(
        _values(evaluations, metric),
        bool(evaluations) and _is_final(evaluations[-1], recipe),
        bool(end),
        max((event.get("epoch") or 0.0 for event in (*train, *evaluations)), default=None),
        timed[-1].get("seconds") if timed else None,
    )


def _values(evaluations: List[dict], metric: str) -> List[Optional[float]]:
    if metric == "best_top1":
        return list(itertools.accumulate(_values(evaluations, "top1"), _larger))
    average, _, name = metric.rpartition(".")
    scores = [event.get(average) if average else event for event in evaluations]
    values = [each.get(name) if isinstance(each, dict) else None for each in scores]
    return [value if type(value) in (int, float) else None for value in values]


def _larger(*values: Optional[float]) -> Optional[float]:
    return max((value for value in values if value is not None), default=None)


def _is_final(evaluation: dict, recipe: Recipe) -> bool:
    if not evaluation.get("epoch"):
        return False
    per_epoch = round(evaluation["step"] / evaluation["epoch"])
    run = recipe.run
    total = max(1, in_steps(run.epochs, run.steps, run.images, per_epoch, recipe.batch.global_))
    return evaluation["step"] >= total

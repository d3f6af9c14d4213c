"""Trials of a sweep: the record that the study has of each, and its progress as its metrics.jsonl shows it."""

from __future__ import annotations

from pathlib import Path
from typing import List, NamedTuple, Optional

from recipe.batch import in_steps
from recipe.config import Recipe
from tools.sweeping.candidates import Parameters
from training.metrics import read_events

COMPLETE, PRUNED, IMPOSSIBLE, FAILED, RUNNING = "complete", "pruned", "impossible", "failed", "running"
STATES = (COMPLETE, PRUNED, IMPOSSIBLE, FAILED, RUNNING)


class Record(NamedTuple):
    """A trial in the study."""

    number: int
    state: str  # one of STATES
    parameters: Parameters
    value: Optional[float]  # of the metric; if not complete, that of its last evaluation
    epochs: Optional[float]
    seconds: Optional[float]  # of training
    reason: Optional[str]  # why it is not complete


class Progress(NamedTuple):
    """A run so far. Without a run all is empty."""

    values: List[Optional[float]]  # of the metric at each evaluation; None: not finite, or not there yet
    last_is_final: bool  # the last of them is that of the run's end
    ended: bool
    epochs: Optional[float]
    seconds: Optional[float]  # of training, over all its sessions


def progress(run_folder: Path, metric: str, recipe: Recipe) -> Progress:
    """Progress of the run of `recipe` in a folder.

    Args:
        metric: best_top1 (the largest top-1 up to each evaluation), or a value of `eval` events, of an average after
            its name and a dot.

    Raises:
        UserError: metrics.jsonl is damaged.
    """
    if not (run_folder / "metrics.jsonl").exists():
        return Progress([], False, False, None, None)
    events = read_events(run_folder)
    evaluations = events.get("eval", [])
    timed = [*events.get("train", []), *events.get("end", [])]
    return Progress(
        _values(evaluations, metric),
        bool(evaluations) and _is_final(evaluations[-1], recipe),
        "end" in events,
        max((event.get("epoch") or 0.0 for kind in ("train", "eval") for event in events.get(kind, [])), default=None),
        timed[-1].get("seconds") if timed else None,
    )


def _values(evaluations: List[dict], metric: str) -> List[Optional[float]]:
    if metric != "best_top1":
        average, _, name = metric.rpartition(".")
        found = [_inner(event, average).get(name) for event in evaluations]
        return [value if type(value) in (int, float) else None for value in found]
    values: List[Optional[float]] = []
    for event in evaluations:
        seen = [value for value in (*values[-1:], event.get("top1")) if value is not None]
        values.append(max(seen, default=None))
    return values


def _inner(event: dict, name: str) -> dict:
    """The event, or the object of that name in it."""
    inner = event.get(name) if name else event
    return inner if isinstance(inner, dict) else {}


def _is_final(evaluation: dict, recipe: Recipe) -> bool:
    if not evaluation.get("epoch"):
        return False
    per_epoch = round(evaluation["step"] / evaluation["epoch"])
    run = recipe.run
    total = max(1, in_steps(run.epochs, run.steps, run.images, per_epoch, recipe.batch.global_))
    return evaluation["step"] >= total

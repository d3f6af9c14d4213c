"""What a run reports once it has come to its end, and what the user may want to do otherwise."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional

from common import cores
from common.text import count, duration
from engines.base import AVERAGES
from recipe.config import Recipe
from training import log_line
from training.monitor import pace, workers_needed
from training.progression import Progression
from training.scoring import accuracy
from training.weights import TRAINED

_INPUT_BOUND = 0.1  # share of the training time above which waiting for images is worth a word


class Ending(NamedTuple):
    """A run that has come to its end.

    recipe: of the run.
    progression: as the run ended, with the sums of all its sessions.
    updates: made or left out, fewer than steps where the batch has a schedule.
    total: steps of the recipe, more than were done where `evaluation.patience` ended the run.
    """

    recipe: Recipe
    progression: Progression
    updates: int
    total: int

    @property
    def images(self) -> int:
        """Return how many images were trained on."""
        return self.progression.step * self.recipe.batch.global_

    @property
    def pace(self) -> float:
        """Return images a second, with evaluation and checkpoints."""
        return self.images / self.progression.seconds

    @property
    def waited(self) -> float:
        """Return the share of the training time that went to waiting for images."""
        # Evaluations also wait for images, but more workers for training would not shorten them.
        training_seconds = max(self.progression.seconds - self.progression.paused, 1e-9)
        return self.progression.waited / training_seconds

    @property
    def workers_needed(self) -> Optional[int]:
        """Return how many workers would keep up; None where waiting was short."""
        if self.waited <= _INPUT_BOUND:
            return None
        return workers_needed(self.recipe.data.workers, self.waited)

    @property
    def is_early(self) -> bool:
        """Tell whether evaluations found nothing better for so long that the run ended."""
        return self.progression.has_lost_patience(self.recipe.evaluation.patience)


def values_of(ending: Ending) -> Dict[str, Any]:
    """Return the numbers of the last event, by which reports judge a finished run.

    Args:
        ending: of the run.
    """
    scores = ending.progression.scores
    workers = ending.workers_needed
    values = {
        "top1": scores["top1"],
        "top5": scores["top5"],
        "best_top1": ending.progression.best_top1,
    }
    for name in AVERAGES:
        if name in scores:
            values[name] = scores[name]
    values.update(
        images=ending.images,
        images_per_second=ending.pace,
        seconds=ending.progression.seconds,
        data_wait=ending.waited,
        input_bound=workers is not None,
        workers_needed=workers,
    )
    return values


def lines(ending: Ending) -> List[str]:
    """Return what is printed: why the run ended early, its scores, and what went wrong in it.

    Args:
        ending: of the run.
    """
    printed = [_result(ending)]
    if ending.is_early:
        printed.insert(0, _why_early(ending))
    if 2 * ending.progression.skipped > ending.updates:
        printed.append(
            "most updates were skipped: their gradients were not finite, and only the others "
            "changed the weights; start a new run with a lower schedule.peak (or "
            "peak_per_image) or precision.loss_scale"
        )
    workers = ending.workers_needed
    if workers is not None:
        printed.append(
            f"input-bound: {ending.waited:.0%} of the training time went to waiting for images; "
            f"data.workers={workers} would keep up instead of {ending.recipe.data.workers}, "
            f"given a core for each (here: {cores.available()})"
        )
    return printed


def _why_early(ending: Ending) -> str:
    """Return the line about a run that ends before its last step."""
    progression = ending.progression
    done = f"step {progression.step} of {ending.total}"
    evaluations = count(progression.without_better, "evaluation")
    best = f"{progression.best_of_all:.2%}"
    return f"ended at {done}: {evaluations} without a better top1 than {best} (evaluation.patience)"


def _result(ending: Ending) -> str:
    """Return the line with scores, duration and images a second."""
    progression = ending.progression
    scores = progression.scores
    classes = ending.recipe.model.classes
    parts = [f"done: {accuracy(scores['top1'], scores['top5'], classes)}"]
    which = progression.best_weights
    whose = "trained weights" if which == TRAINED else which.replace("_", " ")
    parts.append(f"best top1 {progression.best_of_all:.2%} ({whose})")
    for name in AVERAGES:
        if name in scores:
            parts.append(f"{name.replace('_', ' ')} {scores[name]['top1']:.2%}")
    seconds = duration(progression.seconds)
    parts.append(f"{seconds}, {pace(ending.pace)} with evaluation and checkpoints")
    if progression.skipped:
        has_schedule = bool(ending.recipe.batch.schedule)
        parts.append(log_line.skipped_updates(progression.skipped, progression.step, has_schedule))
    return "  ".join(parts)

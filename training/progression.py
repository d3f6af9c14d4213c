"""How far a run is: the state of the loop itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from training.weights import TRAINED


@dataclass
class Progression:
    """State of the loop, saved in every checkpoint; older checkpoints lack what has a default.

    step: steps done, of `batch.global` images each.
    metrics_bytes: length of metrics.jsonl.
    logged_checkpoint: whether the checkpoint's own event follows.
    seconds: of all sessions; paused: those not spent training; waited: those a device waited for
        images.
    loss, correct, images, steps_in_window: sums since the last log line.
    unreadable: images that could not be decoded.
    best_top1: of the trained weights.
    best_of_all: of these and the averages, among which --best chooses; best_weights: whose it is,
        of equal ones those that --best takes.
    lines_above_limit: the last log lines in a row whose loss is above run.loss_limit.
    images_digest: of the images that are trained on.
    rounding: version of the random bits that round weights.
    skipped: updates left out until the last log line.
    scores: of the last evaluation.
    growth: see recipe.course.Course.
    without_better: the last evaluations in a row whose best top-1 was not above best_of_all.
    validation_set: how often the run has gone on with other validation images.
    updates: made or left out, from which the next one has its index; None where all of them were
        made by the recipe's course with the images of now.
    """

    # Each number has a default, so that a checkpoint of an older version can be read: a new number
    # needs one that means what that version did.
    step: int = 0
    metrics_bytes: int = 0
    logged_checkpoint: bool = False
    seconds: float = 0.0
    loss: float = 0.0
    correct: int = 0
    images: int = 0
    steps_in_window: int = 0
    unreadable: int = 0
    paused: float = 0.0
    waited: float = 0.0
    best_top1: float = 0.0
    best_of_all: float = 0.0
    best_weights: str = TRAINED
    lines_above_limit: int = 0
    images_digest: str = ""
    rounding: int = 1
    skipped: int = 0
    scores: dict = field(default_factory=dict)
    growth: list = field(default_factory=list)
    without_better: int = 0
    validation_set: int = 0
    updates: Optional[int] = None

    def has_lost_patience(self, patience: Optional[int]) -> bool:
        """Return whether so many evaluations in a row found nothing better.

        Args:
            patience: that many; None for any number.
        """
        return patience is not None and self.without_better >= patience

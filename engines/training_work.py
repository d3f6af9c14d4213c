"""One training step as the schedules see it: images, losses, and gradients added up."""

from __future__ import annotations

from typing import Callable, Optional

import torch

from engines.base import summable
from engines.feed import Feed
from engines.listeners import Listeners
from models.stochastic import Draws
from optim.gradients import Gradients
from optim.loss_scale import LossScale
from parallel.work import Work


class TrainingWork(Work):
    """The work of one training step in this process; the same object for all steps.

    feed: of its images and labels.
    total: float64 [], losses added up, and correct: int64 [], top-1 hits; 0 except on the last
        stage.
    """

    def __init__(
        self,
        feed: Feed,
        draws: Draws,
        gradients: Gradients,
        *,
        loss_scale: LossScale,
        summed_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        listeners: Listeners,
        check: Callable[[], None],
        arm: Optional[Callable[[], None]],
    ):
        """
        Args:
            feed: of this process.
            draws: of the model's random layers.
            gradients: in which micro batches are added up.
            loss_scale: factor on the loss.
            summed_loss: returns the loss of logits, float32 [rows, classes], and targets, added up
                over the rows: float32 [].
            listeners: that time spans.
            check: raises where the run must not go on.
            arm: called before the last backward pass of a step; None where no exchange overlaps it.
        """
        self.feed = feed
        self.images = feed.images
        self.span = listeners.span
        self._draws = draws
        self._gradients = gradients
        self._loss_scale = loss_scale
        self._summed_loss = summed_loss
        self._check = check
        self._arm = arm
        self._device = gradients.flat.device
        self._rows = 0

    def start(self, rows: int) -> None:
        """Begin an update, of micro batches of so many `rows`; the feed has begun it."""
        self._rows = rows
        self.total = torch.zeros((), dtype=torch.float64, device=self._device)
        self.correct = torch.zeros((), dtype=torch.int64, device=self._device)
        self._gradients.zero()

    def before_forward(self, number: int) -> None:
        """Let random layers draw for micro batch `number`, counted in this replica."""
        # An elastic run whose replicas change leaves the step here, at the next micro batch.
        self._check()
        step, micro_batch = self.feed.place(number)
        self._draws.step = step
        self._draws.micro_batch = micro_batch

    def loss(self, number: int, logits: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, times the loss scale.

        An image that was left out counts as one with loss 0, so others keep their weight.

        Args:
            number: of the micro batch, counted in this replica.
            logits: [rows, classes], in the compute dtype.

        Returns:
            float32 [].
        """
        labels, targets = self.feed.targets(number)
        # Padding comes last, and has no labels.
        logits = logits[: len(labels)].float()
        loss = self._summed_loss(logits, targets) / self._rows
        # Both stay on the device: to read them would be to wait.
        self.total += summable(loss.detach())
        self.correct += (logits.detach().argmax(1) == labels).sum()
        return loss * self._loss_scale.scale

    def before_backward(self, part: int, last: bool) -> None:
        """Let the exchange begin within the `last` backward pass of a step."""
        if last and self._arm is not None:
            self._arm()

    def after_backward(self, part: int, last: bool) -> None:
        """Take in the gradients that a micro batch left in the parameters of a `part`."""
        self._gradients.accumulate(part)

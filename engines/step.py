"""One training step as the schedules see it: images in, losses out, gradients added up."""

from __future__ import annotations

from typing import Callable, ContextManager, Optional

import torch
from torch.nn import functional as F

from engines.base import summable
from engines.feed import Feed
from engines.timeline import Recorder
from models.stochastic import Draws
from optim.gradients import Gradients
from optim.loss_scale import LossScale
from parallel.work import Work


class TrainingStep(Work):
    """The state of one step in this process; used again for each step.

    total: float64 [], losses added up; correct: int64 [], top-1 hits. Both are 0 but on the last stage.
    """

    def __init__(
        self,
        feed: Feed,
        draws: Draws,
        gradients: Gradients,
        loss_scale: LossScale,
        recorder: Recorder,
        smoothing: float,
        arm: Optional[Callable[[], None]],
    ):
        """Args: arm: told that the last backward pass of the step follows, where the exchange can overlap it."""
        self._feed, self._draws, self._gradients = feed, draws, gradients
        self._loss_scale, self._recorder = loss_scale, recorder
        self._smoothing, self._arm = smoothing, arm

    def start(self, step: int, rows: int, device: torch.device) -> None:
        """Args: rows: of a micro batch. The feed must have been started."""
        self._step, self._rows = step, rows
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        self._gradients.zero()

    def images(self, number: int) -> torch.Tensor:
        return self._feed.images(number)

    def before_forward(self, number: int) -> None:
        self._draws.step, self._draws.micro_batch = self._step, self._feed.number_of(number)

    def loss(self, number: int, logits: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy; an image that was left out counts as one with loss 0, so others keep their weight."""
        valid, labels, targets = self._feed.targets(number)
        logits = logits[:valid].float()
        losses = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=self._smoothing)
        loss = losses / self._rows
        self.total += summable(loss.detach())
        self.correct += (logits.detach().argmax(1) == labels).sum()
        return loss * self._loss_scale.scale

    def before_backward(self, part: int, last: bool) -> None:
        if last and self._arm is not None:
            self._arm()

    def after_backward(self, part: int, last: bool) -> None:
        self._gradients.accumulate(part)

    def span(self, kind: str, number: int) -> ContextManager[None]:
        return self._recorder.span(kind, number)

"""One training step as the schedules see it: images in, losses out, gradients added up, and who did what when."""

from __future__ import annotations

import contextlib
import platform
import time
from typing import Callable, ContextManager, Iterator, List, Optional

import torch
from torch.nn import functional as F

from engines.base import Span, summable
from engines.feed import Feed
from models.stochastic import Draws
from optim.gradients import Gradients
from optim.loss_scale import LossScale
from optim.norms import Elsewhere
from parallel.processes import Processes
from parallel.topology import Topology
from parallel.work import Work


class Recorder:
    """Spans of time, while `on`; on CUDA each waits for the device, so that it is the device's time."""

    def __init__(self, topology: Topology, synchronize: Callable[[], None]):
        self._topology, self._synchronize = topology, synchronize
        self.on = False
        self.step = 0
        self._spans: List[Span] = []
        self._start = 0.0

    def span(self, kind: str, number: int = -1) -> ContextManager[None]:
        """Around what is to be recorded. number: of the micro batch within the replica's share."""
        return self._recorded(kind, number) if self.on else contextlib.nullcontext()

    def set_clock(self, processes: Processes) -> None:
        """All ranks start their clocks together."""
        processes.wait_for_all()
        self._start = time.monotonic()

    def common_clock(self, processes: Processes) -> List[Span]:
        """What was recorded, in seconds since all clocks were started; it is forgotten here.

        Ranks on one host have one clock, and the main rank's start counts. Those of other hosts differ from it by the
        time that a barrier takes to end, less than a millisecond in a good network.
        """
        starts = processes.gather((platform.node(), self._start))
        host, start = starts[0]
        if platform.node() != host:
            start = self._start
        spans, self._spans = self._spans, []
        return [span._replace(start=span.start - start, end=span.end - start) for span in spans]

    @contextlib.contextmanager
    def _recorded(self, kind: str, number: int) -> Iterator[None]:
        self._synchronize()
        start = time.monotonic()
        yield
        self._synchronize()
        place = self._topology
        self._spans.append(
            Span(place.replica, place.stage, place.rank, kind, number, self.step, start, time.monotonic())
        )


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


class AllRanks(Elsewhere):
    """What the update asks of other stages and replicas; carries the step's sums along with the first question."""

    def __init__(self, processes: Processes):
        self._processes = processes
        self.sums = torch.zeros(0)

    def carry(self, loss: torch.Tensor, correct: torch.Tensor) -> None:
        """What this rank adds to the sums of this step."""
        self._carried = loss, correct.double()

    def all_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """One message for all: `sums` is then float64 [3], ranks without finite gradients, losses, hits."""
        self.sums = self._processes.sum(torch.stack([(~finite).double(), *self._carried]))
        return self.sums[0] == 0

    def sum_over_stages(self, values: torch.Tensor) -> torch.Tensor:
        return self._processes.sum_over_stages(values)

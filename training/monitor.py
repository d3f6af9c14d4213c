"""Where the events of a run go: metrics.jsonl, loggers, and a progress bar (plain lines without a terminal)."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import Callable, Sequence, Tuple, Union

from recipe.errors import DONE
from training.loggers import Logger
from training.metrics import Metrics, NoMetrics

_TEXT_WIDTH = 100  # of a log line beside the bar


class Monitor:
    """Sends each event of a run to the metrics file, to the loggers, and to the terminal."""

    def __init__(self, metrics: Union[Metrics, NoMetrics], progress: Progress, loggers: Sequence[Logger]):
        self.metrics = metrics
        self.progress = progress
        self._loggers = loggers

    def event(self, kind: str, step: int, values: dict, text: str) -> None:
        """Sends one event: a line to metrics.jsonl, its numbers to each logger, `text` to the terminal."""
        self.metrics.write({"event": kind, "step": step, **values})
        for logger in self._loggers:
            logger.event(kind, step, values)
        self.progress.say(text)

    def close(self, exit_code: int = DONE) -> None:
        """Closes all of it, whatever fails. Args: exit_code: what the run ends with."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(self.metrics.close)
            for logger in self._loggers:
                last_first.callback(logger.close, exit_code)
            last_first.callback(self.progress.close)


class Progress:
    """Plain lines: for logs, pipes and machines without a terminal."""

    def __init__(self, total: int, print_line: Callable[[str], None] = print):
        self._total = total
        self._print = print_line

    def advance(self, step: int, text: str) -> None:
        """A log step: shows how far the run is."""
        self._print(f"step {step}/{self._total}  {text}")

    def tick(self, step: int) -> None:
        """Any step."""

    def say(self, text: str) -> None:
        """A line that stays."""
        if text:
            self._print(text)

    def close(self) -> None:
        """Gives the terminal back."""


class BarProgress(Progress):
    """A progress bar at the foot of the terminal; lines above it, among them one of the log in each epoch."""

    def __init__(self, total: int, step: int, steps_per_epoch: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console()
        bar = BarColumn(bar_width=max(5, min(40, console.width - _TEXT_WIDTH)))
        self._bar = Progress(bar, MofNCompleteColumn(), TextColumn("{task.description}"), console=console)
        self._epoch, self._per_epoch = step // steps_per_epoch, steps_per_epoch
        self._bar.start()
        self._task = self._bar.add_task("", total=total, completed=step)
        super().__init__(total, lambda line: self._bar.console.print(line, highlight=False, markup=False))

    def advance(self, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step, description=text)
        if step // self._per_epoch > self._epoch:
            self._epoch = step // self._per_epoch
            super().advance(step, text)

    def tick(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def close(self) -> None:
        self._bar.stop()


class Clock:
    """Seconds of training over all sessions of a run, and what was done since the last log line.

    paused: seconds not spent training. waited: seconds, up to the last lap, that devices waited for images.
    """

    def __init__(self, seconds: float = 0.0, paused: float = 0.0, waited: float = 0.0):
        """Args: those of earlier sessions."""
        self.paused, self.waited = paused, waited
        self._before, self._waited_before = seconds, waited
        self._start = self._mark = time.monotonic()
        self._images, self._work, self._paused_at_mark = 0, 0.0, paused

    def count(self, images: int, work: float) -> None:
        """Adds images that were trained on, and the floating-point operations that took."""
        self._images += images
        self._work += work

    def pause(self, seconds: float) -> None:
        """Takes time that was not spent training (evaluation, saving) out of the rate."""
        self.paused += seconds

    def lap(self, waited: float) -> Tuple[float, float, float]:
        """Images and floating-point operations a second of training, and the share of it that was waiting; of this lap.

        Args:
            waited: seconds of this session that devices waited for images.
        """
        now = time.monotonic()
        seconds = max(now - self._mark - (self.paused - self._paused_at_mark), 1e-9)
        share = min((self._waited_before + waited - self.waited) / seconds, 1.0)
        lap = self._images / seconds, self._work / seconds, share
        self._mark, self._images, self._work, self._paused_at_mark = now, 0, 0.0, self.paused
        self.waited = self._waited_before + waited
        return lap

    def seconds(self) -> float:
        """Of all sessions."""
        return self._before + time.monotonic() - self._start


def workers_needed(workers: int, share: float) -> int:
    """How many workers would keep up with a device that waits for `workers` of them, a `share` of its time.

    Workers that are waited for are busy, so the images of one second are made in the rest of it by 1 / (1 - share)
    times as many. Without workers (0) the process loads while its device waits, and computes in the rest.
    """
    rest = max(1.0 - share, 1e-3)
    return math.ceil((workers / rest if workers else share / rest) - 1e-9)  # 4.000000000001 are four


def create_progress(total: int, step: int, steps_per_epoch: int) -> Progress:
    """A bar on a terminal, else plain lines."""
    if sys.stdout.isatty():
        return BarProgress(total, step, steps_per_epoch)
    return Progress(total, lambda line: print(line, flush=True))


def pace(images_per_second: float) -> str:
    """Images a second, with two digits where there are only a few."""
    return f"{images_per_second:.0f} img/s" if images_per_second >= 10 else f"{images_per_second:.2g} img/s"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"

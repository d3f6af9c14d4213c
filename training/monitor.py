"""Where the events of a run go: metrics.jsonl, loggers, and lines on the terminal."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Callable, Optional, Sequence, Tuple

from common.errors import DONE
from training.loggers import Logger
from training.metrics import Metrics


class Monitor:
    """Sends each event of a run to the metrics file, to the loggers, and to the terminal.
    metrics: None on all ranks but the main one. say: prints a line."""

    def __init__(self, metrics: Optional[Metrics], loggers: Sequence[Logger], say: Callable[[str], None]):
        self._metrics, self._loggers, self.say = metrics, loggers, say

    def event(self, kind: str, step: int, values: dict, text: str) -> None:
        """Send one event: a line to metrics.jsonl, its numbers to each logger, `text`, if any, to the terminal."""
        if self._metrics is not None:
            self._metrics.write({"event": kind, "step": step, **values})
        for logger in self._loggers:
            logger.event(kind, step, values)
        if text:
            self.say(text)

    def check(self) -> None:
        """Raises OSError where the run folder is no longer the one that was opened."""
        if self._metrics is not None:
            self._metrics.check()

    def position(self) -> int:
        """Return the length of metrics.jsonl in bytes, all of it safely on the disk."""
        return 0 if self._metrics is None else self._metrics.position()

    def close(self, exit_code: int = DONE) -> None:
        """Close everything, whatever fails. Args: exit_code: of the run."""
        with contextlib.ExitStack() as last_first:
            if self._metrics is not None:
                last_first.callback(self._metrics.close)
            for logger in self._loggers:
                last_first.callback(logger.close, exit_code)


class Clock:
    """Seconds of training over all sessions of a run, and the work since the last log line.

    paused: seconds not spent training (evaluation, saving). waited: seconds, up to the last lap, that devices waited
    for images. images, operations: those of training since the last lap.
    """

    def __init__(self, seconds: float = 0.0, paused: float = 0.0, waited: float = 0.0):
        self.paused, self.waited = paused, waited
        self._before, self._waited_before = seconds, waited
        self._start = self._mark = time.monotonic()
        self.images, self.operations, self._paused_at_mark = 0, 0.0, paused

    def lap(self, waited: float) -> Tuple[float, float, float]:
        """Return images and operations per second of training, and the share of waiting, since the last lap.
        Args: waited: seconds of this session that devices waited for images."""
        now = time.monotonic()
        seconds = max(now - self._mark - (self.paused - self._paused_at_mark), 1e-9)
        share = min((self._waited_before + waited - self.waited) / seconds, 1.0)
        lap = self.images / seconds, self.operations / seconds, share
        self._mark, self.images, self.operations, self._paused_at_mark = now, 0, 0.0, self.paused
        self.waited = self._waited_before + waited
        return lap

    def seconds(self) -> float:
        """Of all sessions."""
        return self._before + time.monotonic() - self._start


def workers_needed(workers: int, share: float) -> int:
    """Return how many workers would keep up with a device that waits for `workers` of them, a `share` of its time.
    The images of one second would be made in the rest of it by 1 / (1 - share) times as many workers. Without workers
    (0) the process itself loads while its device waits."""
    rest = max(1.0 - share, 1e-3)
    return math.ceil((workers / rest if workers else share / rest) - 1e-9)  # 4.000000000001 are four


def pace(images_per_second: float) -> str:
    """Images a second, with two digits where there are only a few."""
    return f"{images_per_second:.0f} img/s" if images_per_second >= 10 else f"{images_per_second:.2g} img/s"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"

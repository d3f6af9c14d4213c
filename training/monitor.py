"""Where the events of a run go: metrics.jsonl, loggers, and lines on the terminal."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Callable, NamedTuple, Optional, Sequence

from common.errors import DONE
from training.loggers import Logger
from training.metrics import Metrics

_LEAST_SECONDS = 1e-9  # of a lap; no rate is infinite
_LEAST_REST = 1e-3  # share of the time that is left beside waiting
_ROUNDING = 1e-9  # so that 4.000000000001 workers are four


class Monitor:
    """Sends each event of a run to the metrics file, to the loggers, and to the terminal."""

    def __init__(
        self,
        metrics: Optional[Metrics],
        loggers: Sequence[Logger],
        say: Callable[[str], None],
    ):
        """
        Args:
            metrics: None on all ranks but the main one.
            loggers: that receive each event.
            say: prints a line.
        """
        self._metrics = metrics
        self._loggers = loggers
        self.say = say

    def event(self, kind: str, step: int, values: dict, text: str) -> None:
        """Send one event.

        Args:
            kind: train, eval, checkpoint or end.
            step: steps done.
            values: for metrics.jsonl; loggers get the numbers among them.
            text: for the terminal; empty: none.
        """
        # The file first: services and the terminal show nothing that is not in it.
        if self._metrics is not None:
            self._metrics.write({"event": kind, "step": step, **values})
        for logger in self._loggers:
            logger.event(kind, step, values)
        if text:
            self.say(text)

    def check(self) -> None:
        """Raise OSError where the run folder is no longer the one that was opened."""
        if self._metrics is not None:
            self._metrics.check()

    def position(self) -> int:
        """Return the length of metrics.jsonl in bytes, all of it safely on the disk."""
        return 0 if self._metrics is None else self._metrics.position()

    def close(self, exit_code: int = DONE) -> None:
        """Close everything, whatever fails.

        Args:
            exit_code: of the run.
        """
        # The metrics file last: a logger may fail.
        with contextlib.ExitStack() as last_first:
            if self._metrics is not None:
                last_first.callback(self._metrics.close)
            for logger in self._loggers:
                last_first.callback(logger.close, exit_code)


class Lap(NamedTuple):
    """Rates of training between two log lines.

    images: per second.
    operations: floating-point operations per second.
    waiting: share of the time that devices waited for images.
    """

    images: float
    operations: float
    waiting: float


class Clock:
    """Seconds of training over all sessions of a run, and the work since the last log line.

    paused: seconds not spent training (evaluation, saving), over all sessions.
    waited: seconds, up to the last lap, that devices waited for images, over all sessions.
    images, operations: those of training since the last lap.
    """

    def __init__(self, seconds: float = 0.0, paused: float = 0.0, waited: float = 0.0):
        """
        Args:
            seconds: of the sessions before.
            paused: those of them not spent training.
            waited: those of them that devices waited for images.
        """
        self.paused = paused
        self.waited = waited
        # Work of the lap, which the loop counts.
        self.images = 0
        self.operations = 0.0
        self._seconds_before = seconds
        self._waited_before = waited
        # Monotonic: the time of day jumps when a clock is set.
        self._start = time.monotonic()
        self._lap_start = self._start
        self._paused_at_lap = paused

    def lap(self, waited: float) -> Lap:
        """Return the rates since the last lap, and begin another.

        Args:
            waited: seconds of this session that devices waited for images.
        """
        # Evaluations and checkpoints since the last lap are no training.
        now = time.monotonic()
        paused = self.paused - self._paused_at_lap
        seconds = max(now - self._lap_start - paused, _LEAST_SECONDS)
        waited_in_all = self._waited_before + waited
        lap = Lap(
            images=self.images / seconds,
            operations=self.operations / seconds,
            waiting=min((waited_in_all - self.waited) / seconds, 1.0),
        )
        self.images = 0
        self.operations = 0.0
        self.waited = waited_in_all
        self._lap_start = now
        self._paused_at_lap = self.paused
        return lap

    def seconds(self) -> float:
        """Return the seconds since the run began, over all sessions."""
        return self._seconds_before + time.monotonic() - self._start


def workers_needed(workers: int, share: float) -> int:
    """Return how many workers would keep up with a device.

    The images of one second would be made in the rest of it by 1 / (1 - share) times as many
    workers.

    Args:
        workers: that load now. Without workers (0) the process itself loads while its device waits.
        share: of its time that the device waits for them.
    """
    # Waiting is what loading takes longer than computing, so the rest is the time of computing.
    rest = max(1.0 - share, _LEAST_REST)
    needed = workers / rest if workers else share / rest
    return math.ceil(needed - _ROUNDING)


def pace(images_per_second: float) -> str:
    """Return `images_per_second` as text, with two digits where there are only a few."""
    if images_per_second >= 10:
        return f"{images_per_second:.0f} img/s"
    return f"{images_per_second:.2g} img/s"

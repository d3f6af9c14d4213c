"""What the time of a run went to, session by session, as far as its log shows it.

A log line has the images a second and the share of waiting since the line before it (or the
session's start), and the seconds of the whole run. No line tells of the steps between the last one
of a session and its end: they count at the pace of that line. What all this does not account for
went to evaluation and checkpoints. Those between the last log line of a session and its end count
to the next session. Loading torch and the model is in neither.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import List, NamedTuple, Optional, Sequence

from tools.reporting.run import Metrics, resumed_at


@dataclass
class SessionTime:
    """Seconds of one session by what they went to.

    first, last: steps done before and after it.
    computing: training, but for waiting.
    waiting: for images.
    rest: evaluation and checkpoints.
    """

    first: int
    last: int
    computing: float = 0.0
    waiting: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        """Return all seconds."""
        return self.computing + self.waiting + self.rest


class _Pace(NamedTuple):
    """Pace of training between two log lines.

    seconds: of a step.
    wait: share of them; not from 0 to 1 where it is unknown.
    """

    seconds: float
    wait: float


def session_times(
    metrics: Metrics,
    starts: Sequence[dict],
    global_batch: int,
) -> List[SessionTime]:
    """Divide the time of each session whose work was kept.

    Args:
        metrics: of the run.
        starts: of its sessions.
        global_batch: images of an update.
    """
    sessions = _Sessions(resumed_at(starts), metrics.step)
    # The newest log line: its step, its pace, and the seconds of the run that are accounted for.
    last = 0.0
    pace: Optional[_Pace] = None
    counted = 0.0
    train = metrics.train
    log_lines = zip(train["step"], train["images_per_second"], train["data_wait"], train["seconds"])
    for step, rate, wait, seconds in log_lines:
        if not (rate > 0 and seconds >= counted):
            continue  # not finite, or a file that was put together by hand
        own = _Pace(global_batch / rate, wait)
        # The first line of a session counts from where the session went on.
        begin = max(last, sessions.of(step).first)
        left = sessions.train(begin, step, own, seconds - counted)
        # Before the first line this one's pace is the nearest that is known.
        left = sessions.train(last, begin, pace or own, left)
        sessions.of(step).rest += left
        last = step
        pace = own
        counted = seconds
    # The end comes after the last line's evaluation and checkpoint. In older versions' runs that
    # evaluation.patience has ended no line tells of the last steps.
    if metrics.end and isinstance(metrics.end.get("seconds"), (int, float)):
        step = metrics.end["step"]
        left = max(0.0, metrics.end["seconds"] - counted)
        if pace is not None:
            left = sessions.train(last, step, pace, left)
        sessions.of(step).rest += left
    # Sessions of which nothing was kept have no row.
    return [session for session in sessions.times if session.total > 0]


class _Sessions:
    """The sessions of a run, to which seconds are added.

    times: of all sessions, ascending.
    """

    def __init__(self, resumed: Sequence[int], done: int):
        """
        Args:
            resumed: steps at which sessions after the first begin, ascending.
            done: steps of the run.
        """
        self._firsts = [0, *resumed]
        lasts = [*resumed, max(done, self._firsts[-1])]
        self.times = [SessionTime(first, last) for first, last in zip(self._firsts, lasts)]

    def of(self, step: float) -> SessionTime:
        """Return the session that made the last of so many steps."""
        return self.times[self._number(step)]

    def train(self, first: float, last: float, pace: _Pace, seconds: float) -> float:
        """Add the training from one step to another to the sessions that made it.

        Args:
            first: steps done before.
            last: steps done after.
            pace: of the steps.
            seconds: that are there for them.

        Returns:
            The seconds that are left over.
        """
        newest = self.times[-1]
        for session in self.times[self._number(first + 1) : self._number(last) + 1]:
            end = last if session is newest else min(last, session.last)
            steps = max(0.0, end - max(first, session.first))
            # In a log that was put together by hand training may take more than all of the time.
            training = min(seconds, steps * pace.seconds)
            waited = training * pace.wait if 0 <= pace.wait <= 1 else 0.0
            session.computing += training - waited
            session.waiting += waited
            seconds -= training
        return seconds

    def _number(self, step: float) -> int:
        """Return the number of the session, from 0, that made the last of so many steps."""
        return max(0, bisect.bisect_left(self._firsts, step) - 1)

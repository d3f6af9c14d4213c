"""Stops of an elastic run: signals to its launcher at random moments, after which the same command
goes on.
"""

from __future__ import annotations

import random
import re
import signal
import time
from typing import Callable, List, NamedTuple, Optional, Tuple

from benchmarks.faults.hosts import AnySession, Launchers
from benchmarks.faults.site import SESSION_SECONDS, Ending, Session, Site, send
from common.errors import DONE, FAILED, STOPPED

BOUND = 30.0  # seconds after the first signal in which all processes must have ended
# Each once in a run: two for a replacement, which takes longest. "end" comes last, as the run may
# be done then.
MOMENTS = ("start", "loss at start", "training", "loss", "replacement", "replacement")
_SIGNALS = (
    signal.SIGTERM,
    signal.SIGTERM,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
)
_TWICE = 1 / 3  # of the stops get a second signal, SIGTERM
# Seconds after the first: the launcher takes what comes within 0.5 s for the same signal.
_SECOND = (0.6, 4.0)
_STEPS = (1, 20)  # that a session makes first
_DELAYS = {  # seconds: shorter and longer than what they are to hit
    "start": (0.0, 8.0),
    "loss at start": (0.0, 8.0),
    "training": (0.0, 0.2),
    "loss": (0.0, 0.5),
    "replacement": (0.0, 8.0),
    "end": (0.0, 1.5),
}
# Decide how a run is stopped, and what is promised of it.
CHOICES = (BOUND, MOMENTS, _SIGNALS, _TWICE, _SECOND, _STEPS, _DELAYS)
_ANEW = "is started anew"
_AT_ONCE = "ended at once by a second signal"


class Stop(NamedTuple):
    """A request to stop, and what came of it.

    signal: one name, or two as "SIGINT, SIGTERM".
    phase: what the run was doing by its output.
    code: of all launchers; None if they differ, or hung.
    seconds: from the first signal until all processes had ended.
    as_promised: whether it ended in time, with the right code, and had saved what it had to.
    """

    signal: str
    phase: str
    code: Optional[int]
    seconds: float
    as_promised: bool


def stopped(site: Site, total: int, draws: random.Random) -> Tuple[List[Stop], List[Ending]]:
    """Start a run, stop it at a moment of each kind, and give the same command again each time.

    The last time it goes on to its end.

    Args:
        site: the place of a run on one host or on several.
        total: steps of the run.
        draws: chooses the order of the moments, and all that is random in them.

    Returns:
        The stops, and how the sessions ended: one more than stops, unless the last stop came when
        the run was done.
    """
    stops: List[Stop] = []
    endings: List[Ending] = []
    shuffled = draws.sample(MOMENTS, len(MOMENTS))
    for moment in [*shuffled, "end"]:
        session = site.start()
        _await(moment, site, session, total, draws)
        stop, ending = _stop(site, session, total, draws)
        stops.append(stop)
        endings.append(ending)
        if ending.code == DONE:
            return stops, endings
    endings.append(site.start().wait(0.0))
    return stops, endings


def restarts(endings: List[Ending]) -> int:
    """Return how often a run started from a checkpoint within sessions.

    Args:
        endings: of the run's sessions, of which each but the first begins with such a start.
    """
    total = 0
    for session, ending in enumerate(endings):
        starts = len(re.findall("resuming at", ending.said))
        usual = 0 if session == 0 else 1
        total += max(0, starts - usual)
    return total


def phase(said: str, replicas: int) -> str:
    """Return what a session of a run was doing.

    Args:
        said: what it has printed until then; it has lost one replica at most.
        replicas: of the whole run.
    """
    has_lost = _ANEW in said
    if not _logged(said):
        return "before the first step, a rank is lost" if has_lost else "before the first step"
    if not has_lost:
        return "training, or a loss is not noticed yet"
    for members in re.findall(r"with replicas ([\d, ]+)$", said, re.M):
        if len(members.split(", ")) == replicas:
            return "a replacement has joined"
    return "a replacement starts or waits"


def as_promised(
    ending: Ending,
    total: int,
    *,
    signals: int,
    before: int,
    saved: int,
    events: int,
) -> bool:
    """Judge how a session ended that was told to stop, by the table in docs/reliability.md.

    Args:
        ending: how it ended.
        total: steps of the run.
        signals: how many were sent.
        before: the last step that the session had logged when the first signal was sent, 0 if none.
        saved: step of the newest checkpoint, 0 if there is none.
        events: steps in the run's metrics.
    """
    if ending.seconds > BOUND:
        return False
    if ending.code == DONE:
        return saved == events == total
    if ending.code == FAILED:
        return signals == 2 and _AT_ONCE in ending.said
    if ending.code != STOPPED:
        return False
    # Where no step was made, there is nothing to save.
    if not _logged(ending.said):
        return True
    # A step that was broken off by a loss is made again.
    return saved == events and saved >= before - 1


def _await(
    moment: str,
    site: Site,
    session: AnySession,
    total: int,
    draws: random.Random,
) -> None:
    """Wait for a moment to stop a session; for some, kill a rank first.

    Args:
        moment: one of `MOMENTS`, or "end".
        site: of the run.
        session: that is to be stopped.
        total: steps of the run.
        draws: chooses the step, the rank that is killed, and a delay.
    """
    # Before a launcher has started ranks, it may still load its libraries: Python ends by a signal
    # then.
    ranks = site.topology.replicas * site.topology.stages
    _until(session, lambda: len(session.ranks()) == ranks)
    if moment == "end":
        session.reach(total - draws.randint(0, 3), 0.0)
    elif moment not in ("start", "loss at start"):
        # Steps of this session: the last one may have been ended at once, and steps that it logged
        # are made again.
        goal = draws.randint(*_STEPS)
        _until(session, lambda: len(_logged(session.said())) >= goal)
    if moment in ("loss at start", "loss", "replacement"):
        processes = session.ranks()
        if processes:
            rank = draws.choice(sorted(processes))
            send(processes[rank], signal.SIGKILL)
    if moment == "replacement":
        _until(session, lambda: _ANEW in session.said())
    time.sleep(draws.uniform(*_DELAYS[moment]))


def _until(session: AnySession, condition: Callable[[], bool]) -> None:
    """Wait for something of a session, unless it ends before, or hangs."""
    end = time.monotonic() + SESSION_SECONDS
    while session.running and time.monotonic() < end and not condition():
        time.sleep(0.01)


def _stop(site: Site, session: AnySession, total: int, draws: random.Random) -> Tuple[Stop, Ending]:
    """Send a launcher a signal, or two, and see what comes of it.

    Args:
        site: of the run.
        session: that is stopped.
        total: steps of the run.
        draws: chooses the launcher and the signals.
    """
    launcher = draws.choice(_sessions(session)).process
    signals = [draws.choice(_SIGNALS)]
    # What it had done by now must not be lost.
    said = session.said()
    since = time.monotonic()
    launcher.send_signal(signals[0])
    # Some get a second one, unless they have ended by the first.
    if draws.random() < _TWICE:
        session.reach(0, draws.uniform(*_SECOND))
        if session.running:
            signals.append(signal.SIGTERM)
            launcher.send_signal(signal.SIGTERM)
    ending = session.wait(since)
    promised = as_promised(
        ending,
        total,
        signals=len(signals),
        before=max(_logged(said), default=0),
        saved=_saved(site),
        events=site.steps(),
    )
    stop = Stop(
        signal=", ".join(sent.name for sent in signals),
        phase=phase(said, site.topology.replicas),
        code=ending.code,
        seconds=ending.seconds,
        as_promised=promised,
    )
    return stop, ending


def _sessions(session: AnySession) -> List[Session]:
    """Return the sessions of all hosts."""
    return session.sessions if isinstance(session, Launchers) else [session]


def _saved(site: Site) -> int:
    """Return the step of a run's newest checkpoint, 0 if there is none."""
    checkpoints = site.checkpoints()
    if not checkpoints:
        return 0
    _, _, step = checkpoints[-1].stem.rpartition("-")
    return int(step)


def _logged(said: str) -> List[int]:
    """Return the steps that a session has logged."""
    return [int(step) for step in re.findall(r"^step (\d+)/", said, re.M)]

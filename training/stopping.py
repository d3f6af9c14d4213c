"""The signals that ask a run to stop.

Loads nothing heavy: a launcher's signal may come while torch is still loading.

A single process, and ranks under torchrun, srun or poprun, take SIGTERM, SIGINT and SIGUSR1 for:
finish the step, save, exit with 75. Ranks of run_pod.sh take SIGUSR1 alone, which the launcher
sends when it is stopped itself: the launcher sends SIGTERM when another rank is dead, which ends
them at once, and a terminal's SIGINT is the launcher's.
"""

import contextlib
import os
import signal
import time
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

from parallel import launchers

_EARLY = (signal.SIGTERM, signal.SIGUSR1)
_noted: Optional[int] = None


def name_of(number: int) -> str:
    """Return what a user knows the signal of this `number` by.

    The launcher has named the one that it was given itself.
    """
    if launchers.is_ours(os.environ) and number == signal.SIGUSR1:
        return "stopping"
    return signal.Signals(number).name


def listen_early() -> Dict[int, Any]:
    """Note a launcher's or scheduler's signal from now on, for the `StopSignals` that come later.

    Without a handler it would end the process before anything is saved, or, where the process is
    the first one of a container, be lost.

    Returns:
        The handlers before, by signal.
    """
    handlers: Dict[int, Any] = dict.fromkeys(_EARLY, _note)
    # A terminal sends Ctrl-C to every process; the launcher passes it on as SIGUSR1. Its SIGTERM
    # ends a rank at once.
    if launchers.is_ours(os.environ):
        handlers = {signal.SIGINT: signal.SIG_IGN, signal.SIGUSR1: _note}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    # The program that this process was before may have withheld them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _EARLY)
    return before


def put_back(handlers: Dict[int, Any]) -> None:
    """Set the `handlers` of signals to what they were."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def withhold() -> None:
    """Let signals wait until the program that is about to replace this one listens.

    It must call `listen_early`; for one that does not there is `let_go`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _EARLY)


def let_go() -> bool:
    """Let signals end this process again, as the program that replaces it does not listen.

    Returns:
        Whether one was noted before, which that program would never hear of.
    """
    # First, so that none is noted after the look.
    for number in _EARLY:
        signal.signal(number, signal.SIG_DFL)
    return was_asked()


def wait_for_termination(seconds: float) -> None:
    """Let a SIGTERM end this process for some seconds, also one that was noted before."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _noted == signal.SIGTERM:
        signal.raise_signal(signal.SIGTERM)
    time.sleep(seconds)


def was_asked() -> bool:
    """Return whether a signal was noted since `listen_early`."""
    return _noted is not None


class StopSignals:
    """A context in which a handler gets the signals that ask to stop, also one that came before."""

    def __init__(self, handler: Callable):
        """Call `handler(number, frame)` for each."""
        self._handler = handler
        self._numbers: Tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        if launchers.is_ours(os.environ):
            self._numbers = (signal.SIGUSR1,)
        self._old: Dict[int, Any] = {}

    def __enter__(self) -> None:
        self._old = {number: signal.signal(number, self._handler) for number in self._numbers}
        # A signal may have come while torch was loading.
        if _noted is not None:
            self._handler(_noted, None)

    def __exit__(self, *_: object) -> None:
        put_back(self._old)


@contextlib.contextmanager
def late_signals() -> Iterator[None]:
    """Return a context around the loop.

    A SIGTERM before the loop is noted for it; one after the loop changes nothing, as the run ends
    anyway once all is stored.

    Ctrl-C ends it at once, as it is given by hand. A launcher's SIGTERM to its ranks does so, too.
    """
    global _noted
    if launchers.is_ours(os.environ):
        yield
        return
    old_noted = _noted
    old_handler = signal.signal(signal.SIGTERM, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)
        _noted = old_noted


def _note(number: int, frame: object) -> None:
    global _noted
    _noted = number

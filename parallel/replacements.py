"""The launcher's part in an elastic run: it starts a replica anew whose processes end."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Callable, Dict, NoReturn, Optional, Sequence, Set, Tuple, TypeVar

from common.errors import DONE, FAILED, STOPPED, WRONG_INPUT
from parallel.generations import Generations, Member

_LOOK_SECONDS = 0.25  # between two looks at the generations
_TOGETHER_SECONDS = 1.0  # in which all ranks end if the fault is the run's own
_SHORT_SECONDS = 60.0  # after a shorter life the next one begins later and later
_LONGEST_PAUSE = 60.0
_MOST_STARTS = 4  # of a replica that has not begun: a run that cannot begin ends
_STORE_LIMIT = timedelta(seconds=20)
_PATIENCE_SECONDS = 1.0  # in which a store answers unless its host stands still

_T = TypeVar("_T")
Ranks = Dict[int, subprocess.Popen]  # by their number in the world


def kill(ranks: Ranks, number: int) -> None:
    """Send a signal to ranks and their children, also to those that a dead rank has left.

    Args:
        ranks: each the leader of a process group.
        number: of the signal.
    """
    for rank in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, number)


def signal_name(number: int) -> str:
    """Return the name of the signal with this `number`; real-time signals have none."""
    if number in set(signal.Signals):
        return signal.Signals(number).name
    return f"signal {number}"


@dataclass
class _Replica:
    """A replica of this host.

    life: in which it is.
    begun: when it was started last.
    starts: how often, in its first life.
    pause: seconds that its next start waits if it ends soon.
    due: when it is started again; None while it runs, or if it stays away.
    """

    begun: float
    due: Optional[float] = None
    life: int = 0
    starts: int = 1
    pause: float = 0.0


class Replacements:
    """The replicas of this host's ranks, whose processes are all here."""

    def __init__(
        self,
        ranks: Ranks,
        place: Tuple[str, int],
        stages: int,
        start: Callable[[int, int], None],
        numbers: range,
        check: Callable[[], None] = lambda: None,
    ):
        """
        Args:
            ranks: running, by number; kept up to date here.
            place: host and port of their store.
            stages: of a replica.
            start: starts a rank, in its replica's life.
            numbers: of this host's ranks; those that do not run have been lost with the host.
            check: called again and again while the store does not answer; what it raises ends the
                wait.
        """
        from parallel.joining import connect  # loads torch

        self._check = check
        store = self._ask(functools.partial(connect, *place, _STORE_LIMIT))
        self._generations = Generations(store, stages)
        self._ranks = ranks
        self._stages = stages
        self._start = start
        # Replicas whose ranks do not run are started at the first look.
        now = time.monotonic()
        self._replicas: Dict[int, _Replica] = {}
        for rank in numbers:
            replica = self._replicas.setdefault(rank // stages, _Replica(begun=now))
            if rank not in ranks:
                replica.due = now
        self._members: Set[Member] = set()  # of this host, that ever were taken in
        self._next_look = 0.0
        self._closing = False
        self._has_asked = False  # all hosts to stop
        self._is_to_stop = False

    @property
    def waiting(self) -> bool:
        """Return whether replicas are to be started again later."""
        return any(replica.due is not None for replica in self._replicas.values())

    @property
    def closing(self) -> bool:
        """Return whether the run was about to end at the last look.

        Then no replica is started any more.
        """
        return self._closing

    @property
    def nothing_to_save(self) -> bool:
        """Return whether a run that is to stop can end as it is.

        It can if it is saved, or cannot have begun to train.
        """
        generations = self._generations
        return self._ask(generations.is_saved) or not self._ask(generations.has_met)

    @property
    def is_to_stop(self) -> bool:
        """Return whether a host's launcher had been asked to stop the run at the last look."""
        return self._is_to_stop

    def ask_all_to_stop(self) -> None:
        """Let the launchers of all hosts know that the run is to stop."""
        if not self._has_asked:
            self._ask(self._generations.ask_to_stop)
        self._has_asked = True

    def look(self, closing: bool = False) -> None:
        """Start what is due, and end replicas that were left out.

        Args:
            closing: the run is to stop, or ranks of another host have ended without a failure. From
                then on no replica is started, and those that are starting, or wait to be taken in,
                are ended: they have nothing to save, and nobody would take them in.
        """
        now = time.monotonic()
        codes = [rank.poll() for rank in self._ranks.values()]
        self._closing = closing or DONE in codes or STOPPED in codes
        if self._closing:
            for replica in self._replicas.values():
                replica.due = None
        # The store is asked only now and then.
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        for number, replica in self._replicas.items():
            if replica.due is not None and replica.due <= now:
                self._begin(number, now)
        self._ask(self._generations.catch_up)
        self._is_to_stop = self._ask(self._generations.is_to_stop)
        self._end_those_left_out(set(self._generations.members))

    def _end_those_left_out(self, members: Set[Member]) -> None:
        """End replicas that are not members of the newest generation, and that nobody waits for."""
        self._members |= {member for member in members if member.replica in self._replicas}
        # The first generation has not been founded: whoever starts is welcome.
        if not members:
            return
        for number in self._replicas:
            member = self._member(number)
            if member in members:
                continue
            # It is starting, waits to be taken in, was left out, or does not run.
            is_running = any(rank in self._ranks for rank in self._numbers(number))
            if self._closing and is_running:
                self._remove(number)
                # It may have been taken in since this host looked.
                self._bury(member)
            elif member in self._members:
                self._kill(number)

    def replace(self, failed: Sequence[Tuple[int, int]]) -> bool:
        """End the replicas of ranks that have failed; they are started again later.

        Args:
            failed: rank and exit code of each.

        Returns:
            Whether the run goes on without them.
        """
        if self._is_own_fault(failed):
            return False
        # End what is left of their replicas, of which others may wait for a process.
        goes_on = True
        for number in sorted({rank // self._stages for rank, _ in failed}):
            self._remove(number)
            member = self._member(number)
            if self._has_begun(member):
                self._bury(member)
            elif self._closing or self._replicas[number].starts >= _MOST_STARTS:
                # Nobody has met it, and nobody can train without it.
                goes_on = False
        # Only members know the state of the run: without a living one it does not go on.
        generations = self._generations
        if not goes_on:
            return False
        if self._ask(generations.is_founded) and not self._ask(generations.living):
            return False
        if not self._closing:
            # A replica with the wrong input stays away, whatever its other ranks ended with.
            away = {rank // self._stages for rank, code in failed if code == WRONG_INPUT}
            for rank, code in failed:
                if code == WRONG_INPUT or rank // self._stages not in away:
                    self._plan_start(rank, code)
        return True

    def _is_own_fault(self, failed: Sequence[Tuple[int, int]]) -> bool:
        """Return whether the run's own fault has ended these ranks: others would fail alike."""
        for rank, code in failed:
            # In a first life all replicas have the same input; later its host may have other files.
            if code == WRONG_INPUT and not self._replicas[rank // self._stages].life:
                return True
        if all(code != FAILED for _, code in failed):
            return False
        # A fault of all ranks ends all of them within a moment.
        time.sleep(_TOGETHER_SECONDS)
        return all(rank.poll() not in (None, DONE, STOPPED) for rank in self._ranks.values())

    def _begin(self, number: int, now: float) -> None:
        """Start a replica again: in its first life if nobody has met it, else in a new one."""
        replica = self._replicas[number]
        replica.due = None
        if self._has_begun(self._member(number)):
            # Whoever knows its last life would take reports of this one for that one's.
            next_life = functools.partial(self._generations.next_life, number)
            replica.life = self._ask(next_life)
        else:
            replica.starts += 1
        replica.begun = now
        for rank in self._numbers(number):
            self._start(rank, replica.life)

    def _plan_start(self, rank: int, code: int) -> None:
        """Say when the replica of a rank is started again, and tell the user.

        With code 2 it stays away.
        """
        now = time.monotonic()
        number = rank // self._stages
        replica = self._replicas[number]
        ended = f"ended with {code}" if code >= 0 else f"was ended by signal {signal_name(-code)}"
        line = f"rank {rank} (host {socket.gethostname()}) {ended}: replica {number}"
        if code == WRONG_INPUT:
            print(f"{line} stays away, the others go on", file=sys.stderr, flush=True)
            return
        is_short = now - replica.begun < _SHORT_SECONDS
        pause = replica.pause if is_short else 0.0
        # Ranks of a replica may fail at once: the first of them plans its start.
        if replica.due is None:
            replica.due = now + pause
            # After each short life the next one begins later.
            replica.pause = min(_LONGEST_PAUSE, max(2.0, 2 * replica.pause)) if is_short else 0.0
        others = "the others wait"
        if self._has_begun(self._member(number)):
            others = "the others go on"
        print(f"{line} is started anew, {others}", file=sys.stderr, flush=True)

    def _has_begun(self, member: Member) -> bool:
        """Return whether other processes may know one of this `member`'s."""
        return self._ask(functools.partial(self._generations.has_begun, member))

    def _bury(self, member: Member) -> None:
        """Say that the processes of a `member` are gone."""
        self._ask(functools.partial(self._generations.bury, member))

    def _ask(self, question: Callable[[], _T]) -> _T:
        """Return the answer to a question to the store, which is asked in a thread.

        Torch's store waits for an answer without a limit where the master's host stands still, or
        the way to it is cut, and no signal is handled meanwhile. Tried with torch 2.14.1.

        Raises:
            RuntimeError: the store is gone.
        """
        answers: queue.SimpleQueue[Callable[[], _T]] = queue.SimpleQueue()
        arguments = (question, answers)
        threading.Thread(target=_answer, args=arguments, name="store", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=_PATIENCE_SECONDS)()
            self._check()

    def _member(self, number: int) -> Member:
        """Return a replica in its present life."""
        return Member(number, self._replicas[number].life)

    def _remove(self, number: int) -> None:
        """Kill a replica; how it ended is not looked at."""
        self._kill(number)
        for rank in self._numbers(number):
            self._ranks.pop(rank, None)

    def _kill(self, number: int) -> None:
        """Kill the ranks of a replica, and wait for their end."""
        numbers = self._numbers(number)
        running = {rank: self._ranks[rank] for rank in numbers if rank in self._ranks}
        kill(running, signal.SIGKILL)
        for process in running.values():
            process.wait()

    def _numbers(self, number: int) -> range:
        """Return the ranks of a replica."""
        first = number * self._stages
        return range(first, first + self._stages)


def _answer(question: Callable[[], _T], answers: queue.SimpleQueue[Callable[[], _T]]) -> None:
    """Ask a question, and hand over a function that returns the answer, or raises the fault."""
    try:
        answer = question()
    except Exception as fault:
        answers.put(functools.partial(_raise, fault))
    else:
        answers.put(lambda: answer)


def _raise(fault: Exception) -> NoReturn:
    raise fault

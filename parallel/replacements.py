"""The launcher's part in an elastic run: a replica whose processes end is buried, and started anew to be taken in."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Callable, Dict, Sequence, Set, Tuple

from parallel.generations import Generations, Member
from recipe.errors import DONE, FAILED, STOPPED, WRONG_INPUT

_LOOK_SECONDS = 0.25  # between two looks at the generations
_TOGETHER_SECONDS = 1.0  # in which all ranks end if the fault is the run's own
_SHORT_SECONDS = 60.0  # after a shorter life the next one begins later and later
_LONGEST_PAUSE = 60.0
_MOST_STARTS = 4  # of a replica that has not begun: a run that cannot begin ends
_STORE_LIMIT = timedelta(seconds=20)

Ranks = Dict[int, subprocess.Popen]  # by their number in the world


def kill(ranks: Ranks, number: int) -> None:
    """Sends a signal to the ranks with all their children, also to children that a dead rank has left behind."""
    for rank in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, number)


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class Replacements:
    """The replicas of this host's ranks, whose processes are all here."""

    def __init__(
        self, ranks: Ranks, place: Tuple[str, int], stages: int, start: Callable[[int, int], None], numbers: range
    ):
        """Args: ranks: running, by number; kept up to date here. place: of their store. start: of a rank, in its
        replica's life. numbers: of this host's ranks; those that do not run have been lost with the host."""
        from torch.distributed import TCPStore

        store = TCPStore(*place, None, False, _STORE_LIMIT, wait_for_workers=False)
        self._generations = Generations(store, stages)
        self._ranks, self._stages, self._start = ranks, stages, start
        now = time.monotonic()
        self._lives = {rank // stages: 0 for rank in numbers}
        self._begun, self._pauses = dict.fromkeys(self._lives, now), dict.fromkeys(self._lives, 0.0)
        self._starts = dict.fromkeys(self._lives, 1)  # in the first life
        self._due = {rank // stages: now for rank in numbers if rank not in ranks}  # when a replica is started again
        self._members: Set[Member] = set()  # of this host, that ever were taken in
        self._next_look = 0.0
        self._closing = False
        self._asked = False  # all hosts to stop
        self._is_to_stop = False

    @property
    def waiting(self) -> bool:
        """Whether replicas are to be started again later."""
        return bool(self._due)

    @property
    def closing(self) -> bool:
        """Whether the run was about to end at the last look: no replica is started any more."""
        return self._closing

    @property
    def nothing_to_save(self) -> bool:
        """Whether a run that is to stop can end as it is: it is saved, or its first generation cannot have met."""
        return self._generations.is_saved() or not self._generations.has_met()

    @property
    def is_to_stop(self) -> bool:
        """Whether a host's launcher had been asked to stop the run at the last look."""
        return self._is_to_stop

    def ask_all_to_stop(self) -> None:
        """Let the launchers of all hosts know that the run is to stop."""
        if not self._asked:
            self._generations.ask_to_stop()
        self._asked = True

    def look(self, closing: bool = False) -> None:
        """Start what is due, and end replicas that were left out.

        Args: closing: the run is to stop, or ranks of another host have ended without a failure. From then on no
        replica is started, and those that are starting, or wait to be taken in, are ended: they have nothing to save,
        and nobody would take them in.
        """
        now = time.monotonic()
        self._closing = closing or any(rank.poll() in (DONE, STOPPED) for rank in self._ranks.values())
        if self._closing:
            self._due.clear()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        for replica in [replica for replica, due in self._due.items() if due <= now]:
            del self._due[replica]
            self._begin(replica, now)
        self._generations.catch_up()
        self._is_to_stop = self._generations.is_to_stop()
        current = set(self._generations.members)
        self._members |= {member for member in current if member.replica in self._lives}
        for replica in self._lives:
            member = self._member(replica)
            if member in current or not current:
                continue
            if self._closing and any(rank in self._ranks for rank in self._numbers(replica)):
                self._remove(replica)
                self._generations.bury(member)  # it may have been taken in since this host looked
            elif member in self._members:
                self._kill(replica)

    def replace(self, failed: Sequence[Tuple[int, int]]) -> bool:
        """End the replicas of ranks that have failed; return whether the run goes on without them.

        Args: failed: rank and exit code of each.
        """
        if any(code == WRONG_INPUT and not self._lives[rank // self._stages] for rank, code in failed):
            return False
        if any(code == FAILED for _, code in failed):
            time.sleep(_TOGETHER_SECONDS)
            if all(rank.poll() not in (None, DONE, STOPPED) for rank in self._ranks.values()):
                return False
        goes_on = True
        for replica in sorted({rank // self._stages for rank, _ in failed}):
            self._remove(replica)
            if self._generations.has_begun(self._member(replica)):
                self._generations.bury(self._member(replica))
            else:
                # Nobody has met it, and nobody can train without it.
                goes_on &= self._starts[replica] < _MOST_STARTS and not self._closing
        if not goes_on or (self._generations.is_founded() and not self._generations.living()):
            return False
        if not self._closing:
            for rank, code in failed:
                self._again(rank, code)
        return True

    def _begin(self, replica: int, now: float) -> None:
        """Start a replica again: in its first life if nobody has met it, else in a new one."""
        if self._generations.has_begun(self._member(replica)):
            self._lives[replica] = self._generations.next_life(replica)
        else:
            self._starts[replica] += 1
        self._begun[replica] = now
        for rank in self._numbers(replica):
            self._start(rank, self._lives[replica])

    def _again(self, rank: int, code: int) -> None:
        replica, now = rank // self._stages, time.monotonic()
        name = f"rank {rank} (host {socket.gethostname()})"
        ended = f"{name} was ended by signal {signal_name(-code)}" if code < 0 else f"{name} ended with {code}"
        if code == WRONG_INPUT:
            print(f"{ended}: replica {replica} stays away, the others go on", file=sys.stderr, flush=True)
            return
        short = now - self._begun[replica] < _SHORT_SECONDS
        self._due.setdefault(replica, now + (self._pauses[replica] if short else 0.0))
        self._pauses[replica] = min(_LONGEST_PAUSE, max(2.0, 2 * self._pauses[replica])) if short else 0.0
        others = "the others go on" if self._generations.has_begun(self._member(replica)) else "the others wait"
        print(f"{ended}: replica {replica} is started anew, {others}", file=sys.stderr, flush=True)

    def _member(self, replica: int) -> Member:
        return Member(replica, self._lives[replica])

    def _remove(self, replica: int) -> None:
        """Kill a replica; how it ended is not looked at."""
        self._kill(replica)
        for rank in self._numbers(replica):
            self._ranks.pop(rank, None)

    def _kill(self, replica: int) -> None:
        own = {rank: self._ranks[rank] for rank in self._numbers(replica) if rank in self._ranks}
        kill(own, signal.SIGKILL)
        for process in own.values():
            process.wait()

    def _numbers(self, replica: int) -> range:
        return range(replica * self._stages, (replica + 1) * self._stages)

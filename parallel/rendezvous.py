"""Rendezvous of the launchers of all hosts: who is there, where the ranks connect, and how they ended."""

from __future__ import annotations

import dataclasses
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Dict, Iterable, Optional

from parallel.board import LONGEST, Board, MastersBoard, Outcome
from parallel.hosts import Hosts, listen
from recipe.errors import DONE, FAILED, STOPPED, WRONG_INPUT, UserError

if TYPE_CHECKING:
    from parallel.agent import Signals

REACH_SECONDS = 45.0  # for the master to listen
_TOGETHER_SECONDS = 600.0  # for all hosts to come
_SILENT_SECONDS = 30.0  # until the missing ones are named
_SETTLE_SECONDS = 15.0  # after a failure, for all hosts to report how they ended
_HURRY_SECONDS = 8.0  # after a second signal, for the others to hear of it and to end their ranks
_EXIT_SECONDS = 60.0  # after a success or a stop: ranks of one host may end before those of another
_LEAST_SILENCE = 5.0  # launchers poll once a second
_STORE_TIMEOUT = timedelta(seconds=15)
_LOOK_SECONDS = 0.05  # between two looks at the board


class Stopped(Exception):
    """A signal came while no rank was running."""


class MasterLost(Exception):
    """The master's launcher, or the way to it, is gone; names which."""


class Others:
    """The launchers of the other hosts, through a board that the master serves at --master; none on a single host."""

    def __init__(self, hosts: Hosts, shape: str, signals: Signals, silence: float, secret: str, elastic: bool = False):
        """Args: silence: seconds after which a launcher counts as lost. secret: see `parallel/board.py`. elastic: a
        host that was lost may come back.

        returned: this one has. lost_master: its ranks ended since there was no way to the master.
        """
        self.hosts, self._shape, self._signals = hosts, shape[:LONGEST], signals
        self._silence = max(silence, _LEAST_SILENCE)
        self._attempt = 0
        self._board = (Board if hosts.this else MastersBoard)(hosts, secret)
        self._elastic, self.returned, self.lost_master = elastic, False, False
        if elastic and isinstance(self._board, MastersBoard):
            self._board.succeeded = self._silence
        if not secret and hosts.this == 0 and hosts.number > 1:
            remedy = "on a network that you do not trust set the same secret on all hosts"
            print(f"POD_TOKEN is not set: whoever reaches {hosts.place} can end this run; {remedy}", file=sys.stderr)

    @property
    def address(self) -> str:
        """The master's; known once the hosts have gathered."""
        return self._board.address

    def gather(self, attempt: int) -> int:
        """Waits for all hosts; returns the port of the store for the ranks of this attempt, at the master.

        Raises UserError: the hosts do not come together. Stopped: by a signal. MasterLost: after the first attempt.
        """
        self._look_again()
        self._attempt, entries = attempt, {"shape": self._shape}
        if self.hosts.this == 0:
            entries["port"] = self._serve_ranks()
        self._board.write(attempt, **entries)
        self._await_hosts()
        shapes = self._written("shape")
        for host, shape in sorted(shapes.items()):
            if shape != shapes[0]:
                self._leave(shapes)
                fault = f"host 0 starts {shapes[0]}, but host {host} {shape}"
                raise UserError(f"{fault}; give all hosts the same --replicas and --stages")
        return self._written("port")[0]

    def news(self) -> Optional[Outcome]:
        """Outcome that another host reports when its ranks are gone while ours may wait for them; else None."""
        for outcome in self._written("end").values():
            if outcome.abrupt:
                return dataclasses.replace(outcome, abrupt=False)
        try:
            self._check_master()
        except MasterLost as lost:
            self.lost_master = self._board.gone = (
                True  # which ends its questions: this launcher may come back as another
            )
            return Outcome(FAILED, f"{lost}; all ranks here are gone, too", last=True)
        return None

    def finished(self) -> bool:
        """Whether the ranks of another host have ended without a failure."""
        return any(outcome.code in (DONE, STOPPED) for outcome in self._written("end").values())

    def all_silent(self) -> bool:
        """Whether no launcher of another host is left."""
        return all(self._silent(host) for host in range(self.hosts.number) if host != self.hosts.this)

    def settle(self, mine: Outcome) -> Outcome:
        """Agree with all hosts on the end of the ranks: all return the same code, each its own line."""
        first = not any(outcome.abrupt for outcome in self._written("end").values())
        reported = dataclasses.replace(mine, line=mine.line[:LONGEST], abrupt=mine.abrupt and first)
        self._board.write(self._attempt, end=reported)
        hosts = range(self.hosts.number)
        try:
            self._wait_for("end", hosts, _SETTLE_SECONDS if mine.code in (FAILED, WRONG_INPUT) else _EXIT_SECONDS)
            ended = self._written("end")
            last = any(each.last for each in (mine, *ended.values())) or any(self._silent(host) for host in hosts)
            self._leave(ended)
        except MasterLost:
            return dataclasses.replace(mine, last=True)
        codes = {mine.code, *(outcome.code for outcome in ended.values())}
        return Outcome(next((code for code in (WRONG_INPUT, FAILED, STOPPED) if code in codes), DONE), mine.line, last)

    def _serve_ranks(self) -> int:
        """Port of a new store, which listens at the master's address and nowhere else."""
        from torch.distributed import TCPStore

        while not self.address:
            if self._board.error:
                raise self._board.error
            self._look_again()
        listening = listen(Hosts(master=self.address))
        address, port = listening.getsockname()[:2]
        self._ranks_store = TCPStore(
            address, port, None, True, _STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return port

    def _await_hosts(self) -> None:
        """Waits until this host's entries are on the board, and those of all others."""
        board, hosts, start, named = self._board, self.hosts, time.monotonic(), False
        while True:
            there, waited = self._written("who"), time.monotonic() - start
            joined = hosts.this in there
            if self._elastic and joined and there[hosts.this] != board.who:
                joined = False  # the one before it is not yet silent for long enough
            if joined or self._attempt:
                self._check_master()
            elif waited > REACH_SECONDS or board.refused or board.gone:
                remedy = "that --node-rank 0 was started and that --master and POD_TOKEN are the same on all hosts"
                fault = f"cannot reach the master {hosts.place} ({board.fault or 'no answer'})"
                raise UserError(f"{fault}; check the firewall, {remedy}")
            if joined and there[hosts.this] != board.who:
                raise UserError(f"another host has said --node-rank {hosts.this} already; number the hosts from 0")
            missing = [host for host in range(hosts.number) if host not in there or (host == hosts.this and not joined)]
            if not missing:
                self.returned = self._written("returned").get(hosts.this, False)
                return
            ranks = ", ".join(map(str, missing))
            which = f"{len(missing)} of {hosts.number} hosts at {hosts.place} (--node-rank {ranks})"
            if waited > _TOGETHER_SECONDS:
                text = f"waited {_TOGETHER_SECONDS:.0f} s in vain for {which}; start all hosts, or lower --nnodes"
                raise UserError(text) if self._attempt == 0 else MasterLost(text)
            if self._attempt and all(self._silent(host) for host in missing):
                raise MasterLost(f"have heard nothing for {self._silence:g} s of {which}")
            if joined and waited > _SILENT_SECONDS and not named:
                print(f"waiting for {which}", file=sys.stderr, flush=True)
                named = True
            self._look_again()

    def _leave(self, readers: Iterable[int]) -> None:
        """Report that this host has read what it needs; the master, from which all read, waits for the others."""
        self._board.write(self._attempt, read=True)
        self._wait_for("read", readers if self.hosts.this == 0 else [self.hosts.this], 5.0)

    def _wait_for(self, name: str, hosts: Iterable[int], seconds: float) -> None:
        """Returns when every host has written that or is silent, or the time is up, or a signal comes meanwhile."""
        start, stopping = time.monotonic(), self._signals.stopping
        while any(host not in self._written(name) and not self._silent(host) for host in hosts):
            self._check_master()
            # Without a word of this one the others would wait for its ranks, or end with another code.
            limit = min(seconds, _HURRY_SECONDS) if self._signals.hurry else seconds
            if self._signals.stopping != stopping or time.monotonic() > start + limit:
                return
            time.sleep(_LOOK_SECONDS)

    def _written(self, name: str) -> Dict[int, Any]:
        """The entries of that name in this attempt, by host."""
        entries = self._board.read(self._attempt)
        return {host: found[name] for host, found in entries.items() if name in found}

    def _silent(self, host: int) -> bool:
        """Whether the launcher of a host counts as lost."""
        return host != self.hosts.this and self._board.silent(host) > self._silence

    def _check_master(self) -> None:
        """Raises MasterLost."""
        name = f"the launcher at the master {self.hosts.place}"
        if self._board.gone:
            raise MasterLost(f"{name} is gone")
        if self._silent(0):
            fault = f"{name} has said nothing for {self._silence:g} s"
            raise MasterLost(f"{fault}: it is stopped, or its host or the way there is gone")

    def _look_again(self) -> None:
        """Wait a moment. Raises Stopped if a signal has come."""
        if self._signals.stopping:
            raise Stopped
        time.sleep(_LOOK_SECONDS)

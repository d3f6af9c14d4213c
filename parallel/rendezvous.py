"""Rendezvous of the launchers of all hosts: who is there, where the ranks connect, and how they ended."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Callable, Iterable, Optional, TypeVar, Union

from parallel import hosts as places
from parallel.board import LONGEST, Board, MastersBoard, Outcome
from parallel.hosts import Hosts, listen
from recipe.errors import DONE, FAILED, STOPPED, WRONG_INPUT, UserError

if TYPE_CHECKING:
    from parallel.agent import Signals

_TOGETHER_SECONDS = 600.0  # for all hosts to come
_SILENT_SECONDS = 30.0  # until the missing ones are named
_SETTLE_SECONDS = 15.0  # after a failure, for all hosts to report how they ended
_EXIT_SECONDS = 60.0  # after a success or a stop: ranks of one host may end before those of another
_LEAST_SILENCE = 5.0  # launchers poll once a second
_STORE_TIMEOUT = timedelta(seconds=15)

Result = TypeVar("Result")


class Stopped(Exception):
    """A signal came while no rank was running."""


class MasterLost(Exception):
    """The master's launcher, or the way to it, is gone; names which."""


class Others:
    """The launchers of the other hosts, through a board that the master serves at --master; none on a single host."""

    def __init__(self, hosts: Hosts, shape: str, signals: Signals, silence: float, secret: str):
        """Args: silence: seconds after which a launcher counts as lost. secret: see `parallel/board.py`."""
        self.hosts, self._shape, self._signals = hosts, shape[:LONGEST], signals
        self._silence = max(silence, _LEAST_SILENCE)
        self._attempt = 0
        self._board: Union[MastersBoard, Board, None] = None
        if hosts.number == 1:
            return
        if hosts.this > 0:
            self._board = Board(hosts.master, hosts.port, hosts.this, hosts.number, secret)
            return
        self._board = MastersBoard(self._in_background(lambda: listen(hosts)), hosts.number, secret)
        if not secret:
            remedy = "on a network that you do not trust set the same secret on all hosts"
            print(f"POD_TOKEN is not set: whoever reaches {hosts.place} can end this run; {remedy}", file=sys.stderr)

    @property
    def address(self) -> str:
        """The master's; known once the hosts have gathered."""
        return self._board.address if self._board else self.hosts.master

    def gather(self, attempt: int) -> int:
        """Waits for all hosts; returns the port of the store for the ranks of this attempt, at the master.

        Raises:
            UserError: the hosts do not come together. Stopped: by a signal. MasterLost: after the first attempt.
        """
        self._give_up()
        self._attempt, entries = attempt, {"shape": self._shape}
        if self.hosts.this == 0:
            entries["port"] = self._serve_ranks()
        if self.hosts.number == 1:
            return entries["port"]
        self._board.write(attempt, **entries)
        self._join_master()
        self._await_hosts()
        shapes = [self._entry(host, "shape") for host in range(self.hosts.number)]
        for host, shape in enumerate(shapes):
            if shape != shapes[0]:
                self._leave(range(self.hosts.number))
                fault = f"host 0 starts {shapes[0]}, but host {host} {shape}"
                raise UserError(f"{fault}; give all hosts the same --replicas and --stages")
        return self._entry(0, "port")

    def news(self) -> Optional[Outcome]:
        """Outcome that another host reports when its ranks are gone while ours may wait for them; else None."""
        if self.hosts.number == 1:
            return None
        for entries in self._board.read(self._attempt).values():
            if "news" in entries:
                return dataclasses.replace(entries["news"], abrupt=False)
        try:
            self._check_master()
        except MasterLost as lost:
            return Outcome(FAILED, f"{lost}; all ranks here are gone, too", last=True)
        return None

    def settle(self, mine: Outcome) -> Outcome:
        """Agree with all hosts on the end of the ranks: all return the same code, each its own line."""
        if self.hosts.number == 1:
            return mine
        hosts = range(self.hosts.number)
        reported = dataclasses.replace(mine, line=mine.line[:LONGEST])
        news = mine.abrupt and not any(self._entry(host, "news") for host in hosts)
        self._board.write(self._attempt, end=reported, **({"news": reported} if news else {}))
        seconds = _SETTLE_SECONDS if mine.code in (FAILED, WRONG_INPUT) else _EXIT_SECONDS
        try:
            self._wait_for("end", hosts, seconds)
            ended = [host for host in hosts if self._entry(host, "end")]
            outcomes = [mine, *(self._entry(host, "end") for host in ended)]
            last = any(outcome.last for outcome in outcomes) or any(self._silent(host) for host in hosts)
            self._leave(ended)
        except MasterLost:
            return dataclasses.replace(mine, last=True)
        codes = {outcome.code for outcome in outcomes}
        return Outcome(next((code for code in (WRONG_INPUT, FAILED, STOPPED) if code in codes), DONE), mine.line, last)

    def _serve_ranks(self) -> int:
        """Port of a new store, which listens at the master's address and nowhere else."""
        from torch.distributed import TCPStore

        listening = listen(Hosts(master=self.address))
        address, port = listening.getsockname()[:2]
        self._ranks_store = TCPStore(
            address, port, None, True, _STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return port

    def _join_master(self) -> None:
        """Waits until this host's entries are on the board."""
        board, hosts, end = self._board, self.hosts, time.monotonic() + places.REACH_SECONDS
        fault = f"cannot reach the master {hosts.place}"
        while hosts.this not in board.read(self._attempt):
            self._give_up()
            late = time.monotonic() > end
            if self._attempt:
                self._check_master()
            elif board.refused or board.gone or (board.address and late):
                raise UserError(
                    f"{fault}: what listens there does not answer as a launcher with this host's POD_TOKEN; "
                    "correct --master, or set the same POD_TOKEN on all hosts"
                )
            elif late:
                raise UserError(
                    f"{fault} within {places.REACH_SECONDS:.0f} s ({board.fault}); check that --node-rank 0 was "
                    "started, that --master is the same on all hosts, and the firewall"
                )
            time.sleep(0.05)
        if board.read(self._attempt)[hosts.this]["who"] != board.who:
            raise UserError(f"another host has said --node-rank {hosts.this} already; number the hosts from 0")

    def _await_hosts(self) -> None:
        hosts, start, named = self.hosts, time.monotonic(), False
        while True:
            self._give_up()
            self._check_master()
            missing = [host for host in range(hosts.number) if not self._entry(host, "shape")]
            if not missing:
                return
            waited = time.monotonic() - start
            ranks = ", ".join(map(str, missing))
            which = f"{len(missing)} of {hosts.number} hosts at {hosts.place} (--node-rank {ranks})"
            if waited > _TOGETHER_SECONDS:
                text = f"waited {_TOGETHER_SECONDS:.0f} s in vain for {which}; start all hosts, or lower --nnodes"
                raise UserError(text) if self._attempt == 0 else MasterLost(text)
            if self._attempt and all(self._silent(host) for host in missing):
                raise MasterLost(f"have heard nothing for {self._silence:g} s of {which}")
            if waited > _SILENT_SECONDS and not named:
                print(f"waiting for {which}", file=sys.stderr, flush=True)
                named = True
            time.sleep(0.05)

    def _leave(self, readers: Iterable[int]) -> None:
        """Report that this host has read what it needs; the master, from which all read, waits for the others."""
        self._board.write(self._attempt, read=True)
        self._wait_for("read", readers if self.hosts.this == 0 else [self.hosts.this], 5.0)

    def _wait_for(self, name: str, hosts: Iterable[int], seconds: float) -> None:
        """Returns when every host has written that or is silent, or the time is up, or a signal comes meanwhile."""
        end, stopping = time.monotonic() + seconds, self._signals.stopping
        while any(not self._entry(host, name) and not self._silent(host) for host in hosts):
            self._check_master()
            if self._signals.hurry or self._signals.stopping != stopping or time.monotonic() > end:
                return
            time.sleep(0.05)

    def _entry(self, host: int, name: str) -> object:
        return self._board.read(self._attempt).get(host, {}).get(name)

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

    def _in_background(self, function: Callable[[], Result]) -> Result:
        """Result of `function`, or its error; signals work meanwhile: a name server may take its time."""
        future: Future = Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        while not future.done():
            self._give_up()
            time.sleep(0.05)
        return future.result()

    def _give_up(self) -> None:
        if self._signals.stopping:
            raise Stopped

"""Rendezvous of the launchers of all hosts: who is there, where the ranks connect, and how they ended."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Iterable, Optional, Union

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from parallel import hosts as places
from parallel.board import LONGEST, Board, MastersBoard
from parallel.hosts import Hosts, listen, reach
from parallel.signals import Signals
from recipe.errors import DONE, FAILED, STOPPED, WRONG_INPUT, UserError, printable

_TOGETHER_SECONDS = 600.0  # for all hosts to come
_SILENT_SECONDS = 30.0  # then it is said which are missing
_SETTLE_SECONDS = 15.0  # after a failure, for all hosts to say how they ended
_EXIT_SECONDS = 60.0  # likewise after a success or a stop: ranks of one host may end before those of another
_LEAST_SILENCE = 5.0  # launchers ask each other once a second
_STORE_TIMEOUT = timedelta(seconds=15)


@dataclass(frozen=True)
class Outcome:
    """End of the ranks of a host: `code` as train.py's, `line` for the user, `last` if there is no next try."""

    code: int
    line: str = ""
    last: bool = False
    abrupt: bool = False  # the ranks of the other hosts wait for some that are gone


class Stopped(Exception):
    """A stop was asked for while no rank was running."""


class MasterLost(Exception):
    """The master's launcher, or the way to it, is gone; says which."""


class Rendezvous(RendezvousHandler):
    """The static rendezvous, once per attempt: a new store for the ranks, which keep nothing of the attempt before."""

    def __init__(self, others: Others, attempt: int):
        self._others, self._attempt = others, attempt

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of the store that the master's launcher serves."""
        return True

    def get_backend(self) -> str:
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        port = self._others.gather(self._attempt)
        hosts = self._others.hosts
        # The agent asks for a store, but needs none: every host has as many ranks.
        return RendezvousInfo(HashStore(), hosts.this, hosts.number, RendezvousStoreInfo(self._others.address, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return f"attempt-{self._attempt}"

    def shutdown(self) -> bool:
        return True


class Others:
    """The launchers of the other hosts, through a board that the master serves at --master.

    On a single host there is nobody to ask, and no such board. `address`: of the master.
    """

    def __init__(self, hosts: Hosts, shape: str, signals: Signals, silence: float, secret: str):
        """Args: silence: seconds after which a launcher that says nothing is lost. secret: see `parallel/board.py`."""
        self.hosts, self._shape, self._signals = hosts, shape[:LONGEST], signals
        self._silence = max(silence, _LEAST_SILENCE)
        self._board: Union[MastersBoard, Board, None] = None
        self._ranks_store: Optional[TCPStore] = None
        self._attempt: Optional[int] = None  # of which the hosts have gathered
        if hosts.number == 1 or hosts.this == 0:
            listening = listen(hosts)
            self.address = listening.getsockname()[0]
            if hosts.number == 1:
                listening.close()
                return
            self._board = MastersBoard(listening, hosts.number, secret)
            if not secret:
                print(
                    f"POD_TOKEN is not set: whoever reaches {hosts.place} can end this run; on a network that you do "
                    "not trust set the same secret on all hosts",
                    file=sys.stderr,
                )
        else:
            self.address = reach(hosts, self._give_up)
            self._board = Board(self.address, hosts.port, hosts.this, hosts.number, secret)

    def gather(self, attempt: int) -> int:
        """Waits for all hosts; returns the port of the store for their ranks, at the master."""
        self._give_up()
        port = 0
        if self.hosts.this == 0:
            listening = listen(Hosts(master=self.address))
            port = listening.getsockname()[1]
            self._ranks_store = _serve(listening)
        if self.hosts.number == 1:
            return port
        self._board.write(attempt, shape=self._shape, **({"port": port} if port else {}))
        self._join_master(attempt)
        self._attempt = attempt
        self._await_hosts()
        shapes = [self._entry(host, "shape") for host in range(self.hosts.number)]
        other = next((host for host, shape in enumerate(shapes) if shape != shapes[0]), None)
        if other is not None:
            self._part(range(self.hosts.number))
            raise UserError(
                f"host 0 starts {shapes[0]}, but host {other} {shapes[other]}; give all hosts the same --replicas "
                "and --stages"
            )
        return self._entry(0, "port")

    def _join_master(self, attempt: int) -> None:
        """Waits until this host's entries are on the board."""
        end, hosts = time.monotonic() + places.REACH_SECONDS, self.hosts
        while hosts.this not in self._board.read(attempt):
            self._give_up()
            if attempt:
                self._check_master()
            elif self._board.gone or self._board.refused or time.monotonic() > end:
                raise UserError(
                    f"cannot reach the master {hosts.place}: what listens there does not answer as a launcher with "
                    "this host's POD_TOKEN; correct --master, or set the same POD_TOKEN on all hosts"
                )
            time.sleep(0.05)
        if self._board.read(attempt)[hosts.this].get("who") != self._board.who:
            raise UserError(f"another host has said --node-rank {hosts.this} already; number the hosts from 0")

    def _await_hosts(self) -> None:
        hosts, start, said = self.hosts, time.monotonic(), False
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
            if waited > _SILENT_SECONDS and not said:
                print(f"waiting for {which}", file=sys.stderr, flush=True)
                said = True
            time.sleep(0.05)

    def news(self) -> Optional[Outcome]:
        """Outcome that another host reports when its ranks are gone while ours may wait for them; else None."""
        if self.hosts.number == 1:
            return None
        for entries in self._board.read(self._attempt).values():
            if "news" in entries:
                return _outcome({**entries["news"], "abrupt": False})
        try:
            self._check_master()
        except MasterLost as lost:
            return Outcome(FAILED, f"{lost}; all ranks here are gone, too", last=True)
        return None

    def settle(self, mine: Outcome) -> Outcome:
        """Agree with all hosts on the end of the ranks: all return the same code, each its own line."""
        if self._attempt is None:
            return mine
        hosts = range(self.hosts.number)
        said = {**asdict(mine), "line": mine.line[:LONGEST]}
        news = mine.abrupt and not any(self._entry(host, "news") for host in hosts)
        self._board.write(self._attempt, end=said, **({"news": said} if news else {}))
        try:
            self._wait_for("end", hosts, _SETTLE_SECONDS if mine.code in (FAILED, WRONG_INPUT) else _EXIT_SECONDS)
            ended = [host for host in hosts if self._entry(host, "end")]
            outcomes = [_outcome(self._entry(host, "end")) for host in ended]
            last = any(outcome.last for outcome in outcomes) or any(self._silent(host) for host in hosts)
            self._part(ended)
        except MasterLost:
            return Outcome(mine.code, mine.line, last=True)
        codes = [mine.code, *(outcome.code for outcome in outcomes)]
        code = next((code for code in (WRONG_INPUT, FAILED, STOPPED) if code in codes), DONE)
        return Outcome(code, mine.line, last=last)

    def _part(self, readers: Iterable[int]) -> None:
        """Report that this host has read what it needs; the master, from which all read, waits for the others."""
        self._board.write(self._attempt, read=True)
        self._wait_for("read", readers if self.hosts.this == 0 else [self.hosts.this], 5.0)

    def _wait_for(self, name: str, hosts: Iterable[int], seconds: float) -> None:
        """Returns when every host has written that or is silent, or the time is up, or a signal comes meanwhile."""
        end, stopping = time.monotonic() + seconds, self._signals.stopping
        while any(not self._entry(host, name) and not self._silent(host) for host in hosts):
            self._check_master()
            hurry = self._signals.hurry or self._signals.stopping != stopping
            if hurry or time.monotonic() > end:
                return
            time.sleep(0.05)

    def _entry(self, host: int, name: str) -> object:
        return self._board.read(self._attempt).get(host, {}).get(name)

    def _silent(self, host: int) -> bool:
        """Whether the launcher of a host counts as lost."""
        return host != self.hosts.this and self._board.silent(host) > self._silence

    def _check_master(self) -> None:
        """Raises MasterLost."""
        if self._board.gone:
            raise MasterLost(f"the launcher at the master {self.hosts.place} is gone")
        if self._silent(0):
            raise MasterLost(
                f"the launcher at the master {self.hosts.place} has said nothing for {self._silence:g} s: it is "
                "stopped, or its host or the way there is gone"
            )

    def _give_up(self) -> None:
        if self._signals.stopping:
            raise Stopped


def _outcome(said: dict) -> Outcome:
    return Outcome(**{**said, "line": printable(said["line"])})


def _serve(listening: socket.socket) -> TCPStore:
    """A store that listens at the socket, and nowhere else."""
    address, port = listening.getsockname()[:2]
    return TCPStore(
        address, port, None, True, _STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listening.detach()
    )

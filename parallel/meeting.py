"""What the launchers of all hosts tell each other: who is there, where the ranks meet, and how they ended."""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import List, Optional

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from parallel.hosts import Hosts, listen, reach
from parallel.signals import Signals
from recipe.errors import DONE, FAILED, STOPPED, WRONG_INPUT, UserError

_TOGETHER_SECONDS = 600.0  # for all hosts to come
_SILENT_SECONDS = 30.0  # then it is said which are missing
_SETTLE_SECONDS = 15.0  # after a failure, for all hosts to say how they ended
_EXIT_SECONDS = 60.0  # likewise after a success or a stop: ranks of one host may end before those of another
_ASK_SECONDS = 1.0  # between two looks for news from other hosts
_STORE_TIMEOUT = timedelta(seconds=15)


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a host ended: `code` as train.py's, `line` for the user, `last` if there is no next try."""

    code: int
    line: str = ""
    last: bool = False
    abrupt: bool = False  # the ranks of the other hosts wait for some that are gone


class Stopped(Exception):
    """A stop was asked for while no rank was running."""


class MasterLost(Exception):
    """The master's launcher is gone."""


class Meeting(RendezvousHandler):
    """The static rendezvous, once per attempt: a new store for the ranks, which keep nothing of the attempt before."""

    def __init__(self, others: Others, attempt: int):
        self._others, self._attempt = others, attempt

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of the launcher's store."""
        return True

    def get_backend(self) -> str:
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        store, port = self._others.gather(self._attempt)
        hosts = self._others.hosts
        return RendezvousInfo(store, hosts.this, hosts.number, RendezvousStoreInfo(self._others.address, port))

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
    """What the launchers of all hosts tell each other, through a store that the master serves at --master.

    On a single host there is nobody to ask, and no such store. `address`: of the master.
    """

    def __init__(self, hosts: Hosts, shape: str, signals: Signals):
        self.hosts, self._shape, self._signals = hosts, shape, signals
        self._control: Optional[Store] = None
        self._ranks_store: Optional[Store] = None
        self._attempt: Optional[Store] = None  # what the control store holds of this attempt
        self._asked = 0.0
        if hosts.number == 1 or hosts.this == 0:
            listening = listen(hosts)
            self.address = listening.getsockname()[0]
            if hosts.number == 1:
                listening.close()
            else:
                self._control = _serve(listening)
        else:
            self.address = reach(hosts, self._give_up)
            try:
                self._control = TCPStore(self.address, hosts.port, None, False, _STORE_TIMEOUT)
            except RuntimeError:
                raise UserError(
                    f"cannot reach the master {hosts.place}: what listens there is no launcher; correct --master"
                ) from None

    def gather(self, attempt: int) -> tuple:
        """Waits for all hosts; returns the store of this attempt and the port of the one for its ranks."""
        self._give_up()
        port = 0
        if self.hosts.this == 0:
            listening = listen(Hosts(master=self.address))
            port = listening.getsockname()[1]
            self._ranks_store = _serve(listening)
        if self.hosts.number == 1:
            return PrefixStore("launcher", self._ranks_store), port
        self._attempt = PrefixStore(f"attempt-{attempt}", self._control)
        try:
            if port:
                self._attempt.set("port", str(port))
            self._come(attempt)
            port = int(self._attempt.get("port"))
        except RuntimeError:
            raise MasterLost from None
        return self._attempt, port

    def _come(self, attempt: int) -> None:
        hosts, store = self.hosts, self._attempt
        if store.add(f"came/{hosts.this}", 1) > 1:
            raise UserError(f"another host has said --node-rank {hosts.this} already; number the hosts from 0")
        store.set(f"host/{hosts.this}", self._shape)
        start, said = time.monotonic(), False
        while True:
            self._give_up()
            missing = [i for i in range(hosts.number) if not store.check([f"host/{i}"])]
            if not missing:
                break
            waited = time.monotonic() - start
            ranks = ", ".join(map(str, missing))
            which = f"{len(missing)} of {hosts.number} hosts at {hosts.place} (--node-rank {ranks})"
            if waited > _TOGETHER_SECONDS:
                text = f"waited {_TOGETHER_SECONDS:.0f} s in vain for {which}; start all hosts, or lower --nnodes"
                if attempt == 0:
                    raise UserError(text)
                print(text, file=sys.stderr)
                raise MasterLost
            if waited > _SILENT_SECONDS and not said:
                print(f"waiting for {which}", file=sys.stderr, flush=True)
                said = True
            time.sleep(0.2)
        shapes = [store.get(f"host/{i}").decode() for i in range(hosts.number)]
        other = next((i for i in range(hosts.number) if shapes[i] != shapes[0]), None)
        if other is not None:
            self._part(range(hosts.number))
            raise UserError(
                f"host 0 starts {shapes[0]}, but host {other} {shapes[other]}; give all hosts the same --replicas "
                "and --stages"
            )

    def news(self) -> Optional[Outcome]:
        """What another host said when its ranks were gone while ours may wait for them; None if nothing."""
        if self.hosts.number == 1 or time.monotonic() < self._asked + _ASK_SECONDS:
            return None
        self._asked = time.monotonic()
        try:
            if not self._attempt.check(["news"]):
                return None
            news = json.loads(self._attempt.get("news"))
        except RuntimeError:
            lost = f"the launcher at the master {self.hosts.place} is gone; all ranks here are, too"
            return Outcome(FAILED, lost, last=True)
        return Outcome(**{**news, "abrupt": False})

    def settle(self, mine: Outcome) -> Outcome:
        """What all hosts make of the end of their ranks: all return the same code, each its own line."""
        number = self.hosts.number
        if self._attempt is None:
            return mine
        store, patience = self._attempt, _SETTLE_SECONDS if mine.code in (FAILED, WRONG_INPUT) else _EXIT_SECONDS
        try:
            if mine.abrupt and not store.check(["news"]):
                store.set("news", json.dumps(asdict(mine)))
            store.set(f"end/{self.hosts.this}", json.dumps(asdict(mine)))
            self._wait_for([f"end/{i}" for i in range(number)], patience)
            ends = [store.get(f"end/{i}") for i in range(number) if store.check([f"end/{i}"])]
            outcomes = [Outcome(**json.loads(end)) for end in ends]
            self._part(range(len(outcomes)))
        except RuntimeError:
            return Outcome(mine.code, mine.line, last=True)
        codes = [outcome.code for outcome in outcomes]
        code = next((code for code in (WRONG_INPUT, FAILED, STOPPED) if code in codes), DONE)
        return Outcome(code, mine.line, last=any(outcome.last for outcome in outcomes))

    def _part(self, readers: range) -> None:
        """Says that this host has read what it needs; the master, from which all read, waits for the others."""
        self._attempt.set(f"read/{self.hosts.this}", "")
        if self.hosts.this == 0:
            self._wait_for([f"read/{i}" for i in readers], 5.0)

    def _wait_for(self, keys: List[str], seconds: float) -> None:
        """Returns when all keys are set, or the time is up, or the user hurries."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._signals.hurry and not self._attempt.check(keys):
            time.sleep(0.1)

    def _give_up(self) -> None:
        if self._signals.stopping:
            raise Stopped


def _serve(listening: socket.socket) -> TCPStore:
    """A store that listens at the socket, and nowhere else."""
    address, port = listening.getsockname()[:2]
    return TCPStore(
        address, port, None, True, _STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=listening.detach()
    )

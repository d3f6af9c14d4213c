"""The hosts of an elastic run as network namespaces, a launcher and a replica on each, and what strikes them."""

from __future__ import annotations

import random
import re
import signal
import threading
from typing import Dict, List, Optional, Sequence, Tuple

from benchmarks.faults.hosts import Launchers
from benchmarks.faults.site import Ending, Session, Site, send
from benchmarks.networks import Network

KINDS = ("launcher", "cable for 20 s", "host replaced", "kill", "stop")
_AWAY = {"launcher": 1.0, "cable for 20 s": 20.0, "host replaced": 8.0}  # seconds until it comes back


def members(said: str, replicas: int) -> List[int]:
    """The replicas of a run's generation, by what its hosts have printed until now, one after another."""
    found = re.findall(r"^generation (\d+): .* with replicas ([\d, ]+)$", said, re.M)
    newest = max(found, key=lambda each: int(each[0]), default=None)
    return list(range(replicas)) if newest is None else list(map(int, newest[1].split(", ")))


class Hosts(Launchers):
    """A run over the hosts of a network, which `strikes` strikes."""

    def __init__(self, site: Site, network: Network):
        super().__init__(site, network)
        self._earlier: List[Session] = []  # of hosts that were struck with their launchers
        self._returning: List[threading.Timer] = []
        self._lock = threading.Lock()

    def ranks(self) -> Dict[int, int]:
        with self._lock:
            return super().ranks()

    def said(self) -> str:
        with self._lock:
            return "\n".join([*(each.said() for each in self._earlier), super().said()])

    def strike(self, kind: str, draws: random.Random) -> Tuple[int, ...]:
        """Strike a host other than the first, or its rank, where all replicas are in the run and their hosts in reach;
        the rank, or none if they are not. The host comes back by itself."""
        whole = len(members(self.said(), self._network.hosts)) == self._network.hosts
        processes = self.ranks()
        if not whole or len(processes) < self._network.hosts or any(timer.is_alive() for timer in self._returning):
            return ()
        host = draws.randrange(1, self._network.hosts)
        if kind in ("kill", "stop"):
            send(processes[host], signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            return (host,)
        if kind != "launcher":
            self._network.connect(host, False)
        if kind != "cable for 20 s":
            self.sessions[host].process.kill()  # with it go its ranks
        self._returning = [threading.Timer(_AWAY[kind], self._return, (host, kind))]
        self._returning[0].start()
        return (host,)

    def _return(self, host: int, kind: str) -> None:
        """The cable is plugged in again, or a new host runs the same command."""
        self._network.connect(host, True)
        if kind != "cable for 20 s":
            with self._lock:
                self._earlier.append(self.sessions[host])
                self.sessions[host] = self._start(host)

    def wait(self, since: float) -> Ending:
        """Until all launchers have ended, also those of hosts that are away when the run ends: these come back, look
        for the master, and give up."""
        for timer in self._returning:
            timer.join()
        return super().wait(since)

    def _code(self, codes: Sequence[Optional[int]]) -> Optional[int]:
        """The first host's: one that was away cannot know how the run ended."""
        return codes[0]

"""The hosts of an elastic run as network namespaces, a launcher and a replica on each, and what
strikes them.
"""

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
_AWAY = {  # seconds until a host comes back
    "launcher": 1.0,
    "cable for 20 s": 20.0,
    "host replaced": 8.0,
}
CHOICES = (KINDS, _AWAY)  # that decide how hosts are struck


def members(said: str, replicas: int) -> List[int]:
    """Return the replicas of a run's newest generation.

    Args:
        said: what its hosts have printed until now, one after another.
        replicas: of the whole run, all of which are members before the first line.
    """
    lines = re.findall(r"^generation (\d+): .* with replicas ([\d, ]+)$", said, re.M)
    if not lines:
        return list(range(replicas))
    # The newest need not be the last line: the output of one host follows that of another.
    _, numbers = max(lines, key=lambda line: int(line[0]))
    return [int(number) for number in numbers.split(", ")]


class Hosts(Launchers):
    """A run over the hosts of a network, which `strike` strikes."""

    def __init__(self, site: Site, network: Network):
        """
        Args:
            site: of the run.
            network: with a host for each replica.
        """
        super().__init__(site, network)
        self._earlier: List[Session] = []  # of hosts that were struck with their launchers
        self._returning: List[threading.Timer] = []
        # Timers put new sessions in the place of others.
        self._lock = threading.Lock()

    def ranks(self) -> Dict[int, int]:
        """Return the process numbers of the ranks that have been started, by rank."""
        with self._lock:
            return super().ranks()

    def said(self) -> str:
        """Return what the launchers have printed until now, also those that were struck."""
        with self._lock:
            earlier = [session.said() for session in self._earlier]
            return "\n".join([*earlier, super().said()])

    def strike(self, kind: str, draws: random.Random) -> Tuple[int, ...]:
        """Strike a host other than the first, or its rank. The host comes back by itself.

        Args:
            kind: one of `KINDS`.
            draws: chooses the host.

        Returns:
            The rank; nothing where not all replicas are in the run, or not all hosts in reach.
        """
        hosts = self._network.hosts
        is_whole = len(members(self.said(), hosts)) == hosts
        processes = self.ranks()
        is_away = any(timer.is_alive() for timer in self._returning)
        if not is_whole or len(processes) < hosts or is_away:
            return ()
        host = draws.randrange(1, hosts)
        if kind in ("kill", "stop"):
            send(processes[host], signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            return (host,)
        # The others are struck as a whole, and come back later.
        if kind != "launcher":
            self._network.connect(host, False)
        if kind != "cable for 20 s":
            self.sessions[host].process.kill()  # with it go its ranks
        timer = threading.Timer(_AWAY[kind], self._return, (host, kind))
        self._returning = [timer]
        timer.start()
        return (host,)

    def _return(self, host: int, kind: str) -> None:
        """Plug in a host's cable again, or let a new host run the same command."""
        self._network.connect(host, True)
        if kind != "cable for 20 s":
            with self._lock:
                self._earlier.append(self.sessions[host])
                self.sessions[host] = self._start(host)

    def close(self) -> None:
        """Keep a host that is away from coming back, as after an error its network is removed."""
        for timer in self._returning:
            timer.cancel()
            timer.join()

    def wait(self, since: float) -> Ending:
        """Wait until all launchers have ended, or one hangs.

        Also those of hosts that are away when the run ends: these come back, look for the master,
        and give up.

        Args:
            since: moment (time.monotonic) that the end is timed from.
        """
        for timer in self._returning:
            timer.join()
        return super().wait(since)

    def _code(self, codes: Sequence[Optional[int]]) -> Optional[int]:
        """Return the first host's code: one that was away cannot know how the run ended."""
        return codes[0]

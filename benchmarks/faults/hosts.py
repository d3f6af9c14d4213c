"""A run over several hosts, network namespaces with a launcher on each, and what happens to their cables and clocks."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Dict, Optional, Sequence

from benchmarks.faults.site import SESSION_SECONDS, Effect, Ending, Session, Site, Topology, send
from benchmarks.networks import Network
from benchmarks.processes import tree

RATE = 1_000_000_000  # bits a second of a cable
_SECRET = "of this benchmark"
_MOMENT = (0.2, 1.2)  # seconds that a cable is pulled for: TCP's next try after them comes within the silence
_SLOW = (2.0, 4.0)  # seconds that a host or a cable is slow for
_BURST = (0.1, 0.6)  # seconds that a slow host stands still for, and then goes on for
_SLOW_RATE = (5_000_000, 50_000_000)  # bits a second of a slow cable: a step's gradients take 0.2 to 2 seconds


class Launchers:
    """One start of a run on all hosts of a network: what is asked of a session, of the launchers of all hosts."""

    def __init__(self, site: Site, network: Network):
        self._site, self._network = site, network
        self.sessions = [self._start(host) for host in range(network.hosts)]

    def _start(self, host: int) -> Session:
        place = (*self._network.within(host), "env", f"POD_TOKEN={_SECRET}")
        options = ("--nnodes", self._network.hosts, "--node-rank", host, "--master", self._network.address(0))
        return self._site.launch(place, map(str, options))

    @property
    def running(self) -> bool:
        return self.sessions[0].running

    def reach(self, step: int, delay: float) -> None:
        self.sessions[0].reach(step, delay)

    def said(self) -> str:
        """What the launchers of all hosts have printed until now."""
        return "\n".join(session.said() for session in self.sessions)

    def ranks(self) -> Dict[int, int]:
        return {rank: process for session in self.sessions for rank, process in session.ranks().items()}

    def wait(self, since: float) -> Ending:
        """Until all launchers have ended, or one hangs."""
        end = time.monotonic() + SESSION_SECONDS
        while any(session.running for session in self.sessions) and time.monotonic() < end:
            time.sleep(0.02)
        seconds = time.monotonic() - since
        endings = [session.wait(since) for session in self.sessions]
        codes = [ending.code for ending in endings]
        said = [f"host {host} ended with {ending.code}:\n{ending.said}" for host, ending in enumerate(endings)]
        return Ending(self._code(codes), seconds, "\n".join(said))

    def _code(self, codes: Sequence[Optional[int]]) -> Optional[int]:
        """The run's exit code: that of all launchers, if they have the same."""
        return codes[0] if len(set(codes)) == 1 else None


class SiteOnHosts(Site):
    """The place of a run that has a host for each replica."""

    def __init__(self, folder: Path, topology: Topology, overrides: Sequence[str], network: Network):
        super().__init__(folder, topology, overrides)
        self.network = network

    def start(self) -> Launchers:
        return Launchers(self, self.network)

    def mend(self) -> None:
        for host in range(self.network.hosts):
            self.network.connect(host, True)


def cut(site: SiteOnHosts, session: Launchers, draws: random.Random) -> Effect:
    """A host's cable is pulled for good. The rank after its own is to say that it hears nothing of that, and the host,
    or its rank, that it hears nothing of the others."""
    host = _another(site, draws)
    site.network.connect(host, False)
    silent, after = "has said nothing for", (host + 1) % site.network.hosts
    cut_off = rf"host {host} ended with \d+:(?:(?!host \d ended).)*{silent}"
    return Effect(said=rf"(?=.*rank {after} \(replica {after}, stage 0\): rank {host} {silent})(?=.*{cut_off})")


def cut_for_a_moment(site: SiteOnHosts, session: Launchers, draws: random.Random) -> None:
    host = _another(site, draws)
    site.network.connect(host, False)
    time.sleep(draws.uniform(*_MOMENT))
    site.network.connect(host, True)


def slow_down(site: SiteOnHosts, session: Launchers, draws: random.Random) -> None:
    """All processes of a host stand still again and again."""
    processes = tree(session.sessions[draws.randrange(site.network.hosts)].process.pid)
    end = time.monotonic() + draws.uniform(*_SLOW)
    while session.running and time.monotonic() < end:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in processes:
                send(process, number)
            time.sleep(draws.uniform(*_BURST))


def slow_cable(site: SiteOnHosts, session: Launchers, draws: random.Random) -> None:
    host = _another(site, draws)
    site.network.limit(host, draws.randint(*_SLOW_RATE))
    time.sleep(draws.uniform(*_SLOW))
    site.network.limit(host, RATE)


def _another(site: SiteOnHosts, draws: random.Random) -> int:
    return draws.randrange(1, site.network.hosts)

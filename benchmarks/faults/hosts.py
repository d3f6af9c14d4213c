"""A run over several hosts, network namespaces with a launcher on each, and what happens to their
cables and clocks.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Union

from benchmarks.faults.site import SESSION_SECONDS, Effect, Ending, Session, Site, Topology, send
from benchmarks.networks import Network
from benchmarks.processes import tree

RATE = 1_000_000_000  # bits a second of a cable
_SECRET = "of this benchmark"
# Seconds that a cable is pulled for: TCP's next try after them comes within the silence.
_MOMENT = (0.2, 1.2)
_SLOW = (2.0, 4.0)  # seconds that a host or a cable is slow for
_BURST = (0.1, 0.6)  # seconds that a slow host stands still for, and then goes on for
# Bits a second of a slow cable: a step's gradients take 0.2 to 2 seconds.
_SLOW_RATE = (5_000_000, 50_000_000)


class Launchers:
    """One start of a run on all hosts of a network.

    It is asked what a `Session` is asked, and answers for the launchers of all hosts.

    sessions: of each host.
    """

    def __init__(self, site: Site, network: Network):
        """
        Args:
            site: of the run.
            network: with a host for each replica.
        """
        self._site = site
        self._network = network
        self.sessions = [self._start(host) for host in range(network.hosts)]

    def _start(self, host: int) -> Session:
        """Start the launcher of a host."""
        place = [*self._network.within(host), "env", f"POD_TOKEN={_SECRET}"]
        options = ["--nnodes", str(self._network.hosts), "--node-rank", str(host)]
        return self._site.launch(place, [*options, "--master", self._network.address(0)])

    @property
    def running(self) -> bool:
        """Return whether the first host's launcher has not ended."""
        return self.sessions[0].running

    def reach(self, step: int, delay: float) -> None:
        """Wait until the run has logged `step`, and `delay` seconds more, or until it has ended."""
        self.sessions[0].reach(step, delay)

    def said(self) -> str:
        """Return what the launchers have printed until now, host after host."""
        return "\n".join(session.said() for session in self.sessions)

    def ranks(self) -> Dict[int, int]:
        """Return the process numbers of the ranks that have been started, by rank."""
        processes: Dict[int, int] = {}
        for session in self.sessions:
            processes.update(session.ranks())
        return processes

    def wait(self, since: float) -> Ending:
        """Wait until all launchers have ended, or one hangs.

        Args:
            since: moment (time.monotonic) that the end is timed from.
        """
        end = time.monotonic() + SESSION_SECONDS
        while any(session.running for session in self.sessions) and time.monotonic() < end:
            time.sleep(0.02)
        seconds = time.monotonic() - since
        codes: List[Optional[int]] = []
        said = []
        for host, session in enumerate(self.sessions):
            ending = session.wait(since)
            codes.append(ending.code)
            said.append(f"host {host} ended with {ending.code}:\n{ending.said}")
        return Ending(self._code(codes), seconds, "\n".join(said))

    def _code(self, codes: Sequence[Optional[int]]) -> Optional[int]:
        """Return the run's exit code: that of all launchers, if they have the same."""
        return codes[0] if len(set(codes)) == 1 else None


AnySession = Union[Session, Launchers]


class SiteOnHosts(Site):
    """The place of a run that has a host for each replica.

    network: of these hosts.
    """

    def __init__(
        self, folder: Path, topology: Topology, overrides: Sequence[str], network: Network
    ):
        """
        Args:
            folder: is made if it is not there.
            topology: of the run.
            overrides: of the recipe, after `RECIPE`.
            network: with a host for each replica.
        """
        super().__init__(folder, topology, overrides)
        self.network = network

    def start(self) -> Launchers:
        """Start the run, or resume it, on all hosts."""
        return Launchers(self, self.network)

    def mend(self) -> None:
        """Plug in the cables of all hosts."""
        for host in range(self.network.hosts):
            self.network.connect(host, True)


def cut(site: SiteOnHosts, session: Launchers, draws: random.Random) -> Effect:
    """Pull a host's cable for good.

    Args:
        site: of the run.
        session: not asked.
        draws: chooses the host.

    Returns:
        What both sides must say: the rank after the host's own that it hears nothing of that one,
        and the host, or its rank, that it hears nothing of the others.
    """
    host = _another(site, draws)
    site.network.connect(host, False)
    silent = "has said nothing for"
    after = (host + 1) % site.network.hosts
    # Both in either order: each is looked for from the beginning.
    by_neighbour = rf"rank {after} \(replica {after}, stage 0\): rank {host} {silent}"
    by_host = rf"host {host} ended with \d+:(?:(?!host \d ended).)*{silent}"
    return Effect(said=rf"(?=.*{by_neighbour})(?=.*{by_host})")


def cut_for_a_moment(site: SiteOnHosts, session: Launchers, draws: random.Random) -> None:
    """Pull a host's cable, and plug it in again before anybody may give up.

    Args:
        site: of the run.
        session: not asked.
        draws: chooses the host and the time.
    """
    host = _another(site, draws)
    site.network.connect(host, False)
    time.sleep(draws.uniform(*_MOMENT))
    site.network.connect(host, True)


def slow_down(site: SiteOnHosts, session: Launchers, draws: random.Random) -> None:
    """Make all processes of a host stand still again and again.

    Args:
        site: of the run.
        session: whose processes these are.
        draws: chooses the host and the times.
    """
    host = draws.randrange(site.network.hosts)
    processes = tree(session.sessions[host].process.pid)
    end = time.monotonic() + draws.uniform(*_SLOW)
    while session.running and time.monotonic() < end:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in processes:
                send(process, number)
            time.sleep(draws.uniform(*_BURST))


def slow_cable(site: SiteOnHosts, session: Launchers, draws: random.Random) -> None:
    """Make a host's cable slow for some seconds.

    Args:
        site: of the run.
        session: not asked.
        draws: chooses the host, the rate and the time.
    """
    host = _another(site, draws)
    site.network.limit(host, draws.randint(*_SLOW_RATE))
    time.sleep(draws.uniform(*_SLOW))
    site.network.limit(host, RATE)


def _another(site: SiteOnHosts, draws: random.Random) -> int:
    """Draw a host other than the first, which has the master."""
    return draws.randrange(1, site.network.hosts)

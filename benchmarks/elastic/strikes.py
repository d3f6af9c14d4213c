"""An elastic run whose replicas are struck, or its launchers stopped, at random moments, beside one undisturbed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from benchmarks import CACHE
from benchmarks.elastic import hosts
from benchmarks.elastic.stops import Stop, restarts, stopped
from benchmarks.faults.hosts import RATE, SiteOnHosts
from benchmarks.faults.site import Result, Session, Site, Topology
from benchmarks.networks import Network
from benchmarks.processes import runs
from common.errors import DONE

EPOCHS = 60
STEPS = 5 * EPOCHS
_OVERRIDES = (f"run.epochs={EPOCHS}",)
ELASTIC = ("parallel.elastic=true", "parallel.silence=2")
_LAST = 15  # steps before the end without a strike
_POLL_SECONDS = 0.004
_PAUSES = (1.0, 7.0)  # between two strikes: shorter and longer than a replica takes to come back
KINDS = ("kill", "kill", "kill", "stop", "stop", "two", "meeting", "evaluation", "checkpoint")
_SIGNALS = {  # of others SIGKILL
    "stop": (signal.SIGSTOP,),
    "two": (signal.SIGKILL, signal.SIGKILL),
    "meeting": (signal.SIGKILL, signal.SIGSTOP),
}
_MEETING = 1.5  # seconds at most from a kill until another is stopped, while those that are left meet
_EVERY = {"evaluation": 10, "checkpoint": 3}  # steps after which the recipe has one


class Planned(NamedTuple):
    """A run. on_hosts: each replica on a host of its own, with a cable. stops: it is stopped, and started again."""

    topology: Topology
    seed: int
    on_hosts: bool = False
    stops: bool = False

    def __str__(self) -> str:
        return f"{'stops ' if self.stops else ''}{self.where} {self.seed} {EPOCHS}"

    @property
    def where(self) -> str:
        return f"{self.topology} on hosts" if self.on_hosts else str(self.topology)


class Strike(NamedTuple):
    """kind: of KINDS or hosts.KINDS, or "while another joins". seconds: from the strike until a step was done that had
    not been, less the median step of the run."""

    kind: str
    ranks: Tuple[int, ...]
    step: int
    seconds: float


class Struck(NamedTuple):
    """A run: its topology, strikes, whether it ended with the undisturbed bits, steps whose events differ from the
    undisturbed run's, starts from a checkpoint (other than by the same command after a stop), changes of the
    generation, and seconds that these took in all; or its stops, which have no such seconds."""

    topology: str
    strikes: List[Strike]
    same: bool
    wrong_steps: int
    restarts: int
    generations: int
    seconds: float
    output: str
    stops: Sequence[Stop] = ()


class _Watch(threading.Thread):
    """Notes when each step was done, and when each generation began."""

    def __init__(self, site: Site, session: Session):
        super().__init__(daemon=True)
        self._site, self._session = site, session
        self.times: List[Tuple[float, int]] = []  # that there were more steps, and how many
        self.changes: List[float] = []

    def run(self) -> None:
        while self._session.running:
            now, steps = time.monotonic(), self._site.steps()
            if steps != (self.times[-1][1] if self.times else 0):
                self.times.append((now, steps))
            found = len(re.findall(r"^generation ", self._session.said(), re.M))
            self.changes += [now] * (found - len(self.changes))
            time.sleep(_POLL_SECONDS)

    def after(self, moment: float, steps: int) -> Optional[float]:
        """When more than so many steps were done, after a moment."""
        return next((when for when, number in self.times if when > moment and number > steps), None)

    def intervals(self) -> List[float]:
        return [after - before for (before, _), (after, _) in zip(self.times, self.times[1:])]

    def around_changes(self) -> List[float]:
        """Seconds between the steps before and after each change of the generation."""
        moments = [when for when, _ in self.times]
        pairs = [(before, after) for before, after in zip(moments, moments[1:])]
        return [after - before for before, after in pairs if any(before < change <= after for change in self.changes)]


def undisturbed(folder: Path) -> Result:
    """Of one process."""
    site = Site(folder, Topology(1, 1), _OVERRIDES)
    ending = site.start().wait(0.0)
    assert ending.code == DONE, ending.said
    return site.result()


def struck(planned: Planned, expected: Result, folder: Path) -> Struck:
    """Make a run and disturb it.

    Args:
        planned: which.
        expected: of the undisturbed run.
        folder: an empty place for it.
    """
    overrides = (*_OVERRIDES, *ELASTIC)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Network(planned.topology.replicas, RATE)) if planned.on_hosts else None
        if planned.stops and network is not None:
            return _stopped(planned, SiteOnHosts(folder, planned.topology, overrides, network), expected)
        site = Site(folder, planned.topology, overrides)
        if planned.stops:
            return _stopped(planned, site, expected)
        return _struck(planned, site, site.start() if network is None else hosts.Hosts(site, network), expected)


def _stopped(planned: Planned, site: Site, expected: Result) -> Struck:
    """A run whose launchers are told to stop again and again."""
    stops, endings = stopped(site, STEPS, random.Random(str(planned)))
    result = site.result() if endings[-1].code == DONE else None
    return Struck(
        topology=planned.where,
        strikes=[],
        same=result == expected,
        wrong_steps=_differing(expected, result),
        restarts=restarts(endings),
        generations=0,
        seconds=0.0,
        output="" if result == expected else "\n".join(ending.said for ending in endings),
        stops=stops,
    )


def _differing(expected: Result, result: Optional[Result]) -> int:
    """Steps with events that only one of two runs has. Args: result: None if the run did not end."""
    events = [] if result is None else result.events
    wrong = {event["step"] for event in expected.events if event not in events}
    wrong |= {event["step"] for event in events if event not in expected.events}
    return len(wrong)


def _struck(planned: Planned, site: Site, session: Union[Session, hosts.Hosts], expected: Result) -> Struck:
    topology, draws = planned.topology, random.Random(f"{planned.topology} {planned.seed}")
    watch = _Watch(site, session)
    watch.start()
    session.reach(3, 0.0)
    made = []
    while session.running and site.steps() < STEPS - _LAST:
        time.sleep(draws.uniform(*_PAUSES))
        kind = draws.choice(hosts.KINDS if planned.on_hosts else KINDS)
        if kind in _EVERY:
            session.reach((site.steps() // _EVERY[kind] + 1) * _EVERY[kind], draws.uniform(0, 0.05))
        if session.running and site.steps() < STEPS - _LAST:
            if isinstance(session, hosts.Hosts):
                ranks = session.strike(kind, draws)
            else:
                kind, ranks = _strike(kind, topology, session, draws)
            if ranks:
                made.append((kind, ranks, site.steps(), time.monotonic()))
    ending = session.wait(0.0)
    watch.join()
    usual = statistics.median(watch.intervals())
    strikes = []
    for kind, ranks, steps, moment in made:
        after = watch.after(moment, steps)
        strikes.append(Strike(kind, ranks, steps, max(0.0, (after or time.monotonic()) - moment - usual)))
    result = site.result() if ending.code == DONE else None
    around = watch.around_changes()
    return Struck(
        topology=planned.where,
        strikes=strikes,
        same=result == expected,
        wrong_steps=_differing(expected, result),
        restarts=restarts([ending]),
        generations=len(watch.changes),
        seconds=sum(around) - usual * len(around),
        output="" if result == expected else ending.said,
    )


def _strike(kind: str, topology: Topology, session: Session, draws: random.Random) -> Tuple[str, Tuple[int, ...]]:
    """Strike, but leave one replica whole that has the run's state. The kind, and the ranks; none if that is not
    possible now."""
    members = hosts.members(session.said(), topology.replicas)
    processes = session.ranks()
    running = [
        r for r in range(topology.replicas) if all(map(runs, (processes.get(n, 0) for n in _ranks(r, topology))))
    ]
    whole, waiting = [r for r in members if r in running], [r for r in running if r not in members]
    signals = _SIGNALS.get(kind, (signal.SIGKILL,))
    victims = draws.sample(whole, len(signals)) if len(whole) > len(signals) else []
    joining = bool(waiting) and signal.SIGSTOP not in signals
    if not victims and joining:
        victims = [draws.choice(waiting)]  # on its way back: another joins, or is struck as it does
    ranks = tuple(draws.choice(_ranks(replica, topology)) for replica in victims)
    for rank, sent in zip(ranks, signals):
        if kind == "meeting" and sent == signal.SIGSTOP:
            time.sleep(draws.uniform(0, _MEETING))
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank], sent)
    return "while another joins" if joining else kind, ranks


def _ranks(replica: int, topology: Topology) -> range:
    return range(replica * topology.stages, (replica + 1) * topology.stages)


def all_runs(planned: List[Planned], progress) -> List[Struck]:
    """Those that were made before are read from the cache."""
    cache = CACHE / "elastic" / "strikes.jsonl"
    cache.parent.mkdir(parents=True, exist_ok=True)
    known: Dict[str, Struck] = {}
    if cache.exists():
        for line in cache.read_text().splitlines():
            key, fields = json.loads(line)
            known[key] = Struck(**fields)._replace(
                strikes=[Strike(*each) for each in fields["strikes"]],
                stops=[Stop(*each) for each in fields.get("stops", ())],
            )
    found = []
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        expected: Optional[Result] = None
        for each in progress(planned, "run"):
            if str(each) not in known:
                expected = expected or undisturbed(Path(folder) / "undisturbed")
                known[str(each)] = struck(each, expected, Path(folder) / str(each).replace(" ", "-"))
                with open(cache, "a", encoding="utf-8") as stream:
                    stream.write(json.dumps([str(each), known[str(each)]._asdict()]) + "\n")
            found.append(known[str(each)])
    return found

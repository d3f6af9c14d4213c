"""An elastic run whose replicas are struck, or its launchers stopped, at random moments, beside one
undisturbed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import statistics
import tempfile
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from benchmarks import CACHE
from benchmarks.elastic import hosts, stops
from benchmarks.elastic.stops import Stop, restarts, stopped
from benchmarks.faults.hosts import RATE, AnySession, SiteOnHosts
from benchmarks.faults.site import RECIPE, Result, Site, Topology
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
# Seconds at most from a kill until another is stopped, while those that are left meet.
_MEETING = 1.5
_EVERY = {"evaluation": 10, "checkpoint": 3}  # steps after which the recipe has one
# Decide, beside what `Planned` has, what a run is and what happens to it: others make other runs.
_CHOICES = (
    RECIPE,
    _OVERRIDES,
    ELASTIC,
    RATE,
    _LAST,
    _PAUSES,
    KINDS,
    _SIGNALS,
    _MEETING,
    _EVERY,
    hosts.CHOICES,
    stops.CHOICES,
)


class Planned(NamedTuple):
    """A run that is to be made.

    topology: of the run.
    seed: of the moments and all that is random.
    on_hosts: each replica has a host of its own, with a cable.
    stops: it is stopped, and started again.
    """

    topology: Topology
    seed: int
    on_hosts: bool = False
    stops: bool = False

    def __str__(self) -> str:
        kind = "stops " if self.stops else ""
        return f"{kind}{self.where} {self.seed} {EPOCHS}"

    @property
    def key(self) -> str:
        """Return the key in the cache: the run as text, and a digest of what decides."""
        digest = zlib.crc32(repr(_CHOICES).encode())
        return f"{self} {digest:08x}"

    @property
    def where(self) -> str:
        """Return the topology, and whether it is on hosts, as text."""
        return f"{self.topology} on hosts" if self.on_hosts else str(self.topology)


class Strike(NamedTuple):
    """A strike, and what it cost.

    kind: of KINDS or hosts.KINDS, or "while another joins".
    ranks: that were struck.
    step: how far the run was.
    seconds: from the strike until a step was done that had not been, less the median step of the
        run.
    """

    kind: str
    ranks: Tuple[int, ...]
    step: int
    seconds: float


class Struck(NamedTuple):
    """A run that was disturbed.

    topology: of the run, as text.
    strikes: in their order.
    same: whether it ended with the undisturbed bits.
    wrong_steps: whose events differ from the undisturbed run's.
    restarts: starts from a checkpoint, other than by the same command after a stop.
    generations: changes of the generation.
    seconds: that all changes of the generation took.
    output: of all its sessions, if it did not end with the undisturbed bits.
    stops: of a run that was stopped instead of struck; its generations and seconds are 0.
    """

    topology: str
    strikes: List[Strike]
    same: bool
    wrong_steps: int
    restarts: int
    generations: int
    seconds: float
    output: str
    stops: Sequence[Stop] = ()


class _Moment(NamedTuple):
    """A strike that was made, before its cost is known.

    kind, ranks, step: see `Strike`.
    when: by time.monotonic.
    """

    kind: str
    ranks: Tuple[int, ...]
    step: int
    when: float


class _Watch(threading.Thread):
    """Notes when each step was done, and when each generation began.

    times: moments at which the number of steps was another one, and that number.
    changes: moments at which generations began.
    ended: moment at which the session had ended, infinite before.
    """

    def __init__(self, site: Site, session: AnySession):
        """
        Args:
            site: of the run.
            session: that is watched until it ends.
        """
        super().__init__(daemon=True)
        self._site = site
        self._session = session
        self.times: List[Tuple[float, int]] = []
        self.changes: List[float] = []
        self.ended = math.inf

    def run(self) -> None:
        """Look again and again until the session has ended."""
        before = 0
        while self._session.running:
            now = time.monotonic()
            steps = self._site.steps()
            if steps != before:
                self.times.append((now, steps))
                before = steps
            said = self._session.said()
            generations = len(re.findall(r"^generation ", said, re.M))
            self.changes += [now] * (generations - len(self.changes))
            time.sleep(_POLL_SECONDS)
        self.ended = time.monotonic()

    def after(self, moment: float, steps: int) -> Optional[float]:
        """Return when, after a `moment`, more than so many `steps` were done; None if never."""
        for when, number in self.times:
            if when > moment and number > steps:
                return when
        return None

    def intervals(self) -> List[float]:
        """Return the seconds from each moment of `times` to the next."""
        return [after - before for before, after in self._neighbours()]

    def around_changes(self) -> List[float]:
        """Return the seconds between the steps before and after each change of the generation."""
        seconds = []
        for before, after in self._neighbours():
            if any(before < change <= after for change in self.changes):
                seconds.append(after - before)
        return seconds

    def _neighbours(self) -> List[Tuple[float, float]]:
        """Return each moment of `times` with the next."""
        moments = [when for when, _ in self.times]
        return list(zip(moments, moments[1:]))


def undisturbed(folder: Path) -> Result:
    """Make a run of one process that nothing happens to.

    Args:
        folder: an empty place for it.
    """
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
    topology = planned.topology
    if not planned.on_hosts:
        site = Site(folder, topology, overrides)
        if planned.stops:
            return _stopped(planned, site, expected)
        return _struck(planned, site, site.start(), expected)
    with Network(topology.replicas, RATE) as network:
        if planned.stops:
            site_on_hosts = SiteOnHosts(folder, topology, overrides, network)
            return _stopped(planned, site_on_hosts, expected)
        # A plain site: `Hosts` itself starts a launcher on each host.
        site = Site(folder, topology, overrides)
        with contextlib.closing(hosts.Hosts(site, network)) as session:
            return _struck(planned, site, session, expected)


def _stopped(planned: Planned, site: Site, expected: Result) -> Struck:
    """Make a run whose launchers are told to stop again and again.

    Args:
        planned: the run.
        site: of the run.
        expected: of the undisturbed run.
    """
    draws = random.Random(str(planned))
    stops, endings = stopped(site, STEPS, draws)
    result = site.result() if endings[-1].code == DONE else None
    is_same = result == expected
    output = "\n".join(ending.said for ending in endings)
    return Struck(
        topology=planned.where,
        strikes=[],
        same=is_same,
        wrong_steps=_differing(expected, result),
        restarts=restarts(endings),
        generations=0,
        seconds=0.0,
        output="" if is_same else output,
        stops=stops,
    )


def _differing(expected: Result, result: Optional[Result]) -> int:
    """Return how many steps have events that only one of two runs has.

    Args:
        expected: of the undisturbed run.
        result: None if the run did not end.
    """
    right = _counted(expected.events)
    logged = _counted([] if result is None else result.events)
    # Subtraction leaves those that one side has more often than the other.
    differing = (right - logged) + (logged - right)
    return len({json.loads(event)["step"] for event in differing})


def _counted(events: List[dict]) -> Counter[str]:
    """Return how often each of some events occurs, by its JSON with sorted keys."""
    return Counter(json.dumps(event, sort_keys=True) for event in events)


def _struck(planned: Planned, site: Site, session: AnySession, expected: Result) -> Struck:
    """Strike a run that has been started until it ends.

    Args:
        planned: the run.
        site: of the run.
        session: of the run.
        expected: of the undisturbed run.
    """
    draws = random.Random(f"{planned.topology} {planned.seed}")
    # From before the first strike: its cost shows in the times of steps.
    watch = _Watch(site, session)
    watch.start()
    moments = _strike_again_and_again(planned, site, session, draws)
    ending = session.wait(0.0)
    watch.join()
    # What a strike cost is known only now that the usual step is.
    usual = statistics.median(watch.intervals())
    strikes = [_with_cost(moment, watch, usual) for moment in moments]
    result = site.result() if ending.code == DONE else None
    is_same = result == expected
    around = watch.around_changes()
    return Struck(
        topology=planned.where,
        strikes=strikes,
        same=is_same,
        wrong_steps=_differing(expected, result),
        restarts=restarts([ending]),
        generations=len(watch.changes),
        seconds=sum(around) - usual * len(around),
        output="" if is_same else ending.said,
    )


def _with_cost(moment: _Moment, watch: _Watch, usual: float) -> Strike:
    """Return a strike with its cost.

    Args:
        moment: that it was made at.
        watch: of the run, which has ended.
        usual: seconds of the median step.
    """
    after = watch.after(moment.when, moment.step)
    # No step followed: the strike has cost all that was left of the run.
    if after is None:
        after = watch.ended
    seconds = max(0.0, after - moment.when - usual)
    return Strike(moment.kind, moment.ranks, moment.step, seconds)


def _strike_again_and_again(
    planned: Planned, site: Site, session: AnySession, draws: random.Random
) -> List[_Moment]:
    """Strike a run until it is about to end; return the strikes.

    Args:
        planned: the run.
        site: of the run.
        session: of the run.
        draws: chooses the moments, the kinds, and who is struck.
    """
    moments = []
    session.reach(3, 0.0)
    while session.running and site.steps() < STEPS - _LAST:
        time.sleep(draws.uniform(*_PAUSES))
        kind = draws.choice(hosts.KINDS if planned.on_hosts else KINDS)
        # Some strike as the next evaluation or checkpoint begins.
        if kind in _EVERY:
            every = _EVERY[kind]
            following = (site.steps() // every + 1) * every
            session.reach(following, draws.uniform(0, 0.05))
        # The run has gone on meanwhile.
        if not session.running or site.steps() >= STEPS - _LAST:
            continue
        if isinstance(session, hosts.Hosts):
            ranks = session.strike(kind, draws)
        else:
            kind, ranks = _strike(kind, planned.topology, session, draws)
        if ranks:
            moment = _Moment(kind, ranks, site.steps(), time.monotonic())
            moments.append(moment)
    return moments


def _strike(
    kind: str, topology: Topology, session: AnySession, draws: random.Random
) -> Tuple[str, Tuple[int, ...]]:
    """Strike, but leave one replica whole that has the run's state.

    Args:
        kind: one of `KINDS`.
        topology: of the run.
        session: of the run.
        draws: chooses replicas and their stages.

    Returns:
        The kind, and the ranks; none if that is not possible now.
    """
    signals = _SIGNALS.get(kind, (signal.SIGKILL,))
    members = hosts.members(session.said(), topology.replicas)
    processes = session.ranks()
    running = _running(topology, processes)
    # One of those that are whole must be left.
    whole = [replica for replica in members if replica in running]
    victims: List[int] = []
    if len(whole) > len(signals):
        victims = draws.sample(whole, len(signals))
    # A replica is on its way back: another is struck as it joins, or it is struck itself.
    waiting = [replica for replica in running if replica not in members]
    joining = bool(waiting) and signal.SIGSTOP not in signals
    if joining and not victims:
        victims = [draws.choice(waiting)]
    # One stage of each: the others end by that.
    ranks = [draws.choice(_ranks(replica, topology)) for replica in victims]
    for rank, number in zip(ranks, signals):
        if kind == "meeting" and number == signal.SIGSTOP:
            time.sleep(draws.uniform(0, _MEETING))
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank], number)
    called = "while another joins" if joining else kind
    return called, tuple(ranks)


def _running(topology: Topology, processes: Dict[int, int]) -> List[int]:
    """Return the replicas all of whose ranks run.

    Args:
        topology: of the run.
        processes: numbers by rank; those that have not been started are not there.
    """
    running = []
    for replica in range(topology.replicas):
        ranks = _ranks(replica, topology)
        if all(runs(processes.get(rank, 0)) for rank in ranks):
            running.append(replica)
    return running


def _ranks(replica: int, topology: Topology) -> range:
    """Return the ranks of a replica, one for each stage."""
    first = replica * topology.stages
    return range(first, first + topology.stages)


def all_runs(
    planned: List[Planned],
    progress: Callable[[List[Planned], str], Iterable[Planned]],
) -> List[Struck]:
    """Make runs; those that were made before are read from the cache.

    Args:
        planned: the runs.
        progress: yields these, and tells how many are done; takes the name of one, too.
    """
    cache = CACHE / "elastic" / "strikes.jsonl"
    cache.parent.mkdir(parents=True, exist_ok=True)
    known = _read(cache)
    expected: Optional[Result] = None
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        for this in progress(planned, "run"):
            key = this.key
            if key in known:
                continue
            # Only where a run is made at all is there anything to be compared.
            if expected is None:
                expected = undisturbed(Path(folder) / "undisturbed")
            run = struck(this, expected, Path(folder) / key.replace(" ", "-"))
            known[key] = run
            line = json.dumps([key, run._asdict()])
            with open(cache, "a", encoding="utf-8") as stream:
                stream.write(line + "\n")
    return [known[this.key] for this in planned]


def _read(cache: Path) -> Dict[str, Struck]:
    """Return the runs in the file of the cache, by key."""
    known: Dict[str, Struck] = {}
    if not cache.exists():
        return known
    for line in cache.read_text().splitlines():
        key, fields = json.loads(line)
        fields["strikes"] = [Strike(*values) for values in fields["strikes"]]
        # Older files have no stops.
        fields["stops"] = [Stop(*values) for values in fields.get("stops", ())]
        known[key] = Struck(**fields)
    return known

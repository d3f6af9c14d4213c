"""One trial: a run is struck, mended, resumed until it ends, and compared with the undisturbed run."""

import contextlib
import itertools
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Tuple

from PIL import Image

from benchmarks import ROOT
from benchmarks.faults import hosts
from benchmarks.faults.kinds import KINDS, SHORT, Kind, small_disk
from benchmarks.faults.site import Effect, Ending, Result, Site, Topology
from benchmarks.networks import Network
from data.digits import DigitsSource
from parallel.parent_death import bound_to_parent

_SESSIONS = 3  # in which a run that nothing more happens to must end
_TOO_LATE = 4  # times that a run may end before the fault strikes


class Trial(NamedTuple):
    """Outcome of one fault.

    step: how far the run was. code: of the session that was struck; detection: seconds until it had ended. repeated,
    lost: updates in the metrics of the finished run that are there twice, or missing or other than the undisturbed
    run's. wrong: what was not as it should be; empty if the run survived. noticed: seconds until the first of the
    other ranks had ended, where one was struck.
    """

    kind: str
    topology: str
    step: int
    code: Optional[int]
    detection: float
    repeated: int
    lost: int
    wrong: str
    noticed: Optional[float] = None


class Bench:
    """Shared by all trials: a folder, the library that makes clocks jump, shards, and undisturbed results.

    Threads may try faults side by side, except on hosts, which the main thread alone can make.
    """

    def __init__(self, folder: Path):
        """Raises CalledProcessError where there is no C compiler."""
        self._folder = folder
        self._shim = folder / "shim.so"
        source = Path(__file__).with_name("shim.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", self._shim, source, "-ldl"], check=True)
        self._undisturbed: Dict[bool, Result] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def trial(self, name: str, topology: Topology, draws: random.Random) -> Trial:
        """Tries a kind of fault at a random moment; again with others where the run was faster."""
        kind = KINDS[name]
        reference = self._reference(kind.shards)
        for _ in range(_TOO_LATE):
            with self._site(kind, topology) as site:
                step, ending, effect = _struck(kind, site, draws)
                if ending.code == 0 and 0 not in kind.codes:
                    continue
                wrong = []
                if ending.code not in kind.codes:
                    wrong.append(f"exit code {ending.code} instead of {kind.codes}: {_tail(ending.said)}")
                wrong += _unsaid(kind.said if effect.said is None else effect.said, ending)
                kind.mend(site)
                if ending.code != 0:
                    wrong += _resumed(site, kind)
                repeated, lost = 0, 0
                if not wrong:
                    repeated, lost, wrong = _compared(site.result(), reference)
            detection = ending.seconds if kind.codes != (0,) else 0.0
            outcome = (repeated, lost, "; ".join(wrong), effect.noticed)
            return Trial(name, str(topology), step, ending.code, detection, *outcome)
        return Trial(name, str(topology), 0, None, 0.0, 0, 0, "the run always ended before the fault")

    @contextlib.contextmanager
    def _site(self, kind: Kind, topology: Topology):
        folder, overrides = self._folder / f"trial-{next(self._numbers)}", (*SHORT, *kind.overrides)
        with contextlib.ExitStack() as stack:
            if kind.disk:
                stack.enter_context(small_disk(folder))
            if kind.shards:  # copied, as some will be missing
                if not (self._folder / "shards").exists():
                    _pack(self._folder)
                shutil.copytree(self._folder / "shards", folder / "shards")
                overrides += ("data.source=shards", f"data.root={folder / 'shards'}")
            if kind.hosts:
                network = stack.enter_context(Network(topology.replicas, hosts.RATE))
                yield hosts.SiteOnHosts(folder, topology, overrides, network)
            else:
                yield Site(folder, topology, overrides, self._shim if kind.shim else None)
            shutil.rmtree(folder, ignore_errors=True)

    def _reference(self, shards: bool) -> Result:
        """The result of an undisturbed run in one process; every topology must end like it."""
        with self._lock:
            if shards not in self._undisturbed:
                with self._site(KINDS["shard deleted" if shards else "run killed"], Topology(1, 1)) as site:
                    ending = site.start().wait(time.monotonic())
                    if ending.code != 0:
                        raise RuntimeError(f"the undisturbed run ended with {ending.code}: {_tail(ending.said)}")
                    self._undisturbed[shards] = site.result()
            return self._undisturbed[shards]


def _struck(kind: Kind, site: Site, draws: random.Random) -> Tuple[int, Ending, Effect]:
    """Start a session and strike before its first step, or amid or between its steps; return the step and the end."""
    session, step = site.start(), draws.randint(kind.first, kind.last)
    session.reach(step, delay=draws.uniform(0, 8.0 if step == 0 else 0.15))
    step, since = site.steps(), time.monotonic()
    effect = kind.strike(site, session, draws) or Effect()
    ending = (effect.session or session).wait(effect.since or since)
    if kind.afterwards is not None:
        kind.afterwards(site.checkpoints()[-1], draws)
    return step, ending, effect


def _resumed(site: Site, kind: Kind) -> List[str]:
    """Starts the run again until it ends; what was wrong."""
    wrong = []
    for number in range(_SESSIONS):
        ending = site.start().wait(time.monotonic())
        wrong += _unsaid(kind.resumed, ending) if number == 0 else []
        if ending.code == 0:
            return wrong
        wrong.append(f"resumed, it ended with {ending.code}: {_tail(ending.said)}")
    return wrong


def _unsaid(expected: str, ending: Ending) -> List[str]:
    found = re.search(expected, ending.said, re.DOTALL)
    return [] if found else [f"not said: {expected}; but: {_tail(ending.said)}"]


def _compared(result: Result, reference: Result) -> Tuple[int, int, List[str]]:
    """(updates that are logged twice, updates that are missing or other, what differs)."""
    steps = [event["step"] for event in result.events if event["event"] == "train"]
    ours, theirs = ({e["step"]: e for e in each.events if e["event"] == "train"} for each in (result, reference))
    lost = sum(ours.get(step) != event for step, event in theirs.items())
    wrong = []
    if result.digest != reference.digest:
        wrong.append("other weights, momentum or averages than the undisturbed run's")
    if result.events != reference.events:
        wrong.append("other events than the undisturbed run's")
    return len(steps) - len(set(steps)), lost, wrong


def _pack(folder: Path) -> None:
    for split, name in (("train", "train"), ("validation", "val")):
        source = DigitsSource(split)
        for index in range(len(source)):
            place = folder / "digits" / name / source.classes[source.labels[index]]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(source.read(index).permute(1, 2, 0).numpy()).save(place / f"{index:05d}.png")
        pack = ["pack", folder / "digits" / name, folder / "shards" / name, "--images-per-shard", "200"]
        command = bound_to_parent([sys.executable, "-m", "tools.shards", *pack])
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def _tail(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-4:])[-600:]

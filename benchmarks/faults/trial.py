"""One trial: a run is struck, mended, resumed to its end, and compared with the undisturbed run."""

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
from typing import Dict, Iterator, List, NamedTuple, Optional

from PIL import Image

from benchmarks import ROOT
from benchmarks.faults import hosts
from benchmarks.faults.kinds import KINDS, SHORT, Kind, small_disk
from benchmarks.faults.site import Effect, Ending, Result, Site, Topology
from benchmarks.networks import Network
from data.digits import DigitsSource
from parallel.parent_death import bound_to_parent

_TOO_LATE = 4  # times that a run may end before the fault strikes
_FOLDERS = {"train": "train", "validation": "val"}  # of images in shards, by split


class Trial(NamedTuple):
    """Outcome of one fault.

    kind: its name.
    topology: of the run.
    step: how far the run was.
    code: of the session that was struck.
    detection: seconds until that had ended.
    repeated: updates that are twice in the metrics of the finished run.
    lost: updates that are missing there, or other than the undisturbed run's.
    wrong: what was not as it should be; empty if the run survived.
    noticed: seconds until the first of the other ranks had ended, where one was struck.
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


class _Strike(NamedTuple):
    """A strike that was made, and what came of it.

    step: how far the run was.
    ending: of the session that was struck, or of that which the effect names.
    effect: of the fault.
    """

    step: int
    ending: Ending
    effect: Effect


class _Comparison(NamedTuple):
    """A finished run beside the undisturbed one.

    repeated, lost: see `Trial`.
    wrong: what differs.
    """

    repeated: int
    lost: int
    wrong: List[str]


class Bench:
    """Makes trials, which share a folder, a library, shards, and undisturbed results.

    The library makes clocks jump and disks fail. Threads may try faults side by side, except on
    hosts, which the main thread alone can make.
    """

    def __init__(self, folder: Path):
        """Compile the library.

        Args:
            folder: of all trials.

        Raises:
            CalledProcessError: there is no C compiler.
        """
        self._folder = folder
        self._shim = folder / "shim.so"
        source = Path(__file__).with_name("shim.c")
        compiler = ["cc", "-shared", "-fPIC", "-O2"]
        subprocess.run([*compiler, "-o", self._shim, source, "-ldl"], check=True)
        self._undisturbed: Dict[bool, Result] = {}  # by whether images are in shards
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def trial(self, name: str, topology: Topology, draws: random.Random) -> Trial:
        """Try a kind of fault at a random moment; again at others where the run was faster.

        Args:
            name: of the kind.
            topology: of the run.
            draws: chooses the moment, and all that is random in the fault.
        """
        for _ in range(_TOO_LATE):
            outcome = self._try_once(name, topology, draws)
            if outcome is not None:
                return outcome
        return Trial(
            kind=name,
            topology=str(topology),
            step=0,
            code=None,
            detection=0.0,
            repeated=0,
            lost=0,
            wrong="the run always ended before the fault",
        )

    def _try_once(self, name: str, topology: Topology, draws: random.Random) -> Optional[Trial]:
        """Try a kind of fault; return None if the run ended before it."""
        kind = KINDS[name]
        reference = self._reference(kind.shards)
        with self._site(kind, topology) as site:
            strike = _struck(kind, site, draws)
            code = strike.ending.code
            if code == 0 and 0 not in kind.codes:
                return None
            compared = _judged(kind, site, strike, reference)
        # A run that is to bear the fault does not end by it.
        detection = strike.ending.seconds if kind.codes != (0,) else 0.0
        return Trial(
            kind=name,
            topology=str(topology),
            step=strike.step,
            code=code,
            detection=detection,
            repeated=compared.repeated,
            lost=compared.lost,
            wrong="; ".join(compared.wrong),
            noticed=strike.effect.noticed,
        )

    @contextlib.contextmanager
    def _site(self, kind: Kind, topology: Topology) -> Iterator[Site]:
        """Make the place of a run, with all that a kind needs there."""
        folder = self._folder / f"trial-{next(self._numbers)}"
        overrides = [*SHORT, *kind.overrides]
        with contextlib.ExitStack() as stack:
            if kind.disk:
                stack.enter_context(small_disk(folder))
            if kind.shards:
                packed = self._folder / "shards"
                if not packed.exists():
                    _pack(self._folder)
                # A copy, as some will be missing.
                shutil.copytree(packed, folder / "shards")
                overrides.append("data.source=shards")
                overrides.append(f"data.root={folder / 'shards'}")
            if kind.hosts:
                network = stack.enter_context(Network(topology.replicas, hosts.RATE))
                yield hosts.SiteOnHosts(folder, topology, overrides, network)
            else:
                shim = self._shim if kind.shim else None
                yield Site(folder, topology, overrides, shim)
            shutil.rmtree(folder, ignore_errors=True)

    def _reference(self, shards: bool) -> Result:
        """Return the result of an undisturbed run in one process; every topology must end like it.

        Raises:
            RuntimeError: the run failed.
        """
        with self._lock:
            if shards not in self._undisturbed:
                self._undisturbed[shards] = self._run_undisturbed(shards)
            return self._undisturbed[shards]

    def _run_undisturbed(self, shards: bool) -> Result:
        """Make a run that nothing happens to."""
        # The kind says where its images are; it does not strike.
        kind = KINDS["shard deleted" if shards else "run killed"]
        with self._site(kind, Topology(1, 1)) as site:
            ending = site.start().wait(time.monotonic())
            if ending.code != 0:
                text = _tail(ending.said)
                raise RuntimeError(f"the undisturbed run ended with {ending.code}: {text}")
            return site.result()


def _struck(kind: Kind, site: Site, draws: random.Random) -> _Strike:
    """Start a session and strike before its first step, or amid or between its steps."""
    session = site.start()
    step = draws.randint(kind.first, kind.last)
    # Seconds: starting takes longer than a step.
    longest = 8.0 if step == 0 else 0.15
    session.reach(step, delay=draws.uniform(0, longest))
    reached = site.steps()
    since = time.monotonic()
    effect = kind.strike(site, session, draws) or Effect()
    # Some faults are noticed by another session only, or from a later moment on.
    struck_session = effect.session or session
    ending = struck_session.wait(effect.since or since)
    if kind.afterwards is not None:
        newest = site.checkpoints()[-1]
        kind.afterwards(newest, draws)
    return _Strike(reached, ending, effect)


def _judged(kind: Kind, site: Site, strike: _Strike, reference: Result) -> _Comparison:
    """Mend and resume a run that was struck, and judge it.

    Args:
        kind: of the fault.
        site: of the run.
        strike: that was made.
        reference: of the undisturbed run.
    """
    ending = strike.ending
    wrong = []
    if ending.code not in kind.codes:
        text = _tail(ending.said)
        wrong.append(f"exit code {ending.code} instead of {kind.codes}: {text}")
    expected = strike.effect.said
    if expected is None:
        expected = kind.said
    wrong += _unsaid(expected, ending)
    kind.mend(site)
    if ending.code != 0:
        wrong += _resumed(site, kind)
    # The result of a run that went wrong, if it has one, says nothing more.
    if wrong:
        return _Comparison(0, 0, wrong)
    return _compared(site.result(), reference)


def _resumed(site: Site, kind: Kind) -> List[str]:
    """Start the run again, which must go on to its end; return what was wrong."""
    ending = site.start().wait(time.monotonic())
    wrong = _unsaid(kind.resumed, ending)
    if ending.code != 0:
        wrong.append(f"resumed, it ended with {ending.code}: {_tail(ending.said)}")
    return wrong


def _unsaid(expected: str, ending: Ending) -> List[str]:
    """Return a complaint if a session has not said what it must, a regular expression."""
    if re.search(expected, ending.said, re.DOTALL):
        return []
    return [f"not said: {expected}; but: {_tail(ending.said)}"]


def _compared(result: Result, reference: Result) -> _Comparison:
    """Compare a run with the undisturbed one."""
    updates = _updates(result)
    by_step = {event["step"]: event for event in updates}
    repeated = len(updates) - len(by_step)
    lost = 0
    for event in _updates(reference):
        if by_step.get(event["step"]) != event:
            lost += 1
    wrong = []
    if result.digest != reference.digest:
        wrong.append("other weights, momentum or averages than the undisturbed run's")
    if result.events != reference.events:
        wrong.append("other events than the undisturbed run's")
    return _Comparison(repeated, lost, wrong)


def _updates(result: Result) -> List[dict]:
    """Return the events of a run's updates."""
    return [event for event in result.events if event["event"] == "train"]


def _pack(folder: Path) -> None:
    """Write the digits as image files, and pack these into shards."""
    for split, name in _FOLDERS.items():
        images = folder / "digits" / name
        shards = folder / "shards" / name
        _write_images(split, images)
        command = [sys.executable, "-m", "tools.shards", "pack", str(images), str(shards)]
        command += ["--images-per-shard", "200"]
        subprocess.run(bound_to_parent(command), cwd=ROOT, check=True, capture_output=True)


def _write_images(split: str, folder: Path) -> None:
    """Write a split of the digits as image files, in a folder for each class."""
    source = DigitsSource(split)
    for index in range(len(source)):
        label = source.labels[index]
        place = folder / source.classes[label]
        place.mkdir(parents=True, exist_ok=True)
        pixels = source.read(index).permute(1, 2, 0)  # [size, size, 3]
        image = Image.fromarray(pixels.numpy())
        image.save(place / f"{index:05d}.png")


def _tail(text: str) -> str:
    """Return the end of a session's output in one line."""
    lines = text.strip().splitlines()
    return " | ".join(lines[-4:])[-600:]

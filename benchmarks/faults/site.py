"""A run under test: its folder, its sessions as real processes, and the result that it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Iterable, List, NamedTuple, Optional, Sequence, Union

from benchmarks import ROOT
from benchmarks.golden import digest_of
from benchmarks.processes import children
from parallel import launchers
from parallel.parent_death import bound_to_parent
from training.checkpoint import CheckpointFolder
from training.metrics import TIMING_FIELDS

if TYPE_CHECKING:
    from benchmarks.faults.hosts import Launchers

# Draws in every way that a run can, keeps both averages, changes its image size. 30 steps, a
# checkpoint every 3; 12 micro batches a step are 1 or 2 replicas'. Every topology ends with the
# same bits: replicas are summed in a tree, and there is no noise scale, for which each replica
# measures up to eight micro batches.
RECIPE = (
    "run.device=cpu",
    "run.epochs=6",
    "model.width=0.25",
    "model.depth=0.1",
    "model.dropout=0.3",
    "model.drop_path=0.3",
    "model.image_size=8",
    "batch.global=240",
    "batch.micro=20",
    "batch.evaluation=90",
    "exchange.order=tree",
    "schedule.warmup_steps=6",
    "data.augment=randaugment",
    "data.mixup=0.2",
    "data.cutmix=0.85",
    "data.image_sizes=[[0, 8], [1, 12]]",
    "average.step_decay=0.9",
    "average.epoch_decay=0.97",
    "checkpoint.every_epochs=0.6",
    "evaluation.every_epochs=2",
    "log.every_steps=1",
    "log.tensorboard=false",
    "log.noise_scale=false",
    "parallel.silence=4",
)
SESSION_SECONDS = 180.0  # in which a session ends, or hangs
_LEAVING_SECONDS = 10.0  # in which its processes are gone once it has ended
_MARK = "FAULTS_SITE"  # in the environment of all that is started for a site
_CONTROL_FORMAT = "qq"  # as shim.c reads it: nanoseconds, whether the disk is broken


class Topology(NamedTuple):
    """Processes of a run: replicas, and stages of each."""

    replicas: int
    stages: int

    def __str__(self) -> str:
        return f"{self.replicas}x{self.stages}"


class Ending(NamedTuple):
    """How a session ended.

    code: exit code; None if it hung and was killed.
    seconds: since it was struck.
    said: its output.
    """

    code: Optional[int]
    seconds: float
    said: str


class Result(NamedTuple):
    """Result of a finished run, without times.

    digest: one of weights, momentum and averages.
    events: of its metrics.
    """

    digest: str
    events: List[dict]


class Effect(NamedTuple):
    """How a fault that has struck differs from the defaults of its kind.

    session: that must end; None for the one that was struck.
    since: moment (time.monotonic) that its end is timed from; None for that of the strike.
    said: what the session must print, a regular expression; None for the kind's.
    noticed: seconds until the first of the other ranks had ended, where one was struck.
    """

    session: Optional[Union[Session, Launchers]] = None
    since: Optional[float] = None
    said: Optional[str] = None
    noticed: Optional[float] = None


class Site:
    """The place of one run, in which its sessions are started one after another.

    folder: of all that belongs to the run.
    topology: of the run.
    run: the run folder.
    """

    def __init__(
        self,
        folder: Path,
        topology: Topology,
        overrides: Sequence[str] = (),
        shim: Optional[Path] = None,
    ):
        """
        Args:
            folder: is made if it is not there.
            topology: of the run.
            overrides: of the recipe, after `RECIPE`.
            shim: the library of shim.c, for runs whose clock or disk is to fail.
        """
        self.folder = folder
        self.topology = topology
        self.run = folder / "run"
        self._overrides = tuple(overrides)
        self._shim = shim
        folder.mkdir(parents=True, exist_ok=True)
        self.control(0, False)

    def control(self, clock: float, broken_disk: bool) -> None:
        """Set the clock and the disk that processes with the shim see.

        Args:
            clock: seconds by which the time of day is off.
            broken_disk: whether fsync fails.
        """
        path = self.folder / "control"
        # In place: processes that run have this file in their memory.
        with open(path, "r+b" if path.exists() else "wb") as stream:
            stream.write(struct.pack(_CONTROL_FORMAT, int(clock * 1e9), broken_disk))

    def start(self) -> Union[Session, Launchers]:
        """Start the run, or resume it."""
        return self.launch()

    def launch(self, within: Sequence[str] = (), options: Iterable[str] = ()) -> Session:
        """Start one launcher of the run.

        Args:
            within: a command that runs the launcher's.
            options: of the launcher.
        """
        shape = ["--replicas", str(self.topology.replicas), "--stages", str(self.topology.stages)]
        recipe = [
            "--config",
            "configs/quickstart.yaml",
            *RECIPE,
            *self._overrides,
            f"run.output={self.run}",
        ]
        environment = launchers.without(os.environ)
        environment["OMP_NUM_THREADS"] = "1"
        # What a session has said is read while it runs.
        environment["PYTHONUNBUFFERED"] = "1"
        environment[_MARK] = str(self.folder)
        if self._shim is not None:
            environment["LD_PRELOAD"] = str(self._shim)
            environment["FAULTS_CONTROL"] = str(self.folder / "control")
        command = [*within, sys.executable, "-m", "tools.launch", *options, *shape, *recipe]
        return Session(self, command, environment)

    def steps(self) -> int:
        """Return how many steps the run's metrics have."""
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b'"event": "train"') if path.exists() else 0

    def checkpoints(self) -> List[Path]:
        """Return the files of the checkpoints that count, the oldest first."""
        folder = self._checkpoint_folder()
        return [folder.path(manifest.step) for manifest in folder.manifests(warn=_ignore)]

    def result(self) -> Result:
        """Return the result of the run, which has ended."""
        content = self._checkpoint_folder().load_newest(warn=_ignore)
        assert content is not None, f"{self.run} has no checkpoint"
        events = []
        for line in (self.run / "metrics.jsonl").read_text().splitlines():
            event = json.loads(line)
            events.append({key: event[key] for key in event if key not in TIMING_FIELDS})
        return Result(digest_of([content["engine"]]), events)

    def _checkpoint_folder(self) -> CheckpointFolder:
        """Return the run's checkpoints, to be read only."""
        return CheckpointFolder(self.run / "checkpoints", keep_last=2, keep_best=True)


def _ignore(line: str) -> None:
    """Drop a warning about a checkpoint: damaged ones are part of the test."""


class Session:
    """The processes of one start of a run on one host.

    process: the launcher, or the run itself where that is one process.
    """

    def __init__(self, site: Site, command: List[str], environment: Dict[str, str]):
        """
        Args:
            site: of the run.
            command: that starts it; begins with a program's full path.
            environment: variables, all of them.
        """
        self._site = site
        self._log = site.folder / f"session-{time.monotonic_ns()}.log"
        with open(self._log, "wb") as stream:
            # With a session of its own, Ctrl-C reaches this process alone; the run dies with it.
            self.process = subprocess.Popen(
                bound_to_parent(command),
                cwd=ROOT,
                env=environment,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def reach(self, step: int, delay: float) -> None:
        """Wait until the run has logged a step, or this session has ended.

        Args:
            step: 0 waits for none.
            delay: seconds that it then waits for in any case.
        """
        end = time.monotonic() + SESSION_SECONDS
        while self.running and self._site.steps() < step and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(delay)

    @property
    def running(self) -> bool:
        """Return whether its first process has not ended."""
        return self.process.poll() is None

    def said(self) -> str:
        """Return what it has printed until now."""
        return self._log.read_text(errors="replace")

    def ranks(self) -> Dict[int, int]:
        """Return the process numbers of the ranks that have been started, by rank."""
        if self._site.topology == (1, 1):
            return {0: self.process.pid}
        processes = {}
        # A rank is known by its environment: the launcher may have other children.
        for child in children(self.process.pid):
            with contextlib.suppress(OSError):  # it may be gone
                environment = Path(f"/proc/{child}/environ").read_bytes()
                rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", environment)
                if rank:
                    processes[int(rank[1])] = child
        return processes

    def noticed(self, ranks: Iterable[int], since: float) -> float:
        """Wait until the first of some `ranks` has ended; return the seconds `since` a moment."""
        running = set(ranks)
        # A rank that has ended has no environment, and is not among `ranks` any more.
        end = time.monotonic() + SESSION_SECONDS
        while self.running and running <= self.ranks().keys() and time.monotonic() < end:
            time.sleep(0.005)
        return time.monotonic() - since

    def wait(self, since: float) -> Ending:
        """Wait until all its processes are gone; kill those that hang.

        Args:
            since: moment (time.monotonic) that the end is timed from.
        """
        code: Optional[int] = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(SESSION_SECONDS)
        seconds = time.monotonic() - since
        self.process.kill()
        self.process.wait()
        # Its ranks may take a moment longer, but what outlives its launcher hangs.
        end = time.monotonic() + _LEAVING_SECONDS
        while _alive(self._site.folder) and time.monotonic() < end:
            time.sleep(0.02)
        for process in _alive(self._site.folder):
            code = None
            send(process, signal.SIGKILL)
        return Ending(code, seconds, self.said())


def send(process: int, number: int) -> None:
    """Send the signal `number` to a `process` that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _alive(folder: Path) -> List[int]:
    """Return the processes that were started for a site, whatever has become of their parents."""
    mark = f"\0{_MARK}={folder}\0".encode()
    processes = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # a process that has ended has no environment
            environment = (entry / "environ").read_bytes()
            if mark in b"\0" + environment:
                processes.append(int(entry.name))
    return processes

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
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence

from benchmarks import ROOT
from benchmarks.golden import digest_of
from benchmarks.processes import children
from parallel import launchers
from parallel.parent_death import bound_to_parent
from training.checkpoint import CheckpointFolder
from training.metrics import TIMING_FIELDS

# Draws in every way that a run can, keeps both averages, changes its image size. 30 steps, a checkpoint every 3;
# 12 micro batches a step are 1 or 2 replicas'. Every topology ends with the same bits: replicas are summed in a tree,
# and there is no noise scale, for which each replica measures up to eight micro batches.
RECIPE = (
    "run.device=cpu", "run.epochs=6", "model.width=0.25", "model.depth=0.1", "model.dropout=0.3",
    "model.drop_path=0.3", "model.image_size=8", "batch.global=240", "batch.micro=20", "batch.evaluation=90",
    "exchange.order=tree", "schedule.warmup_steps=6", "data.augment=randaugment", "data.mixup=0.2",
    "data.cutmix=0.85", "data.image_sizes=[[0, 8], [1, 12]]", "average.step_decay=0.9", "average.epoch_decay=0.97",
    "checkpoint.every_epochs=0.6", "evaluation.every_epochs=2", "log.every_steps=1", "log.tensorboard=false",
    "log.noise_scale=false", "parallel.silence=4",
)  # fmt: skip
SESSION_SECONDS = 180.0  # in which a session ends, or hangs
_LEAVING_SECONDS = 10.0  # in which its processes are gone once it has ended
_MARK = "FAULTS_SITE"  # in the environment of all that is started for a site


class Topology(NamedTuple):
    """Processes of a run."""

    replicas: int
    stages: int

    def __str__(self) -> str:
        return f"{self.replicas}x{self.stages}"


class Ending(NamedTuple):
    """How a session ended: exit code (None: it hung and was killed), seconds since it was struck, its output."""

    code: Optional[int]
    seconds: float
    said: str


class Result(NamedTuple):
    """Result of a finished run without times: one digest of weights, momentum and averages, and the events."""

    digest: str
    events: List[dict]


class Effect(NamedTuple):
    """What differs from the kind's defaults once a fault has struck: the session that must end, the moment it is timed
    from, what it must print, and seconds until the first of the other ranks had ended."""

    session: Optional[Session] = None
    since: Optional[float] = None
    said: Optional[str] = None
    noticed: Optional[float] = None


class Site:
    """One run's place."""

    def __init__(self, folder: Path, topology: Topology, overrides: Sequence[str] = (), shim: Optional[Path] = None):
        """Args: shim: the library of shim.c, for runs whose clock or disk is to fail."""
        self.folder, self.topology = folder, topology
        self.run = folder / "run"
        self._overrides, self._shim = tuple(overrides), shim
        folder.mkdir(parents=True, exist_ok=True)
        self.control(0, False)

    def control(self, clock: float, broken_disk: bool) -> None:
        """Args: clock: seconds by which the time of day is off. broken_disk: whether what is written can be synced."""
        path = self.folder / "control"
        with open(path, "r+b" if path.exists() else "wb") as stream:
            stream.write(struct.pack("qq", int(clock * 1e9), broken_disk))

    def start(self) -> Session:
        return self.launch()

    def launch(self, within: Sequence[str] = (), options: Iterable[str] = ()) -> Session:
        """Args: within: a command that runs the launcher's. options: of the launcher."""
        shape = ["--replicas", str(self.topology.replicas), "--stages", str(self.topology.stages)]
        recipe = ["--config", "configs/quickstart.yaml", *RECIPE, *self._overrides, f"run.output={self.run}"]
        environment = {
            **launchers.without(os.environ),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            _MARK: str(self.folder),
        }
        if self._shim is not None:
            environment.update(LD_PRELOAD=str(self._shim), FAULTS_CONTROL=str(self.folder / "control"))
        command = [*within, sys.executable, "-m", "tools.launch", *options, *shape, *recipe]
        return Session(self, command, environment)

    def steps(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b'"event": "train"') if path.exists() else 0

    def checkpoints(self) -> List[Path]:
        """Files of those that count, the oldest first."""
        folder = CheckpointFolder(self.run / "checkpoints", 2, True)
        return [folder.path(manifest.step) for manifest in folder.manifests(warn=lambda line: None)]

    def result(self) -> Result:
        content = CheckpointFolder(self.run / "checkpoints", 2, True).load_newest(warn=lambda line: None)
        events = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        told = [{key: value for key, value in event.items() if key not in TIMING_FIELDS} for event in events]
        return Result(digest_of([content["engine"]]), told)


class Session:
    """The processes of one start of a run."""

    def __init__(self, site: Site, command: List[str], environment: Dict[str, str]):
        self._site = site
        self._log = site.folder / f"session-{time.monotonic_ns()}.log"
        with open(self._log, "wb") as stream:
            streams = {"stdout": stream, "stderr": stream, "start_new_session": True}
            self.process = subprocess.Popen(bound_to_parent(command), cwd=ROOT, env=environment, **streams)

    def reach(self, step: int, delay: float) -> None:
        """Waits until the run has ended, or logged `step` (0: not at all) and `delay` seconds more have passed."""
        end = time.monotonic() + SESSION_SECONDS
        while self.running and self._site.steps() < step and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(delay)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """What it has printed until now."""
        return self._log.read_text(errors="replace")

    def ranks(self) -> Dict[int, int]:
        """Rank -> process number, of those that have been started."""
        if self._site.topology == (1, 1):
            return {0: self.process.pid}
        found = {}
        for child in children(self.process.pid):
            with contextlib.suppress(OSError):
                rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{child}/environ").read_bytes())
                if rank:
                    found[int(rank[1])] = child
        return found

    def noticed(self, ranks: Iterable[int], since: float) -> float:
        """Seconds from `since` until the first of these ranks has ended."""
        ranks, end = set(ranks), time.monotonic() + SESSION_SECONDS
        while self.running and ranks <= self.ranks().keys() and time.monotonic() < end:
            time.sleep(0.005)
        return time.monotonic() - since

    def wait(self, since: float) -> Ending:
        """Until all its processes are gone. Args: since: moment (time.monotonic) that it is timed from."""
        code: Optional[int] = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(SESSION_SECONDS)
        seconds = time.monotonic() - since
        self.process.kill()
        self.process.wait()
        end = time.monotonic() + _LEAVING_SECONDS
        while _alive(self._site.folder) and time.monotonic() < end:
            time.sleep(0.02)
        for left in _alive(self._site.folder):
            code = None  # what outlives its launcher hangs
            send(left, signal.SIGKILL)
        return Ending(code, seconds, self.said())


def send(process: int, number: int) -> None:
    """Sends a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _alive(site: Path) -> List[int]:
    """Processes that were started for a site, whatever has become of their parents."""
    mark = f"\0{_MARK}={site}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # a process that has ended has no environment
                if mark in b"\0" + (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found

"""Runs of an experiment: each an ordinary run folder in the cache, trained once, continued where it was left off.

A run's folder is named after its content: experiments that need the same run share it, a changed run gets a new one.
What was trained on another machine is found by the same name in docs/results/runs.jsonl, which also says when and where
it was trained. To train a run anew, remove its line there and its folder in the cache.
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from multiprocessing import connection
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch

from benchmarks import CACHE, QUIET, RESULTS, ROOT, provenance
from benchmarks.provenance import Provenance
from common import yaml_text
from common.errors import FAILED, STOPPED
from common.json_io import parse_json
from data.glyphs import GlyphsSource
from data.sources import open_source
from parallel import launchers
from parallel.parent_death import bound_to_parent, die_with_parent
from recipe import loading
from recipe.config import Recipe
from training.loop import Stopped, TrainingError
from training.metrics import NAME as METRICS
from training.metrics import read_events
from training.run import run as train

RUNS = CACHE / "evidence"
RECIPE = "configs/evidence.yaml"
KEPT = RESULTS / "runs.jsonl"
_KEPT_FIELDS = {
    "train": ("event", "step", "epoch", "loss", "batch", "noise_scale"),
    "eval": ("event", "step", "epoch", "loss", "top1"),
    "end": ("event", "step", "top1", "step_average", "epoch_average"),
}
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_KEEP_BUFFERS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}  # the same for programs that begin
_DIVERGED = "diverged.txt"  # in the folder of a run that did not come to its end: why


class Run(NamedTuple):
    """One training run.

    overrides: of the recipe, without seed and folder. stages, replicas: more than one process, if their product is.
    """

    overrides: Tuple[str, ...]
    seed: int
    stages: int = 1
    replicas: int = 1
    base: str = RECIPE

    @property
    def folder(self) -> Path:
        content = [_content(self.base), sorted(self.overrides), self.seed, self.stages, self.replicas]
        return RUNS / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]

    @property
    def processes(self) -> int:
        return self.stages * self.replicas

    @property
    def arguments(self) -> List[str]:
        """The overrides of this run alone, in the form of a command line."""
        return [*self.overrides, f"run.seed={self.seed}"]

    @property
    def program(self) -> List[str]:
        """What trains it, as arguments of Python: the program, the recipe and this run's overrides."""
        launch = ["-m", "tools.launch", "--stages", str(self.stages), "--replicas", str(self.replicas)]
        return [*(["train.py"] if self.processes == 1 else launch), "--config", self.base, *self.arguments]

    def recipe(self) -> Recipe:
        return loading.load(ROOT / self.base, [*self.arguments, *QUIET, f"run.output={self.folder}"])

    def command(self) -> List[str]:
        return [sys.executable, *self.program, *QUIET, f"run.output={self.folder}"]


class Outcome(NamedTuple):
    """Final figures of a run.

    top1, loss: of the validation images; train_loss: the last that was logged.
    A run that diverged has infinite losses, and its error message in `diverged`.
    """

    top1: float
    loss: float
    train_loss: float
    diverged: str = ""


class Lost(RuntimeError):
    """A run failed for a reason that is no finding."""


def outcome(run: Run) -> Optional[Outcome]:
    """None as long as the run is not finished."""
    line, diverged = _kept(run), run.folder / _DIVERGED
    why = line["diverged"] if line and not run.folder.exists() else ""
    if diverged.exists():
        why = diverged.read_text().strip()
    if why:
        return Outcome(1 / run.recipe().model.classes, float("inf"), float("inf"), why)
    found = events_of(run)
    if "end" not in found:
        return None
    return Outcome(found["end"][-1]["top1"], found["eval"][-1]["loss"], found["train"][-1]["loss"])


def events_of(run: Run) -> Dict[str, List[dict]]:
    """The events of its log by kind: those of its folder, or what is kept of it. Empty: there is neither."""
    if (run.folder / METRICS).exists():
        return read_events(run.folder)
    line = _kept(run)
    return line["events"] if line else {}


def provenance_of(run: Run) -> Provenance:
    """When and where a run was trained, by its folder or by what is kept of it."""
    line = None if run.folder.exists() else _kept(run)
    return provenance.of_folder(run.folder) if line is None else provenance.from_json(line["trained"])


def curve(run: Run, kind: str, key: str) -> Tuple[List[float], List[float]]:
    """Epochs and values along the run, e.g. of ("eval", "top1"). Empty for a run that diverged at once."""
    events = events_of(run).get(kind, [])
    return [event["epoch"] for event in events], [event[key] for event in events]


def train_all(
    wanted: Callable[[], Iterable[Run]], at_once: int, report: Callable[[str], None], kept: bool = False
) -> None:
    """Train the wanted runs that are not finished, in processes of one thread each, `at_once` at the same time.

    Args:
        wanted: called again whenever a run has ended: which runs come next may depend on it.
        report: called with a line about each run that ends.
        kept: whether finished runs are also kept in docs/results, those included that were finished before.

    Raises:
        Lost: a run failed. KeyboardInterrupt: Ctrl-C; the runs have saved themselves before.
    """
    torch.set_num_threads(1)  # threads would not live on in forked processes, and runs are to be the same everywhere
    running: Dict[multiprocessing.Process, Run] = {}
    try:
        while True:
            known = list(dict.fromkeys(wanted()))
            pending = [run for run in known if outcome(run) is None]
            if kept:
                for run in known:
                    if run not in running.values():
                        keep(run)
            for run in pending:
                used = sum(each.processes for each in running.values())
                if run not in running.values() and used + min(run.processes, at_once) <= at_once:
                    running[_started(run)] = run
            if not running:
                return
            connection.wait([process.sentinel for process in running])
            for process in [process for process in running if not process.is_alive()]:
                run = running.pop(process)
                found = outcome(run)
                if process.exitcode == STOPPED:
                    raise KeyboardInterrupt
                if process.exitcode or found is None:
                    raise Lost(f"{' '.join(run.command())}: ended with {process.exitcode}; see {run.folder}.log")
                pending = [other for other in pending if other != run]  # it may have ended before they were counted
                result = f"diverged ({found.diverged})" if found.diverged else f"top1 {found.top1:.2%}"
                report(f"{' '.join(run.arguments)}: {result}; {len(pending)} more known to come")
    finally:
        for process in running:
            process.terminate()  # saves and ends: the next start goes on there
        for process in running:
            process.join()


def _started(run: Run) -> multiprocessing.Process:
    """Forked, so that neither libraries are loaded nor glyphs drawn again; drawing a set takes long the first time."""
    recipe = run.recipe()
    for split in ("train", "validation"):
        source = open_source(recipe.data, recipe.model.classes, split)
        if isinstance(source, GlyphsSource):
            source.draw_ahead()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(run,))
    process.start()
    return process


def _serve(run: Run) -> None:
    """In a process of its own, which ends with the one that started it."""
    die_with_parent()
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        # Buffers are not given back after each operation: to get them again takes a fifth of such small steps.
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)
    os.chdir(ROOT)
    RUNS.mkdir(parents=True, exist_ok=True)
    log = f"{run.folder}.log"
    with open(log, "a") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        os.dup2(stream.fileno(), 1)  # what it starts, and libraries, write there too
        os.dup2(stream.fileno(), 2)
        try:
            code = train_here(run)
        except Exception:
            traceback.print_exc()
            code = FAILED
    os._exit(code)  # without what the process that forked it does at its end


def train_here(run: Run) -> int:
    """Train in this process, or in several that it starts; return the exit code."""
    if run.processes > 1:
        environment = {**launchers.without(os.environ), "OMP_NUM_THREADS": "1", **_KEEP_BUFFERS}
        return subprocess.run(bound_to_parent(run.command()), env=environment, check=False).returncode
    try:
        train(run.recipe())
    except Stopped:
        return STOPPED
    except TrainingError as error:
        (run.folder / _DIVERGED).write_text(f"{error}\n")
    return 0


@functools.lru_cache(maxsize=None)
def _content(recipe: str) -> str:
    """Content of the recipe's file, independent of its layout."""
    return json.dumps(yaml_text.parse_yaml((ROOT / recipe).read_text(), recipe), sort_keys=True)


# Runs of other machines -----------------------------------------------------------------------------------------------


def keep(run: Run) -> None:
    """Add a run to docs/results/runs.jsonl: what trained it, when and where, and what pages read of its log.

    Only one that is finished and has a folder here, and is not there yet.
    """
    if not run.folder.exists() or _kept(run) is not None:
        return
    found = outcome(run)
    if found is None:
        return
    events = {kind: events_of(run).get(kind, []) for kind in _KEPT_FIELDS}
    events["train"] = [each for each in events["train"] if each.get("noise_scale") or each is events["train"][-1]]
    line = {
        "run": run.folder.name,
        "program": run.program,
        "trained": provenance_of(run)._asdict(),
        "diverged": found.diverged,
        "events": {kind: [_shortened(kind, event) for event in some] for kind, some in events.items()},
    }
    with open(KEPT, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line, separators=(",", ":")) + "\n")


def _shortened(kind: str, event: dict) -> dict:
    short = {key: event[key] for key in _KEPT_FIELDS[kind] if key in event}
    if short.get("noise_scale"):
        short["noise_scale"] = {key: short["noise_scale"][key] for key in ("images", "error")}
    return short


def _kept(run: Run) -> Optional[dict]:
    """The line of a run: `events` by kind, and `diverged`, empty if it did not."""
    if not KEPT.exists():
        return None
    state = KEPT.stat()
    return _lines(KEPT, state.st_mtime_ns, state.st_size).get(run.folder.name)


@functools.lru_cache(maxsize=1)
def _lines(path: Path, changed: int, size: int) -> Dict[str, dict]:
    """Lines by run. Args: changed, size: of the file, so that it is read again once they are others."""
    read = map(parse_json, path.read_text(encoding="utf-8").splitlines())
    return {line["run"]: line for line in read}

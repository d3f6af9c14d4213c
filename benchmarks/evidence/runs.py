"""Training runs of experiments: trained side by side, cached, resumed, read back.

A run's folder is named after its content: experiments that need the same run share it, a changed run gets a new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import traceback
from multiprocessing import connection
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

import torch

from benchmarks import CACHE, QUIET, ROOT
from benchmarks.lars_ratio import Recorder
from data.glyphs import GlyphsSource
from data.sources import open_source
from parallel.parent_death import bound_to_parent, die_with_parent
from recipe import loading
from recipe.config import Recipe
from recipe.errors import FAILED, STOPPED
from training.loop import Stopped, TrainingError
from training.metrics import read_events
from training.run import run as train

RUNS = CACHE / "evidence"
RECIPE = "configs/evidence.yaml"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_DIVERGED = "diverged.txt"  # in the folder of a run that did not come to its end: why


class Run(NamedTuple):
    """One training run.

    overrides: of the recipe, without seed and folder. stages, replicas: more than one process, if their product is.
    measured: whether the lengths of LARS's steps are recorded; such a run is not resumed but starts over.
    """

    overrides: Tuple[str, ...]
    seed: int
    stages: int = 1
    replicas: int = 1
    base: str = RECIPE
    measured: bool = False

    @property
    def folder(self) -> Path:
        content = [_base(self.base), sorted(self.overrides), self.seed, self.stages, self.replicas]
        content += ["measured"] * self.measured
        return RUNS / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]

    @property
    def record(self) -> Path:
        """The recorded step lengths (JSON) of a run that is measured."""
        return self.folder / "step_ratio.json"

    @property
    def log(self) -> Path:
        """File of the run's output."""
        return self.folder.with_suffix(".log")

    @property
    def arguments(self) -> List[str]:
        """The overrides of this run alone, in the form of a command line."""
        return [*self.overrides, f"run.seed={self.seed}"]

    @property
    def processes(self) -> int:
        """Number of processes that train it together."""
        return self.stages * self.replicas

    @property
    def program(self) -> List[str]:
        """The program that trains it, as arguments of Python."""
        if self.processes == 1:
            return ["train.py"]
        return ["-m", "tools.launch", "--stages", str(self.stages), "--replicas", str(self.replicas)]

    def recipe(self) -> Recipe:
        """The resolved recipe."""
        return loading.load(ROOT / self.base, [*self.arguments, *QUIET, f"run.output={self.folder}"])

    def command(self) -> List[str]:
        """Command line that trains this run alone."""
        return [
            sys.executable,
            *self.program,
            "--config",
            self.base,
            *self.arguments,
            *QUIET,
            f"run.output={self.folder}",
        ]


class Outcome(NamedTuple):
    """Final figures of a run.

    top1, loss: of the validation images; train_loss: the last that was logged; averages: top-1 of the averaged weights.
    A run that diverged has infinite losses, and its error message in `diverged`.
    """

    top1: float
    loss: float
    train_loss: float
    averages: Dict[str, float]
    diverged: str = ""


class Lost(RuntimeError):
    """A run failed for a reason that is no finding."""


def outcome(run: Run) -> Optional[Outcome]:
    """None as long as the run is not finished."""
    folder = run.folder
    if (folder / _DIVERGED).exists():
        chance = 1 / run.recipe().model.classes
        why = (folder / _DIVERGED).read_text().strip()
        return Outcome(chance, float("inf"), float("inf"), {}, why)
    if not (run.record if run.measured else folder / "metrics.jsonl").exists():
        return None
    events = read_events(folder)
    if "end" not in events:
        return None
    end = events["end"][-1]
    averages = {name: end[name]["top1"] for name in ("step_average", "epoch_average") if name in end}
    return Outcome(end["top1"], events["eval"][-1]["loss"], events["train"][-1]["loss"], averages)


def curve(run: Run, kind: str, key: str) -> Tuple[List[float], List[float]]:
    """Epochs and values along the run, e.g. of ("eval", "top1"). Nothing of a run that diverged at once."""
    events = read_events(run.folder).get(kind, [])
    return [event["epoch"] for event in events], [event[key] for event in events]


def train_all(wanted: Callable[[], Iterable[Run]], at_once: int, say: Callable[[str], None]) -> None:
    """Trains what is wanted and has not come to its end, in processes of one thread each.

    Args:
        wanted: called again whenever a run has ended: which runs come next may depend on it.
        at_once: processes that train at the same time.
        say: told of each run that ends.

    Raises:
        Lost: a run failed.
        KeyboardInterrupt: Ctrl-C; the runs have saved themselves before.
    """
    torch.set_num_threads(1)  # threads would not live on in forked processes, and runs are to be the same everywhere
    running: Dict[multiprocessing.Process, Run] = {}
    try:
        while True:
            pending = [run for run in dict.fromkeys(wanted()) if outcome(run) is None]
            for run in pending:
                used = sum(each.processes for each in running.values())
                if run not in running.values() and used + min(run.processes, at_once) <= at_once:
                    running[_started(run)] = run
            if not running:
                return
            connection.wait([process.sentinel for process in running])
            for process in [process for process in running if not process.is_alive()]:
                run = running.pop(process)
                _check(process, run)
                pending = [other for other in pending if other != run]  # it may have ended before they were counted
                say(f"{' '.join(run.arguments)}: {_described(outcome(run))}; {len(pending)} more known to come")
    finally:
        for process in running:
            process.terminate()  # saves and ends: the next start goes on there
        for process in running:
            process.join()


def _started(run: Run) -> multiprocessing.Process:
    """Forked, so that neither libraries are loaded nor glyphs drawn again."""
    _draw_glyphs(run.recipe())
    process = multiprocessing.get_context("fork").Process(target=_train, args=(run,))
    process.start()
    return process


def _check(process: multiprocessing.Process, run: Run) -> None:
    if process.exitcode == STOPPED:
        raise KeyboardInterrupt
    if process.exitcode or outcome(run) is None:
        raise Lost(f"{' '.join(run.command())}: ended with {process.exitcode}; see {run.log}")


def _described(found: Outcome) -> str:
    return f"diverged ({found.diverged})" if found.diverged else f"top1 {found.top1:.2%}"


def _train(run: Run) -> None:
    """In a process of its own, which ends with the one that started it."""
    die_with_parent()
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        # Buffers are not given back after each operation: to get them again takes a fifth of such small steps.
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)
    os.chdir(ROOT)
    RUNS.mkdir(parents=True, exist_ok=True)
    with open(run.log, "a") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        os.dup2(stream.fileno(), 1)  # what it starts, and libraries, write there too
        os.dup2(stream.fileno(), 2)
        try:
            code = _outcome_of(run)
        except Exception:
            traceback.print_exc()
            code = FAILED
    os._exit(code)  # without what the process that forked it does at its end


def _outcome_of(run: Run) -> int:
    """Trains; the exit code."""
    try:
        if run.processes > 1:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.run(bound_to_parent(run.command()), env=environment, check=False).returncode
        if run.measured:
            _train_measured(run)
        else:
            train(run.recipe())
    except Stopped:
        return STOPPED
    except TrainingError as error:
        (run.folder / _DIVERGED).write_text(f"{error}\n")
    return 0


def _train_measured(run: Run) -> None:
    """Trains from the start: the record needs every step."""
    shutil.rmtree(run.folder, ignore_errors=True)
    with Recorder() as recorder:
        train(run.recipe())
    run.record.write_text(json.dumps(recorder.summary()))


def _draw_glyphs(recipe: Recipe) -> None:
    """In the process that forks the others; takes as long as the set is large, the first time."""
    for split in ("train", "validation"):
        source = open_source(recipe.data, recipe.model.classes, split)
        if isinstance(source, GlyphsSource):
            source.draw_ahead()


@functools.lru_cache(maxsize=None)
def _base(recipe: str) -> str:
    """Content of the recipe's file, independent of its layout."""
    return json.dumps(loading.parse_yaml((ROOT / recipe).read_text(), recipe), sort_keys=True)

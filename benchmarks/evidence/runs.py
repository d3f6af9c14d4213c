"""Training runs that are evidence: which recipe, overrides and seed; trained side by side, kept, resumed, read back.

A run's folder is named by what it is: experiments that need the same run share it, and a changed one is another.
"""

from __future__ import annotations

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

from benchmarks.experiments import CACHE, QUIET, ROOT
from data.glyphs import GlyphsSource
from data.sources import open_source
from parallel.parent_death import bound_to_parent, die_with_parent
from recipe import loading
from recipe.config import Recipe
from recipe.errors import FAILED, STOPPED
from tools.curves import read_events
from training.loop import Stopped, TrainingError
from training.run import run as train

RUNS = CACHE / "evidence"
RECIPE = "configs/evidence.yaml"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_DIVERGED = "diverged.txt"  # in the folder of a run that did not come to its end: why


class Run(NamedTuple):
    """One training run.

    overrides: of configs/evidence.yaml, without seed and folder. stages, replicas: more than one process, if their
    product is.
    """

    overrides: Tuple[str, ...]
    seed: int
    stages: int = 1
    replicas: int = 1

    @property
    def folder(self) -> Path:
        what = json.dumps([_base(), sorted(self.overrides), *self[1:]])
        return RUNS / hashlib.sha256(what.encode()).hexdigest()[:12]

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder.with_suffix(".log")

    @property
    def arguments(self) -> List[str]:
        """The overrides of this run alone, in the form of a command line."""
        return [*self.overrides, f"run.seed={self.seed}"]

    @property
    def processes(self) -> int:
        """How many train it together."""
        return self.stages * self.replicas

    def recipe(self) -> Recipe:
        """What is trained."""
        return loading.load(ROOT / RECIPE, [*self.arguments, *QUIET, f"run.output={self.folder}"])

    def command(self) -> List[str]:
        """What trains it by itself."""
        start = ["train.py"]
        if self.processes > 1:
            start = ["-m", "tools.launch", "--stages", str(self.stages), "--replicas", str(self.replicas)]
        return [sys.executable, *start, "--config", RECIPE, *self.arguments, *QUIET, f"run.output={self.folder}"]


class Outcome(NamedTuple):
    """How a run ended.

    top1: of the validation images; averages: likewise of the averages of weights. loss: of the validation images,
    train_loss: the last that was logged; both infinite where the run diverged. diverged: what it said then.
    """

    top1: float
    loss: float
    train_loss: float
    averages: Dict[str, float]
    diverged: str = ""


class Lost(RuntimeError):
    """A run failed for a reason that is no finding."""


def outcome(run: Run) -> Optional[Outcome]:
    """None as long as the run has not come to its end."""
    folder = run.folder
    if (folder / _DIVERGED).exists():
        chance = 1 / run.recipe().model.classes
        why = (folder / _DIVERGED).read_text().strip()
        return Outcome(chance, float("inf"), float("inf"), {}, why)
    if not (folder / "metrics.jsonl").exists():
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
                say(f"{' '.join(run.arguments)}: {_told(outcome(run))}; {len(pending)} more known to come")
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


def _told(found: Outcome) -> str:
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
        train(run.recipe())
    except Stopped:
        return STOPPED
    except TrainingError as error:
        (run.folder / _DIVERGED).write_text(f"{error}\n")
    return 0


def _draw_glyphs(recipe: Recipe) -> None:
    """In the process that forks the others; takes as long as the set is large, the first time."""
    for split in ("train", "validation"):
        source = open_source(recipe.data, recipe.model.classes, split)
        if isinstance(source, GlyphsSource):
            source.draw_ahead()


@functools.lru_cache(maxsize=None)
def _base() -> str:
    """What the recipe's file says, however it is written."""
    return json.dumps(loading.parse_yaml((ROOT / RECIPE).read_text(), RECIPE), sort_keys=True)

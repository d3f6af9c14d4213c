"""Runs of an experiment: each an ordinary run folder in the cache, trained once, continued where it
was left off.

A run's folder is named after its content: experiments that need the same run share it, a changed
run gets a new one. What was trained on another machine is found by the same name in
docs/results/runs.jsonl, which also says when and where it was trained. To train a run anew, remove
its line there and its folder in the cache.
"""

import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from benchmarks import CACHE, QUIET, RESULTS, ROOT, processes, provenance
from benchmarks.provenance import Provenance
from common import yaml_text
from common.errors import DONE, FAILED, STOPPED
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
# What pages read of a log: fields by kind of event.
_KEPT_FIELDS = {
    "train": ("event", "step", "epoch", "loss", "batch", "noise_scale"),
    "eval": ("event", "step", "epoch", "loss", "top1"),
    "end": ("event", "step", "top1", "step_average", "epoch_average"),
}
# Have a program that begins keep freed memory, as `processes.keep_freed_memory` does.
_KEEP_BUFFERS = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
_DIVERGED = "diverged.txt"  # in the folder of a run that did not come to its end: why
# The line that train.py prints of a TrainingError, on stderr.
_TRAINING_ERROR = re.compile(r"^step \d+: .*start a new run with a lower .*$", re.MULTILINE)


class Run(NamedTuple):
    """One training run, in several processes if the product of stages and replicas is more than 1.

    overrides: of the recipe, without seed and folder.
    seed: of all random draws.
    stages: of the pipeline.
    replicas: of the model.
    base: the recipe's file.
    """

    overrides: Tuple[str, ...]
    seed: int
    stages: int = 1
    replicas: int = 1
    base: str = RECIPE

    @property
    def folder(self) -> Path:
        """Return the run folder, which is named after what the run is."""
        content = [
            _content(self.base),
            sorted(self.overrides),
            self.seed,
            self.stages,
            self.replicas,
        ]
        text = json.dumps(content)
        return RUNS / hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def processes(self) -> int:
        """Return how many processes train it."""
        return self.stages * self.replicas

    @property
    def arguments(self) -> List[str]:
        """Return the overrides of this run alone, in the form of a command line."""
        return [*self.overrides, f"run.seed={self.seed}"]

    @property
    def program(self) -> List[str]:
        """Return what trains it: the program, the recipe and this run's overrides, for Python."""
        program = ["train.py"]
        if self.processes > 1:
            program = ["-m", "tools.launch"]
            program += ["--stages", str(self.stages), "--replicas", str(self.replicas)]
        return [*program, "--config", self.base, *self.arguments]

    def recipe(self) -> Recipe:
        """Return the recipe with this run's overrides and folder."""
        return loading.load(ROOT / self.base, [*self.arguments, *self._place()])

    def command(self) -> List[str]:
        """Return the command line that trains it in its folder."""
        return [sys.executable, *self.program, *self._place()]

    def _place(self) -> List[str]:
        """Return the overrides that do not change what is learned."""
        return [*QUIET, f"run.output={self.folder}"]


class Outcome(NamedTuple):
    """Final figures of a run. One that diverged has infinite losses.

    top1: of the validation images, from 0 to 1.
    loss: of the validation images.
    train_loss: the last that was logged.
    diverged: the error message of a run that diverged, else empty.
    """

    top1: float
    loss: float
    train_loss: float
    diverged: str = ""


class Lost(RuntimeError):
    """A run failed for a reason that is no finding."""


def outcome(run: Run) -> Optional[Outcome]:
    """Return the final figures of a `run`; None as long as it is not finished."""
    message = _divergence(run)
    if message:
        guessing = 1 / run.recipe().model.classes
        return Outcome(guessing, math.inf, math.inf, message)
    events = events_of(run)
    if "end" not in events:
        return None
    return Outcome(
        top1=events["end"][-1]["top1"],
        loss=events["eval"][-1]["loss"],
        train_loss=events["train"][-1]["loss"],
    )


def _divergence(run: Run) -> str:
    """Return the error message of a run that diverged, else nothing."""
    path = run.folder / _DIVERGED
    if path.exists():
        return path.read_text().strip()
    # A folder without the file is that of a run which is being trained anew.
    line = _kept(run)
    if line is None or run.folder.exists():
        return ""
    return line["diverged"]


def events_of(run: Run) -> Dict[str, List[dict]]:
    """Return the events of a run's log by kind.

    They are those of its folder, or what is kept of it; without either there are none.

    Args:
        run: which need not be finished.
    """
    if (run.folder / METRICS).exists():
        return read_events(run.folder)
    line = _kept(run)
    return line["events"] if line else {}


def provenance_of(run: Run) -> Provenance:
    """Return when and where a `run` was trained, by its folder or by what is kept of it."""
    line = None if run.folder.exists() else _kept(run)
    if line is None:
        return provenance.of_folder(run.folder)
    return provenance.from_json(line["trained"])


def curve(run: Run, kind: str, key: str) -> Tuple[List[float], List[float]]:
    """Return epochs and values along a run; both are empty for one that diverged at once.

    Args:
        run: which need not be finished.
        kind: of event, such as "eval".
        key: of the value, such as "top1".
    """
    events = events_of(run).get(kind, [])
    epochs = [event["epoch"] for event in events]
    values = [event[key] for event in events]
    return epochs, values


# Training -----------------------------------------------------------------------------------------


def train_all(
    wanted: Callable[[], Iterable[Run]],
    at_once: int,
    report: Callable[[str], None],
    kept: bool = False,
) -> None:
    """Train the wanted runs that are not finished, in processes of one thread each.

    Args:
        wanted: called again whenever a run has ended: which runs come next may depend on it.
        at_once: processes at the same time.
        report: called with a line about each run that ends.
        kept: whether finished runs are also kept in docs/results, those included that were
            finished before.

    Raises:
        Lost: a run failed.
        KeyboardInterrupt: Ctrl-C; runs of one process have saved themselves before, those of
            several go on from their last checkpoint.
    """
    # Threads would not live on in forked processes, and runs are to be the same everywhere.
    torch.set_num_threads(1)
    running: Dict[BaseProcess, Run] = {}
    try:
        while True:
            # Which runs are wanted follows from those that have ended.
            known = list(dict.fromkeys(wanted()))
            pending = [run for run in known if outcome(run) is None]
            if kept:
                for run in known:
                    if run not in running.values():
                        keep(run)
            _start_some(pending, running, at_once)
            if not running:
                return
            # Until one of them ends, nothing is to be done.
            connection.wait([process.sentinel for process in running])
            ended = [process for process in running if not process.is_alive()]
            for process in ended:
                run = running.pop(process)
                figures = _checked(run, process.exitcode)
                # It may have ended before those that are pending were counted.
                pending = [other for other in pending if other != run]
                arguments = " ".join(run.arguments)
                report(f"{arguments}: {figures}; {len(pending)} more known to come")
    finally:
        # A run in one process saves and ends: the next start goes on there. One in several dies
        # with the process that has started them, and goes on from its last checkpoint.
        for process in running:
            process.terminate()
        for process in running:
            process.join()


def _start_some(
    pending: Sequence[Run],
    running: Dict[BaseProcess, Run],
    at_once: int,
) -> None:
    """Start as many of the pending runs as there is room for.

    Args:
        pending: runs that are not finished, in order; some of them run already.
        running: to which those that start are added.
        at_once: processes at the same time.
    """
    for run in pending:
        if run in running.values():
            continue
        used = sum(other.processes for other in running.values())
        # A run of more processes than that has the machine to itself.
        needed = min(run.processes, at_once)
        if used + needed <= at_once:
            running[_started(run)] = run


def _checked(run: Run, code: Optional[int]) -> str:
    """Return in words what a run came to whose process has ended.

    Args:
        run: that has ended.
        code: the exit code of its process.

    Raises:
        Lost: it failed.
        KeyboardInterrupt: it was stopped, and has saved itself if it is of one process.
    """
    result = outcome(run)
    if code == STOPPED:
        raise KeyboardInterrupt
    if code or result is None:
        command = " ".join(run.command())
        raise Lost(f"{command}: ended with {code}; see {run.folder}.log")
    if result.diverged:
        return f"diverged ({result.diverged})"
    return f"top1 {result.top1:.2%}"


def _started(run: Run) -> BaseProcess:
    """Start a process that trains a run, and return it."""
    # Glyphs are drawn before it is forked, so that no run draws them again: that takes long. Nor
    # does a forked process load the libraries again.
    recipe = run.recipe()
    for split in ("train", "validation"):
        source = open_source(recipe.data, recipe.model.classes, split)
        if isinstance(source, GlyphsSource):
            source.draw_ahead()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(run,))
    process.start()
    return process


def _serve(run: Run) -> None:
    """Train in a process of its own, which ends with the one that started it."""
    die_with_parent()
    # Buffers are else given back after each operation, and to get them again takes a fifth of such
    # small steps.
    processes.keep_freed_memory()
    os.chdir(ROOT)
    RUNS.mkdir(parents=True, exist_ok=True)
    with open(f"{run.folder}.log", "a") as stream:
        # What it starts, and libraries, write there too.
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            try:
                code = train_here(run)
            except Exception:
                traceback.print_exc()
                code = FAILED
    # Not sys.exit: what the process that forked it does at its end is not to be done here.
    os._exit(code)


def train_here(run: Run) -> int:
    """Train in this process, or in several that it starts.

    Args:
        run: which goes on if its folder is there.

    Returns:
        The exit code; one that diverged has come to its end.
    """
    if run.processes > 1:
        return _launch(run)
    try:
        train(run.recipe())
    except Stopped:
        return STOPPED
    except TrainingError as error:
        _note_divergence(run, str(error))
    return DONE


def _launch(run: Run) -> int:
    """Train in several processes, and return the exit code as `train_here` does."""
    environment = launchers.without(os.environ)
    environment["OMP_NUM_THREADS"] = "1"
    environment.update(_KEEP_BUFFERS)
    launched = subprocess.run(
        bound_to_parent(run.command()),
        env=environment,
        check=False,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    print(launched.stderr, end="", file=sys.stderr)
    # Only its message tells a run that diverged from one that failed: the exit codes are the same.
    message = _TRAINING_ERROR.search(launched.stderr)
    if launched.returncode == FAILED and message:
        _note_divergence(run, message[0])
        return DONE
    return launched.returncode


def _note_divergence(run: Run, message: str) -> None:
    """Note in its folder that a run diverged, by its error message."""
    (run.folder / _DIVERGED).write_text(f"{message}\n")


@functools.lru_cache(maxsize=None)
def _content(recipe: str) -> str:
    """Return the content of a recipe's file, independent of its layout."""
    text = (ROOT / recipe).read_text()
    return json.dumps(yaml_text.parse_yaml(text, recipe), sort_keys=True)


# Runs of other machines ---------------------------------------------------------------------------


def keep(run: Run) -> None:
    """Add a run to docs/results/runs.jsonl if it is finished, has a folder here, and is not there.

    A line says what trained the run, when and where, and what pages read of its log.

    Args:
        run: which need not be finished.
    """
    if not run.folder.exists() or _kept(run) is not None:
        return
    result = outcome(run)
    if result is None:
        return
    events = events_of(run)
    line = {
        "run": run.folder.name,
        "program": run.program,
        "trained": provenance_of(run)._asdict(),
        "diverged": result.diverged,
        "events": {kind: _kept_events(kind, events.get(kind, [])) for kind in _KEPT_FIELDS},
    }
    with open(KEPT, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(line, separators=(",", ":")) + "\n")


def _kept_events(kind: str, events: Sequence[dict]) -> List[dict]:
    """Return what pages read of the events of a kind."""
    # A page reads the last training loss, and all noise scales.
    if kind == "train":
        last = events[-1:]
        scales = [event for event in events[:-1] if event.get("noise_scale")]
        events = [*scales, *last]
    return [_shortened(kind, event) for event in events]


def _shortened(kind: str, event: dict) -> dict:
    """Return the fields of an event that pages read."""
    short = {key: event[key] for key in _KEPT_FIELDS[kind] if key in event}
    scale = short.get("noise_scale")
    if scale:
        short["noise_scale"] = {"images": scale["images"], "error": scale["error"]}
    return short


def _kept(run: Run) -> Optional[dict]:
    """Return the line of a run: `events` by kind, and `diverged`, empty if it did not."""
    if not KEPT.exists():
        return None
    state = KEPT.stat()
    lines = _lines(KEPT, state.st_mtime_ns, state.st_size)
    return lines.get(run.folder.name)


@functools.lru_cache(maxsize=1)
def _lines(path: Path, changed: int, size: int) -> Dict[str, dict]:
    """Return the lines of a file by run.

    Args:
        path: of the file.
        changed: when it was, so that it is read again afterwards.
        size: in bytes, for the same reason.
    """
    lines = [parse_json(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return {line["run"]: line for line in lines}

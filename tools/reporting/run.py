"""A run as its folder tells it: the recipe, the events, the starts, and the state that it is in."""

from __future__ import annotations

import datetime
import fcntl
import os
import struct
from pathlib import Path
from typing import List, NamedTuple, Optional, Tuple

from recipe import batch, loading
from recipe.config import Recipe
from recipe.errors import ConfigError, UserError
from tools.reporting import metrics, sessions
from tools.reporting.metrics import Metrics
from tools.reporting.sessions import Start

FINISHED, RUNNING, CUT_OFF, FAILED, NOT_BEGUN = "finished", "running", "cut off", "failed", "not begun"
AVERAGES = ("step_average", "epoch_average")


class Run(NamedTuple):
    """recipe: None where config.yaml cannot be used; complaint: why not."""

    folder: Path
    recipe: Optional[Recipe]
    complaint: str
    metrics: Metrics
    starts: List[Start]

    @property
    def name(self) -> str:
        """That of the folder: two runs of a recipe have the same run.name."""
        return self.folder.resolve().name


class State(NamedTuple):
    """kind: one of the five above. text: how far it came, and why no further."""

    kind: str
    text: str


def read(folder: Path) -> Run:
    """The run in a folder. Raises UserError where there is none, or where its events cannot be read."""
    config, events = folder / "config.yaml", folder / "metrics.jsonl"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name a run folder, e.g. runs/quickstart")
    if not config.exists() and not events.exists():
        raise UserError(
            f"{folder}: neither config.yaml nor metrics.jsonl in it; name a run folder, e.g. runs/quickstart"
        )
    try:
        recipe, complaint = loading.load(config), ""
    except ConfigError as error:
        recipe, complaint = None, str(error)
    try:
        found = metrics.read(events)
    except OSError as error:
        raise UserError(f"{events}: {error.strerror}; make it readable") from None
    return Run(folder, recipe, complaint, found, sessions.starts(folder))


def state(run: Run) -> State:
    """Whether the run is finished, and if not, how far it came and what is known of the reason."""
    done, total = run.metrics.step, total_steps(run)
    where = f"step {done:,}" + (f" of {total:,}" if total else "")
    if run.metrics.end:
        return State(FINISHED, where)
    process = _writer(run.folder / "lock")
    if process:
        return State(RUNNING, f"{where} is logged (process {process})")
    if not done:
        return State(NOT_BEGUN, "no update is logged yet")
    skipped = _skipped_at_last(run)
    if run.recipe and skipped > run.recipe.precision.max_skipped_steps:
        return State(FAILED, f"at {where}: the last {skipped} updates had gradients that are not finite")
    return State(CUT_OFF, f"at {where}: stopped, killed or failed; the command that began it resumes it")


def _writer(lock: Path) -> int:
    """The process that holds the folder's lock, asked without taking it; 0 where none on this machine does."""
    if not hasattr(fcntl, "F_GETLK") or os.uname().sysname != "Linux":
        return 0  # the layout below is Linux's
    try:
        with open(lock, "rb") as stream:
            question = struct.pack("hhqqii", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0, 0)
            kind, _, _, _, process, _ = struct.unpack("hhqqii", fcntl.fcntl(stream, fcntl.F_GETLK, question))
    except OSError:
        return 0
    return 0 if kind == fcntl.F_UNLCK else process


def _skipped_at_last(run: Run) -> int:
    """How many of the updates at the end of the log were left out for gradients that are not finite, in a row."""
    pairs = list(zip(run.metrics.train["step"], run.metrics.train["skipped_steps"]))
    in_row = 0.0
    for (before, left_before), (step, left) in reversed(list(zip([(0.0, 0.0), *pairs], pairs))):
        in_row += left - left_before if left >= left_before else 0.0
        if left - left_before < step - before:
            break
    return int(in_row)


def steps_per_epoch(run: Run) -> Optional[float]:
    """As the events have it; None without any."""
    for events in (run.metrics.evaluation, run.metrics.train):
        for step, epoch in zip(reversed(events["step"]), reversed(events["epoch"])):
            if epoch > 0:
                return step / epoch
    return None


def total_steps(run: Run) -> Optional[int]:
    """The length of the run in updates; None where neither recipe nor events tell it."""
    per_epoch = steps_per_epoch(run)
    if run.recipe is None:
        return None
    if per_epoch is None:
        images = run.recipe.data.images("train")
        per_epoch = batch.steps_per_epoch(images, run.recipe.batch.global_) if images else 0
    length = run.recipe.run
    if not per_epoch and length.epochs is not None:
        return None
    return max(
        1, batch.in_steps(length.epochs, length.steps, length.images, round(per_epoch), run.recipe.batch.global_)
    )


def division(run: Run) -> Optional[str]:
    """The line of the batch arithmetic; None without a recipe that can be divided."""
    if run.recipe is None:
        return None
    replicas = next((start.replicas for start in reversed(run.starts) if start.replicas), None)
    try:
        line = batch.divide(run.recipe, replicas).describe()
    except UserError:
        return None
    if run.recipe.parallel.replicas is None and replicas is None:
        line += "; with replicas: auto, as one replica divides it"
    return line


def headline(run: Run) -> dict:
    """The figures that a run is judged by; None for those that are not known (yet)."""
    now, end, evaluation = state(run), run.metrics.end or {}, run.metrics.evaluation
    best = max((value for value in evaluation["top1"] if value == value), default=None)
    return {
        "folder": str(run.folder),
        "name": run.name,
        "state": now.kind,
        "step": run.metrics.step,
        "steps": total_steps(run),
        "epoch": _last(run, "epoch"),
        "top1": end.get("top1", _newest(evaluation["top1"])),
        "top5": end.get("top5", _newest(evaluation["top5"])),
        "best_top1": end.get("best_top1", best),
        **{name: _newest(evaluation[f"{name}/top1"]) for name in AVERAGES if evaluation.has(f"{name}/top1")},
        "images_per_second": end.get("images_per_second", _newest(run.metrics.train["images_per_second"])),
        "seconds": end.get("seconds", _newest(run.metrics.train["seconds"])),
        "global_batch": run.recipe.batch.global_ if run.recipe else None,
        "device": device(run),
        "started": run.starts[0].environment.get("started") if run.starts else None,
        "last_written": last_written(run),
        "revision": run.starts[-1].environment.get("revision") if run.starts else None,
        "starts": len(run.starts),
    }


def device(run: Run) -> Optional[str]:
    """Devices of the newest start: the GPUs that it saw, IPUs, or the CPU."""
    if not run.starts:
        return None
    environment = run.starts[-1].environment
    asked = run.recipe.run.device if run.recipe else "auto"
    if asked == "ipu":
        return "IPU"
    devices = environment.get("devices")
    if isinstance(devices, list) and devices and asked != "cpu":
        return ", ".join(_counted([str(name) for name in devices]))
    return f"CPU: cores {environment.get('cpus')}, threads a process {environment.get('threads')}"


def _counted(names: List[str]) -> List[str]:
    """["A", "A", "B"] as ["2 x A", "B"]."""
    counts = [(name, names.count(name)) for name in dict.fromkeys(names)]
    return [f"{number} x {name}" if number > 1 else name for name, number in counts]


def last_written(run: Run) -> Optional[str]:
    """When the events were written last, as ISO 8601 in UTC."""
    path = run.folder / "metrics.jsonl"
    if not path.exists():
        return None
    written = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)
    return written.isoformat(timespec="seconds")


def _newest(column) -> Optional[float]:
    return next((value for value in reversed(column) if value == value), None)


def _last(run: Run, name: str) -> Optional[float]:
    values = [_newest(events[name]) for events in (run.metrics.train, run.metrics.evaluation)]
    return max((value for value in values if value is not None), default=None)


def places(run: Run) -> Tuple[List[float], List[float]]:
    """Steps of the log lines and the seconds of the run at each, for a time axis; without lines that lack either."""
    pairs = [pair for pair in zip(run.metrics.train["step"], run.metrics.train["seconds"]) if pair[1] == pair[1]]
    return [step for step, _ in pairs], [seconds for _, seconds in pairs]

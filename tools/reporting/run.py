"""A run as read from its folder: the recipe, the events, the starts, and its state."""

from __future__ import annotations

import collections
import datetime
import fcntl
from pathlib import Path
from typing import List, NamedTuple, Optional

from recipe import batch, loading
from recipe.config import Recipe
from recipe.division import count
from recipe.errors import ConfigError, UserError
from tools.reporting import metrics
from tools.reporting.metrics import Metrics
from training import run_folder
from training.metrics import MOST_STEPS, NAME

FINISHED, RUNNING, CUT_OFF, FAILED, NOT_BEGUN = "finished", "running", "cut off", "failed", "not begun"
AVERAGES = ("step_average", "epoch_average")
_EXAMPLE = "name a run folder, e.g. runs/quickstart"


class Run(NamedTuple):
    """recipe: None where config.yaml cannot be used; complaint: why not. starts: see `starts_in`."""

    folder: Path
    recipe: Optional[Recipe]
    complaint: str
    metrics: Metrics
    starts: List[dict]

    @property
    def name(self) -> str:
        """That of the folder: two runs of a recipe have the same run.name."""
        return self.folder.resolve().name


class State(NamedTuple):
    """kind: one of the five above. text: how far the run came, and why no further."""

    kind: str
    text: str


def read(folder: Path) -> Run:
    """The run in a folder. Raises UserError where there is none, or where its events cannot be read."""
    config, events = folder / "config.yaml", folder / NAME
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; {_EXAMPLE}")
    if not config.exists() and not events.exists():
        raise UserError(f"{folder}: neither config.yaml nor {NAME} in it; {_EXAMPLE}")
    try:
        recipe, complaint = loading.load(config), ""
    except ConfigError as error:
        recipe, complaint = None, str(error)
    try:
        found = metrics.read(events)
    except OSError as error:
        raise UserError(f"{events}: {error.strerror}; make it readable") from None
    return Run(folder, recipe, complaint, found, starts_in(folder))


def starts_in(folder: Path) -> List[dict]:
    """All starts that environment.json has, the first one first.

    `step` (updates done before) and `replicas` are left out unless they are counts; a start that trained nothing, as
    the run was finished or the recipe refused, has neither.
    """
    found = []
    for start in run_folder.starts(folder):
        for name, least in (("step", 0), ("replicas", 1)):
            count = start.get(name)
            if type(count) is not int or not least <= count < MOST_STEPS:
                start.pop(name, None)
        found.append(start)
    return found


def resumed_at(starts: List[dict]) -> List[int]:
    """The steps at which a later session went on from an earlier one, ascending."""
    return sorted({start["step"] for start in starts if start.get("step")})


def state(run: Run) -> State:
    """Whether the run is finished, and if not, how far it came and what is known of the reason."""
    done, total = run.metrics.step, total_steps(run)
    where = f"step {done:,}" + (f" of {total:,}" if total else "")
    if run.metrics.end:
        return State(FINISHED, where)
    if in_use(run.folder):
        return State(RUNNING, f"{where} is logged")
    if not done:
        return State(NOT_BEGUN, "no update is logged yet")
    skipped = _skipped_at_last(run.metrics.train)
    if run.recipe and skipped > run.recipe.precision.max_skipped_steps:
        return State(FAILED, f"at {where}: the last {skipped:.0f} updates had gradients that are not finite")
    return State(CUT_OFF, f"at {where}: stopped, killed or failed; the command that began it resumes it")


def in_use(folder: Path) -> bool:
    """Whether a process of this machine holds the lock of a run folder."""
    try:
        with open(folder / "lock", "rb") as stream:
            fcntl.lockf(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until it is closed
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _skipped_at_last(train: metrics.Events) -> float:
    """Number of updates in a row, at the end of the log, that were left out for gradients that are not finite."""
    in_row, step, skipped = 0.0, 0.0, 0.0
    for next_step, next_skipped in zip(train["step"], train["skipped_steps"]):
        if next_skipped - skipped < next_step - step:
            in_row = 0.0
        in_row += next_skipped - skipped if next_skipped >= skipped else 0.0
        step, skipped = next_step, next_skipped
    return in_row


def steps_per_epoch(run: Run) -> Optional[float]:
    """As the events have it; None without any."""
    for events in (run.metrics.evaluation, run.metrics.train):
        for step, epoch in zip(reversed(events["step"]), reversed(events["epoch"])):
            if epoch > 0:
                return step / epoch
    return None


def total_steps(run: Run) -> Optional[int]:
    """The length of the run in updates; None where it follows from neither recipe nor events."""
    if run.recipe is None:
        return None
    size, length, per_epoch = run.recipe.batch.global_, run.recipe.run, steps_per_epoch(run)
    if per_epoch is None:
        per_epoch = batch.steps_per_epoch(run.recipe.data.images("train") or 0, size)
    if not per_epoch and length.epochs is not None:
        return None
    return max(1, batch.in_steps(length.epochs, length.steps, length.images, round(per_epoch), size))


def division(run: Run) -> Optional[str]:
    """The line of the batch arithmetic; None without a recipe that can be divided."""
    if run.recipe is None:
        return None
    replicas = next((start["replicas"] for start in reversed(run.starts) if "replicas" in start), None)
    try:
        line = batch.divide(run.recipe, replicas).describe()
    except UserError:
        return None
    if run.recipe.parallel.replicas is None and replicas is None:
        line += "; with replicas: auto, as one replica divides it"
    return line


def headline(run: Run) -> dict:
    """The figures that a run is judged by; None for those that are not known (yet)."""
    train, evaluation, end = run.metrics.train, run.metrics.evaluation, run.metrics.end or {}
    epochs = [epoch for epoch in (_newest(train["epoch"]), _newest(evaluation["epoch"])) if epoch is not None]
    events = run.folder / NAME
    written = (
        datetime.datetime.fromtimestamp(events.stat().st_mtime, datetime.timezone.utc) if events.exists() else None
    )
    return {
        "folder": str(run.folder),
        "name": run.name,
        "state": state(run).kind,
        "step": run.metrics.step,
        "steps": total_steps(run),
        "epoch": max(epochs, default=None),
        "top1": end.get("top1", _newest(evaluation["top1"])),
        "top5": end.get("top5", _newest(evaluation["top5"])),
        "best_top1": end.get("best_top1", max((top1 for top1 in evaluation["top1"] if top1 == top1), default=None)),
        **{name: _newest(evaluation[f"{name}/top1"]) for name in AVERAGES if evaluation.has(f"{name}/top1")},
        "images_per_second": end.get("images_per_second", _newest(train["images_per_second"])),
        "seconds": end.get("seconds", _newest(train["seconds"])),
        "global_batch": run.recipe.batch.global_ if run.recipe else None,
        "device": device(run),
        "started": run.starts[0].get("started") if run.starts else None,
        "last_written": written and written.isoformat(timespec="seconds"),
        "revision": run.starts[-1].get("revision") if run.starts else None,
        "starts": len(run.starts),
    }


def _newest(column) -> Optional[float]:
    return next((value for value in reversed(column) if value == value), None)


def device(run: Run) -> Optional[str]:
    """Devices of the newest start: the GPUs that it saw, IPUs, or the CPU."""
    if not run.starts:
        return None
    environment = run.starts[-1]
    wanted = run.recipe.run.device if run.recipe else "auto"
    if wanted == "ipu":
        return "IPU"
    devices = environment.get("devices")
    if isinstance(devices, list) and devices and wanted != "cpu":
        counts = collections.Counter(map(str, devices))
        return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
    cores, threads = (environment.get(key) for key in ("cpus", "threads"))
    return f"CPU: {count(cores, 'core')}, {count(threads, 'thread')} per process"

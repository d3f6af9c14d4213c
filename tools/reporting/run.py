"""A run as read from its folder: the recipe, the events, the starts, and its state."""

from __future__ import annotations

import collections
import fcntl
import math
from array import array
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from common.errors import ConfigError, UserError
from common.text import count
from recipe import batch, loading
from recipe.config import Recipe
from tools import log_updates
from tools.log_updates import LogLine
from training import run_folder
from training.metrics import MOST_STEPS, NAME, TOP, is_number, lines

AVERAGES = ("step_average", "epoch_average")
_EXAMPLE = "name a run folder, e.g. runs/quickstart"
_LEAST = {"step": 0, "replicas": 1}  # of the counts in environment.json


class Events:
    """Events of one kind in columns: 100,000 log lines of two hundred layers fit into memory.

    A column for each number, those of inner objects as `trust/stem.conv_stem.weight`; NaN for what
    an event lacks.
    """

    def __init__(self) -> None:
        self.columns: Dict[str, array] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> array:
        """Return a column, float64 [events]; NaN throughout where no event has `name`."""
        column = self.columns.get(name)
        if column is None:
            return array("d", [math.nan]) * self._length
        # Events since the last one that had this number lack it.
        if len(column) < self._length:
            column.extend([math.nan] * (self._length - len(column)))
        return column

    def has(self, name: str) -> bool:
        """Return whether any event has a number called `name`."""
        return not all(map(math.isnan, self[name]))

    def add(self, event: dict) -> None:
        """Append an `event`."""
        values = dict(event)
        for key, inner in event.items():
            if type(inner) is dict:
                for name, value in inner.items():
                    values[f"{key}/{name}"] = value
        # A number that is not finite is null in the file, or NaN where other programs wrote it.
        for name, value in values.items():
            known = is_number(value)
            if not known and type(value) is not float:
                continue
            if name not in self.columns:
                self.columns[name] = array("d")
            self[name].append(value if known and value is not None else math.nan)
        self._length += 1


class Metrics(NamedTuple):
    """Content of metrics.jsonl.

    evaluation: events that have the `seconds` of the newest log line before them.
    step: the newest.
    end: the event of a finished run.
    odd: numbers of the lines that are no events, but for one still being written.
    """

    train: Events
    evaluation: Events
    step: int
    end: Optional[dict]
    odd: List[int]


def read_metrics(path: Path) -> Metrics:
    """Read the events of a file that may still be written.

    Args:
        path: of metrics.jsonl; without the file there are no events.

    Raises:
        OSError: the file cannot be read.
    """
    train = Events()
    evaluation = Events()
    end = None
    step = 0
    seconds = None
    odd = []
    for number, event in lines(path) if path.exists() else ():
        if event is None:
            odd.append(number)
            continue
        kind = event["event"]
        step = max(step, event["step"])
        if kind == "train":
            seconds = event.get("seconds")
            train.add({"seconds": seconds, **event})
        elif kind == "eval":
            evaluation.add({"seconds": seconds, **event})
        # An end that is not the last event was that of an earlier session.
        end = event if kind == "end" else None
    return Metrics(train, evaluation, step, end, odd)


class Run(NamedTuple):
    """A run folder.

    folder: its path, as it was named.
    metrics: content of metrics.jsonl.
    recipe: None where config.yaml cannot be used.
    complaint: why not.
    starts: see `starts_in`.
    """

    folder: Path
    recipe: Optional[Recipe]
    complaint: str
    metrics: Metrics
    starts: List[dict]

    @property
    def name(self) -> str:
        """Return the folder's name: two runs of a recipe have the same run.name."""
        return self.folder.resolve().name


class State(NamedTuple):
    """State of a run.

    kind: finished, running, cut off, failed or not begun.
    text: how far the run came, and why no further.
    """

    kind: str
    text: str


def read(folder: Path) -> Run:
    """Read the run in a folder.

    Args:
        folder: of the run, which need not be finished.

    Raises:
        UserError: there is no run, or its events cannot be read.
    """
    config = folder / "config.yaml"
    events = folder / NAME
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; {_EXAMPLE}")
    if not config.exists() and not events.exists():
        raise UserError(f"{folder}: neither config.yaml nor {NAME} in it; {_EXAMPLE}")
    # Without a recipe there are still events to show.
    recipe = None
    complaint = ""
    try:
        recipe = loading.load(config)
    except ConfigError as error:
        complaint = str(error)
    try:
        metrics = read_metrics(events)
    except OSError as error:
        raise UserError(f"{events}: {error.strerror}; make it readable") from None
    return Run(folder, recipe, complaint, metrics, starts_in(folder))


def starts_in(folder: Path) -> List[dict]:
    """Read all starts in environment.json, the first one first.

    Args:
        folder: of the run.

    Returns:
        Starts without `step` and `replicas` where these are no counts.
    """
    starts = []
    for start in run_folder.starts(folder):
        known = {name: value for name, value in start.items() if _is_usable(name, value)}
        starts.append(known)
    return starts


def _is_usable(name: str, value: object) -> bool:
    """Return whether an entry is a count where a count is needed; all others are usable."""
    if name not in _LEAST:
        return True
    return type(value) is int and _LEAST[name] <= value < MOST_STEPS


def resumed_at(starts: Sequence[dict]) -> List[int]:
    """Return the steps at which a later session went on from an earlier one, ascending.

    Args:
        starts: of a run.
    """
    return sorted({start["step"] for start in starts if start.get("step")})


def state(run: Run) -> State:
    """Return whether the `run` is finished, and if not, how far it came and the reason if known."""
    done = run.metrics.step
    total = total_steps(run)
    where = f"step {done:,}"
    if total:
        where += f" of {total:,}"
    if run.metrics.end:
        return State("finished", where)
    if in_use(run.folder):
        return State("running", f"{where} is logged")
    if not done:
        return State("not begun", "no update is logged yet")
    # Without an end event and a process, the log shows one reason only.
    if run.recipe is not None:
        skipped = _skipped_at_last(run.metrics.train, run.recipe)
        if skipped > run.recipe.precision.max_skipped_steps:
            return State(
                "failed",
                f"at {where}: the last {skipped:.0f} updates had gradients that are not finite",
            )
    return State(
        "cut off",
        f"at {where}: stopped, killed or failed; the command that began it resumes it",
    )


def in_use(folder: Path) -> bool:
    """Return whether a process of this machine holds the lock of a run `folder`."""
    try:
        with open(folder / "lock", "rb") as stream:
            # Refused while a process holds the exclusive lock.
            fcntl.lockf(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until it is closed
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _skipped_at_last(train: Events, recipe: Recipe) -> float:
    """Count the updates at the end of the log that were skipped for non-finite gradients.

    Args:
        train: the run's events.
        recipe: of the run.
    """
    columns = [train[name] for name in LogLine._fields]
    log = [LogLine(*numbers) for numbers in zip(*columns)]
    in_row = 0.0
    skipped = 0.0
    # Updates, not steps: with batch.schedule an update may be several.
    for updates, next_skipped in zip(log_updates.between(log, recipe), train["skipped_steps"]):
        # An update that was not skipped since the line before starts the count anew.
        if next_skipped - skipped < updates:
            in_row = 0.0
        # Fewer are skipped where a session went on from an older checkpoint.
        if next_skipped >= skipped:
            in_row += next_skipped - skipped
        skipped = next_skipped
    return in_row


def steps_per_epoch(run: Run, done: float = math.inf) -> Optional[float]:
    """Return the steps of an epoch by the events of a run; None without any.

    Other images that a session has accepted may have changed them (data.changed_images).

    Args:
        run: with its events.
        done: steps, of whose session the epochs are: that of the first event behind them, of the
            newest event where none is.
    """
    newest = None
    first_behind = None
    for events in (run.metrics.evaluation, run.metrics.train):
        for step, epoch in zip(events["step"], events["epoch"]):
            if not epoch > 0:
                continue
            if newest is None or step >= newest[0]:
                newest = (step, epoch)
            if step > done and (first_behind is None or step < first_behind[0]):
                first_behind = (step, epoch)
    told = first_behind or newest
    return None if told is None else told[0] / told[1]


def total_steps(run: Run) -> Optional[int]:
    """Return the length of the `run` in updates; None if neither recipe nor events tell it."""
    if run.recipe is None:
        return None
    size = run.recipe.batch.global_
    length = run.recipe.run
    per_epoch = steps_per_epoch(run)
    # Before the first event the number of images gives the length of an epoch.
    if per_epoch is None:
        images = run.recipe.data.images("train") or 0
        per_epoch = batch.steps_per_epoch(images, size)
    if not per_epoch and length.epochs is not None:
        return None
    steps = batch.in_steps(
        length.epochs,
        length.steps,
        length.images,
        per_epoch=round(per_epoch),
        global_batch=size,
    )
    return max(1, steps)


def noted_replicas(starts: Sequence[dict]) -> Optional[int]:
    """Return the replicas of a run's newest session that has noted them; None: none has.

    Launchers decide on them where recipes leave them open.

    Args:
        starts: of the run.
    """
    return newest_noted(starts).get("replicas")


def newest_noted(starts: Sequence[dict]) -> dict:
    """Return a run's newest start that has noted its replicas; {}: none has.

    A start that trains nothing, because the run is finished or its recipe is refused, notes none.

    Args:
        starts: of the run.
    """
    noted = [start for start in starts if "replicas" in start]
    return noted[-1] if noted else {}


def division(run: Run) -> Optional[str]:
    """Return the line of a run's batch arithmetic.

    Args:
        run: whose newest session tells the replicas.

    Returns:
        The line; None without a recipe that can be divided.
    """
    if run.recipe is None:
        return None
    replicas = noted_replicas(run.starts)
    try:
        line = batch.divide(run.recipe, replicas).describe()
    except UserError:
        return None
    if run.recipe.parallel.replicas is None and replicas is None:
        return f"{line}; with replicas: auto, as one replica divides it"
    return line


def epoch_and_seconds(metrics: Metrics) -> Tuple[Optional[float], Optional[float]]:
    """Return epochs and seconds of training so far; None where unknown.

    Args:
        metrics: of the run.
    """
    epochs = []
    for events in (metrics.train, metrics.evaluation):
        epoch = _newest(events["epoch"])
        if epoch is not None:
            epochs.append(epoch)
    end = metrics.end or {}
    seconds = end.get("seconds", _newest(metrics.train["seconds"]))
    return max(epochs, default=None), seconds


def headline(run: Run) -> dict:
    """Return the figures that a `run` is judged by; None for those that are not known (yet)."""
    epoch, seconds = epoch_and_seconds(run.metrics)
    end = run.metrics.end or {}
    pace = _newest(run.metrics.train["images_per_second"])
    return {
        "folder": str(run.folder),
        "name": run.name,
        "state": state(run).kind,
        "step": run.metrics.step,
        "steps": total_steps(run),
        "epoch": epoch,
        **_scores(run),
        "images_per_second": end.get("images_per_second", pace),
        "seconds": seconds,
        "global_batch": run.recipe.batch.global_ if run.recipe else None,
        "device": device(run),
        # The run began with its first start; the newest has the code that trained last.
        "started": run.starts[0].get("started") if run.starts else None,
        "revision": run.starts[-1].get("revision") if run.starts else None,
        "starts": len(run.starts),
    }


def _scores(run: Run) -> Dict[str, Optional[float]]:
    """Return the scores of a run, and of its weights' averages where these were evaluated."""
    evaluation = run.metrics.evaluation
    # The last event of a finished run has its scores; until then the newest events count.
    end = run.metrics.end or {}
    # Scores of other validation images than the newest ones' are not compared.
    numbers = validation_sets(evaluation)
    known = []
    for top1, number in zip(evaluation["top1"], numbers):
        if number == numbers[-1] and not math.isnan(top1):
            known.append(top1)
    top5 = end.get("top5", _newest(evaluation["top5"]))
    if run.recipe is not None and run.recipe.model.classes <= TOP:
        top5 = None  # each class is among the five likeliest
    scores = {
        "top1": end.get("top1", _newest(evaluation["top1"])),
        "top5": top5,
        "best_top1": end.get("best_top1", max(known, default=None)),
    }
    for name in AVERAGES:
        if evaluation.has(f"{name}/top1"):
            scores[name] = _newest(evaluation[f"{name}/top1"])
    return scores


def validation_sets(evaluation: Events) -> List[float]:
    """Return the number of the validation images that each evaluation scored.

    Args:
        evaluation: the `eval` events of a run.
    """
    # A number stands in the events from the second set of images on.
    return [0.0 if math.isnan(number) else number for number in evaluation["validation_set"]]


def _newest(column: Sequence[float]) -> Optional[float]:
    """Return the last value of a column that is a number."""
    # From the end, as the newest is nearly always a number.
    return next((value for value in reversed(column) if not math.isnan(value)), None)


def device(run: Run) -> Optional[str]:
    """Return the devices of the newest start of a `run`: the GPUs that it saw, IPUs, or the CPU."""
    if not run.starts:
        return None
    environment = run.starts[-1]
    # A recipe may choose the CPU of a machine that has GPUs.
    wanted = run.recipe.run.device if run.recipe else "auto"
    if wanted == "ipu":
        return "IPU"
    devices = environment.get("devices")
    if isinstance(devices, list) and devices and wanted != "cpu":
        kinds = []
        for name, number in collections.Counter(map(str, devices)).items():
            kinds.append(f"{number} x {name}" if number > 1 else name)
        return ", ".join(kinds)
    cores = _counted(environment.get("cpus"), "core")
    threads = _counted(environment.get("threads"), "thread")
    return f"CPU: {cores}, {threads} per process"


def _counted(number: object, noun: str) -> str:
    """Return an entry of environment.json, which may be no number, with its noun."""
    if isinstance(number, (int, float)):
        return count(number, noun)
    return f"{number} {noun}s"

"""A run as read from its folder: the recipe, the events, the starts, and its state."""

from __future__ import annotations

import bisect
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
from training import run_folder
from training.metrics import MOST_STEPS, NAME, TOP, is_number, lines

AVERAGES = ("step_average", "epoch_average")
_EXAMPLE = "name a run folder, e.g. runs/quickstart"


class Events:
    """Events of one kind in columns, so that a hundred thousand log lines of two hundred layers fit into memory.

    A column for each number, those of inner objects as `trust/stem.conv_stem.weight`; NaN for what an event lacks.
    """

    def __init__(self) -> None:
        self.columns: Dict[str, array] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> array:
        """float64 [events]; NaN throughout where no event has it."""
        column = self.columns.get(name)
        if column is None:
            return array("d", [math.nan]) * self._length
        if len(column) < self._length:
            column.extend([math.nan] * (self._length - len(column)))
        return column

    def has(self, name: str) -> bool:
        """Whether any event has a number of that name."""
        return any(value == value for value in self[name])

    def add(self, event: dict) -> None:
        """Append an event."""
        values = dict(event)
        for key, inner in event.items():
            if type(inner) is dict:
                values.update((f"{key}/{name}", value) for name, value in inner.items())
        for name, value in values.items():
            if is_number(value) or type(value) is float:
                if name not in self.columns:
                    self.columns[name] = array("d")
                self[name].append(value if is_number(value) and value is not None else math.nan)
        self._length += 1


class Metrics(NamedTuple):
    """Content of metrics.jsonl; evaluations have the `seconds` of the newest log line before them. step: the newest.
    end: the event of a finished run. odd: numbers of the lines that are no events, but for one still being written."""

    train: Events
    evaluation: Events
    step: int
    end: Optional[dict]
    odd: List[int]


def read_metrics(path: Path) -> Metrics:
    """The events in a file that may still be written; none if it is missing. Raises OSError."""
    kinds = {"train": Events(), "eval": Events()}
    end, step, seconds, odd = None, 0, None, []
    for number, event in lines(path) if path.exists() else ():
        if event is None:
            odd.append(number)
            continue
        step = max(step, event["step"])
        if event["event"] == "train":
            seconds = event.get("seconds")
        if event["event"] in kinds:
            kinds[event["event"]].add({"seconds": seconds, **event})
        end = event if event["event"] == "end" else None
    return Metrics(kinds["train"], kinds["eval"], step, end, odd)


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
    """kind: finished, running, cut off, failed or not begun. text: how far the run came, and why no further."""

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
        found = read_metrics(events)
    except OSError as error:
        raise UserError(f"{events}: {error.strerror}; make it readable") from None
    return Run(folder, recipe, complaint, found, starts_in(folder))


def starts_in(folder: Path) -> List[dict]:
    """All starts in environment.json, the first one first; without `step` and `replicas` where these are no counts."""
    least = {"step": 0, "replicas": 1}

    def known(name: str, value: object) -> bool:
        return name not in least or (type(value) is int and least[name] <= value < MOST_STEPS)

    return [{name: value for name, value in start.items() if known(name, value)} for start in run_folder.starts(folder)]


def resumed_at(starts: List[dict]) -> List[int]:
    """The steps at which a later session went on from an earlier one, ascending."""
    return sorted({start["step"] for start in starts if start.get("step")})


def state(run: Run) -> State:
    """Whether the run is finished, and if not, how far it came and what is known of the reason."""
    done, total = run.metrics.step, total_steps(run)
    where = f"step {done:,}" + (f" of {total:,}" if total else "")
    if run.metrics.end:
        return State("finished", where)
    if in_use(run.folder):
        return State("running", f"{where} is logged")
    if not done:
        return State("not begun", "no update is logged yet")
    skipped = _skipped_at_last(run.metrics.train)
    if run.recipe and skipped > run.recipe.precision.max_skipped_steps:
        return State("failed", f"at {where}: the last {skipped:.0f} updates had gradients that are not finite")
    return State("cut off", f"at {where}: stopped, killed or failed; the command that began it resumes it")


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


def _skipped_at_last(train: Events) -> float:
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
    auto = run.recipe.parallel.replicas is None and replicas is None
    return f"{line}; with replicas: auto, as one replica divides it" if auto else line


def epoch_and_seconds(run: Run) -> Tuple[Optional[float], Optional[float]]:
    """Epochs and seconds of training so far; None where unknown."""
    train, evaluation, end = run.metrics.train, run.metrics.evaluation, run.metrics.end or {}
    epochs = [epoch for epoch in (_newest(train["epoch"]), _newest(evaluation["epoch"])) if epoch is not None]
    return max(epochs, default=None), end.get("seconds", _newest(train["seconds"]))


def headline(run: Run) -> dict:
    """The figures that a run is judged by; None for those that are not known (yet)."""
    train, evaluation, end = run.metrics.train, run.metrics.evaluation, run.metrics.end or {}
    epoch, seconds = epoch_and_seconds(run)
    few_classes = run.recipe is not None and run.recipe.model.classes <= TOP  # each is among the five likeliest
    return {
        "folder": str(run.folder),
        "name": run.name,
        "state": state(run).kind,
        "step": run.metrics.step,
        "steps": total_steps(run),
        "epoch": epoch,
        "top1": end.get("top1", _newest(evaluation["top1"])),
        "top5": None if few_classes else end.get("top5", _newest(evaluation["top5"])),
        "best_top1": end.get("best_top1", max((top1 for top1 in evaluation["top1"] if top1 == top1), default=None)),
        **{name: _newest(evaluation[f"{name}/top1"]) for name in AVERAGES if evaluation.has(f"{name}/top1")},
        "images_per_second": end.get("images_per_second", _newest(train["images_per_second"])),
        "seconds": seconds,
        "global_batch": run.recipe.batch.global_ if run.recipe else None,
        "device": device(run),
        "started": run.starts[0].get("started") if run.starts else None,
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


class SessionTime(NamedTuple):
    """Seconds of one session by what they went to. first, last: updates done before and after it."""

    first: int
    last: int
    computing: float
    waiting: float
    rest: float


def session_times(metrics: Metrics, starts: Sequence[dict], global_batch: int) -> List[SessionTime]:
    """Where the time of each session went, as far as the log shows it; the sessions whose work was kept.

    A log line has the images a second and the share of waiting since the line before it (or the session's start), and
    the seconds of the whole run. What the two do not account for went to evaluation and checkpoints. Those between
    the last log line of a session and its end count to the next session. Loading torch and the model is in neither.
    """
    bounds = [0, *resumed_at(starts)]
    parts = [[0.0, 0.0, 0.0] for _ in bounds]
    last, counted, session = 0, 0.0, 0
    columns = (metrics.train[name] for name in ("step", "images_per_second", "data_wait", "seconds"))
    for step, pace, wait, seconds in zip(*columns):
        session = max(0, bisect.bisect_left(bounds, step) - 1)
        updates = step - max(last, bounds[session])
        last = step
        if not (pace > 0 and seconds >= counted):
            continue  # not finite, or a file that was put together by hand
        total, counted = seconds - counted, seconds
        training = min(total, updates * global_batch / pace)
        waiting = training * wait if 0 <= wait <= 1 else 0.0
        parts[session] = [sum(pair) for pair in zip(parts[session], (training - waiting, waiting, total - training))]
    if metrics.end and isinstance(metrics.end.get("seconds"), (int, float)):
        parts[session][2] += max(0.0, metrics.end["seconds"] - counted)
    ends = [*bounds[1:], max(metrics.step, bounds[-1])]
    return [SessionTime(first, end, *part) for first, end, part in zip(bounds, ends, parts) if sum(part) > 0]

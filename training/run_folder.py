"""The folder of a run: whose it is, what ran in it, and that only one process writes it."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import IO, List, Mapping, Optional, Sequence, Set

from common import cores
from common.errors import CheckpointError, ConfigError
from common.files import check_same, write_text
from common.json_io import json_text, read_json
from recipe import loading
from recipe.batch import output_folder, settled
from recipe.config import Log, Parallel, Recipe
from recipe.hardware import EngineSection, Ipu
from training import metrics

# What may change between the sessions of one run: where and how it is computed, not what is learned.
_FREE = {
    "run": {"name", "output", "device", "resume", "lock", "threads"},
    "batch": {"evaluation"},
    "parallel": set(Parallel.fields()),
    "data": {"root", "workers", "prefetch", "bad_images", "changed_images"},
    "log": set(Log.fields()),
    "checkpoint": {"keep_last", "keep_best"},
    "engine": set(EngineSection.model_fields),
    "ipu": set(Ipu.model_fields) - {"synthetic_data"},
}

_LOCK, CONFIG, _ENVIRONMENT, DECISIONS = "lock", "config.yaml", "environment.json", "decisions.json"


class RunFolder:
    """An opened run folder (docs/runs.md)."""

    def __init__(self, recipe: Recipe):
        """Open or make the folder and lock it for this process, unless run.lock is false.
        Raises ConfigError: it holds something else, is in use, cannot be locked, or must not be resumed."""
        self.path = Path(output_folder(recipe))
        self.metrics = self.path / metrics.NAME
        check_owner(recipe)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"{self.path}: a file is in the way; choose a folder by run.output=FOLDER") from None
        self._lock: IO[str] = open(self.path / _LOCK, "a+")  # noqa: SIM115
        if recipe.run.lock:
            self._acquire()
        self._opened = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        if not _has_begun(self.path):  # an earlier start, after which nothing was trained, may have had another recipe
            (self.path / DECISIONS).unlink(missing_ok=True)
            write_text(self.path / CONFIG, loading.dump(recipe))
        _write_starts(self.path, [*starts(self.path), describe_environment()])

    def finished(self) -> Optional[dict]:
        """Return the `end` event of a complete run, else None."""
        event = metrics.last_events(self.metrics).get("end", {})
        return event if None not in (event.get("top1"), event.get("seconds")) else None

    def first_threads(self) -> Optional[int]:
        """Return the number of threads of the main process when the run began, None where that was not noted."""
        threads = next((start.get("threads") for start in starts(self.path)), None)
        return threads if isinstance(threads, int) else None

    def note(self, **facts: int) -> None:
        """Add `facts`, which are known only once training can begin, to the newest start in `environment.json`.
        Raises OSError once the folder's path no longer leads to the folder that was opened."""
        check_same(self.path, self._opened)
        *before, last = starts(self.path) or [{}]
        _write_starts(self.path, [*before, {**last, **facts}])

    def close(self) -> None:
        if not self._lock.closed:
            self._lock.close()
            os.close(self._opened)

    def _acquire(self) -> None:
        try:
            # Not flock: workers would inherit that, and keep it for seconds after the training process was killed.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            problem = (
                f"cannot be locked, as its file system has no locks or does not reach them ({error.strerror}); "
                "give run.output=FOLDER elsewhere, or run.lock=false if no other process writes this folder"
            )
            if error.errno in (errno.EAGAIN, errno.EACCES):
                problem = "is in use by another process; wait for it or give run.output=FOLDER"
            raise ConfigError(f"{self.path} {problem}") from None


def check_owner(recipe: Recipe) -> None:
    """Raises ConfigError or CheckpointError unless the recipe's folder is new, or holds a run that it may resume.
    Loads no torch. `auto` of exchange.method and batch.micro is what the run began with."""
    path, remedy = Path(output_folder(recipe)), "choose another folder by run.output=FOLDER"
    if not path.is_dir() or not {entry.name for entry in path.iterdir()} - {_LOCK, "config.yaml.tmp"}:
        return
    if not (path / CONFIG).exists():
        raise ConfigError(f"{path} holds files that are no run; {remedy}")
    if recipe.run.resume == "never":
        raise ConfigError(f"{path} already holds a run and run.resume is never; {remedy}")
    begun = begun_recipe(recipe)
    if begun and recipe.exchange.method == "auto":
        recipe = recipe.model_copy(update={"exchange": begun.exchange})
    if begun and recipe.batch.micro is None:
        recipe = settled(recipe, begun.batch.micro)
    difference = begun and first_difference(begun, recipe)
    if difference:
        weights = shlex.quote(f"model.init_from={path}")
        raise CheckpointError(
            f"{path} belongs to another recipe: {difference}; give the key its old value to resume, or {remedy} (add "
            f"{weights} to start from its weights, as for a longer training)"
        )


def starts(folder: Path) -> List[dict]:
    """Return the entries of `environment.json`, oldest first; none where it cannot be read."""
    try:
        return [start for start in read_json(folder / _ENVIRONMENT)["starts"] if isinstance(start, dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _write_starts(folder: Path, entries: Sequence[dict]) -> None:
    write_text(folder / _ENVIRONMENT, json_text({"starts": entries}, indent=1) + "\n")


def begun_recipe(recipe: Recipe) -> Optional[Recipe]:
    """Return the recipe of the run begun in this one's folder, if any. Raises ConfigError if it cannot be read."""
    path = Path(output_folder(recipe))
    return loading.load(path / CONFIG) if _has_begun(path) and (path / CONFIG).exists() else None


def _has_begun(path: Path) -> bool:
    """Whether anything was trained there: a recipe that failed before that may be corrected in place."""
    written = path / metrics.NAME
    return (path / "checkpoints").exists() or (written.exists() and written.stat().st_size > 0)


def describe_environment() -> dict:
    """Return versions, revision and devices: what a result depends on besides its recipe."""
    import numpy
    import timm
    import torch
    import torchvision

    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    revision = None  # outside a checkout
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        revision = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True, timeout=10
        ).stdout.strip()
    found = {"poptorch": sys.modules["poptorch"]} if "poptorch" in sys.modules else {}
    libraries = {"torch": torch, "torchvision": torchvision, "timm": timm, "numpy": numpy, **found}
    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "revision": revision,
        "python": platform.python_version(),
        **{name: library.__version__ for name, library in libraries.items()},
        "platform": platform.platform(),
        "processor": cores.processor(),
        "cpus": cores.available(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def first_difference(old: Recipe, new: Recipe, free: Mapping[str, Set[str]] = _FREE) -> str:
    """Return `section.key is OLD there, NEW here` for the first key that differs and is not in `free`, or ""."""
    before, after = (recipe.model_dump(mode="json", by_alias=True) for recipe in (old, new))
    for section, keys in after.items():
        for key, value in keys.items():
            if key not in free.get(section, ()) and before[section].get(key) != value:
                there, here = ("null" if each is None else each for each in (before[section].get(key), value))
                return f"{section}.{key} is {there} there, {here} here"
    return ""

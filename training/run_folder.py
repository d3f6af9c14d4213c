"""The folder of a run: whose it is, what ran in it, and that only one process writes it."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import functools
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Callable, Dict, List, Mapping, Optional, Sequence, Set

from common import cores
from common.errors import CheckpointError, ConfigError, first_line
from common.files import check_same, write_text
from common.json_io import json_text, read_json
from common.text import count
from recipe import loading
from recipe.batch import output_folder, settled
from recipe.class_folders import NOT_OF_THE_USER
from recipe.config import Log, Parallel, Recipe
from recipe.hardware import EngineSection, Ipu
from training import metrics
from training.mirror import CONFIG, RESTORING, Mirror

DECISIONS = "decisions.json"
_LOCK = "lock"
_IS_LOCKED = (errno.EAGAIN, errno.EACCES)  # by another process: POSIX allows either
_LOCK_TRIALS = 4
_LOCK_SECONDS = 0.02  # between two of them
_ENVIRONMENT = "environment.json"
_ANOTHER_FOLDER = "choose another folder by run.output=FOLDER"
# The remedy where images are not those that a run was trained on.
ACCEPT_IMAGES = (
    "bring those back, or go on with the images that are there by data.changed_images=accept"
)
# Keys that may change between the sessions of one run: they say where and how it is computed, and
# change what is learned no more than rule 1 of docs/architecture.md says. Only the last two of
# `data` can change more, at the user's word. A replica that joins an elastic run must have the same
# values of all keys, and the same code: see `identity` in training/elastic.py.
_FREE = {
    "run": {"name", "output", "device", "resume", "lock", "threads", "loss_limit"},
    "batch": {"evaluation"},
    "parallel": set(Parallel.fields()),
    "data": {"root", "workers", "prefetch", "bad_images", "changed_images"},
    "log": set(Log.fields()),
    "checkpoint": {"keep_last", "keep_best", "mirror"},
    "engine": set(EngineSection.model_fields),
    "ipu": set(Ipu.model_fields) - {"synthetic_data"},
}
# Keys of `data` that say how many images there are: they may change with the images, where
# data.changed_images accepts other ones.
_NUMBERS_OF_IMAGES = {"train_images", "validation_images"}


class InUse(ConfigError):
    """Another process has locked the run folder."""


class RunFolder:
    """An opened run folder (docs/runs.md)."""

    def __init__(self, recipe: Recipe, has_trained: bool = False):
        """Open or make the folder, and lock it for this process unless run.lock is false.

        Args:
            recipe: of the run.
            has_trained: whether this process has trained this run before, as a part of an elastic
                one: then no fault of the mirror ends it.

        Raises:
            InUse: another process has locked it.
            ConfigError: it holds something else, cannot be locked, or must not be resumed.
            CheckpointError: it holds a run of another recipe.
        """
        self.path = Path(output_folder(recipe))
        self.metrics = self.path / metrics.NAME
        check_owner(recipe)  # before anything is written
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            fault = "a file is in the way; choose a folder by run.output=FOLDER"
            raise ConfigError(f"{self.path}: {fault}") from None
        # Opened to be written, without which there is no exclusive lock.
        self._lock: IO[str] = open(self.path / _LOCK, "a+")  # noqa: SIM115
        # Before the mirror is read: only one process may fill an empty folder.
        if recipe.run.lock:
            self._acquire()
        # Held open, so that a folder that is removed or replaced meanwhile is noticed.
        self._opened = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.mirror = self._open_mirror(recipe, has_trained)
            self.start(recipe)
        except BaseException:
            self._give_back()
            raise

    def start(self, recipe: Recipe) -> None:
        """Note a start of the run, or of a later generation of an elastic one.

        Args:
            recipe: of the run.

        Raises:
            ConfigError: the folder was not filled from its mirror to the end.
            OSError: the folder's path no longer leads to the folder that was opened.
        """
        self._check()
        if (self.path / RESTORING).exists():
            fault = "holds a part of a run, as the transfer from its mirror was cut off"
            remedy = "give the same checkpoint.mirror to go on with it, or remove the folder"
            raise ConfigError(f"{self.path} {fault}; {remedy}")
        # An earlier start, after which nothing was trained, may have had another recipe.
        if not has_begun(self.path):
            (self.path / DECISIONS).unlink(missing_ok=True)
            write_text(self.path / CONFIG, loading.dump(recipe))
        _write_starts(self.path, [*starts(self.path), describe_environment()])

    def finished(self) -> Optional[dict]:
        """Return the `end` event of a complete run, else None."""
        # A line by hand, or of an older version, may lack the numbers that are printed.
        event = metrics.last_events(self.metrics).get("end", {})
        if event.get("top1") is None or event.get("seconds") is None:
            return None
        return event

    def first_threads(self) -> Optional[int]:
        """Return the threads of the main process when the run began, None where not noted."""
        entries = starts(self.path)
        threads = entries[0].get("threads") if entries else None
        return threads if isinstance(threads, int) else None

    def note(self, **facts: int) -> None:
        """Add to the newest start in `environment.json`.

        Args:
            facts: what is known only once training can begin.

        Raises:
            OSError: the folder's path no longer leads to the folder that was opened.
        """
        self._check()
        # The file may have been damaged or removed since this session wrote its start.
        *before, last = starts(self.path) or [{}]
        _write_starts(self.path, [*before, {**last, **facts}])

    def note_images(self, recipe: Recipe) -> None:
        """Write into `config.yaml` how many images the run goes on with, where it has accepted them.

        From then on these are the run's: its next session need not accept them again.

        Args:
            recipe: of this session, which has found so many images.

        Raises:
            ConfigError: `config.yaml` cannot be read.
            OSError: the folder's path no longer leads to the folder that was opened.
        """
        self._check()
        begun = begun_recipe(recipe)
        if begun is None:
            return
        numbers = {}
        for key in _NUMBERS_OF_IMAGES & set(type(begun.data).model_fields):
            numbers[key] = getattr(recipe.data, key)
        changed = begun.model_copy(update={"data": begun.data.model_copy(update=numbers)})
        if changed != begun:
            write_text(self.path / CONFIG, loading.dump(changed))

    def close(self) -> None:
        """Give the folder back; a second call does nothing."""
        if not self._lock.closed:
            # While the lock is held: another process may change the folder once it is free.
            if self.mirror is not None:
                self.mirror.close()
            self._give_back()

    def _give_back(self) -> None:
        """Let other processes have the folder."""
        self._lock.close()
        os.close(self._opened)

    def _check(self) -> None:
        """Raise OSError once the path no longer leads to the folder that was opened."""
        check_same(self.path, self._opened)

    def _open_mirror(self, recipe: Recipe, has_trained: bool) -> Optional[Mirror]:
        """Return the mirror that the recipe names, and fill an empty folder from it.

        Args:
            recipe: of the run.
            has_trained: whether this process has trained this run before.

        Raises:
            ConfigError: the mirror cannot be read, or is no mirror of this folder.
            CheckpointError: the mirror has a run of another recipe.
        """
        url = recipe.checkpoint.mirror
        if url is None:
            return None
        say = functools.partial(print, flush=True)
        try:
            mirror = Mirror(url, self.path, say, check=self._check)
            # The main process before this one has compared the mirror with events and checkpoints
            # that are here. An empty folder lacks them: its first checkpoint would remove theirs.
            if not (has_trained and has_begun(self.path)):
                self._compare_or_fill(mirror, recipe, say)
            return mirror
        except Exception as error:  # stores raise anything
            if not has_trained:
                raise
            # What this process remembers is newer than what is lacking, and needs a folder to be
            # written to: `start` would refuse one that is not filled to the end.
            (self.path / RESTORING).unlink(missing_ok=True)
            say(f"{self.path} is not mirrored from here: {first_line(error)}")
            return None

    def _compare_or_fill(self, mirror: Mirror, recipe: Recipe, say: Callable[[str], None]) -> None:
        """Check that a mirror is of this run, and fill an empty folder from it.

        Args:
            mirror: that the recipe names.
            recipe: of the run.
            say: prints a line.

        Raises:
            ConfigError: the mirror cannot be read, or is no mirror of this folder.
            CheckpointError: the mirror has a run of another recipe.
        """
        url = recipe.checkpoint.mirror
        assert url is not None
        text = mirror.recipe()
        # What is here counts. The mirror must be of the same run, as it is written from now on.
        if has_begun(self.path):
            if text is not None:
                _check_same_run(loading.loads(text, url), recipe, url)
                mirror.check_not_ahead()
            return
        is_resumed = mirror.has_checkpoint()
        if text is None:
            return
        if not is_resumed:
            _check_same_run(loading.loads(text, url), recipe, url)
            say(f"{url} has no whole checkpoint: its first transfer was cut off")
            return
        # A folder that is filled would be resumed.
        if recipe.run.resume == "never":
            fault = f"{url} holds a run and run.resume is never"
            raise ConfigError(f"checkpoint.mirror: {fault}; give another mirror")
        _check_same_run(loading.loads(text, url), recipe, url)
        files = mirror.restore()
        say(f"{self.path}: {count(files, 'file')} restored from {url}")

    def _acquire(self) -> None:
        """Lock the folder; raise ConfigError where that is not possible."""
        try:
            self._lock_soon()
        except OSError as error:
            self._lock.close()
            if error.errno in _IS_LOCKED:
                fault = "is in use by another process; wait for it or give run.output=FOLDER"
                raise InUse(f"{self.path} {fault}") from None
            reason = f"as its file system has no locks or does not reach them ({error.strerror})"
            remedy = "give run.output=FOLDER elsewhere"
            other = "run.lock=false if no other process writes this folder"
            fault = f"cannot be locked, {reason}; {remedy}, or {other}"
            raise ConfigError(f"{self.path} {fault}") from None

    def _lock_soon(self) -> None:
        """Lock the folder's file. Raises OSError where another process keeps it locked."""
        # Reports look whether the folder is in use by locking it for an instant.
        for _ in range(_LOCK_TRIALS - 1):
            try:
                return self._lock_now()
            except OSError as error:
                if error.errno not in _IS_LOCKED:
                    raise
            time.sleep(_LOCK_SECONDS)
        self._lock_now()

    def _lock_now(self) -> None:
        """Lock the folder's file, or raise OSError."""
        # Not flock: workers would inherit that, and keep it for seconds after the training process
        # was killed.
        fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_owner(recipe: Recipe) -> None:
    """Refuse a folder unless it is new, or holds a run that the recipe may resume.

    Loads no torch. `auto` of exchange.method and batch.micro is what the run began with.

    Args:
        recipe: of the run, with its folder.

    Raises:
        ConfigError: the folder holds no run, or one that must not be resumed.
        CheckpointError: it holds a run of another recipe.
    """
    # A mistyped folder of the user must neither be written into nor have its files pruned.
    path = Path(output_folder(recipe))
    if not _is_occupied(path):
        return
    if not (path / CONFIG).exists():
        raise ConfigError(f"{path} holds files that are no run; {_ANOTHER_FOLDER}")
    if recipe.run.resume == "never":
        fault = "already holds a run and run.resume is never"
        raise ConfigError(f"{path} {fault}; {_ANOTHER_FOLDER}")
    # What `auto` stood for when the run began is no difference.
    begun = begun_recipe(recipe)
    if begun is not None:
        _check_same_run(begun, recipe, str(path))


def _check_same_run(begun: Recipe, recipe: Recipe, place: str) -> None:
    """Raise CheckpointError unless a run may go on with a recipe.

    Args:
        begun: recipe of the run.
        recipe: for the sessions to come.
        place: where the run is.
    """
    if recipe.exchange.method == "auto":
        recipe = recipe.model_copy(update={"exchange": begun.exchange})
    if recipe.batch.micro is None:
        recipe = settled(recipe, begun.batch.micro)
    difference = first_difference(begun, recipe)
    if difference and differs_in_images(begun, recipe):
        fault = f"belongs to a run with another number of images: {difference}"
        raise CheckpointError(f"{place} {fault}; {ACCEPT_IMAGES}")
    if difference:
        weights = shlex.quote(f"model.init_from={place}")
        remedy = f"give the key its old value to resume, or {_ANOTHER_FOLDER}"
        longer = f"(add {weights} to start from its weights, as for a longer training)"
        raise CheckpointError(f"{place} belongs to another recipe: {difference}; {remedy} {longer}")


def starts(folder: Path) -> List[dict]:
    """Return the entries of `environment.json`, oldest first.

    Args:
        folder: of the run; there are no entries where its file cannot be read.
    """
    try:
        entries = read_json(folder / _ENVIRONMENT)["starts"]
        return [entry for entry in entries if isinstance(entry, dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def begun_recipe(recipe: Recipe) -> Optional[Recipe]:
    """Return the recipe of the run that has begun in this one's folder, None if there is none.

    Args:
        recipe: with the folder.

    Raises:
        ConfigError: it cannot be read.
    """
    path = Path(output_folder(recipe))
    if not has_begun(path) or not (path / CONFIG).exists():
        return None
    return loading.load(path / CONFIG)


def describe_environment() -> dict:
    """Return versions, revision and devices: what a result depends on besides its recipe."""
    # Late: `check_owner` must not load it.
    import torch

    return {
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "revision": _revision(),
        "python": platform.python_version(),
        **_versions(),
        "platform": platform.platform(),
        "processor": cores.processor(),
        "cpus": cores.available(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def differs_in_images(old: Recipe, new: Recipe) -> bool:
    """Return whether `new` might go on with the run of `old` if it accepted other images.

    Args:
        old: recipe of the run.
        new: for the sessions to come.
    """
    data = new.data.model_copy(update={"changed_images": "accept"})
    return not first_difference(old, new.model_copy(update={"data": data}))


def first_difference(
    old: Recipe,
    new: Recipe,
    free: Optional[Mapping[str, Set[str]]] = None,
) -> str:
    """Return `section.key is OLD there, NEW here` for the first key that differs, or "".

    Args:
        old: "there".
        new: "here".
        free: keys that may differ, by section; None for those that may change between the sessions
            of one run.
    """
    if free is None:
        free = _FREE
        if new.data.changed_images == "accept":
            free = {**_FREE, "data": _FREE["data"] | _NUMBERS_OF_IMAGES}
    # As files have them, in which a tuple is a list.
    before = old.model_dump(mode="json", by_alias=True)
    after = new.model_dump(mode="json", by_alias=True)
    for section, keys in after.items():
        for key, value in keys.items():
            old_value = before[section].get(key)
            if old_value != value and key not in free.get(section, ()):
                return f"{section}.{key} is {_shown(old_value)} there, {_shown(value)} here"
    return ""


def _shown(value: object) -> object:
    """Return a value as a recipe could have it."""
    return "null" if value is None else value


def _write_starts(folder: Path, entries: Sequence[dict]) -> None:
    """Write the entries of `environment.json`."""
    write_text(folder / _ENVIRONMENT, json_text({"starts": entries}, indent=1) + "\n")


def _is_occupied(path: Path) -> bool:
    """Return whether a folder holds more than what a start that was cut off leaves."""
    if not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    # A new file system is not empty.
    names -= set(map(os.fsdecode, NOT_OF_THE_USER))
    # What lies there comes from the mirror, and is fetched again.
    if RESTORING in names:
        return False
    return bool(names - {_LOCK, f"{CONFIG}.tmp"})


def has_begun(path: Path) -> bool:
    """Return whether anything was trained in a folder.

    A recipe that failed before that may be corrected in place.

    Args:
        path: of the folder, which may not exist.
    """
    # The transfer from the mirror is not done: it is repeated.
    if (path / RESTORING).exists():
        return False
    written = path / metrics.NAME
    has_events = written.exists() and written.stat().st_size > 0
    return has_events or (path / "checkpoints").exists()


@functools.lru_cache(maxsize=None)
def _revision() -> Optional[str]:
    """Return git's name of this repository's state; None outside a checkout."""
    # Asked once: a process goes on with the code that it has loaded. A result without it is still
    # one: no git, no checkout and a slow disk are no errors.
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
            timeout=10,
        )
        return done.stdout.strip()
    return None


def _versions() -> Dict[str, str]:
    """Return the versions of the libraries that compute."""
    import numpy
    import timm
    import torch
    import torchvision

    # Bits of a result depend on these. poptorch is not imported for its version alone.
    libraries = {"torch": torch, "torchvision": torchvision, "timm": timm, "numpy": numpy}
    if "poptorch" in sys.modules:
        libraries["poptorch"] = sys.modules["poptorch"]
    return {name: library.__version__ for name, library in libraries.items()}

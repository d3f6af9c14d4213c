"""The folder of a sweep: its owner, its files, and the lock that lets only one sweep write it.

Like a run folder (training/run_folder.py), but without torch, which a sweep does not need.
"""

from __future__ import annotations

import errno
import fcntl
import json
from pathlib import Path
from typing import IO, Any, Mapping

from recipe import loading
from recipe.bounded import read_json
from recipe.config import Recipe
from recipe.errors import CheckpointError, ConfigError
from recipe.files import write_text
from tools.sweeping.candidates import Candidates

_LOCK, _DEFINITION, _RECIPE = "lock", "sweep.json", "recipe.yaml"
# What may change between the sessions of one sweep. The recipe is compared by what it says, with its overrides.
_FREE = ("trials", "recipe", "overrides")


class SweepFolder:
    """An opened sweep folder: `study.db`, `trials/`, `logs/`, `leaderboard.csv`, `importance.png`, `best.yaml`."""

    def __init__(self, path: Path, found: Candidates):
        """Opens or makes the folder and locks it for this process.

        Raises:
            ConfigError: the folder holds something else, is in use, or cannot be made or written.
            CheckpointError: it holds another sweep, or one that was defined otherwise.
        """
        self.path = path
        self.study, self.leaderboard = path / "study.db", path / "leaderboard.csv"
        self.picture, self.best = path / "importance.png", path / "best.yaml"
        try:
            self._check(found)
            path.mkdir(parents=True, exist_ok=True)
            self._lock = self._acquire()
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(f"{path}: a file is in the way; choose a folder by --output FOLDER") from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ConfigError(
                f"{path}: cannot be made or written: {error.strerror}; choose a folder by --output FOLDER"
            ) from None
        self._check(found)  # another one may have begun meanwhile
        if not (path / _DEFINITION).exists():
            write_text(path / _RECIPE, loading.dump(found.base))
            write_text(path / _DEFINITION, json.dumps(_as_data(found), indent=1) + "\n")
        for folder in (self.path / "trials", self.path / "logs"):
            folder.mkdir(exist_ok=True)

    def trial(self, number: int) -> Path:
        """The run folder of a trial."""
        return self.path / "trials" / f"{number:04d}"

    def log(self, number: int) -> Path:
        """Output of a trial; beside its run folder, which must be empty when a run begins."""
        return self.path / "logs" / f"{number:04d}.log"

    def close(self) -> None:
        self._lock.close()

    def _check(self, found: Candidates) -> None:
        remedy = "choose another folder by --output FOLDER"
        if not self.path.is_dir():
            return
        names = {entry.name for entry in self.path.iterdir() if entry.suffix != ".tmp"}
        if _DEFINITION not in names:
            if names - {_LOCK, _RECIPE}:
                raise ConfigError(f"{self.path} holds files that are no sweep; {remedy}")
            return
        try:
            before = read_json(self.path / _DEFINITION)
        except ValueError:
            raise ConfigError(f"{self.path / _DEFINITION}: not what a sweep wrote; {remedy}") from None
        difference = _difference(before, _as_data(found)) or _changed_recipe(self.path / _RECIPE, found.base)
        if difference:
            raise CheckpointError(f"{self.path} belongs to another sweep: {difference}; {remedy}")

    def _acquire(self) -> IO[str]:
        stream = open(self.path / _LOCK, "a+")  # noqa: SIM115
        if not _locked(stream):
            stream.close()
            raise ConfigError(
                f"{self.path} is in use by another sweep; wait for it, or choose another folder by --output FOLDER"
            )
        return stream


def run_in_use(run_folder: Path) -> bool:
    """Whether a process still writes a run folder: that of a trial whose sweep was killed may be about to end."""
    try:
        with open(run_folder / _LOCK, "r+") as stream:
            return not _locked(stream)
    except FileNotFoundError:
        return False


def _locked(stream: IO[str]) -> bool:
    """Takes the lock on a file until it is closed; False: another process has it."""
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _as_data(found: Candidates) -> Mapping[str, Any]:
    return found.sweep.definition.model_dump(mode="json", exclude=set(_FREE))


def _difference(before: Any, after: Any, place: str = "") -> str:
    """`key is OLD there, NEW here` for the first place in which two trees of values differ, or nothing."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            name = f"{place}: {key}" if place else str(key)
            if key not in after or key not in before:
                return f"{name} is only {'there' if key in before else 'here'}"
            found = _difference(before[key], after[key], name)
            if found:
                return found
        return ""
    return "" if before == after else f"{place} is {json.dumps(before)} there, {json.dumps(after)} here"


def _changed_recipe(path: Path, now: Recipe) -> str:
    before = loading.load(path)
    if before == now:
        return ""
    from training.run_folder import first_difference  # loads torch

    difference = first_difference(before, now)
    return f"the recipe's {difference}" if difference else ""

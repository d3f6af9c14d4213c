"""The folder of a sweep: its definition, its files, and the lock that lets only one sweep write it.

Loads no torch.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from common.errors import CheckpointError, ConfigError
from common.files import checking, write_text
from common.json_io import json_text, read_json
from recipe import loading
from recipe.config import Recipe
from tools.sweeping.candidates import Candidates
from training.run_folder import first_difference

_LOCK = "lock"
_DEFINITION = "sweep.json"
_RECIPE = "recipe.yaml"
# Keys that may change between the sessions of one sweep. The resolved recipe is compared instead of
# its path and overrides.
_FREE = {"trials", "recipe", "overrides"}
_REMEDY = "choose another folder by --output FOLDER"


class SweepFolder:
    """An opened sweep folder.

    In it are `study.db`, `trials/`, `logs/`, `leaderboard.csv`, `importance.png`, `best.yaml`.
    """

    def __init__(self, path: Path, candidates: Candidates):
        """Open or make the folder, and lock it for this process.

        Args:
            path: of the folder.
            candidates: of the sweep.

        Raises:
            ConfigError: the folder holds something else, is in use, or cannot be written.
            CheckpointError: it holds another sweep.
        """
        self.path = path
        self.study = path / "study.db"
        self.leaderboard = path / "leaderboard.csv"
        self.picture = path / "importance.png"
        self.best = path / "best.yaml"
        definition = candidates.sweep.definition.model_dump(mode="json", exclude=_FREE)
        # Checked before anything is made: a wrong command leaves nothing behind.
        with checking(path, _REMEDY):
            self._check(definition, candidates.base)
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / _LOCK, "a+")  # noqa: SIM115
        self._take_lock()
        # Another sweep may have begun between the check and the lock.
        self._check(definition, candidates.base)
        self._fill(definition, candidates.base)

    def _take_lock(self) -> None:
        """Keep other sweeps out as long as this process lives. Raises ConfigError if one is in."""
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"{self.path} is in use by another sweep; wait for it, or {_REMEDY}"
            ) from None

    def _fill(self, definition: dict, recipe: Recipe) -> None:
        """Write what is missing in a new folder, or in one whose process was killed early."""
        if not (self.path / _DEFINITION).exists():
            # The definition comes last: a folder that has it must have the recipe, too.
            write_text(self.path / _RECIPE, loading.dump(recipe))
            write_text(self.path / _DEFINITION, json_text(definition, indent=1) + "\n")
        for name in ("trials", "logs"):
            (self.path / name).mkdir(exist_ok=True)

    def trial(self, number: int) -> Path:
        """Return the run folder of trial `number`."""
        return self.path / "trials" / f"{number:04d}"

    def log(self, number: int) -> Path:
        """Return the path of the output of trial `number`.

        It is beside the run folder, which must be empty when a run begins.
        """
        return self.path / "logs" / f"{number:04d}.log"

    def close(self) -> None:
        """Let other sweeps write the folder."""
        self._lock.close()

    def _check(self, definition: dict, recipe: Recipe) -> None:
        """Check that the folder holds nothing, or this sweep."""
        if not self.path.is_dir():
            return
        # A process that was killed while it wrote leaves files that end in .tmp.
        names = {entry.name for entry in self.path.iterdir() if entry.suffix != ".tmp"}
        if _DEFINITION not in names:
            if names - {_LOCK, _RECIPE}:
                raise ConfigError(f"{self.path} holds files that are no sweep; {_REMEDY}")
            return
        try:
            before = _flat(read_json(self.path / _DEFINITION))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"{self.path / _DEFINITION}: not what a sweep wrote; {_REMEDY}"
            ) from None
        # The sweep file may have moved, but what it says must be the same.
        difference = _difference(before, _flat(definition))
        if not difference:
            changed = first_difference(loading.load(self.path / _RECIPE), recipe)
            difference = f"the recipe's {changed}" if changed else ""
        if difference:
            raise CheckpointError(f"{self.path} belongs to another sweep: {difference}; {_REMEDY}")


def _flat(definition: dict) -> dict:
    """Return a definition with an entry for each key of its space."""
    flat = {**definition, "space": None}
    for key, axis in definition["space"].items():
        flat[f"space: {key}"] = axis
    return flat


def _difference(before: dict, after: dict) -> str:
    """Return `KEY is OLD there, NEW here` for the first key that differs, or nothing."""
    for key in {**before, **after}:
        # As JSON, in which 1 and true, or 1 and 1.0, differ.
        there = json.dumps(before.get(key))
        here = json.dumps(after.get(key))
        if there != here:
            return f"{key} is {there} there, {here} here"
    return ""

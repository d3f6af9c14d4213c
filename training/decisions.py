"""What sessions of a run have measured and decided, kept in its folder so that later ones do not measure again.

What `auto` came to when the run began is in its config.yaml; here is what holds for a kind of device or a topology.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, List, Mapping

from recipe.bounded import read_json
from recipe.errors import CheckpointError
from recipe.files import write_text

_FILE = "decisions.json"
_KEYS = {"subject", "place", "taken"}


def find(folder: Path, subject: str, place: Mapping[str, Any], fits: Callable[[Any], bool]) -> Any:
    """What the run in `folder` has decided on a subject in a place, or None.

    Args:
        place: all that the decision holds for, as JSON has it.
        fits: whether a value can be such a decision.

    Raises:
        CheckpointError: the file is damaged.
    """
    for entry in _read(folder):
        if (entry["subject"], entry["place"]) == (subject, place):
            if not fits(entry["taken"]):
                raise _damaged(folder)
            return entry["taken"]
    return None


def keep(folder: Path, subject: str, place: Mapping[str, Any], taken: Any) -> None:
    """Has `find` return `taken` from now on. Raises CheckpointError where the file is damaged."""
    before = _read(folder)
    decision = {"subject": subject, "place": place, "taken": taken}
    if decision not in before:
        others = [entry for entry in before if (entry["subject"], entry["place"]) != (subject, place)]
        write_text(folder / _FILE, json.dumps([*others, decision], indent=1) + "\n")


def forget(folder: Path) -> None:
    """Removes what a start decided after which nothing was trained: the recipe may be another one now."""
    (folder / _FILE).unlink(missing_ok=True)


def _read(folder: Path) -> List[dict]:
    try:
        found = read_json(folder / _FILE)
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        raise _damaged(folder) from None
    if not (isinstance(found, list) and all(isinstance(entry, dict) and entry.keys() == _KEYS for entry in found)):
        raise _damaged(folder)
    return found


def _damaged(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder / _FILE}: damaged or not readable; restore it, or delete it to measure anew")

"""decisions.json of a run folder: what was measured for a kind of device or a topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple

from common.errors import CheckpointError
from common.files import write_text
from common.json_io import json_text, read_json
from training.run_folder import DECISIONS


class _Decision(NamedTuple):
    """An entry of the file.

    subject: "engine" or "split".
    place: for which it was taken, as JSON has it.
    choice: the decision, as JSON has it; `taken` in the file.
    """

    subject: str
    place: Any
    choice: Any


def find(folder: Path, subject: str, place: Mapping[str, Any]) -> Any:
    """Return the decision of the run in a folder, or None.

    Args:
        folder: of the run.
        subject: of the decision.
        place: for which it was taken.

    Raises:
        CheckpointError: the file is damaged.
    """
    for decision in _read(folder):
        if decision.subject == subject and decision.place == place:
            return decision.choice
    return None


def keep(folder: Path, subject: str, place: Mapping[str, Any], choice: Any) -> None:
    """Have `find` return a decision from now on.

    Args:
        folder: of the run.
        subject: of the decision.
        place: for which it is taken.
        choice: the decision.

    Raises:
        CheckpointError: the file is damaged.
    """
    decisions = _read(folder)
    decision = _Decision(subject, dict(place), choice)
    # Every session of a run keeps what it has found: the file is written for something new only.
    if decision in decisions:
        return
    others = [other for other in decisions if other[:2] != decision[:2]]
    entries = [_entry(remembered) for remembered in [*others, decision]]
    write_text(folder / DECISIONS, json_text(entries, indent=1) + "\n")


def _entry(decision: _Decision) -> Dict[str, Any]:
    """Return a decision as the file has it."""
    return {"subject": decision.subject, "place": decision.place, "taken": decision.choice}


def _read(folder: Path) -> List[_Decision]:
    """Return the decisions so far. Raises CheckpointError."""
    file = folder / DECISIONS
    if not file.exists():
        return []
    try:
        content = read_json(file)
        return [_Decision(entry["subject"], entry["place"], entry["taken"]) for entry in content]
    except (OSError, ValueError, TypeError, KeyError):
        raise CheckpointError(
            f"{file}: damaged or not readable; restore it, or delete it to measure anew"
        ) from None

"""The best trial of a sweep as a recipe that anyone can train: `best.yaml`."""

from __future__ import annotations

import os
import shlex
import textwrap
from pathlib import Path
from typing import Dict, List, Sequence

from recipe import schema
from recipe.config import Recipe
from recipe.files import write_text
from tools.sweeping.candidates import Candidates, as_text, sections
from tools.sweeping.definition import Definition
from tools.sweeping.folder import SweepFolder
from tools.sweeping.leaderboard import counts
from tools.sweeping.trials import COMPLETE, FAILED, IMPOSSIBLE, PRUNED, Record


def write(folder: SweepFolder, found: Candidates, records: Sequence[Record], winner: Record) -> None:
    """Writes the recipe of `winner`, laid over the sweep's recipe by its path from the folder."""
    write_text(folder.best, _text(folder, found, records, winner))


def _text(folder: SweepFolder, found: Candidates, records: Sequence[Record], winner: Record) -> str:
    sweep, definition = found.sweep, found.sweep.definition
    lines = [
        f"# yaml-language-server: $schema={_path(schema.PATH, folder.path)}",
        *_head(folder, found, records, winner),
    ]
    lines += ["", f"extends: {as_text(_path(sweep.recipe, folder.path))}"]
    own: Dict[str, Dict[str, str]] = {"run": {"name": as_text(f"{sweep.word}-best")}}
    for section, keys in sections(found.overrides(winner.parameters)).items():
        own[section] = {**own.get(section, {}), **keys}
    for section, keys in sorted(own.items(), key=lambda each: list(Recipe.model_fields).index(each[0])):
        lines += ["", f"{section}:"]
        for key, text in keys.items():
            swept = "   # found by the sweep" if f"{section}.{key}" in definition.space else ""
            lines.append(f"  {key}: {text}{swept}")
    return "\n".join(lines) + "\n"


def _head(folder: SweepFolder, found: Candidates, records: Sequence[Record], winner: Record) -> List[str]:
    definition = found.sweep.definition
    number = counts(records)
    others = ", ".join(f"{number[state]} {state}" for state in (PRUNED, IMPOSSIBLE, FAILED) if number[state])
    space = ", ".join(f"{key} in {_range(definition, key)}" for key in definition.space)
    lines = [
        f"Best of {number[COMPLETE]} complete trials of the sweep {found.sweep.name} ({found.sweep.path}): trial "
        f"{winner.number}.",
        f"  python train.py --config {shlex.quote(str(folder.best))}",
        f"Measured: {definition.metric} {winner.value:.6g} after {winner.epochs:.4g} epochs, {winner.seconds:.1f} s of "
        f"training; its run: {folder.trial(winner.number)}",
        f"Found by {definition.sampler}, seed {definition.seed}; {others or 'none pruned or failed'}. Of many trials "
        "the best is in part the luckiest: train it with another run.seed before you rely on its figure.",
        f"Space: {space}.",
    ]
    return [f"# {part}" for line in lines for part in _wrapped(line)]


def _wrapped(line: str) -> List[str]:
    line = " ".join(line.splitlines())  # names of files may hold line breaks
    return [line] if line.startswith(" ") else textwrap.wrap(line, 116, break_long_words=False, break_on_hyphens=False)


def _range(definition: Definition, key: str) -> str:
    axis = definition.space[key]
    if axis.choices is not None:
        return as_text(axis.choices)
    kind = " (log)" if axis.log else f" (step {axis.step:g})" if axis.step else ""
    return f"{axis.low:g} to {axis.high:g}{kind}"


def _path(target: Path, folder: Path) -> str:
    """From the folder to the file, both as they are without links: `..` of a linked folder is elsewhere."""
    return os.path.relpath(os.path.realpath(target), os.path.realpath(folder))

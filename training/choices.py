"""Resolves `auto` in a recipe: measured or counted once, and the same in every session of a run.

What `auto` came to when the run began is in its config.yaml. What holds for a kind of device or a topology is in
decisions.json, so that later sessions do not measure again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, List, Mapping

from engines import factory
from engines.base import Engine
from parallel.agreement import Agreement
from recipe.batch import output_folder
from recipe.bounded import read_json
from recipe.config import Recipe
from recipe.division import Batch, count
from recipe.errors import CheckpointError
from recipe.files import write_text
from training.run_folder import DECISIONS, begun_recipe

_ENGINE = {"memory_format", "kernels"}
_TOPOLOGY = {"stages", "virtual_stages", "schedule", "recompute"}
_KEYS = {"subject", "place", "taken"}  # of an entry of decisions.json
Say = Callable[[str], None]


def resolve(recipe: Recipe, batch: Batch, processes: Agreement, say: Say) -> Recipe:
    """`recipe` with `auto` of exchange.method, engine.memory_format and engine.kernels resolved. Every process calls.

    To what it comes here, or came to when the run in its folder began.
    """
    links = recipe.exchange.method == "auto"
    device = recipe.run.device != "ipu" and "auto" in (recipe.engine.memory_format, recipe.engine.kernels)
    if not (links or device):
        return recipe
    begun = processes.from_main(lambda: begun_recipe(recipe))
    if links:
        from engines import choice  # seldom needed

        recipe = choice.resolve(recipe, batch, processes, say, begun.exchange if begun else None)
    if device:
        from engines import tuning  # where there are IPUs, torch is too old for it

        section = begun.engine if begun else None
        if begun:
            place, folder = _device(recipe, processes), Path(output_folder(recipe))
            found = processes.from_main(lambda: find(folder, "engine", place, _is_choice))
            section = section.model_copy(update=found) if found else section
        recipe = tuning.resolve(recipe, batch, processes, say, section)
    return recipe


def create_engine(
    recipe: Recipe, asked: Recipe, batch: Batch, processes: Agreement, steps_per_epoch: int, say: Say
) -> Engine:
    """The engine of what `resolve` made of `asked`, once the run folder is open. Every process calls.

    Where processes have a stage each and the recipe leaves open where to cut, the run keeps its cut in a topology.
    """
    topology, parallel, folder = processes.topology, recipe.parallel, Path(output_folder(recipe))
    if recipe.engine != asked.engine:
        place, chosen = _device(recipe, processes), recipe.engine.model_dump(include=_ENGINE)
        processes.from_main(lambda: keep(folder, "engine", place, chosen))
    if parallel.split is not None or topology.stages == 1:
        return processes.together(lambda: factory.create(recipe, batch, processes, steps_per_epoch))
    where = {
        **_device(recipe, processes),
        **parallel.model_dump(mode="json", include=_TOPOLOGY),
        "replicas": topology.replicas,
    }
    cut = processes.from_main(lambda: find(folder, "split", where, lambda value: _is_cut(value, parallel.parts - 1)))
    if cut:
        replicas = count(topology.replicas, "replica")
        say(f"split [{', '.join(cut)}], as this run has had it with {replicas} of {topology.stages} stages")
        recipe = recipe.model_copy(update={"parallel": parallel.model_copy(update={"split": cut})})
    engine = processes.together(lambda: factory.create(recipe, batch, processes, steps_per_epoch))
    processes.from_main(lambda: keep(folder, "split", where, list(engine.cut)))
    return engine


def find(folder: Path, subject: str, place: Mapping[str, Any], fits: Callable[[Any], bool]) -> Any:
    """The decision on a subject in a place by the run in `folder`, or None.

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
        write_text(folder / DECISIONS, json.dumps([*others, decision], indent=1) + "\n")


def _read(folder: Path) -> List[dict]:
    try:
        found = read_json(folder / DECISIONS)
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        raise _damaged(folder) from None
    if not (isinstance(found, list) and all(isinstance(entry, dict) and entry.keys() == _KEYS for entry in found)):
        raise _damaged(folder)
    return found


def _damaged(folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder / DECISIONS}: damaged or not readable; restore it, or delete it to measure anew")


def _device(recipe: Recipe, processes: Agreement) -> dict:
    """The kind of device of the main process, as a place of decisions."""
    from engines.devices import device_of, name_of

    return processes.from_main(lambda: {"device": name_of(device_of(recipe, processes.topology))})


def _is_choice(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == _ENGINE and all(isinstance(each, str) for each in value.values())


def _is_cut(value: object, points: int) -> bool:
    return isinstance(value, list) and len(value) == points and all(isinstance(name, str) for name in value)

"""Resolves `auto` in a recipe: measured or counted once, and the same in every session of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Optional

from engines import factory
from engines.base import Engine
from parallel.agreement import Agreement
from recipe.batch import output_folder
from recipe.config import Recipe
from recipe.division import Batch, count
from training import decisions
from training.run_folder import begun_recipe

_ENGINE = {"memory_format", "kernels"}
_TOPOLOGY = {"stages", "virtual_stages", "schedule", "recompute"}
Say = Callable[[str], None]


def resolve(recipe: Recipe, batch: Batch, processes: Agreement, say: Say) -> Recipe:
    """`recipe` with what its `auto` comes to here, or came to when the run in its folder began.

    That of exchange.method, of engine.memory_format and of engine.kernels. Every process calls.
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
        found = _find(recipe, processes, "engine", _device(recipe, processes), _is_choice) if begun else None
        recipe = tuning.resolve(recipe, batch, processes, say, section.model_copy(update=found) if found else section)
    return recipe


def create_engine(
    recipe: Recipe, asked: Recipe, batch: Batch, processes: Agreement, steps_per_epoch: int, say: Say
) -> Engine:
    """The engine of what `resolve` made of `asked`, once the run folder is open. Every process calls.

    Where processes have a stage each and the recipe leaves open where to cut, the run keeps its cut in a topology.
    """
    place, parallel = processes.topology, recipe.parallel
    if recipe.engine != asked.engine:
        chosen = recipe.engine.model_dump(include=_ENGINE)
        _keep(recipe, processes, "engine", _device(recipe, processes), chosen)
    if parallel.split is not None or place.stages == 1:
        return processes.together(lambda: factory.create(recipe, batch, processes, steps_per_epoch))
    where = {
        **_device(recipe, processes),
        **parallel.model_dump(mode="json", include=_TOPOLOGY),
        "replicas": place.replicas,
    }
    cut = _find(recipe, processes, "split", where, lambda value: _is_cut(value, parallel.parts - 1))
    if cut:
        replicas = count(place.replicas, "replica")
        say(f"split [{', '.join(cut)}], as this run has had it with {replicas} of {place.stages} stages")
        recipe = recipe.model_copy(update={"parallel": parallel.model_copy(update={"split": cut})})
    engine = processes.together(lambda: factory.create(recipe, batch, processes, steps_per_epoch))
    _keep(recipe, processes, "split", where, list(engine.cut))
    return engine


def _device(recipe: Recipe, processes: Agreement) -> dict:
    """The kind of device of the main process, as a place of decisions."""
    from engines.devices import device_of, name_of

    return processes.from_main(lambda: {"device": name_of(device_of(recipe, processes.topology))})


def _find(
    recipe: Recipe, processes: Agreement, subject: str, place: dict, fits: Callable[[Any], bool]
) -> Optional[Any]:
    return processes.from_main(lambda: decisions.find(Path(output_folder(recipe)), subject, place, fits))


def _keep(recipe: Recipe, processes: Agreement, subject: str, place: dict, taken: object) -> None:
    processes.from_main(lambda: decisions.keep(Path(output_folder(recipe)), subject, place, taken))


def _is_choice(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == _ENGINE and all(isinstance(each, str) for each in value.values())


def _is_cut(value: object, points: int) -> bool:
    return isinstance(value, list) and len(value) == points and all(isinstance(name, str) for name in value)

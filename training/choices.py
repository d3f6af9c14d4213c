"""Resolves `auto` in a recipe once, so that all sessions of a run use the same value.

The run's config.yaml has the values with which it began; decisions.json those for a kind of device or a topology.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional

from common.errors import CheckpointError
from common.files import write_text
from common.json_io import json_text, read_json
from common.text import count
from engines import factory
from engines.base import Engine
from parallel.processes import Processes
from recipe.batch import divide, output_folder, settled
from recipe.config import Recipe
from recipe.division import Batch
from recipe.hardware import EngineSection
from training.run_folder import DECISIONS, begun_recipe

_ENGINE = {"memory_format", "kernels"}
_TOPOLOGY = {"stages", "virtual_stages", "schedule", "recompute"}
_KEYS = ("subject", "place", "taken")  # of an entry of decisions.json
Say = Callable[[str], None]


def resolve(recipe: Recipe, batch: Batch, processes: Processes, say: Say) -> Recipe:
    """Return `recipe` with `auto` of batch.micro, exchange.method, engine.memory_format and engine.kernels resolved.
    Every process calls. A run that has begun keeps its values. Args: batch: of `recipe`."""
    links, micro = recipe.exchange.method == "auto", recipe.batch.micro is None
    device = recipe.run.device != "ipu" and "auto" in (recipe.engine.memory_format, recipe.engine.kernels)
    if not (links or device or micro):
        return recipe
    begun = processes.from_main(lambda: begun_recipe(recipe))
    if begun and micro:
        recipe = settled(recipe, begun.batch.micro)
        batch = divide(recipe, batch.replicas)
        say(f"batch.micro auto: {batch.micro}, as the run began")
    if links:
        from engines import choice  # seldom needed

        recipe = choice.resolve(recipe, batch, processes, say, begun and begun.exchange)
    section = begun and begun.engine
    if begun and device:
        place, folder = _device(recipe, processes), Path(output_folder(recipe))
        found = processes.from_main(lambda: find(folder, "engine", place))
        section = section.model_copy(update=found or {})
    return measured(recipe, batch, processes, say, section) if device or recipe.batch.micro is None else recipe


def measured(
    recipe: Recipe, batch: Batch, processes: Processes, say: Say, begun: Optional[EngineSection] = None
) -> Recipe:
    """Return `recipe` with what is measured on its device resolved: the section `engine`, and batch.micro by it.
    Every process calls. Args: batch: of `recipe`. begun: the section of a run that is resumed."""
    from engines import micro_batch, tuning  # where there are IPUs, torch is too old for them

    tuned = tuning.resolve(recipe, batch, processes, say, begun)
    sized = micro_batch.resolve(tuned, batch, processes, say)
    if tuned.engine == recipe.engine or sized.batch.micro >= batch.micro:
        return sized
    # Kernels were measured with more images than there is memory for, so that perhaps none could be.
    batch = divide(settled(recipe, sized.batch.micro), batch.replicas)
    return micro_batch.resolve(tuning.resolve(recipe, batch, processes, say, begun), batch, processes, say)


def create_engine(
    recipe: Recipe, given: Recipe, batch: Batch, processes: Processes, steps_per_epoch: int, say: Say
) -> Engine:
    """Return the engine of `recipe`, which `resolve` made of `given`, and store its choices in the run folder.
    Every process calls. With `parallel.split: auto` the run keeps its cut in each topology."""
    topology, parallel, folder = processes.topology, recipe.parallel, Path(output_folder(recipe))
    if recipe.engine != given.engine:
        place, chosen = _device(recipe, processes), recipe.engine.model_dump(include=_ENGINE)
        processes.from_main(lambda: keep(folder, "engine", place, chosen))
    if parallel.split is not None or topology.stages == 1:
        return processes.together(lambda: factory.create(recipe, batch, processes, steps_per_epoch))
    where = {**_device(recipe, processes), **parallel.model_dump(mode="json", include=_TOPOLOGY)}
    where["replicas"] = topology.replicas
    cut = processes.from_main(lambda: find(folder, "split", where))
    if cut:
        replicas = count(topology.replicas, "replica")
        say(f"split [{', '.join(cut)}], as this run has had it with {replicas} of {topology.stages} stages")
        recipe = recipe.model_copy(update={"parallel": parallel.model_copy(update={"split": cut})})
    engine = processes.together(lambda: factory.create(recipe, batch, processes, steps_per_epoch))
    processes.from_main(lambda: keep(folder, "split", where, list(engine.cut)))
    return engine


def find(folder: Path, subject: str, place: Mapping[str, Any]) -> Any:
    """Return the decision on a subject in a place (as JSON has it) by the run in `folder`, or None.
    Raises CheckpointError: the file is damaged."""
    return next((taken for *about, taken in _read(folder) if about == [subject, place]), None)


def keep(folder: Path, subject: str, place: Mapping[str, Any], taken: Any) -> None:
    """Have `find` return `taken` from now on. Raises CheckpointError where the file is damaged."""
    before, decision = _read(folder), [subject, dict(place), taken]
    if decision not in before:
        entries = [*(entry for entry in before if entry[:2] != decision[:2]), decision]
        text = json_text([dict(zip(_KEYS, entry)) for entry in entries], indent=1)
        write_text(folder / DECISIONS, text + "\n")


def _read(folder: Path) -> List[list]:
    """The decisions so far, each as [subject, place, taken]."""
    file = folder / DECISIONS
    try:
        return [[entry[key] for key in _KEYS] for entry in read_json(file)] if file.exists() else []
    except (OSError, ValueError, TypeError, KeyError):
        raise CheckpointError(f"{file}: damaged or not readable; restore it, or delete it to measure anew") from None


def _device(recipe: Recipe, processes: Processes) -> dict:
    """The kind of device of the main process, as a place of decisions."""
    from engines.devices import device_of, name_of

    return processes.from_main(lambda: {"device": name_of(device_of(recipe.run.device, processes.topology))})

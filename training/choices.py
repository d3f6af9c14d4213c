"""Settles `auto` in a recipe once, so that all sessions of a run use the same value.

The run's config.yaml has the values with which it began; decisions.json those for a kind of device
or a topology. A further key with `auto` needs: a value here that a run keeps (`settle`), a rule for
a run folder that has another one (`training.run_folder.check_owner`), a word in docs/architecture.md
on what it changes, and, if replicas of an elastic run could settle it differently, a part in
`training.elastic.Memory`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence

from common.text import count
from engines import factory
from engines.base import Engine
from parallel.processes import Processes
from recipe.batch import divide, output_folder, settled
from recipe.config import Recipe
from recipe.division import Batch
from recipe.hardware import EngineSection
from training import decisions
from training.run_folder import begun_recipe

_ENGINE = {"memory_format", "kernels"}
_TOPOLOGY = {"stages", "virtual_stages", "schedule", "recompute"}
_ON_ENGINE = "engine"
_ON_SPLIT = "split"
Say = Callable[[str], None]


def settle(recipe: Recipe, batch: Batch, processes: Processes, say: Say) -> Recipe:
    """Return a recipe without `auto` of the micro batch, the exchange, the layout and the kernels.

    Every process calls. A run that has begun keeps its values.

    Args:
        recipe: of the run.
        batch: of `recipe`.
        processes: of the run.
        say: prints a line, on the main rank.
    """
    # Three keys are left open independently; without any of them nothing is read or measured.
    exchange_is_open = recipe.exchange.method == "auto"
    micro_is_open = recipe.batch.micro is None
    engine = recipe.engine
    engine_is_open = recipe.run.device != "ipu" and "auto" in (engine.memory_format, engine.kernels)
    if not (exchange_is_open or engine_is_open or micro_is_open):
        return recipe
    # What the run began with counts first.
    begun = processes.from_main(lambda: begun_recipe(recipe))
    if begun and micro_is_open:
        recipe = settled(recipe, begun.batch.micro)
        batch = divide(recipe, batch.replicas)
        say(f"batch.micro auto: {batch.micro}, as the run began")
    if exchange_is_open:
        from engines import choice  # seldom needed

        recipe = choice.settle(recipe, batch, processes, say, begun.exchange if begun else None)
    # What is measured on a device may be known from an earlier session on such a one.
    section = begun.engine if begun else None
    if begun and engine_is_open:
        place = _device(recipe, processes)
        folder = Path(output_folder(recipe))
        known = processes.from_main(lambda: decisions.find(folder, _ON_ENGINE, place))
        section = begun.engine.model_copy(update=known or {})
    if engine_is_open or recipe.batch.micro is None:
        return settle_on_device(recipe, batch, processes, say, section)
    return recipe


def settle_on_device(
    recipe: Recipe,
    batch: Batch,
    processes: Processes,
    say: Say,
    begun: Optional[EngineSection] = None,
) -> Recipe:
    """Return a recipe with what is measured on its device: layout, kernels, micro batch by them.

    Every process calls.

    Args:
        recipe: of the run.
        batch: of `recipe`.
        processes: of the run.
        say: prints a line, on the main rank.
        begun: section `engine` of a run that is resumed.
    """
    from engines import micro_batch, tuning  # where there are IPUs, torch is too old for them

    # Kernels first: they decide how much memory a micro batch takes.
    tuned = tuning.settle(recipe, batch, processes, say, begun)
    sized = micro_batch.settle(tuned, batch, processes, say)
    assert sized.batch.micro is not None
    if tuned.engine == recipe.engine or sized.batch.micro >= batch.micro:
        return sized
    # Kernels were measured with more images than there is memory for, so that perhaps none could
    # be.
    batch = divide(settled(recipe, sized.batch.micro), batch.replicas)
    tuned = tuning.settle(recipe, batch, processes, say, begun)
    return micro_batch.settle(tuned, batch, processes, say)


def create_engine(
    recipe: Recipe,
    given: Recipe,
    batch: Batch,
    processes: Processes,
    *,
    steps_per_epoch: int,
    class_weights: Optional[Sequence[float]],
    say: Say,
) -> Engine:
    """Return the engine of a recipe, and store its choices in the run folder.

    Every process calls. With `parallel.split: auto` the run keeps its cut in each topology.

    Args:
        recipe: settled.
        given: from which `settle` made it.
        batch: of `recipe`.
        processes: of the run.
        steps_per_epoch: of the run.
        class_weights: factors on the loss by class; None: 1.
        say: prints a line, on the main rank.
    """
    folder = Path(output_folder(recipe))
    # Also where the run began on other hardware, whose choices config.yaml has.
    if recipe.engine != given.engine:
        place = _device(recipe, processes)
        chosen = recipe.engine.model_dump(include=_ENGINE)
        processes.from_main(lambda: decisions.keep(folder, _ON_ENGINE, place, chosen))

    def create() -> Engine:
        return processes.together(
            lambda: factory.create(
                recipe,
                batch,
                processes,
                steps_per_epoch,
                class_weights=class_weights,
            )
        )

    stages = processes.topology.stages
    if recipe.parallel.split is not None or stages == 1:
        return create()
    # Another cut could be another result, or what remembers a stage would have another one.
    where = _place_of_cut(recipe, processes)
    cut = processes.from_main(lambda: decisions.find(folder, _ON_SPLIT, where))
    if cut:
        replicas = count(processes.topology.replicas, "replica")
        say(f"split [{', '.join(cut)}], as this run has had it with {replicas} of {stages} stages")
        parallel = recipe.parallel.model_copy(update={"split": cut})
        recipe = recipe.model_copy(update={"parallel": parallel})
    engine = create()
    # Once the engine is there: a cut that cannot be built must not be found again.
    processes.from_main(lambda: decisions.keep(folder, _ON_SPLIT, where, list(engine.cut)))
    return engine


def _place_of_cut(recipe: Recipe, processes: Processes) -> Dict[str, Any]:
    """Return what a cut depends on, as a place of decisions."""
    return {
        **_device(recipe, processes),
        **recipe.parallel.model_dump(mode="json", include=_TOPOLOGY),
        "replicas": processes.topology.replicas,
    }


def _device(recipe: Recipe, processes: Processes) -> Dict[str, Any]:
    """Return the kind of device of the main process, as a place of decisions."""
    from engines.devices import device_of, name_of

    def kind() -> str:
        return name_of(device_of(recipe.run.device, processes.topology))

    return processes.from_main(lambda: {"device": kind()})

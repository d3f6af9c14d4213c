"""The engine for a recipe's device.

Engines are imported when they are needed: each has its own dependencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Sequence

from engines.base import Engine
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.config import Recipe
from recipe.division import Batch

if TYPE_CHECKING:
    from parallel.elastic import Elastic


def connect(
    recipe: Recipe,
    topology: Topology,
    elastic: Optional[Elastic] = None,
) -> Processes:
    """Connect the run's processes, on the device of the recipe.

    Args:
        recipe: of the run.
        topology: this process's place in it.
        elastic: see `Processes`.

    Raises:
        ConfigError: a device that this machine does not have, or ranks that do not meet.
    """
    if recipe.run.device == "ipu":
        from engines import ipu_engine

        return ipu_engine.connect(recipe, topology)
    from engines.devices import device_of

    device = device_of(recipe.run.device, topology)
    return Processes(topology, device, recipe.parallel.silence, elastic)


def create(
    recipe: Recipe,
    batch: Batch,
    processes: Optional[Processes] = None,
    steps_per_epoch: Optional[int] = None,
    *,
    class_weights: Optional[Sequence[float]] = None,
) -> Engine:
    """Create the engine of `run.device`.

    Args:
        recipe: of the run.
        batch: of a step.
        processes: of the run; None for a single one.
        steps_per_epoch: of a run that trains.
        class_weights: factors on the loss by class; None: 1.

    Raises:
        ConfigError: a device or library that this machine does not have, or cut points that the
            model does not have.
    """
    processes = processes or connect(recipe, Topology())
    if recipe.run.device == "ipu":
        # PopTorch is where IPUs are; there torch is too old for the other engine.
        from engines.ipu_engine import IpuEngine

        return IpuEngine(recipe, batch, processes)
    from engines.torch_engine import TorchEngine

    return TorchEngine(
        recipe,
        batch,
        processes,
        steps_per_epoch,
        class_weights=class_weights,
    )

"""From the recipe's device to an engine. Engines are imported when they are asked for: each has its own needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from engines.base import Engine
from parallel.topology import Topology
from recipe.batch import Batch
from recipe.config import Recipe
from recipe.errors import ConfigError

if TYPE_CHECKING:
    from parallel.processes import Processes


def connect(recipe: Recipe, topology: Topology) -> Processes:
    """Meets the run's other processes, on the device that the recipe asks for.

    Raises:
        ConfigError: a device that this machine does not have, or ranks that do not meet.
    """
    _refuse_ipu(recipe)
    from engines.devices import device_of
    from parallel.processes import Processes

    return Processes(topology, device_of(recipe, topology))


def create(recipe: Recipe, batch: Batch, processes: Optional[Processes] = None) -> Engine:
    """The engine that `run.device` asks for.

    Args:
        processes: of the run; None for a process that is alone.

    Raises:
        ConfigError: a device that this machine does not have, or cut points that the model does not have.
    """
    processes = processes or connect(recipe, Topology())
    from engines.torch_engine import TorchEngine

    return TorchEngine(recipe, batch, processes)


def _refuse_ipu(recipe: Recipe) -> None:
    if recipe.run.device == "ipu":
        raise ConfigError(
            "run.device ipu: this version plans IPU runs (--dry-run) but cannot make them; use cuda or cpu"
        )

"""From the recipe's device to an engine. Engines are imported when they are asked for: each has its own needs."""

from __future__ import annotations

from engines.base import Engine
from parallel.topology import Topology
from recipe.batch import Batch
from recipe.config import Recipe
from recipe.errors import ConfigError


def create(recipe: Recipe, batch: Batch, topology: Topology) -> Engine:
    """The engine that `run.device` asks for.

    Raises:
        ConfigError: a device that this machine does not have.
    """
    if recipe.run.device == "ipu":
        raise ConfigError(
            "run.device ipu: this version plans IPU runs (--dry-run) but cannot make them; use cuda or cpu"
        )
    from engines.torch_engine import TorchEngine

    return TorchEngine(recipe, batch, topology)

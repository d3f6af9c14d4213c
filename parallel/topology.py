"""Which replica and stage this process computes. One process so far: it computes them all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Mapping

from recipe.config import Recipe
from recipe.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """replicas: copies of the model; replica: the one this process serves; world: processes."""

    replicas: int
    replica: int
    world: int

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run folder."""
        return self.replica == 0


def from_environment(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> Topology:
    """The topology that launcher and recipe agree on.

    Raises:
        ConfigError: the launcher started several processes or no number of them, or the recipe asks for
            several replicas.
    """
    text = environment.get("WORLD_SIZE", "1")
    if not text.isdecimal():
        raise ConfigError(f"WORLD_SIZE {text!r} in the environment is no number of processes; unset it")
    world = int(text)
    replicas = recipe.parallel.replicas or 1
    if world > 1:
        raise ConfigError(f"{world} processes were started, but this version trains in one; start train.py once")
    if replicas > 1:
        raise ConfigError(
            f"parallel.replicas {replicas} needs {replicas * recipe.parallel.stages} processes, one was started; "
            "use parallel.replicas=auto, which keeps batch.global by accumulating more"
        )
    return Topology(replicas=1, replica=0, world=1)

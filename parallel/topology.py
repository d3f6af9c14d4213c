"""Replica and stage that this process computes, from the launcher's environment and the recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Mapping, Optional

from common.errors import ConfigError
from common.text import count
from parallel import launchers
from parallel.launchers import Launched
from recipe.config import Recipe

_POPRUN = (
    "POPDIST_NUM_TOTAL_REPLICAS",
    "POPDIST_NUM_LOCAL_REPLICAS",
    "POPDIST_REPLICA_INDEX_OFFSET",
)


@dataclass(frozen=True)
class Topology:
    """World = replicas x stages processes.

    The stages of a replica are neighbours, so mostly on one host.

    replicas: copies of the model.
    stages: processes that share one replica; 1 also where a single process computes all of the
        recipe's stages.
    rank: number of this process in the world.
    local_rank: on its host.
    served: replicas that this process feeds (poprun starts one process for several; everybody else
        1).
    """

    replicas: int = 1
    stages: int = 1
    rank: int = 0
    local_rank: int = 0
    served: int = 1

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return self.replicas // self.served * self.stages

    @property
    def replica(self) -> int:
        """Return the replica that this process serves, the first of several."""
        return self.rank // self.stages * self.served

    @property
    def stage(self) -> int:
        """Return the stage that this process computes, from 0."""
        return self.rank % self.stages

    def describe(self) -> str:
        """Return the place of this process in words, e.g. `rank 3 (replica 1, stage 1)`."""
        return f"rank {self.rank} (replica {self.replica}, stage {self.stage})"

    @property
    def is_main(self) -> bool:
        """Return whether this process writes the run folder."""
        return self.rank == 0

    @property
    def is_first(self) -> bool:
        """Return whether images enter here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Return whether the loss is computed here."""
        return self.stage == self.stages - 1


def from_environment(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> Topology:
    """Return the topology that launcher and recipe agree on.

    Args:
        recipe: says how many replicas and stages there are to be.
        environment: of this process, with the launcher's variables.

    Raises:
        ConfigError: processes that do not make whole replicas, or another number of them than the
            recipe says, or a launcher's variable that is missing or no number.
    """
    # poprun counts replicas, all others count processes.
    if _POPRUN[0] in environment:
        return _from_poprun(recipe, environment)
    # One of several processes: torchrun, SLURM or this program's launcher say which.
    launched = launchers.found(environment)
    if launched is not None and launched.world > 1:
        stages = recipe.parallel.stages
        prints = launchers.prints(environment, launched.rank)
        _check_several(recipe.parallel.replicas, stages, launched, prints)
        return Topology(launched.world // stages, stages, launched.rank, launched.local_rank)
    # A single process, which feeds all replicas on IPUs, and is the only one elsewhere.
    replicas = recipe.parallel.replicas or 1
    if recipe.run.device == "ipu":
        return Topology(replicas=replicas, served=replicas)
    if replicas > 1:
        processes = replicas * recipe.parallel.stages
        raise ConfigError(
            f"parallel.replicas {replicas} needs {processes} processes, one was started; "
            "start them by ./run_pod.sh, or use parallel.replicas=auto, "
            "which keeps batch.global by accumulating more"
        )
    return Topology()


def _check_several(replicas: Optional[int], stages: int, launched: Launched, prints: bool) -> None:
    """Check that as many processes were started as the recipe says.

    Args:
        replicas: that the recipe says; None: any number.
        stages: likewise.
        launched: what the launcher says.
        prints: whether this rank's error has a message.

    Raises:
        ConfigError: there are others.
    """
    # Either another number than the recipe asks for, or one that does not make whole replicas.
    world = launched.world
    started = f"{launched.counted_by} {world}: {world} ranks were started"
    fault = ""
    if replicas is not None and replicas * stages != world:
        wanted = replicas * stages
        fault = (
            f"{started}, but {count(replicas, 'replica')} x {count(stages, 'stage')} = {wanted}; "
            f"start {wanted} by ./run_pod.sh --replicas {replicas}, or use parallel.replicas=auto"
        )
    elif world % stages:
        fewer = world // stages
        nearest = f"{fewer} or {fewer + 1}" if fewer else "1"
        fault = (
            f"{started}, no multiple of {stages} stages; "
            f"start them by ./run_pod.sh --replicas {nearest}, "
            "or change parallel.stages and parallel.split"
        )
    if fault:
        raise ConfigError(fault if prints else "")


def _from_poprun(recipe: Recipe, environment: Mapping[str, str]) -> Topology:
    """Return the topology that poprun and the recipe agree on.

    poprun counts replicas; all stages of a replica, on as many IPUs, belong to one process.
    """
    total, served, first = [launchers.number(environment, name, "poprun") for name in _POPRUN]
    wanted = recipe.parallel.replicas
    if wanted is not None and wanted != total:
        raise ConfigError(
            f"poprun started {total} replicas, but parallel.replicas is {wanted}; use parallel.replicas=auto"
        )
    if not served or total % served or first % served or not first < total:
        raise ConfigError(
            f"poprun started {total} replicas with {served} from number {first} on "
            "in this process; "
            "give --num-replicas a multiple of --num-instances"
        )
    # Every process serves as many, neighbours: its number follows from its first one.
    return Topology(replicas=total, rank=first // served, served=served)

"""Replica and stage that this process computes, from the launcher's environment and the recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Mapping

from parallel import launchers
from parallel.launchers import Launched
from recipe.config import Recipe
from recipe.division import count
from recipe.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """World = replicas x stages processes; the stages of a replica are neighbours, so mostly on one host.

    replicas: copies of the model. stages: processes that share one replica; 1 also where a single process computes
    all of the recipe's stages. rank: number of this process in the world. local_rank: on its host. served: replicas
    that this process feeds (poprun starts one process for several; everybody else 1).
    """

    replicas: int = 1
    stages: int = 1
    rank: int = 0
    local_rank: int = 0
    served: int = 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.replicas // self.served * self.stages

    @property
    def replica(self) -> int:
        """The replica that this process serves, the first of them where it serves several."""
        return self.rank // self.stages * self.served

    @property
    def stage(self) -> int:
        """The stage that this process computes, from 0."""
        return self.rank % self.stages

    @property
    def is_main(self) -> bool:  # it writes the run folder
        return self.rank == 0

    @property
    def is_first(self) -> bool:  # images enter here
        return self.stage == 0

    @property
    def is_last(self) -> bool:  # the loss is computed here
        return self.stage == self.stages - 1


_POPRUN = ("POPDIST_NUM_TOTAL_REPLICAS", "POPDIST_NUM_LOCAL_REPLICAS", "POPDIST_REPLICA_INDEX_OFFSET")


def from_environment(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> Topology:
    """The topology that launcher and recipe agree on.

    Raises ConfigError: processes that do not make whole replicas, or another number of them than the recipe says, or a
    launcher's variable that is missing or no number.
    """
    if _POPRUN[0] in environment:
        return _of_poprun(recipe, environment)
    launched = launchers.found(environment)
    if launched is not None and launched.world > 1:
        _check_several(recipe, launched, launchers.prints(environment, launched.rank))
        stages = recipe.parallel.stages
        return Topology(launched.world // stages, stages, launched.rank, launched.local_rank)
    replicas = recipe.parallel.replicas or 1
    if recipe.run.device == "ipu":
        return Topology(replicas, 1, 0, 0, replicas)  # one process can feed them all
    if replicas > 1:
        raise ConfigError(
            f"parallel.replicas {replicas} needs {replicas * recipe.parallel.stages} processes, one was started; start "
            "them by ./run_pod.sh, or use parallel.replicas=auto, which keeps batch.global by accumulating more"
        )
    return Topology()


def _check_several(recipe: Recipe, launched: Launched, prints: bool) -> None:
    """Raises ConfigError, without a message unless this rank `prints`, for other processes than the recipe says."""
    world = launched.world
    wanted = recipe.parallel.replicas
    stages = recipe.parallel.stages
    started = f"{launched.counted_by} {world}: {world} ranks were started"
    if wanted is not None and wanted * stages != world:
        raise ConfigError(
            f"{started}, but {count(wanted, 'replica')} x {count(stages, 'stage')} = {wanted * stages}; start "
            f"{wanted * stages} by ./run_pod.sh --replicas {wanted}, or use parallel.replicas=auto"
            if prints
            else ""
        )
    if world % stages:
        fewer = world // stages
        nearest = f"{fewer} or {fewer + 1}" if fewer else "1"
        raise ConfigError(
            f"{started}, no multiple of {stages} stages; start them by ./run_pod.sh --replicas {nearest}, "
            "or change parallel.stages and parallel.split"
            if prints
            else ""
        )


def _of_poprun(recipe: Recipe, environment: Mapping[str, str]) -> Topology:
    """poprun counts replicas; all stages of a replica, on as many IPUs, belong to one process."""
    total, served, first = (launchers.number(environment, name, "poprun") for name in _POPRUN)
    wanted = recipe.parallel.replicas
    if wanted is not None and wanted != total:
        raise ConfigError(
            f"poprun started {total} replicas, but parallel.replicas is {wanted}; use parallel.replicas=auto"
        )
    if not served or total % served or first % served or not first < total:
        raise ConfigError(
            f"poprun started {total} replicas with {served} from number {first} on in this process; "
            "give --num-replicas a multiple of --num-instances"
        )
    return Topology(total, 1, first // served, 0, served)

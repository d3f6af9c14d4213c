"""Replica and stage that this process computes, from the launcher's environment and the recipe."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Mapping

from recipe.config import Recipe
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


# Variables for the number of processes, this one's number, and that on its host. torchrun's come first: it may itself
# run inside a SLURM step. SLURM_STEP_NUM_TASKS is set by srun alone, not in a batch script.
_LAUNCHERS = (
    ("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    ("SLURM", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)
_POPRUN = ("POPDIST_NUM_TOTAL_REPLICAS", "POPDIST_NUM_LOCAL_REPLICAS", "POPDIST_REPLICA_INDEX_OFFSET")


def from_environment(recipe: Recipe, environment: Mapping[str, str] = os.environ) -> Topology:
    """The topology that launcher and recipe agree on.

    Raises ConfigError: processes that do not make whole replicas, or another number of them than the recipe says, or a
    launcher's variable that is missing or no number.
    """
    if _POPRUN[0] in environment:
        return _of_poprun(recipe, environment)
    wanted, stages = recipe.parallel.replicas, recipe.parallel.stages
    for launcher, *names in _LAUNCHERS:
        if names[0] in environment:
            world = _number(environment, names[0], launcher)
            if world == 1:
                break
            rank, local_rank = (_number(environment, name, launcher) for name in names[1:])
            if rank >= world:
                raise ConfigError(f"{names[1]} {rank} is not below {names[0]} {world} in the environment; unset both")
            if wanted is not None and wanted * stages != world:
                raise ConfigError(
                    f"{world} processes were started, but {wanted} replicas x {stages} stages = {wanted * stages}; "
                    f"start {wanted * stages}, or use parallel.replicas=auto"
                )
            if world % stages:
                fewer = world - world % stages
                nearest = f"{fewer} or {fewer + stages}" if fewer else f"{stages}"
                raise ConfigError(
                    f"{world} processes are not a multiple of {stages} stages; start {nearest}, "
                    "or change parallel.stages and parallel.split"
                )
            return Topology(world // stages, stages, rank, local_rank)
    replicas = wanted or 1
    if recipe.run.device == "ipu":
        return Topology(replicas, 1, 0, 0, replicas)  # one process can feed them all
    if replicas > 1:
        raise ConfigError(
            f"parallel.replicas {replicas} needs {replicas * stages} processes, one was started; start them by "
            "./run_pod.sh, or use parallel.replicas=auto, which keeps batch.global by accumulating more"
        )
    return Topology()


def _of_poprun(recipe: Recipe, environment: Mapping[str, str]) -> Topology:
    """poprun counts replicas; all stages of a replica, on as many IPUs, belong to one process."""
    total, served, first = (_number(environment, name, "poprun") for name in _POPRUN)
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


def _number(environment: Mapping[str, str], name: str, launcher: str) -> int:
    text = environment.get(name)
    if text is None:
        raise ConfigError(f"{launcher} sets {name}, but it is missing in the environment; start by ./run_pod.sh")
    if not text.isdecimal():
        raise ConfigError(f"{name} {text!r} in the environment is no number; unset it")
    return int(text)

"""How launchers tell a process that it is one of several: by variables of its environment.

Such variables outlive what they were true for: a shell that srun started hands them to every command. Loads no torch
and runs on Python 3.8.
"""

from __future__ import annotations

from typing import Dict, Mapping, MutableMapping, NamedTuple, Optional

from recipe.errors import ConfigError

_NAMES = frozenset(
    (
        *("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
        *("POD_LAUNCHER", "POD_LIFE"),
        *("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID"),
        *("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    )
)
_PREFIXES = ("TORCHELASTIC_", "POPDIST_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "PMIX_")
# Launchers of MPI programs, by the number of processes and this one's: none of our ranks meets by them.
_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)


class Launched(NamedTuple):
    """What a launcher says of this process. world: number of processes, by the variable `counted_by`."""

    launcher: str
    world: int
    rank: int
    local_rank: int
    counted_by: str


def forget(environment: MutableMapping[str, str]) -> None:
    """Remove every variable by which a launcher says that a process is one of several.

    What tells of machines, networks and jobs stays (SLURM_JOB_ID, NCCL_*, OMPI_MCA_*).
    """
    for name in list(environment):
        if name in _NAMES or name.startswith(_PREFIXES):
            del environment[name]


def without(environment: Mapping[str, str]) -> Dict[str, str]:
    """Return a copy of `environment` for a process that is none of several."""
    copy = dict(environment)
    forget(copy)
    return copy


def left_over(environment: Mapping[str, str]) -> str:
    """Return `NAME=number` of the variable that says that this process is one of several, or ""."""
    named = ("WORLD_SIZE", _slurm_count(environment), *(count for count, _ in _MPI))
    several = (name for name in named if environment.get(name, "1") not in ("", "1"))
    return next((f"{name}={environment[name]}" for name in several), "")


def found(environment: Mapping[str, str]) -> Optional[Launched]:
    """Return what torchrun, ./run_pod.sh or srun says of this process; None where it was started by itself.

    torchrun's variables count first: it may itself run inside a SLURM step. In the shell of a step that has a terminal
    (srun --pty) a command is started by itself, whatever the number of the step's tasks.

    Raises:
        ConfigError: a variable is missing or is no number, or processes were started that cannot meet.
    """
    if environment.get("WORLD_SIZE"):  # an empty variable counts as one that is not set
        return _read(environment, "torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    shell = "SLURM_PTY_PORT" in environment and environment.get("SLURM_PROCID") == "0"
    if shell and "MASTER_ADDR" not in environment:
        return None
    counted_by = _slurm_count(environment)
    if counted_by in environment:
        tasks = number(environment, counted_by, "SLURM")
        if tasks > 1 and "MASTER_ADDR" not in environment:
            fault = f"SLURM started {tasks} tasks of this command ({counted_by}), which do not know where to meet"
            remedy = "start one task a node, which starts its ranks: srun --ntasks-per-node=1 ./run_pod.sh"
            alone = "for one process in a shell of this step ./run_pod.sh alone"
            first = environment.get("SLURM_PROCID", "0") == "0"
            raise ConfigError(f"{fault}; {remedy}, with the same arguments; {alone}" if first else "")
        return _read(environment, "SLURM", counted_by, "SLURM_PROCID", "SLURM_LOCALID")
    for count, rank in _MPI:
        world = number(environment, count, "mpirun") if count in environment else 1
        if world > 1:
            fault = f"an MPI launcher started {world} processes of this command ({count}), which do not know each other"
            remedy = "start ./run_pod.sh with the same arguments once on each host (docs/cluster.md)"
            raise ConfigError(f"{fault}; {remedy}" if environment.get(rank, "0") == "0" else "")
    return None


def check_first(environment: Mapping[str, str]) -> None:
    """Raises ConfigError where srun or mpirun started one launcher a process on one host, and this is not the first.

    Each would start a whole run, in the same folder. Of torchrun's variables nothing follows: they may be left over.
    """
    for count, rank in ((_slurm_count(environment), "SLURM_PROCID"), *_MPI):
        own = environment.get(rank, "0")
        if environment.get(count, "1") != "1" and own != "0":
            fault = f"{environment[count]} launchers were started on this host ({count}), each of which would train"
            remedy = "start one on each host, which starts its ranks: srun --ntasks-per-node=1, or mpirun -npernode 1"
            raise ConfigError(f"{fault}; {remedy}" if own == "1" else "")


def prints(environment: Mapping[str, str], rank: int) -> bool:
    """Whether this rank prints a fault that all ranks find: the first, or one whose launcher is not known to run."""
    known = "POD_LAUNCHER" in environment or "TORCHELASTIC_RUN_ID" in environment or "WORLD_SIZE" not in environment
    return rank == 0 or not known


def number(environment: Mapping[str, str], name: str, launcher: str) -> int:
    """Return the whole number that a launcher's variable holds. Raises ConfigError."""
    text = environment.get(name)
    if text is None:
        raise ConfigError(f"{launcher} sets {name}, but it is missing in the environment; start by ./run_pod.sh")
    if not text.isdecimal():
        raise ConfigError(f"{name} {text!r} in the environment is no number; unset it")
    return int(text)


def _slurm_count(environment: Mapping[str, str]) -> str:
    """The variable that counts the tasks of this step. A batch script, too, has SLURM_NTASKS, but is no step."""
    in_step = "SLURM_STEP_ID" in environment and "SLURM_STEP_NUM_TASKS" not in environment
    return "SLURM_NTASKS" if in_step else "SLURM_STEP_NUM_TASKS"


def _read(environment: Mapping[str, str], launcher: str, world: str, rank: str, local_rank: str) -> Launched:
    count = number(environment, world, launcher)
    if count == 1:
        return Launched(launcher, 1, 0, 0, world)
    own = number(environment, rank, launcher)
    on_host = number(environment, local_rank, launcher)
    if own >= count:
        raise ConfigError(f"{rank} {own} is not below {world} {count} in the environment; unset both")
    return Launched(launcher, count, own, on_host, world)

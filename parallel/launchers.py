"""How launchers tell a process that it is one of several: by variables of its environment.

Such variables outlive what they were true for: a shell that srun started hands them to every
command. Loads no torch and runs on Python 3.8.
"""

from __future__ import annotations

import sys
from typing import Dict, Mapping, MutableMapping, NamedTuple, Optional

from common.errors import STOPPED, ConfigError

# What a launcher says that was stopped before a rank was started: see `stopped_early`.
STOPPED_EARLY = "stopped while no rank was running; the same command goes on"

_TORCHRUN = (
    "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
)  # fmt: skip
_OURS = ("POD_LAUNCHER", "POD_LIFE")
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID")
_INTEL_MPI = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_NAMES = frozenset(_TORCHRUN + _OURS + _SLURM + _INTEL_MPI)
_PREFIXES = ("TORCHELASTIC_", "POPDIST_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_", "PMIX_")
# Of MPI's launchers the number of processes and this one's; none of our ranks meets by them.
_MPI = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)


class Launched(NamedTuple):
    """A launcher's description of this process.

    launcher: its name.
    world: number of processes, by the variable `counted_by`.
    rank: number of this process.
    local_rank: on its host.
    """

    launcher: str
    world: int
    rank: int
    local_rank: int
    counted_by: str


def is_ours(environment: Mapping[str, str]) -> bool:
    """Return whether run_pod.sh's launcher started this process as one of several ranks.

    Args:
        environment: of the process.
    """
    return environment.get("POD_LAUNCHER") == "1"


def stopped_early() -> int:
    """Tell the user that a signal came before a rank was started; return the exit code."""
    print(STOPPED_EARLY, file=sys.stderr, flush=True)
    return STOPPED


def forget(environment: MutableMapping[str, str]) -> None:
    """Remove from the `environment` all variables by which a process is one of several.

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
    """Return `NAME=number` of a variable in `environment` by which this process is one of several.

    "" if there is none.
    """
    mpi = [count for count, _ in _MPI]
    for name in ("WORLD_SIZE", _slurm_count(environment), *mpi):
        number = environment.get(name, "1")
        # An empty variable counts as one that is not set; 1 is a process by itself.
        if number not in ("", "1"):
            return f"{name}={number}"
    return ""


def found(environment: Mapping[str, str]) -> Optional[Launched]:
    """Return what torchrun, ./run_pod.sh or srun says of this process.

    A process that was started by itself gets None.

    torchrun's variables count first: it may itself run inside a SLURM step. In the shell of a step
    that has a terminal (srun --pty) a command is started by itself, whatever the number of the
    step's tasks.

    Args:
        environment: of this process.

    Raises:
        ConfigError: a variable is missing or is no number, or processes were started that cannot
            meet.
    """
    # torchrun, or ./run_pod.sh; an empty variable counts as one that is not set.
    if environment.get("WORLD_SIZE"):
        return _read(environment, "torchrun", "WORLD_SIZE", rank="RANK", local_rank="LOCAL_RANK")
    # A shell in a step, where one types commands.
    has_master = "MASTER_ADDR" in environment
    in_terminal = "SLURM_PTY_PORT" in environment and environment.get("SLURM_PROCID") == "0"
    if in_terminal and not has_master:
        return None
    # srun, whose tasks can meet only if somebody told them where.
    tasks_name = _slurm_count(environment)
    if tasks_name in environment:
        if not has_master:
            _check_slurm(environment, tasks_name)
        return _read(
            environment,
            "SLURM",
            tasks_name,
            rank="SLURM_PROCID",
            local_rank="SLURM_LOCALID",
        )
    _check_mpi(environment)
    return None


def _check_slurm(environment: Mapping[str, str], tasks_name: str) -> None:
    """Check that SLURM has not started several tasks that cannot meet.

    Raises ConfigError, with a message in the first task.
    """
    tasks = number(environment, tasks_name, "SLURM")
    if tasks > 1:
        is_first = environment.get("SLURM_PROCID", "0") == "0"
        fault = (
            f"SLURM started {tasks} tasks of this command ({tasks_name}), "
            "which do not know where to meet; start one task a node, which starts its ranks: "
            "srun --ntasks-per-node=1 ./run_pod.sh, with the same arguments; "
            "for one process in a shell of this step ./run_pod.sh alone"
        )
        raise ConfigError(fault if is_first else "")


def _check_mpi(environment: Mapping[str, str]) -> None:
    """Check that no launcher of MPI programs started this process. Raises ConfigError."""
    # They tell how many processes there are, but not where these could meet.
    for count, rank in _MPI:
        if count not in environment:
            continue
        world = number(environment, count, "mpirun")
        if world > 1:
            is_first = environment.get(rank, "0") == "0"
            fault = (
                f"an MPI launcher started {world} processes of this command ({count}), "
                "which do not know each other; "
                "start ./run_pod.sh with the same arguments once on each host (docs/cluster.md)"
            )
            raise ConfigError(fault if is_first else "")


def check_first(environment: Mapping[str, str]) -> None:
    """Check that this is not a further launcher that srun or mpirun started on one host.

    Each would start a whole run, in the same folder. Of torchrun's variables nothing follows: they
    may be left over.

    Args:
        environment: of this process.

    Raises:
        ConfigError: there are several, and this is not the first; with a message in the second.
    """
    for count, rank in ((_slurm_count(environment), "SLURM_PROCID"), *_MPI):
        launched = environment.get(count, "1")
        number_here = environment.get(rank, "0")
        if launched != "1" and number_here != "0":
            fault = (
                f"{launched} launchers were started on this host ({count}), "
                "each of which would train; start one on each host, which starts its ranks: "
                "srun --ntasks-per-node=1, or mpirun -npernode 1"
            )
            raise ConfigError(fault if number_here == "1" else "")


def prints(environment: Mapping[str, str], rank: int) -> bool:
    """Return whether a rank prints a fault that all ranks find.

    The first does, and each one whose launcher is not known to run.

    Args:
        environment: of this process.
        rank: of this process.
    """
    by_launcher = "POD_LAUNCHER" in environment or "TORCHELASTIC_RUN_ID" in environment
    is_known = by_launcher or "WORLD_SIZE" not in environment
    return rank == 0 or not is_known


def number(environment: Mapping[str, str], name: str, launcher: str) -> int:
    """Return the whole number that a launcher's variable holds.

    Args:
        environment: of this process.
        name: of the variable.
        launcher: that sets it.

    Raises:
        ConfigError: it is missing, or is no number.
    """
    text = environment.get(name)
    if text is None:
        raise ConfigError(
            f"{launcher} sets {name}, but it is missing in the environment; start by ./run_pod.sh"
        )
    if not text.isdecimal():
        raise ConfigError(f"{name} {text!r} in the environment is no number; unset it")
    return int(text)


def _slurm_count(environment: Mapping[str, str]) -> str:
    """Return the variable that counts the tasks of this step.

    A batch script, too, has SLURM_NTASKS, but is no step.
    """
    in_step = "SLURM_STEP_ID" in environment and "SLURM_STEP_NUM_TASKS" not in environment
    return "SLURM_NTASKS" if in_step else "SLURM_STEP_NUM_TASKS"


def _read(
    environment: Mapping[str, str],
    launcher: str,
    world: str,
    rank: str,
    local_rank: str,
) -> Launched:
    """Read what a launcher says by the variables of these names. Raises ConfigError."""
    count = number(environment, world, launcher)
    # Then its rank does not matter, and may be missing.
    if count == 1:
        return Launched(launcher, world=1, rank=0, local_rank=0, counted_by=world)
    in_world = number(environment, rank, launcher)
    on_host = number(environment, local_rank, launcher)
    if in_world >= count:
        raise ConfigError(
            f"{rank} {in_world} is not below {world} {count} in the environment; unset both"
        )
    return Launched(launcher, world=count, rank=in_world, local_rank=on_host, counted_by=world)

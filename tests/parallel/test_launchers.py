"""Variables by which launchers tell a process that it is one of several, and what is made of those
left over."""

import pytest

from common.errors import ConfigError
from parallel.launchers import check_first, left_over, without
from parallel.topology import Topology, from_environment

# As `srun --ntasks=8 --mpi=pmix --pty bash` on one node sets them, apart from what names machines
# and the job.
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
TORCHRUN = {
    **{
        "WORLD_SIZE": "4",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
    },
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"},
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
    "PMI_SIZE": "2",
    "PMI_RANK": "0",
    "PMIX_RANK": "0",
}
POPRUN = {"POPDIST_NUM_TOTAL_REPLICAS": "4", "POPDIST_NUM_IPUS_PER_REPLICA": "2"}
OURS = {"POD_LAUNCHER": "1", "POD_LIFE": "2"}
KEPT = {
    **{
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "gpu07",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth0",
    },
    **{"OMP_NUM_THREADS": "4", "OMPI_MCA_btl": "tcp", "CUDA_VISIBLE_DEVICES": "1", "PATH": "/bin"},
}


@pytest.mark.parametrize(
    "variables",
    [STEP, TORCHRUN, MPI, POPRUN, OURS],
    ids=["step", "torchrun", "mpi", "poprun", "ours"],
)
def test_a_process_without_them_is_none_of_several(tiny, variables):
    remaining = without({**variables, **KEPT})
    assert from_environment(tiny(), remaining) == Topology()
    assert KEPT.items() <= remaining.items()
    assert set(remaining) - set(KEPT) <= {"SLURM_STEP_ID"}


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, ""),
        (KEPT, ""),
        ({"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        (TORCHRUN, "WORLD_SIZE=4"),
        (STEP, "SLURM_STEP_NUM_TASKS=8"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_NTASKS=2"),
        ({"SLURM_NTASKS": "2"}, ""),  # a batch script
        (MPI, "OMPI_COMM_WORLD_SIZE=2"),
    ],
)
def test_what_is_set_aside_is_named(variables, named):
    assert left_over(variables) == named


def test_of_several_launchers_on_a_host_the_first_one_trains():
    """In the shell of a step there is the first alone; of `srun --ntasks=8 ./run_pod.sh` the second
    one says why."""
    for first in ({}, KEPT, STEP, TORCHRUN, MPI):
        check_first(first)
    with pytest.raises(
        ConfigError, match=r"^8 launchers were started on this host .* srun --ntasks-per-node=1"
    ):
        check_first({**STEP, "SLURM_PROCID": "1"})
    with pytest.raises(ConfigError, match=r"^$"):
        check_first({**STEP, "SLURM_PROCID": "7"})
    with pytest.raises(ConfigError, match=r"^2 launchers .*OMPI_COMM_WORLD_SIZE"):
        check_first({**MPI, "OMPI_COMM_WORLD_RANK": "1"})

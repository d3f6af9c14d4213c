"""Which replica and stage a process computes, by what each launcher writes into the environment."""

import pytest

from common.errors import ConfigError
from parallel.topology import Topology, from_environment


def torchrun(world, rank, local_rank=0):
    return {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_RANK": str(local_rank)}


def tasks(world, rank, local_rank=0):
    return {
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
    }


def slurm(world, rank, local_rank=0):
    return {**tasks(world, rank, local_rank), "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


def poprun(total, local, first):
    names = (
        "POPDIST_NUM_TOTAL_REPLICAS",
        "POPDIST_NUM_LOCAL_REPLICAS",
        "POPDIST_REPLICA_INDEX_OFFSET",
    )
    return dict(zip(names, map(str, (total, local, first))))


BATCH_SCRIPT = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}  # where SLURM starts nothing by itself
# of `srun --ntasks=8 --pty bash`
SHELL = {**tasks(8, 0), "SLURM_STEP_ID": "0", "SLURM_PTY_PORT": "34889"}


@pytest.mark.parametrize("launcher", [torchrun, slurm])
def test_the_stages_of_a_replica_are_neighbours(tiny, launcher):
    """Activations cross between them with every micro batch, gradients between replicas once a
    step."""
    places = [
        from_environment(tiny("parallel.stages=2"), launcher(6, rank, rank % 3))
        for rank in range(6)
    ]
    assert places == [Topology(3, 2, rank, rank % 3) for rank in range(6)]
    assert [(place.replica, place.stage) for place in places] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert {place.world for place in places} == {6}
    assert [place.is_main for place in places] == [True] + [False] * 5
    assert (
        [place.is_first for place in places]
        == [not place.is_last for place in places]
        == [True, False] * 3
    )


@pytest.mark.parametrize(
    ("overrides", "environment", "expected"),
    [
        # A single process computes all stages of the only replica.
        *(
            ((), environment, Topology())
            for environment in ({}, torchrun(1, 0), tasks(1, 0), BATCH_SCRIPT, SHELL)
        ),
        # torchrun inside a SLURM step
        ((), {**slurm(2, 1), **torchrun(2, 1, 1)}, Topology(1, 2, 1, 1)),
        # On IPUs a process feeds all replicas, of one pipeline each; or some of them, where poprun
        # says so.
        (("run.device=ipu", "parallel.replicas=8"), {}, Topology(8, 1, 0, 0, 8)),
        (("run.device=ipu",), {}, Topology(1, 1, 0, 0, 1)),
        (("parallel.replicas=8",), poprun(8, 4, 4), Topology(8, 1, 1, 0, 4)),
    ],
    ids=str,
)
def test_other_launchers(tiny, overrides, environment, expected):
    place = from_environment(tiny("parallel.stages=2", *overrides), environment)
    assert place == expected
    if place.stages == 1:
        assert (
            place.world == expected.replicas // expected.served
            and place.replica == place.rank * place.served
        )
        assert (place.is_first, place.is_last, place.is_main) == (True, True, place.rank == 0)


@pytest.mark.parametrize(
    ("overrides", "environment", "message"),
    [
        (
            ("parallel.stages=2",),
            torchrun(5, 0),
            r"^WORLD_SIZE 5: 5 ranks were started, no multiple of 2 stages; .* --replicas 2 or 3, or change ",
        ),
        (
            ("parallel.stages=4",),
            torchrun(2, 0),
            r"no multiple of 4 stages; .* ./run_pod.sh --replicas 1, or change ",
        ),
        (
            ("parallel.stages=2", "parallel.replicas=2"),
            torchrun(6, 0),
            r"^WORLD_SIZE 6: 6 ranks were started, but 2 replicas x 2 stages = 4; "
            r"start 4 by ./run_pod.sh --replicas 2, or use parallel.replicas=auto$",
        ),
        (
            ("parallel.replicas=3",),
            {},
            r"parallel.replicas 3 needs 3 processes.*run_pod.sh.*replicas=auto",
        ),
        (
            ("parallel.replicas=3", "parallel.stages=2"),
            {},
            r"parallel.replicas 3 needs 6 processes",
        ),
        ((), {"WORLD_SIZE": "two"}, r"^WORLD_SIZE 'two' .*unset it$"),
        ((), {"WORLD_SIZE": "2"}, r"^torchrun sets RANK, but it is missing"),
        (
            (),
            {"SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "a"},
            r"^SLURM sets SLURM_PROCID, but it is missing",
        ),
        # srun or mpirun started train.py itself, several times: each would train a run of its own.
        (
            (),
            tasks(2, 0),
            r"^SLURM started 2 tasks .*\(SLURM_STEP_NUM_TASKS\), .* srun --ntasks-per-node=1 ./run_pod.sh",
        ),
        (
            (),
            {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
            r"^SLURM started 2 tasks .*SLURM_NTASKS",
        ),
        ((), {**SHELL, **tasks(2, 1)}, "^$"),  # of srun within that shell; task 0 says why
        (
            (),
            {"OMPI_COMM_WORLD_SIZE": "2"},
            r"^an MPI launcher started 2 processes .* ./run_pod.sh .* on each host",
        ),
        ((), {"PMI_SIZE": "2", "PMI_RANK": "0"}, r"^an MPI launcher started 2 processes"),
        ((), torchrun(2, 2), r"^RANK 2 is not below WORLD_SIZE 2"),
        (
            ("parallel.replicas=4",),
            poprun(8, 4, 4),
            r"^poprun started 8 replicas, but parallel.replicas is 4",
        ),
        (
            (),
            poprun(8, 3, 0),
            r"^poprun started 8 replicas with 3 from number 0 .* a multiple of --num-instances$",
        ),
        ((), poprun(8, 0, 0), r"^poprun started 8 replicas with 0 "),
        ((), poprun(8, 4, 8), r"^poprun started 8 replicas with 4 from number 8 "),
    ],
)
def test_what_does_not_divide_is_refused_with_the_arithmetic(tiny, overrides, environment, message):
    with pytest.raises(ConfigError, match=message):
        from_environment(tiny(*overrides), environment)


@pytest.mark.parametrize(
    ("environment", "prints"),
    [
        ({**torchrun(2, 1), "TORCHELASTIC_RUN_ID": "none"}, False),
        ({**torchrun(2, 1), "POD_LAUNCHER": "1"}, False),
        ({**torchrun(2, 0), "POD_LAUNCHER": "1"}, True),
        (torchrun(2, 1), True),  # perhaps left over: there may be no rank 0 that says it
        (slurm(2, 1), False),
    ],
)
def test_what_all_ranks_find_is_printed_once(tiny, environment, prints):
    with pytest.raises(ConfigError) as error:
        from_environment(tiny("parallel.replicas=4"), environment)
    assert bool(str(error.value)) == prints

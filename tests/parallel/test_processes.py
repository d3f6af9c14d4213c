"""What ranks send each other on the host, and how they end together; several real processes on the
loopback."""

import os
import re
import signal
import subprocess
import time

import pytest
import torch

from common.errors import ConfigError, DataError, MachineError, UserError
from parallel.processes import Processes
from parallel.topology import Topology
from tests import ranks, world
from tests.world import addresses

CPU = torch.device("cpu")
pytestmark = pytest.mark.multiprocess


def _failure(call, failing, rank, kind=DataError, agreed=UserError):
    """Message of the error that `call` raises where some of the ranks fail."""

    def function():
        if rank in failing:
            raise kind(f"no images on {rank}")

    with pytest.raises(agreed) as error:
        call(function)
    return str(error.value)


def talk(rank, size):
    group = Processes(Topology(size // 2, 2, rank, rank), CPU, silence=1.5)
    found = {
        "gathered": group.gather(rank * 10),
        "at main": group.gather_to_main({"rank": rank}, range(2)),
        "from main": group.from_main(lambda: {"from": rank}),
        "own": group.together(lambda: rank + 100),
        "sum": group.sum(torch.tensor([1.0 + rank])).item(),
        "over stages": group.sum_over_stages(torch.tensor([1.0 + rank])).item(),
        "agreed": [group.agree_late(value) for value in (rank, 0, 0)],
        "groups": [
            torch.distributed.get_process_group_ranks(g)
            for g in (group.stage_group, group.replica_group)
        ],
        "errors": [_failure(group.together, (1, 2), rank), _failure(group.from_main, (0,), rank)],
        "machine": _failure(group.together, (2, 3), rank, MachineError, MachineError),
    }
    time.sleep(2.5)  # ranks that rest are not given up
    group.wait_for_all()
    group.part()
    return found


def test_ranks_gather_broadcast_sum_agree_and_fail_together():
    """The error of one is the error of all, and has a message once."""
    for rank, found in enumerate(world.run(4, talk, connect=False)):
        assert found == {
            "gathered": [0, 10, 20, 30],
            "at main": [{"rank": 0}, {"rank": 1}] if rank == 0 else [],
            "from main": {"from": 0},
            "own": rank + 100,
            "sum": 10.0,
            "over stages": 3.0 if rank < 2 else 7.0,
            "agreed": [0, 3, 0],  # a call late
            "groups": [[rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]],
            "errors": [
                "no images on 1" if rank == 1 else "",
                "no images on 0" if rank == 0 else "",
            ],
            "machine": "no images on 2" if rank == 2 else "",
        }


def fail(rank, size, number):
    """Rank 0 kills itself, or is stopped for five seconds and then killed."""
    Processes(
        Topology(size, 1, rank, rank), CPU, silence=1.5 if number == signal.SIGSTOP else 300.0
    )
    if rank == 0:
        if number == signal.SIGSTOP:  # nobody else would end it
            subprocess.Popen(["sh", "-c", f"sleep 5; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), number)
    time.sleep(100)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_falls_silent_is_named_and_takes_the_others_with_it(number):
    """Nobody communicates, and nobody ends them: the watch alone can notice.

    One rank tells the next by its own end.

    They notice a death by the broken connection: by themselves they would end after 100 s with code
    0, and silence counts after 300 s only. How soon that is: benchmarks/faults. Of a silent rank
    they end before it is killed.
    """
    first, after, third = ranks.run(3, fail, number)
    fault = "is gone"
    if number == signal.SIGSTOP:
        fault = "has said nothing for 1.5 s: it is stopped or hangs, or its host is gone"
        assert max(after.later, third.later) < first.later
    assert first.code == -signal.SIGKILL
    assert after[:3] == (1, [], [f"rank 1 (replica 1, stage 0): rank 0 {fault}; leaving"])
    assert third[:3] == (1, [], ["rank 2 (replica 2, stage 0): rank 1 is gone; leaving"])


@pytest.mark.parametrize(
    ("address", "port", "fault"),
    [
        (
            "127.0.0.1",
            "1",
            r"rank 1 \(replica 1, stage 0\) did not meet all 2 ranks at 127.0.0.1:1 ",
        ),
        *(
            (*place, "MASTER_ADDR and MASTER_PORT must name")
            for place in (("", "1234"), ("127.0.0.1", "http"))
        ),
    ],
)
def test_ranks_that_do_not_meet_are_an_error_of_one_line(monkeypatch, address, port, fault):
    monkeypatch.setattr("parallel.joining.RENDEZVOUS_SECONDS", 0.2)
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=f"^{fault}"):
        Processes(Topology(2, 1, 1), CPU)


def test_ranks_of_our_launcher_that_do_not_meet_are_a_fault_of_the_machine(monkeypatch):
    """Of wrong input the launcher would make the end of the job."""
    monkeypatch.setattr("parallel.joining.RENDEZVOUS_SECONDS", 0.2)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "POD_LAUNCHER": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        MachineError, match=r"^rank 1 .* did not meet all 2 ranks .*; rerun to resume$"
    ):
        Processes(Topology(2, 1, 1), CPU)


@pytest.mark.parametrize(
    ("rank", "world", "said"),
    [
        (
            0,
            2,
            r"rank 0 \(replica 0, stage 0\): 1 of 2 ranks is here; "
            r"waiting for rank 1 at HOST until TIME, for another 2 s",
        ),
        (
            0,
            12,
            r".*: 1 of 12 ranks is here; waiting for ranks 1, 2, 3, 4, 5, 6, 7, 8 ... at HOST .*",
        ),
        (
            1,
            2,
            r"rank 1 \(replica 1, stage 0\): waiting for rank 0 to listen at HOST until TIME, for another 2 s",
        ),
    ],
)
def test_a_rank_that_waits_for_others_says_for_whom_where_and_until_when(
    monkeypatch, capsys, rank, world, said
):
    place = addresses()
    monkeypatch.setattr("parallel.joining.RENDEZVOUS_SECONDS", 3.0)
    monkeypatch.setattr("parallel.joining._SILENT_SECONDS", 0.6)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="did not meet all"):
        Processes(Topology(world, 1, rank), CPU)
    pattern = said.replace("HOST", f"127.0.0.1:{place['MASTER_PORT']}").replace(
        "TIME", r"\d\d:\d\d:\d\d"
    )
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if re.fullmatch(pattern, line)] == lines[:1] and len(lines) == 1

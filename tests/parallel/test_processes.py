"""What ranks send each other on the host, and how they end together; several real processes on the loopback."""

import os
import signal
import subprocess
import time

import pytest
import torch

from parallel.processes import Processes
from parallel.topology import Topology
from recipe.errors import ConfigError, DataError, UserError
from tests import ranks, world

CPU = torch.device("cpu")
pytestmark = pytest.mark.multiprocess


def _fails_on(failing, rank):
    def function():
        if rank in failing:
            raise DataError(f"no images on {rank}")
        return rank

    return function


def talk(rank, size):
    group = Processes(Topology(size // 2, 2, rank, rank), CPU, silence=1.5)
    found = {
        "gathered": group.gather(rank * 10),
        "at main": group.gather_to_main({"rank": rank}, range(2)),
        "from main": group.from_main(lambda: {"from": rank}),
        "own": group.together(lambda: rank + 100),
        "sum": group.sum(torch.tensor([1.0 + rank])).item(),
        "over stages": group.sum_over_stages(torch.tensor([1.0 + rank])).item(),
        "agreed": [group.agree(value) for value in (rank, 0, 0)],
        "groups": [torch.distributed.get_process_group_ranks(g) for g in (group.stage_group, group.replica_group)],
        "errors": [],
    }
    for call in (lambda: group.together(_fails_on((1, 2), rank)), lambda: group.from_main(_fails_on((0,), rank))):
        try:
            call()
        except UserError as error:
            found["errors"].append(str(error))
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
            "errors": ["no images on 1" if rank == 1 else "", "no images on 0" if rank == 0 else ""],
        }


def die(rank, size, who):
    Processes(Topology(size, 1, rank, rank), CPU)
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def test_a_rank_that_dies_takes_the_others_with_it(size=3, who=0):
    """Nobody communicates, and nobody ends them: the watch alone can notice. One rank tells the next by its own end.

    They notice by the broken connection: by themselves they would end after 100 s with code 0, and silence counts after
    300 s only. How soon that is: benchmarks/faults.
    """
    ended = ranks.run(size, die, who)
    assert ended[who].code == -signal.SIGKILL
    for step in range(1, size):
        rank, before = (who + step) % size, (who + step - 1) % size
        message = f"rank {rank} (replica {rank}, stage 0): rank {before} is gone; leaving"
        assert ended[rank][:3] == (1, [], [message])


def fall_silent(rank, size, who):
    Processes(Topology(size, 1, rank, rank), CPU, silence=1.5)
    if rank == who:
        subprocess.Popen(["sh", "-c", f"sleep 5; kill -KILL {os.getpid()}"])  # nobody else would
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)


def test_a_rank_that_falls_silent_is_named_and_given_up():
    """By the next rank, whose end the third reports; before the silent one is killed."""
    silent, after, third = ranks.run(3, fall_silent, 0)
    reason = "rank 0 has said nothing for 1.5 s: it is stopped or hangs, or its host is gone; leaving"
    assert after[:3] == (1, [], [f"rank 1 (replica 1, stage 0): {reason}"])
    assert (third.code, third.errors) == (1, ["rank 2 (replica 2, stage 0): rank 1 is gone; leaving"])
    assert max(after.later, third.later) < silent.later


@pytest.mark.parametrize(
    ("address", "port", "fault"),
    [
        ("127.0.0.1", "1", r"rank 1 \(replica 1, stage 0\) did not meet all 2 ranks at 127.0.0.1:1 "),
        ("", "1234", "MASTER_ADDR and MASTER_PORT must name"),
        ("127.0.0.1", "", "MASTER_ADDR and MASTER_PORT must name"),
        ("127.0.0.1", "http", "MASTER_ADDR and MASTER_PORT must name"),
    ],
)
def test_ranks_that_do_not_meet_are_an_error_of_one_line(monkeypatch, address, port, fault):
    monkeypatch.setattr("parallel.processes._RENDEZVOUS_SECONDS", 0.2)
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=f"^{fault}"):
        Processes(Topology(2, 1, 1), CPU)

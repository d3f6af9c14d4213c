"""Two hosts on one machine: network namespaces joined by a cable, each with its own loopback and nothing else."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from parallel.parent_death import bound_to_parent
from tests import ranks
from tests.conftest import QUICKSTART, ROOT
from tests.training.test_resume import Outcome, lines_of
from tests.training.test_several_ranks import TWO_STAGES, assert_same_outcome, train_to_the_end

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]

SUM = r"""
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
local, interface = os.environ["LOCAL_RANK"], os.environ["GLOO_SOCKET_IFNAME"]
print(f"rank {dist.get_rank()} local {local} by {interface}: {total.item():.0f}\n", end="")
dist.destroy_process_group()
"""

REST = r"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, os.getcwd())
import torch
from parallel.processes import Processes
from parallel.topology import Topology
rank, world, silence = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), float(sys.argv[-2].partition("=")[2])
processes = Processes(Topology(world, 1, rank, 0), torch.device("cpu"), silence)
(Path(__file__).parent / f"ready-{rank}").touch()
time.sleep(300)
"""

# What run_pod.sh runs, but for the program.
DRIVE = """
import sys
import time
from parallel import hosts
from tools import launch
hosts.REACH_SECONDS = float(sys.argv.pop(1))
sys.exit(launch.main(sys.argv[2:], program=sys.argv[1]))
"""


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@pytest.fixture
def two_hosts():
    """Names of two namespaces; 10.83.0.1 and 10.83.0.2 are their addresses on `cable`."""
    names = [f"pod{os.getpid()}-{number}" for number in range(2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            if os.geteuid() or ip("netns", "add", name).returncode:
                pytest.skip("needs root and network namespaces")
            stack.callback(ip, "netns", "del", name)
        commands = [f"-n {names[0]} link add cable type veth peer name cable netns {names[1]}"]
        for number, name in enumerate(names):
            commands += [f"-n {name} addr add 10.83.0.{number + 1}/24 dev cable"]
            commands += [f"-n {name} link set {device} up" for device in ("lo", "cable")]
        for command in commands:
            done = ip(*command.split())
            if done.returncode:
                pytest.skip(f"ip {command}: {done.stderr}")
        yield names


@contextlib.contextmanager
def started(commands):
    """The processes of several commands, all of them ended at the end."""
    environment = {**os.environ, "POD_TOKEN": "of these tests"}
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            command, pipe = bound_to_parent(["/usr/bin/env", *command]), subprocess.PIPE
            process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=environment)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def on(name, program, patience, hosts=2):
    """The launcher's command in a namespace, as far as it is the same on all hosts."""
    recipe = ["--config", str(QUICKSTART), "batch.global=256", "run.device=cpu", "--replicas", "4", f"--nnodes={hosts}"]
    return ["ip", "netns", "exec", name, sys.executable, "-c", DRIVE, str(patience), str(program), *recipe]


def test_four_ranks_on_two_hosts_add_up(two_hosts, tmp_path):
    program = tmp_path / "sum.py"
    program.write_text(SUM)
    commands = [
        [*on(name, program, patience=45), "--node-rank", str(number), "--master", "10.83.0.1:29511"]
        for number, name in enumerate(two_hosts)
    ]
    with started(commands) as processes:
        for number, process in enumerate(processes):
            out, errors = process.communicate(timeout=80)
            assert (process.returncode, errors) == (0, "")
            assert sorted(out.splitlines()[1:]) == [
                f"rank {2 * number + local} local {local} by cable: 1111" for local in range(2)
            ]


def test_a_host_without_a_way_to_the_master(two_hosts, tmp_path):
    """198.51.100.0/24 is for documentation (RFC 5737): there is no route to it."""
    command = [*on(two_hosts[1], tmp_path / "none.py", patience=2), "--node-rank", "1", "--master", "198.51.100.1"]
    with started([command]) as (process,):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        assert len(errors.splitlines()) == 1
        assert errors.startswith("cannot reach the master 198.51.100.1:29500 within 2 s (Network is unreachable); ")


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_no_launcher_stays_when_the_link_between_hosts_is_cut(two_hosts, tmp_path, restarts):
    """Four hosts, two on each side: packets vanish, and nobody is told. All end."""
    program, silence = tmp_path / "rest.py", 6
    program.write_text(REST)
    options = ["--master", "10.83.0.1:29512", f"--max-restarts={restarts}", f"parallel.silence={silence}"]
    commands = [[*on(two_hosts[host // 2], program, 45, 4), f"--node-rank={host}", *options] for host in range(4)]
    with started(commands) as processes:
        end = time.monotonic() + 120
        while len(list(tmp_path.glob("ready-*"))) < 4:
            assert time.monotonic() < end and all(process.poll() is None for process in processes)
            time.sleep(0.05)
        for number, name in enumerate(two_hosts):
            nobody = f"neigh replace 10.83.0.{2 - number} lladdr 02:00:00:00:00:99 dev cable nud permanent"
            assert ip("-n", name, *nobody.split()).returncode == 0
        # 10 and what a busy machine adds; TCP gives up after a quarter of an hour.
        end = time.monotonic() + silence + 60
        ended = [process.communicate(timeout=max(0.1, end - time.monotonic())) for process in processes]
    assert [process.returncode for process in processes] == [1] * 4, ended


@contextlib.contextmanager
def training(two_hosts, tmp_path, *recipe):
    """Processes of the command of docs/cluster.md on each host; at the end they have trained what one process does."""
    train_to_the_end(1, *recipe, f"run.output={tmp_path / 'single'}")
    pod = [ROOT / "run_pod.sh", "--nnodes", "2", "--master", "10.83.0.1", "--replicas", "2", "--config", QUICKSTART]
    pod += [*ranks.RECIPE, *recipe, f"run.output={tmp_path / 'run'}"]
    commands = [["ip", "netns", "exec", name, *pod, "--node-rank", str(rank)] for rank, name in enumerate(two_hosts)]
    with started(commands) as processes:
        yield processes
        outputs = [process.communicate(timeout=300) for process in processes]
    assert [(process.returncode, errors) for process, (_, errors) in zip(processes, outputs)] == [(0, ""), (0, "")]
    assert [len(out.splitlines()) > 1 for out, _ in outputs] == [True, False]
    assert_same_outcome(tmp_path / "run", Outcome(tmp_path / "single"))


@pytest.mark.slow
def test_two_hosts_train_what_one_process_trains(two_hosts, tmp_path):
    """Two replicas of two stages, a replica on each host."""
    with training(two_hosts, tmp_path, *TWO_STAGES):
        pass


@pytest.mark.slow
def test_a_cable_that_is_pulled_for_twenty_seconds_is_survived(two_hosts, tmp_path):
    """Two replicas, one on each host; less than `parallel.silence`, so both wait, and end as one process does."""
    with training(two_hosts, tmp_path, "run.epochs=6") as processes:
        while lines_of(tmp_path / "run") < 3:
            assert all(process.poll() is None for process in processes), processes[0].communicate()
            time.sleep(0.01)
        assert ip("-n", two_hosts[1], "link", "set", "cable", "down").returncode == 0
        time.sleep(2)  # what is on its way
        before = lines_of(tmp_path / "run")
        time.sleep(18)
        assert lines_of(tmp_path / "run") == before and all(process.poll() is None for process in processes)
        assert ip("-n", two_hosts[1], "link", "set", "cable", "up").returncode == 0

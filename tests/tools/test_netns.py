"""Two hosts on one machine: network namespaces joined by a cable, each with its own loopback and
nothing else."""

import contextlib
import os
import subprocess
import time

import pytest

from tests import ranks
from tests.conftest import ROOT
from tests.tools.launchers import Launcher
from tests.training.test_resume import lines_of
from tests.training.test_several_ranks import TWO_STAGES, assert_same_outcome, train_to_the_end
from tests.waiting import wait_until

pytestmark = [pytest.mark.netns, pytest.mark.multiprocess]

SUM = r"""
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
print(f"rank {dist.get_rank()} by {os.environ['GLOO_SOCKET_IFNAME']}: {total.item():.0f}")
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

MASTER = ("--master", "10.83.0.1")


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


@pytest.fixture
def start(two_hosts, tmp_path):
    """start(host, program, *arguments): a launcher in the namespace of host 0 or 1; ends with the
    test."""
    with contextlib.ExitStack() as stack:

        def started(host, program, *arguments, **options):
            options.update(namespace=two_hosts[host], OMP_NUM_THREADS="1")
            launcher = Launcher(tmp_path, program, "run.device=cpu", *arguments, **options)
            stack.callback(launcher.kill)
            return launcher

        yield started


@pytest.mark.slow
def test_ranks_on_two_hosts_add_up(start, tmp_path):
    program = tmp_path / "sum.py"
    program.write_text(SUM)
    options = ("batch.global=256", "--replicas", "2", "--nnodes", "2", *MASTER, "--node-rank")
    launchers = [start(host, program, *options, host) for host in range(2)]
    for host, launcher in enumerate(launchers):
        code, out, errors = launcher.end(timeout=80)
        assert (code, out[1:], errors) == (0, [f"rank {host} by cable: 11"], [])


@pytest.mark.slow
@pytest.mark.clock
@pytest.mark.parametrize("restarts", [0, 1])
def test_no_launcher_stays_when_the_link_between_hosts_is_cut(start, two_hosts, tmp_path, restarts):
    """Four hosts, two on each side: packets vanish, and nobody is told. All end."""
    program = tmp_path / "rest.py"
    silence = 6
    program.write_text(REST)
    options = ("batch.global=256", "--replicas", "4", "--nnodes", "4", *MASTER)
    options += (f"--max-restarts={restarts}", f"parallel.silence={silence}", "--node-rank")
    launchers = [start(host // 2, program, *options, host) for host in range(4)]
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 4)
    for number, name in enumerate(two_hosts):
        nobody = (
            f"neigh replace 10.83.0.{2 - number} lladdr 02:00:00:00:00:99 dev cable nud permanent"
        )
        assert ip("-n", name, *nobody.split()).returncode == 0
    # 10 and what a busy machine adds; TCP gives up after a quarter of an hour.
    end = time.monotonic() + silence + 60
    ended = [launcher.end(timeout=max(0.1, end - time.monotonic())) for launcher in launchers]
    assert [code for code, _, _ in ended] == [1] * 4, ended


@pytest.mark.slow
@pytest.mark.clock
def test_two_hosts_train_what_one_process_trains_also_if_a_cable_is_pulled_for_twenty_seconds(
    start, two_hosts, tmp_path
):
    """Two replicas of two stages, a replica on each host; less than `parallel.silence`, so both
    wait. Each replica takes the noise scale of its own micro batches, so it is off."""
    recipe = (*TWO_STAGES, "run.epochs=6", "log.noise_scale=false")
    train_to_the_end(1, *recipe, f"run.output={tmp_path / 'single'}")
    options = (
        "--replicas",
        "2",
        *ranks.RECIPE,
        *recipe,
        f"run.output={tmp_path / 'run'}",
        "--nnodes",
        "2",
        *MASTER,
    )
    launchers = [start(host, ROOT / "train.py", *options, "--node-rank", host) for host in range(2)]

    def lines():
        assert all(launcher.running() for launcher in launchers), launchers[0].errors()
        return lines_of(tmp_path / "run")

    wait_until(lambda: lines() >= 3)
    assert ip("-n", two_hosts[1], "link", "set", "cable", "down").returncode == 0
    time.sleep(2)  # what is on its way
    before = lines()
    time.sleep(18)
    assert lines() == before
    assert ip("-n", two_hosts[1], "link", "set", "cable", "up").returncode == 0
    ended = [launcher.end(timeout=300) for launcher in launchers]
    assert [(code, errors) for code, _, errors in ended] == [(0, []), (0, [])]
    assert [len(out) > 1 for _, out, _ in ended] == [True, False]
    assert_same_outcome(tmp_path / "run", tmp_path / "single")


@pytest.mark.slow
@pytest.mark.clock
def test_a_host_that_is_cut_off_for_twenty_seconds_comes_back_into_an_elastic_run(
    start, two_hosts, tmp_path
):
    """For longer than `parallel.silence`: the first host goes on alone; the bits are those of one
    process."""
    recipe = ("run.epochs=60", "log.noise_scale=false", "log.every_steps=1")
    train_to_the_end(1, *recipe, f"run.output={tmp_path / 'single'}")
    elastic = ("parallel.elastic=true", "parallel.silence=5", "--nnodes", "2", *MASTER)
    options = (
        "--replicas",
        "2",
        *ranks.RECIPE,
        *recipe,
        f"run.output={tmp_path / 'run'}",
        *elastic,
    )
    launchers = [start(host, ROOT / "train.py", *options, "--node-rank", host) for host in range(2)]
    wait_until(lambda: lines_of(tmp_path / "run") >= 10)
    assert ip("-n", two_hosts[1], "link", "set", "cable", "down").returncode == 0
    time.sleep(20)
    before = lines_of(tmp_path / "run")
    assert ip("-n", two_hosts[1], "link", "set", "cable", "up").returncode == 0
    ended = [launcher.end(timeout=300) for launcher in launchers]
    assert before > 20 and [code for code, _, _ in ended] == [0, 0], ended
    lines = ended[0][1]
    assert any(line.endswith("with replicas 0") for line in lines)
    assert any(line.endswith("with replicas 0, 1") for line in lines), lines[-20:]
    assert_same_outcome(tmp_path / "run", tmp_path / "single")

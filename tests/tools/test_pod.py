"""A whole run by the launcher whose main rank is killed: it starts again, ends as the undisturbed run, leaves nothing.

The undisturbed run is one process, the other two stages.
"""

import contextlib
import os
import signal
import socket
import uuid

import pytest

from tests import ranks
from tests.conftest import ROOT
from tests.tools.launchers import Launcher, alive, kill_all
from tests.training.test_resume import Outcome, lines_of
from tests.training.test_several_ranks import train_to_the_end
from tests.waiting import wait_until

pytestmark = pytest.mark.multiprocess

# Of one process, and of two, the noise scale measures other micro batches.
RECIPE = (*ranks.RECIPE, "log.every_steps=1", "data.workers=1", "log.noise_scale=false")


def processes(mark):
    """{pid: rank} of all that has inherited this mark in its environment: ranks and their data workers."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as stream:
            variables = dict(entry.partition(b"=")[::2] for entry in stream.read().split(b"\0"))
            if variables.get(b"TEST_OF_POD") == mark.encode() and alive(int(name)):
                found[int(name)] = int(variables[b"RANK"])
    return found


@pytest.fixture
def mark():
    made = uuid.uuid4().hex
    yield made
    kill_all(processes(made))


@pytest.mark.slow  # test_launch.py kills ranks, and training/test_resume.py whole runs
def test_a_killed_main_rank_is_started_again_and_resumes(tmp_path, mark):
    folder = tmp_path / "run"
    train_to_the_end(1, *RECIPE, f"run.output={tmp_path / 'undisturbed'}")
    arguments = ("--stages", "2", "--replicas", "1", "--max-restarts", "1", *RECIPE, f"run.output={folder}")
    launcher = Launcher(tmp_path, ROOT / "train.py", *arguments, OMP_NUM_THREADS="1", TEST_OF_POD=mark)
    try:
        # The third step is the first to be saved; its line is the fourth.
        wait_until(lambda: not launcher.running() or lines_of(folder) >= 5, seconds=240)
        before = processes(mark)
        assert list(before.values()).count(0) >= 2, (launcher.errors(), "a rank that reads images has a data worker")
        os.kill(min(pid for pid, rank in before.items() if rank == 0), signal.SIGKILL)
        code, out, errors = launcher.end(timeout=240)
    finally:
        launcher.kill()
    killed = f"rank 0 (host {socket.gethostname()}) was killed (SIGKILL); all ranks stopped; rerun to resume"
    assert (code, errors) == (0, [killed, "restart 1 of 1: the run goes on from its last checkpoint"])
    assert len([line for line in out if line.startswith("resuming at step ")]) == 1
    assert processes(mark) == {}
    Outcome(folder).assert_same(Outcome(tmp_path / "undisturbed"))

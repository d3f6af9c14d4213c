"""Whole runs by the launcher: killed, failed, and ended as the undisturbed run; no process is left behind.

The undisturbed run is one process; the others are replicas or stages; sums in a tree have the same bits.
"""

import contextlib
import os
import signal
import socket
import time
import uuid

import pytest

from tests import ranks
from tests.conftest import ROOT
from tests.tools.launchers import Launcher, alive, kill_all
from tests.training.test_resume import Outcome, lines_of
from tests.training.test_several_ranks import train_to_the_end
from tests.waiting import wait_until

pytestmark = pytest.mark.multiprocess

DONE, FAILED = 0, 1
# Of one process, and of two, the noise scale measures other micro batches.
RECIPE = (*ranks.RECIPE, "log.every_steps=1", "data.workers=1", "log.noise_scale=false")


class Pod:
    """Runs that write one folder. A variable that they inherit marks their ranks and the workers of these."""

    def __init__(self, tmp_path):
        self.tmp_path, self.folder = tmp_path, tmp_path / "run"
        self._mark = uuid.uuid4().hex
        self.started = []

    def start(self, *arguments, program=ROOT / "train.py"):
        arguments = (*arguments, f"run.output={self.folder}")
        launcher = Launcher(self.tmp_path, program, *arguments, OMP_NUM_THREADS="1", TEST_OF_POD=self._mark)
        self.started.append(launcher)
        return launcher

    def end(self, launcher):
        """Exit code, lines of stdout but the launcher's first, lines of stderr; nothing of the run goes on."""
        code, out, errors = launcher.end(timeout=240)
        assert self.processes() == {}
        return code, out[1:], errors

    def __call__(self, *arguments, **options):
        return self.end(self.start(*arguments, **options))

    def processes(self):
        """{pid: rank} of all that goes on."""
        found = {}
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as stream:
                variables = dict(entry.partition(b"=")[::2] for entry in stream.read().split(b"\0"))
                if variables.get(b"TEST_OF_POD") == self._mark.encode() and alive(int(name)):
                    found[int(name)] = int(variables[b"RANK"])
        return found

    def kill(self, launcher, rank):
        """In mid-run, one rank; its data worker is left to the launcher. All pids, and when."""

        def begun():
            assert launcher.running(), launcher.errors()
            return lines_of(self.folder) >= 5  # the third step is the first to be saved; its line is the fourth

        wait_until(begun, seconds=240)
        before = self.processes()
        assert list(before.values()).count(rank) >= 2, "a rank that reads images has a data worker"
        os.kill(min(pid for pid, number in before.items() if number == rank), signal.SIGKILL)
        return before, time.monotonic()


@pytest.fixture
def pod(tmp_path):
    made = Pod(tmp_path)
    yield made
    for launcher in made.started:
        launcher.kill()
    kill_all(made.processes())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train_to_the_end(1, *RECIPE, f"run.output={folder}")
    return Outcome(folder)


def line_about(rank):
    return f"rank {rank} (host {socket.gethostname()}) was killed (SIGKILL); all ranks stopped; rerun to resume"


@pytest.mark.slow  # test_launch.py kills ranks, and training/test_resume.py whole runs
def test_a_killed_rank_ends_the_run_which_the_same_command_resumes(pod, undisturbed):
    arguments = ("--replicas", "2", *RECIPE)
    launcher = pod.start(*arguments)
    before, then = pod.kill(launcher, 1)
    wait_until(lambda: not any(alive(pid) for pid in before), seconds=10 - (time.monotonic() - then))
    code, _, errors = pod.end(launcher)
    assert (code, errors) == (FAILED, [line_about(1)])
    code, out, errors = pod(*arguments)
    assert (code, errors) == (DONE, []) and any(line.startswith("resuming at step ") for line in out)
    Outcome(pod.folder).assert_same(undisturbed)


@pytest.mark.slow
def test_a_killed_main_rank_is_started_again_by_itself(pod, undisturbed):
    launcher = pod.start("--stages", "2", "--replicas", "1", "--max-restarts", "1", *RECIPE)
    pod.kill(launcher, 0)
    code, out, errors = pod.end(launcher)
    assert (code, errors) == (DONE, [line_about(0), "restart 1 of 1: the run goes on from its last checkpoint"])
    assert len([line for line in out if line.startswith("resuming at step ")]) == 1
    Outcome(pod.folder).assert_same(undisturbed)


FAULTY = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import train
from tests import ranks
from training.command import finish
def fault():
    raise RuntimeError("the fault of one")
if os.environ["RANK"] == "1":
    ranks.before_step(3, fault)
finish(train.main)
"""


@pytest.mark.slow
def test_a_fault_in_one_rank_is_reported_once_and_first(pod, tmp_path):
    program = tmp_path / "faulty.py"
    program.write_text(FAULTY)
    code, _, errors = pod("--replicas", "2", *ranks.RECIPE, program=program)
    assert (code, errors[0]) == (FAILED, "Traceback (most recent call last):")
    assert errors[-2:] == [
        "RuntimeError: the fault of one",
        f"rank 1 failed with exit code 1 (host {socket.gethostname()}); all ranks stopped",
    ]
    assert not [line for line in errors[1:-1] if "Traceback" in line or "leaving" in line]

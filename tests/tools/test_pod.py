"""Whole runs by run_pod.sh: killed, stopped, failed, and ended as the undisturbed run; no process is left behind.

The undisturbed run is one process; the others are replicas or stages, whose tree of sums has the same bits.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest
from PIL import Image

from data.base import permutation
from data.folder import FolderSource
from parallel.parent_death import bound_to_parent
from tests import ranks
from tests.conftest import QUICKSTART, ROOT
from tests.tools.test_launch import alive
from tests.training.test_resume import Outcome, lines_of
from tests.training.test_several_ranks import train_to_the_end

pytestmark = pytest.mark.multiprocess

DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 75
# 20 steps, so that there is time to disturb it; the third is the first to be saved, and its line the fourth.
LONG = ("run.epochs=4", "log.every_steps=1")

# The launcher with another program in place of train.py: train.py after what the file `sabotage` says.
DRIVE = "import sys; from tools import launch; sys.exit(launch.main(sys.argv[2:], program=sys.argv[1]))"
PROGRAM = """
import functools, os, sys
sys.path.insert(0, {root!r})
import train
from tests import ranks
from training.command import finish
if __name__ == "__main__":
    rank = int(os.environ["RANK"])
{sabotage}
    finish(train.main)
"""


class Pod:
    """Runs of run_pod.sh that write one folder. All their processes can be told by a variable that they inherit."""

    def __init__(self, tmp_path):
        self.tmp_path, self.folder = tmp_path, tmp_path / "run"
        self._mark = uuid.uuid4().hex
        self._started = []

    def start(self, *arguments, sabotage=None):
        command = [ROOT / "run_pod.sh"]
        if sabotage is not None:
            program = self.tmp_path / "program.py"
            program.write_text(PROGRAM.format(root=str(ROOT), sabotage=sabotage))
            command = [sys.executable, "-c", DRIVE, program]
        process = subprocess.Popen(
            bound_to_parent([*command, "--config", QUICKSTART, *arguments, f"run.output={self.folder}"]),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TEST_OF_POD": self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def end(self, process, timeout=240):
        """Exit code, lines of stdout but the launcher's first, lines of stderr; nothing of the run goes on."""
        out, errors = process.communicate(timeout=timeout)
        assert self.processes() == {}
        return process.returncode, out.splitlines()[1:], errors.splitlines()

    def __call__(self, *arguments, **options):
        return self.end(self.start(*arguments, **options))

    def processes(self):
        """{pid: rank} of all that goes on; the launcher's rank is None."""
        found = {}
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as stream:
                variables = dict(entry.partition(b"=")[::2] for entry in stream.read().split(b"\0"))
                if variables.get(b"TEST_OF_POD") == self._mark.encode() and alive(int(name)):
                    found[int(name)] = int(variables[b"RANK"]) if b"RANK" in variables else None
        return found

    def wait_for_lines(self, process, number):
        end = time.monotonic() + 240
        while lines_of(self.folder) < number:
            assert process.poll() is None and time.monotonic() < end, process.communicate(timeout=10)
            time.sleep(0.002)

    def kill(self, process, rank):
        """In mid-run, one rank; its data worker is left to the launcher. All pids, and when."""
        self.wait_for_lines(process, 5)
        before = self.processes()
        assert min(list(before.values()).count(number) for number in (0, 1)) >= 2, "each rank has a data worker"
        os.kill(min(pid for pid, number in before.items() if number == rank), signal.SIGKILL)
        return before, time.monotonic()


@pytest.fixture
def pod(tmp_path):
    made = Pod(tmp_path)
    yield made
    for pid in [process.pid for process in made._started if process.poll() is None] + list(made.processes()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in made._started:
        process.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train_to_the_end(1, *LONG, f"run.output={folder}")
    return Outcome(folder)


def line_about(rank):
    return f"rank {rank} (host {socket.gethostname()}) was ended by signal 9 (SIGKILL); all ranks are gone"


WITH_WORKERS = (*ranks.RECIPE, *LONG, "data.workers=1")


def test_a_killed_rank_ends_the_run_which_the_same_command_resumes(pod, undisturbed):
    arguments = ("--replicas", "2", *WITH_WORKERS)
    process = pod.start(*arguments)
    before, then = pod.kill(process, 1)
    while any(alive(pid) for pid in before):
        assert time.monotonic() - then < 10, pod.processes()
        time.sleep(0.02)
    code, _, errors = pod.end(process)
    assert (code, errors) == (FAILED, [line_about(1)])
    code, out, errors = pod(*arguments)
    assert (code, errors) == (DONE, []) and any(line.startswith("resuming at step ") for line in out)
    Outcome(pod.folder).assert_same(undisturbed)


@pytest.mark.slow
def test_a_killed_main_rank_is_started_again_by_itself(pod, undisturbed):
    process = pod.start("--stages", "2", "--replicas", "1", "--max-restarts", "1", *WITH_WORKERS)
    pod.kill(process, 0)
    code, out, errors = pod.end(process)
    assert (code, errors) == (DONE, [line_about(0), "restart 1 of 1: the run goes on from its last checkpoint"])
    assert len([line for line in out if line.startswith("resuming at step ")]) == 1
    Outcome(pod.folder).assert_same(undisturbed)


@pytest.mark.slow
def test_a_stopped_run_is_saved_and_goes_on(pod, undisturbed):
    arguments = ("--replicas", "2", *ranks.RECIPE, *LONG)
    process = pod.start(*arguments)
    pod.wait_for_lines(process, 2)
    process.send_signal(signal.SIGTERM)
    code, _, errors = pod.end(process)
    assert code == STOPPED
    first = "SIGTERM: the ranks finish their step, save and end; a second signal ends them at once"
    assert errors[0] == first and len(errors) == 2
    step = int(errors[1].partition("saved at step ")[2].partition(";")[0])
    assert errors[1] == f"SIGUSR1: saved at step {step}; the same command resumes"
    assert (pod.folder / "checkpoints" / f"step-{step:08d}.json").exists()
    code, out, errors = pod(*arguments)
    assert (code, errors) == (DONE, [])
    assert f"resuming at step {step} of 20" in out
    Outcome(pod.folder).assert_same(undisturbed)


def test_an_unreadable_image_is_one_line(pod, tmp_path):
    """Only the second replica meets it; under the launcher no other rank prints a line."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), dtype=np.uint8)
    for split in ("train", "val"):
        for kind in ("a", "b"):
            (tmp_path / split / kind).mkdir(parents=True)
            for number in range(24):
                Image.fromarray(pixels).save(tmp_path / split / kind / f"{number}.png")
    source = FolderSource(str(tmp_path / "train"))
    name = source.name(int(permutation(0, 0, 48)[14]))
    os.truncate(name, 20)
    folder = ("data.source=folder", f"data.root={tmp_path}", "model.classes=2", "batch.global=24", "batch.micro=4")
    code, _, errors = pod("--replicas", "2", "--max-restarts", "1", *ranks.RECIPE, *folder)
    assert code == WRONG_INPUT
    assert len(errors) == 1 and errors[0].startswith(f"{name}: "), errors


FAULT = """
    def fault():
        raise RuntimeError("the fault of one")
    if rank == 1:
        ranks.before_step(3, fault)
"""


def test_a_fault_in_one_rank_is_reported_once_and_first(pod):
    code, _, errors = pod("--replicas", "2", *ranks.RECIPE, sabotage=FAULT)
    assert code == FAILED
    assert errors[0] == "Traceback (most recent call last):"
    assert errors[-2:] == [
        "RuntimeError: the fault of one",
        f"rank 1 failed with exit code 1 (host {socket.gethostname()}); all ranks are gone",
    ]
    assert not [line for line in errors[1:-1] if "Traceback" in line or "leaving" in line]


FILL = """
    def fill():
        free = os.statvfs({disk!r})
        with open({disk!r} + "/filler", "wb") as stream:
            stream.write(bytes(free.f_bavail * free.f_bsize - 4096))
    if rank == 0:
        ranks.before_step(5, fill)
"""


@pytest.mark.slow
def test_a_full_disk_is_one_line(pod, small_disk):
    """Step 6 is to be saved, and there is no room."""
    disk = small_disk("8m")
    pod.folder = disk / "run"
    code, _, errors = pod("--stages", "2", *ranks.RECIPE, sabotage=FILL.format(disk=str(disk)))
    assert code == FAILED
    assert errors == [
        f"{pod.folder}/checkpoints/step-00000006.pt: No space left on device; make room, then rerun the same command"
        " to resume from the last checkpoint",
        f"rank 0 failed with exit code 1 (host {socket.gethostname()}); all ranks are gone",
    ]

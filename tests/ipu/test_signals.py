"""Signals to all processes of a run whose images PopTorch's own process reads: whole commands, with
the double."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from common.errors import STOPPED
from engines import ipu_input
from tests.conftest import QUICKSTART, ROOT, TINY
from tests.ipu.conftest import DOUBLE, Hanging
from tests.ipu.test_engine import FLOAT32, LARS
from tests.waiting import wait_until

pytestmark = [pytest.mark.ipu, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

PATIENCE = 200  # seconds, on a busy machine

# The process that reads may end while the thread of a queue, for which torch does not wait, has
# unlinked a semaphore and not yet told Python's resource tracker. That unlinks it once more and
# warns; nothing is lost (seen with CPython 3.8.18 and torch 2.0.1 on a busy machine, and where that
# thread was delayed by 0.7 ms).
QUIET_TRACKER = {"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning"}


def of_group(group):
    """{process: its parent} of a process group, without the dead."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, own = path.read_text().rpartition(")")[2].split()[:3]
            if int(own) == group and state != "Z":
                found[int(path.parent.name)] = int(parent)
    return found


def reader_of(run):
    """PopTorch's process: the child of the server that forks it, which is a child of the run."""
    group = of_group(run)
    return next((each for each, parent in group.items() if group.get(parent) == run), None)


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGUSR1)]


@pytest.mark.parametrize("number", [signal.SIGTERM, *SLOW])
def test_a_signal_to_all_processes_while_images_are_waited_for_saves_the_run(tmp_path, number):
    """The process that reads is stopped, so the step lacks its images until the run has noted the
    signal."""
    output = tmp_path / "output"
    errors = tmp_path / "errors"
    command = [
        sys.executable,
        "train.py",
        "--config",
        QUICKSTART,
        *TINY,
        *FLOAT32,
        *LARS,
        "run.device=ipu",
    ]
    command += [
        f"run.output={tmp_path}/run",
        "run.steps=1000000",
        "data.workers=1",
        "log.every_steps=1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(DOUBLE), "OMP_NUM_THREADS": "1", **QUIET_TRACKER}
    with open(output, "w") as stdout, open(errors, "w") as stderr:
        run = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env=environment,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(
            lambda: (metrics.exists() and metrics.stat().st_size) or run.poll() is not None,
            PATIENCE,
        )
        assert run.poll() is None, errors.read_text()
        reader = reader_of(run.pid)
        os.kill(reader, signal.SIGSTOP)
        seen = None
        while seen != (seen := metrics.read_text()):  # what was read before is used up
            time.sleep(1)
        os.killpg(run.pid, number)
        wait_until(
            lambda: (
                f"{number.name}: finishing this step" in output.read_text()
                or run.poll() is not None
            ),
            PATIENCE,
        )
        os.kill(reader, signal.SIGCONT)
        assert run.wait(PATIENCE) == STOPPED, errors.read_text()
        wait_until(lambda: not of_group(run.pid), PATIENCE)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    line = errors.read_text()
    assert line.startswith(f"{number.name}: saved at step ") and line.count("\n") == 1
    step = int(line.split("saved at step ")[1].split(";")[0])
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:08d}.pt").exists()


def feed_of(double, images):
    """A feed of `images`, two a step."""
    values = {
        "batch_size": 2,
        "mode": double.DataLoaderMode.AsyncRebatched,
        "auto_distributed_partitioning": False,
    }
    return ipu_input.TrainingFeed(
        images,
        range(50),
        lambda positions: double.DataLoader(double.Options(), positions, **values),
    )


def test_a_feed_ends_while_others_hold_copies_of_its_pipe(double):
    """As the workers of validation do, which are forks of the run."""
    feed = feed_of(double, TensorDataset(torch.zeros(100, 1), torch.zeros(100)))
    next(feed)
    (reader,) = feed._readers
    copy = os.dup(feed._loader._pipe.fileno())
    try:
        feed.close()
    finally:
        os.close(copy)
    assert reader.exitcode == 0  # killed it would be negative


def test_a_feed_ends_though_a_read_hangs(double, monkeypatch):
    """PopTorch ends its process by the very signals that are withheld from it."""
    monkeypatch.setattr(ipu_input, "_PATIENCE", 1.0)
    feed = feed_of(double, Hanging())
    next(feed)
    (reader,) = feed._readers
    closing = threading.Thread(target=feed.close)
    try:
        closing.start()
        closing.join(PATIENCE / 4)
        assert not closing.is_alive()
    finally:
        reader.kill()
        closing.join()

"""Worker processes: without signals and GPU, gone with their parent, and what is printed where one
cannot go on."""

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from data import workers
from data.batches import Request
from recipe.config import Data
from tests.conftest import QUICKSTART, ROOT, TINY
from tests.waiting import wait_until


def test_workers_block_the_signals_that_ask_a_run_to_stop_and_see_no_gpu(monkeypatch):
    """Decoders that can use a GPU would each take hundreds of megabytes of its memory."""
    with workers.signals_withheld():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= {
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGUSR1,
        }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(workers.multiprocessing, "parent_process", multiprocessing.current_process)
    monkeypatch.setattr(workers, "_WAITS_FOR_SIGNALS", False)
    workers.begin_work(0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_queue_to_a_killed_worker_prints_nothing(capfd):
    """Nobody reads it any more; without this the thread that feeds it prints a traceback, if it is
    about to write."""
    queue = workers._quiet_context().Queue()
    queue._reader.close()
    queue.put("for a worker that is gone")
    queue.close()
    queue.join_thread()
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="workers elsewhere do not wait for signals")
def test_a_worker_that_hangs_ends_with_a_parent_that_was_killed(tmp_path):
    """It waits within a call to the system, as for a file server that is gone; there torch's
    watchdog has no turn."""
    os.mkfifo(tmp_path / "pipe")
    run = multiprocessing.get_context("fork").Process(target=_train_on, args=(Hung(tmp_path),))
    run.start()
    worker = tmp_path / "worker"
    try:
        wait_until(lambda: worker.exists() and worker.read_text())
    finally:
        run.kill()
        run.join()
    running = ["grep", "-qs", "State:.[RSD]", f"/proc/{worker.read_text()}/status"]
    # it is gone, or waits for its parent to look at how it ended
    wait_until(lambda: subprocess.call(running))


class Hung:
    def __init__(self, folder):
        self._folder = folder

    def __getitem__(self, request):
        (self._folder / "worker").write_text(str(os.getpid()))
        (self._folder / "pipe").read_text()


def _train_on(reader):
    next(iter(workers.Loader(reader, [Request(0, 0, 0, 8, [0])], Data(source="digits", workers=1))))


@pytest.mark.parametrize(
    ("fault", "is_full"),
    [("No space left on device (28)", True), ("Too many open files (24)", False)],
)
def test_images_in_memory_that_find_no_room_on_their_way_to_workers_are_one_line(
    monkeypatch, fault, is_full
):
    """On CUDA torch moves them to shared memory as a worker is started, and says so in words
    alone."""
    text = f"unable to allocate shared memory(shm) for file </torch_1_2_0>: {fault}"

    def start(self):
        raise RuntimeError(text)

    monkeypatch.setattr(workers.DataLoader, "__iter__", start)
    loader = workers.Loader(None, [], Data(source="digits", workers=0))
    with pytest.raises(OSError if is_full else RuntimeError) as raised:
        iter(loader)
    if is_full:
        assert (
            raised.value.filename == "/dev/shm" and "data sets in memory" in raised.value.strerror
        )
    else:
        assert str(raised.value) == text


_FULL = """
import os, subprocess, sys
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv[1]}", "tmpfs", "/dev/shm"], check=True)
if sys.argv[1] == "4k":
    open("/dev/shm/filled", "wb").write(bytes(4096))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@pytest.mark.multiprocess  # torch 2.0.1 words a full shared memory otherwise
@pytest.mark.slow  # two whole commands
@pytest.mark.parametrize("size", ["4k", "64k"])
def test_shared_memory_that_is_full_is_named(tmp_path, size):
    """Full before workers are started, or by their first images: one line, which names neither
    folder nor internals."""
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs root and namespaces")
    recipe = [
        "--config",
        str(QUICKSTART),
        *TINY,
        "run.device=cpu",
        "data.workers=2",
        f"run.output={tmp_path / 'run'}",
    ]
    train = ["train.py", *recipe, "batch.micro=24", "model.image_size=64"]
    command = ["unshare", "-m", sys.executable, "-c", _FULL, size, *train]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 1, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert (
        line.startswith("/dev/shm: No space left on device")
        and "--shm-size" in line
        and "data.workers" in line
    )

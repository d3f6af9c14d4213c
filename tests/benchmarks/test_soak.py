"""The soak measures memory that is held, and not pages that stop being shared."""

import os
import signal
import subprocess
import sys

import pytest

from benchmarks import soak
from benchmarks.soak import Sample, sample

_MEGABYTES = 64
# Each line that it is given takes it one step on: keeps memory, has a child that inherits it,
# writes to all of it.
_PROGRAM = f"""
import os, sys, time
def pause():
    print(flush=True)
    sys.stdin.readline()
pause()
kept = bytearray(b"1" * {_MEGABYTES << 20})
pause()
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
pause()
kept[::4096] = bytes(len(kept[::4096]))
opened = [open(os.devnull) for _ in range(7)]
pause()
"""


def test_what_is_kept_shows_and_what_is_no_longer_shared_does_not():
    """A few pages more or less are the interpreter's own."""
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], **pipes) as program:
        samples = []
        for number in range(4):
            program.stdout.readline()
            samples.append(sample(program.pid, number))
            program.stdin.write("\n")
            program.stdin.flush()
        os.killpg(program.pid, signal.SIGKILL)
    start, kept, shared, written = samples
    size = 1024 * _MEGABYTES
    assert kept.memory_kb - start.memory_kb == pytest.approx(size, rel=0.05)
    assert shared.memory_kb > kept.memory_kb + 0.9 * size, "inherited pages count"
    assert written.memory_kb == pytest.approx(shared.memory_kb, abs=1024)
    assert (shared.files, written.files) == (2 * start.files, 2 * start.files + 7)
    assert (start.threads, shared.threads) == (1, 2)


@pytest.mark.parametrize("lost", ["fd", "task"])
def test_a_process_that_ends_as_it_is_read_does_not_count_at_all(monkeypatch, lost):
    def entries(folder):
        if folder.endswith(lost):
            raise FileNotFoundError(folder)
        return 7

    monkeypatch.setattr(soak, "_entries", entries)
    assert sample(os.getpid(), 50) == Sample(50, 0, 0, 0)


def test_an_error_ends_the_training(monkeypatch, tmp_path):
    late = tmp_path / "late"
    program = f"import pathlib, time; time.sleep(2); pathlib.Path({str(late)!r}).touch()"
    monkeypatch.setattr(soak, "bound_to_parent", lambda command: [sys.executable, "-c", program])
    monkeypatch.setattr(soak, "_reached", lambda log: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        soak.measure(soak.Run((), ()), tmp_path)
    assert not late.exists()


def test_the_slope_is_of_what_comes_after_the_warm_up():
    """3 kB an update from the thousandth on, and a jump before."""
    samples = [
        Sample(step, 5e5 * (step >= 500) + 3.0 * step, 20, 5) for step in range(0, soak.STEPS, 50)
    ]
    assert soak.slope(samples, "memory_kb") == pytest.approx(3000.0)
    assert soak.slope(samples, "files") == 0.0

"""The soak measures memory that is held, and not pages that stop being shared."""

import os
import signal
import subprocess
import sys

import pytest

from benchmarks import soak
from benchmarks.soak import Sample, sample

_MEGABYTES = 64
# Each line that it is given takes it one step on: keeps memory, has a child that inherits it, writes to all of it.
_PROGRAM = f"""
import os, sys, time
print(flush=True)
sys.stdin.readline()
kept = bytearray(b"1" * {_MEGABYTES << 20})
print(flush=True)
sys.stdin.readline()
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print(flush=True)
sys.stdin.readline()
kept[::4096] = bytes(len(kept[::4096]))
opened = [open(os.devnull) for _ in range(7)]
print(flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def stages():
    """Samples of the program above: as it starts, with memory, with a child that shares it, once nothing is shared."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], **pipes) as program:
        found = []
        for number in range(4):
            program.stdout.readline()
            found.append(sample(program.pid, number))
            program.stdin.write("\n")
            program.stdin.flush()
        os.killpg(program.pid, signal.SIGKILL)
    return found


def test_what_is_kept_shows_and_what_is_no_longer_shared_does_not(stages):
    """A few pages more or less are the interpreter's own."""
    start, kept, shared, written = stages
    size = 1024 * _MEGABYTES
    assert kept.memory_kb - start.memory_kb == pytest.approx(size, rel=0.05)
    assert kept.distinct_kb == pytest.approx(kept.memory_kb, rel=0.01)
    assert shared.distinct_kb == pytest.approx(kept.distinct_kb, rel=0.1), "the child has no pages of its own"
    assert shared.memory_kb > kept.memory_kb + 0.9 * size, "and its inherited ones count"
    assert written.distinct_kb - shared.distinct_kb == pytest.approx(size, rel=0.05)
    assert written.memory_kb == pytest.approx(shared.memory_kb, abs=1024)
    assert (shared.files, written.files) == (2 * start.files, 2 * start.files + 7)
    assert (start.threads, shared.threads) == (1, 2)


def test_the_slope_is_of_what_comes_after_the_warm_up():
    """3 kB an update from the thousandth on, and a jump before."""
    steps = range(0, soak.STEPS, 50)
    samples = [Sample(step, 5e5 * (step >= 500) + 3.0 * step, 1e6, 20, 5) for step in steps]
    assert soak.slope(samples, "memory_kb") == pytest.approx(3000.0)
    assert soak.slope(samples, "files") == 0.0

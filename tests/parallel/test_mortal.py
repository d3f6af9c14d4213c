"""Processes that die with the one that started them."""

import os
import signal
import subprocess
import sys
import time

import pytest

from parallel.mortal import mortal
from tests.conftest import ROOT

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def test_the_program_is_what_runs():
    command = mortal([sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b", "$c"])
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "['a b', '$c']\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_child_dies_with_a_parent_that_is_killed():
    code = (
        "import subprocess, sys, time\nfrom parallel.mortal import mortal\n"
        f"child = subprocess.Popen(mortal({SLEEP!r}))\nprint(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        deadline = time.monotonic() + 60
        while _lives(child):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("ignores", [False, True])
def test_interrupts_are_left_to_the_parent_if_asked(ignores):
    code = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may let it be ignored
    try:
        done = subprocess.run(mortal([sys.executable, "-c", code], ignores), capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.stdout == f"{ignores}\n"


def test_a_parent_that_is_gone_already_leaves_no_child():
    command = mortal(SLEEP)
    assert command.count(str(os.getpid())) == 1
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1


def _lives(process):
    try:
        with open(f"/proc/{process}/stat", encoding="ascii") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

"""Processes that die with the one that started them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel.parent_death import bound_to_parent, die_with_parent
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]  # not from tests.conftest, which loads torch


def rest(*place):
    Path(os.environ["MARKS"], str(os.getpid())).touch()
    time.sleep(300)


def begin():
    die_with_parent()
    rest()


REST = "from tests.parallel.test_parent_death import rest; rest()"
PROGRAM = """
import multiprocessing, subprocess, sys, time
from pathlib import Path
from tests.parallel.test_parent_death import REST, ROOT, begin, bound_to_parent, rest
if __name__ == "__main__":
    {start}
    time.sleep(300)
"""
CONTEXTS = "for way in 'fork', 'spawn', 'forkserver': multiprocessing.get_context(way).Process(target=begin).start()"
# A module that takes long to import, as torch does: the process is killed meanwhile.
SLOW = """
import multiprocessing
from tests.parallel.test_parent_death import rest
if multiprocessing.current_process().name != "MainProcess":
    rest()
def begin():
    pass
"""
IMPORTING = (
    "import slow; from parallel import parent_death; "
    "parent_death.context('spawn').Process(target=slow.begin).start()"
)
BENCHMARK = "from benchmarks import ranks; ranks.run(2, rest)"
EXPERIMENT = (
    "from benchmarks.evidence import runs; runs.train = rest; runs.RUNS = Path(__file__).parent / 'runs'; "
    "runs.train_all(lambda: [runs.Run((), 0, base='configs/quickstart.yaml')], 1, print)"
)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a child of its parent's death"
)
@pytest.mark.parametrize(
    ("start", "count", "number"),
    [
        (CONTEXTS, 3, signal.SIGKILL),
        (IMPORTING, 1, signal.SIGKILL),
        (
            "subprocess.Popen(bound_to_parent([sys.executable, '-c', REST]), cwd=ROOT)",
            1,
            signal.SIGKILL,
        ),
        pytest.param(BENCHMARK, 2, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(BENCHMARK, 2, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(EXPERIMENT, 1, signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_all_processes_die_with_the_one_that_started_them(tmp_path, start, count, number):
    (tmp_path / "starts.py").write_text(PROGRAM.format(start=start))
    (tmp_path / "slow.py").write_text(SLOW)
    marks = tmp_path / "marks"
    marks.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MARKS": str(marks)}
    command = bound_to_parent([sys.executable, str(tmp_path / "starts.py")])
    with subprocess.Popen(command, cwd=ROOT, env=environment) as parent:
        wait_until(lambda: len(list(marks.iterdir())) == count or parent.poll() is not None, 120)
        parent.send_signal(number)
    started = [int(mark.name) for mark in marks.iterdir()]
    assert len(started) == count
    wait_until(lambda: not any(map(_lives, started)))


def test_whatever_starts_processes_binds_them_to_itself():
    """Commands that end by themselves within moments need not be bound; torch watches those of
    data/workers.py."""
    # Not above: processes that import this file shall not load torch.
    from tests.conftest import ROOMS

    others = {
        "training/run_folder.py",
        "parallel/hosts.py",
        "common/cpp_compiler.py",
        "data/workers.py",
        "parallel/parent_death.py",  # where they are bound
        "benchmarks/networks.py",
        "benchmarks/faults/kinds.py",
    }
    starts = re.compile(
        r"subprocess\.(Popen|run|check_\w+)\(|\.Process\(|get_context\(|ProcessPoolExecutor\(|os\.fork"
    )
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text()
            name = str(path.relative_to(ROOT))
            assert (
                name in others or not starts.search(text) or "parallel.parent_death import" in text
            ), name


@pytest.mark.parametrize("ignores", [False, True])
def test_the_program_is_what_runs_and_interrupts_are_left_to_the_parent_if_wanted(ignores):
    code = "import signal, sys; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN, sys.argv[1:]); sys.exit(7)"
    # shells may let it be ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command = bound_to_parent([sys.executable, "-c", code, "a b", "$c"], ignores)
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout) == (7, f"{ignores} ['a b', '$c']\n")


def test_a_parent_that_is_gone_already_leaves_no_child():
    command = bound_to_parent([sys.executable, "-c", "import time; time.sleep(60)"])
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1


def _lives(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

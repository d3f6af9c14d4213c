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


# What starts processes, each in a program of its own, and how many.
STARTERS = {
    "multiprocessing": (
        "for way in 'fork', 'spawn', 'forkserver': multiprocessing.get_context(way).Process(target=begin).start()",
        3,
    ),
    "bound_to_parent": ("subprocess.Popen(bound_to_parent([sys.executable, '-c', REST]), cwd=ROOT)", 1),
    "benchmarks.ranks": ("from benchmarks import ranks; ranks.run(2, rest)", 2),
    "tests.world": ("from tests import world; world.run(1, rest, connect=False)", 1),
    "benchmarks.evidence": (
        "from benchmarks.evidence import runs; runs.train = rest; runs.RUNS = Path(__file__).parent / 'runs'; "
        "runs.train_all(lambda: [runs.Run((), 0, base='configs/quickstart.yaml')], 1, print)",
        1,
    ),
}
REST = "from tests.parallel.test_parent_death import rest; rest()"
PROGRAM = """
import multiprocessing, subprocess, sys, time
from pathlib import Path
from tests.parallel.test_parent_death import REST, ROOT, begin, bound_to_parent, rest
if __name__ == "__main__":
    {start}
    time.sleep(300)
"""


def begin():
    die_with_parent()
    rest(0)


SLOW = [(name, signal.SIGKILL) for name in ("benchmarks.ranks", "tests.world", "benchmarks.evidence")]
SLOW += [("benchmarks.ranks", signal.SIGTERM)]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
@pytest.mark.parametrize(
    ("starter", "number"),
    [
        ("multiprocessing", signal.SIGKILL),
        ("bound_to_parent", signal.SIGKILL),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_all_processes_die_with_the_one_that_started_them(tmp_path, starter, number):
    start, count = STARTERS[starter]
    (tmp_path / "starts.py").write_text(PROGRAM.format(start=start))
    marks = tmp_path / "marks"
    marks.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MARKS": str(marks)}
    with subprocess.Popen(
        bound_to_parent([sys.executable, str(tmp_path / "starts.py")]), cwd=ROOT, env=environment
    ) as parent:
        wait_until(lambda: len(list(marks.iterdir())) == count or parent.poll() is not None, 120)
        parent.send_signal(number)
    started = [int(mark.name) for mark in marks.iterdir()]
    wait_until(lambda: not any(map(_lives, started)))


def test_whatever_starts_processes_binds_them_to_itself():
    """Commands that end by themselves within moments need not be bound."""
    moments = {
        *("training/run_folder.py", "parallel/hosts.py", "optim/compilation.py"),
        *("benchmarks/networks.py", "benchmarks/faults/kinds.py"),
    }
    torch_watches = {"data/workers.py"}
    starts = re.compile(r"subprocess\.(Popen|run|check_\w+)\(|\.Process\(|get_context\(|ProcessPoolExecutor\(|os\.fork")
    found = set()
    for room in ("benchmarks", "data", "engines", "models", "optim", "parallel", "recipe", "tools", "training"):
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text()
            if starts.search(text) and "parallel.parent_death import" not in text:
                found.add(str(path.relative_to(ROOT)))
    assert found - moments - torch_watches == set()


@pytest.mark.parametrize("ignores", [False, True])
def test_the_program_is_what_runs_and_interrupts_are_left_to_the_parent_if_wanted(ignores):
    code = "import signal, sys; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN, sys.argv[1:]); sys.exit(7)"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may let it be ignored
    try:
        command = bound_to_parent([sys.executable, "-c", code, "a b", "$c"], ignores)
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout) == (7, f"{ignores} ['a b', '$c']\n")


def test_a_parent_that_is_gone_already_leaves_no_child():
    command = bound_to_parent([sys.executable, "-c", "import time; time.sleep(60)"])
    assert command.count(str(os.getpid())) == 1
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1


def _lives(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

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
from tests.conftest import ROOT

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def test_the_program_is_what_runs():
    command = bound_to_parent([sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b", "$c"])
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "['a b', '$c']\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_child_dies_with_a_parent_that_is_killed():
    code = (
        "import subprocess, sys, time\nfrom parallel.parent_death import bound_to_parent\n"
        f"child = subprocess.Popen(bound_to_parent({SLEEP!r}))\nprint(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        deadline = time.monotonic() + 60
        while _lives(child):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def rest(*place):
    Path(os.environ["MARKS"], str(os.getpid())).touch()
    time.sleep(300)


# What starts processes: as a program that shows nothing else.
STARTERS = {
    **{
        way: f"multiprocessing.get_context('{way}').Process(target=begin).start()"
        for way in ("fork", "spawn", "forkserver")
    },
    "benchmarks.ranks": "from benchmarks import ranks; ranks.run(2, rest)",
    "tests.world": "from tests import world; world.run(1, rest, connect=False)",
    "benchmarks.evidence": (
        "from benchmarks.evidence import runs; runs.train = rest; runs.RUNS = Path(__file__).parent / 'runs'; "
        "runs.train_all(lambda: [runs.Run((), 0, base='configs/quickstart.yaml')], 1, print)"
    ),
}
PROGRAM = """
import multiprocessing, time
from pathlib import Path
from tests.parallel.test_parent_death import begin, rest
if __name__ == "__main__":
    {start}
    time.sleep(300)
"""


def begin():
    die_with_parent()
    rest(0)


@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
@pytest.mark.parametrize(
    ("starter", "number"), [*((name, signal.SIGKILL) for name in STARTERS), ("benchmarks.ranks", signal.SIGTERM)]
)
def test_all_processes_die_with_the_one_that_started_them(tmp_path, starter, number):
    (tmp_path / "starts.py").write_text(PROGRAM.format(start=STARTERS[starter]))
    marks = tmp_path / "marks"
    marks.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MARKS": str(marks)}
    with subprocess.Popen(
        bound_to_parent([sys.executable, str(tmp_path / "starts.py")]), cwd=ROOT, env=environment
    ) as parent:
        deadline = time.monotonic() + 120
        while len(list(marks.iterdir())) < (2 if starter == "benchmarks.ranks" else 1):
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.05)
        parent.send_signal(number)
    started = [int(mark.name) for mark in marks.iterdir()]
    deadline = time.monotonic() + 60
    while any(_lives(child) for child in started):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_whatever_starts_processes_binds_them_to_itself():
    """Commands that end by themselves within moments need not be bound."""
    moments = {"training/run_folder.py", "parallel/hosts.py", "benchmarks/networks.py", "benchmarks/faults/kinds.py"}
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
def test_interrupts_are_left_to_the_parent_if_asked(ignores):
    code = "import signal; print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may let it be ignored
    try:
        done = subprocess.run(bound_to_parent([sys.executable, "-c", code], ignores), capture_output=True, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.stdout == f"{ignores}\n"


def test_a_parent_that_is_gone_already_leaves_no_child():
    command = bound_to_parent(SLEEP)
    assert command.count(str(os.getpid())) == 1
    command[command.index(str(os.getpid()))] = "1"
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1


def _lives(process):
    try:
        with open(f"/proc/{process}/stat", encoding="ascii") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

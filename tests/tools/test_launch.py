"""The launcher: what it starts and refuses, which exit codes and lines come back, and that no rank
outlives it.

Ranks are a small program in place of train.py, whose behaviour the recipe's name asks for.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import cores
from parallel import launchers
from parallel.board import Board
from parallel.hosts import Hosts
from tests.conftest import QUICKSTART, ROOT
from tests.tools.launchers import Launcher
from tests.waiting import wait_until
from tests.world import _free_port

pytestmark = pytest.mark.multiprocess

DONE = 0
FAILED = 1
WRONG_INPUT = 2
STOPPED = 75

RANK = r"""
import json, os, signal, subprocess, sys, time
from pathlib import Path
folder, rank = Path(__file__).parent, int(os.environ.get("RANK", "-1"))
behaviour = next(text for text in sys.argv if text.startswith("run.name=")).partition("=")[2]
folder.joinpath(f"pid-{rank}").write_text(str(os.getpid()))
with folder.joinpath(f"starts-{rank}").open("a") as starts:
    print(json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()}), file=starts)

def save(*_):
    time.sleep(1.0 * rank)
    folder.joinpath(f"saved-{rank}").touch()
    sys.exit(75)

if behaviour != "early":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN if behaviour == "unheeding" else save)
if behaviour.startswith("code") and rank == 1:
    others = [folder / f"starts-{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
    mine = len(others[1].read_text().splitlines())
    while any(not other.exists() or len(other.read_text().splitlines()) < mine for other in others):
        time.sleep(0.02)
    print("rank 1 complains", file=sys.stderr)
    sys.exit(int(behaviour[4:]))
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    folder.joinpath(f"pid-child-{rank}").write_text(str(child.pid))
if behaviour == "stops":
    save()
folder.joinpath(f"ready-{rank}").touch()
if behaviour != "ends":
    time.sleep(300)
"""

TWO = ("--replicas", "2")
FOUR = ("--replicas", "4")
IMPATIENT = {"REACH_SECONDS": 1.0, "_SILENT_SECONDS": 0.5, "_TOGETHER_SECONDS": 2.0}


class Launch:
    """Launchers with RANK as their program; `folder` holds what the ranks leave."""

    def __init__(self, folder):
        self.folder = folder
        self.started = []
        (folder / "rank.py").write_text(RANK)

    def start(self, behaviour, *arguments, **options):
        recipe = ("batch.global=768", "run.device=cpu", f"run.name={behaviour}")
        self.started.append(
            Launcher(self.folder, self.folder / "rank.py", *recipe, *arguments, **options)
        )
        return self.started[-1]

    def end(self, launcher, timeout=120):
        """Exit code, lines of stdout, lines of stderr; every rank must be gone.

        What ranks have started is killed with them, but nobody waits for it: it may need a moment
        to die.
        """
        ended = launcher.end(timeout)
        assert [pid for pid in self.pids("pid-[0-9]*") if alive(pid)] == []
        wait_until(lambda: not any(alive(pid) for pid in self.pids()), seconds=5)
        return ended

    def __call__(self, behaviour, *arguments, **options):
        return self.end(self.start(behaviour, *arguments, **options))

    def running(self, behaviour, *arguments):
        """A launcher whose two ranks are at work."""
        launcher = self.start(behaviour, *TWO, *arguments)
        self.wait_for("ready-0", "ready-1")
        return launcher

    def two_hosts(self, behaviour, *arguments, port=None, **options):
        """Four ranks over two launchers that meet on the loopback."""
        for_host = (
            "--nnodes",
            "2",
            "--master",
            f"127.0.0.1:{port or _free_port()}",
            *FOUR,
            *arguments,
            "--node-rank",
        )
        started = [self.start(behaviour, *for_host, rank, **options) for rank in "01"]
        if behaviour == "stays":
            self.wait_for(*(f"ready-{rank}" for rank in range(4)))
        return started

    def pids(self, names="pid-*"):
        return [int(path.read_text() or 0) for path in self.folder.glob(names)]

    def starts(self, rank):
        path = self.folder / f"starts-{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, *names):
        wait_until(lambda: all((self.folder / name).exists() for name in names))


def alive(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def launch(tmp_path):
    made = Launch(tmp_path)
    yield made
    for launcher in made.started:
        launcher.kill()
    for pid in filter(alive, made.pids()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_ranks_get_the_environment_of_torchrun_and_the_arguments_unchanged(launch):
    odd = "run.output=/a folder/it's $HOME $$ ${local_rank} *"
    left_over = {
        "POPDIST_NUM_TOTAL_REPLICAS": "8",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_PROCID": "0",
    }
    code, out, errors = launch(
        "ends", odd, "--stages", "2", *TWO, CUBLAS_WORKSPACE_CONFIG=":16:8", **left_over
    )
    noted = ["SLURM_STEP_NUM_TASKS=8 in the environment is set aside: 4 processes of this launcher"]
    assert (code, errors, len(out)) == (DONE, noted, 1)
    assert out[0].startswith(
        "4 processes = 2 replicas x 2 stages on this host: torchrun --standalone --nproc-per-node"
    )
    for rank in range(4):
        (start,) = launch.starts(rank)
        given = start["environment"]
        assert start["arguments"][:4] == [
            "--config",
            str(QUICKSTART),
            "batch.global=768",
            "run.device=cpu",
        ]
        assert odd in start["arguments"]
        assert start["arguments"][-2:] == ["parallel.replicas=2", "parallel.stages=2"]
        names = (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "POD_LAUNCHER",
        )
        assert [given[name] for name in names] == [str(rank), str(rank), "4", "4", "127.0.0.1", "1"]
        assert given["OMP_NUM_THREADS"] == str(max(1, cores.available() // 4))
        assert (given["GLOO_SOCKET_IFNAME"], given["TORCH_CPP_LOG_LEVEL"]) == ("lo", "ERROR")
        # of every launcher, see common/command.py
        assert given["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        assert not {"POD_TOKEN", *left_over} & set(given)


def test_one_process_is_train_itself(launch):
    """No agent between: the process is the launcher's own, with its signals.

    What srun or torchrun have left in the environment of the shell would make it one of eight.
    """
    shell = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    launcher = launch.start(
        "ends", "--replicas", "1", **shell, WORLD_SIZE="4", RANK="3", LOCAL_RANK="3"
    )
    noted = ["WORLD_SIZE=4 in the environment is set aside: 1 process of this launcher"]
    assert launch.end(launcher) == (DONE, [], noted)
    (start,) = launch.starts(-1)
    assert start["pid"] == launcher.pid and "POD_LAUNCHER" not in start["environment"]
    assert launchers.found(start["environment"]) is None


def test_ranks_that_stop_by_themselves_are_not_started_again(launch):
    """As after a signal to another host's launcher; rank 1 saves a second longer than rank 0."""
    code, _, errors = launch("stops", *TWO, "--max-restarts", "2")
    assert (code, errors, len(launch.starts(0))) == (STOPPED, [], 1)
    assert (launch.folder / "saved-1").exists()


def test_a_failure_is_tried_again_as_often_as_asked(launch):
    own = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "x"}
    code, _, errors = launch("code9", *TWO, "--max-restarts", "2", **own)
    fault = [
        "rank 1 complains",
        f"rank 1 failed with exit code 9 (host {socket.gethostname()}); all ranks stopped",
    ]
    again = [
        f"restart {number} of 2: the run goes on from its last checkpoint" for number in (1, 2)
    ]
    assert (code, errors) == (FAILED, [*fault, again[0], *fault, again[1], *fault])
    assert [len(launch.starts(rank)) for rank in (0, 1)] == [3, 3]
    given = [start["environment"] for start in launch.starts(0)]
    assert len({start["MASTER_PORT"] for start in given}) == 3
    assert all(own.items() <= start.items() for start in given)


def test_a_killed_rank_takes_all_with_it_within_ten_seconds(launch):
    """Also ranks that ignore SIGTERM, and what ranks have started."""
    launcher = launch.running("stubborn")
    start = time.monotonic()
    os.kill(int((launch.folder / "pid-1").read_text()), signal.SIGKILL)
    code, _, errors = launch.end(launcher)
    assert time.monotonic() - start < 10
    line = f"rank 1 (host {socket.gethostname()}) was killed (SIGKILL); all ranks stopped; rerun to resume"
    assert (code, errors) == (FAILED, [line])


def test_ranks_do_not_outlive_a_killed_launcher(launch):
    launch.running("stays").kill()
    wait_until(lambda: not any(alive(pid) for pid in launch.pids()), seconds=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_lets_the_ranks_save(launch, number):
    """To the whole process group, as Ctrl-C does it, and twice at once, as timeout(1) does."""
    launcher = launch.running("stays", "--max-restarts", "2")
    os.killpg(launcher.pid, number)
    launcher.send(number)
    code, _, errors = launch.end(launcher)
    message = f"{number.name}: the ranks finish their step, save and end; a second signal ends them at once"
    assert (code, errors) == (STOPPED, [message])
    saved = [(launch.folder / f"saved-{rank}").exists() for rank in (0, 1)]
    assert saved == [True, True] and len(launch.starts(0)) == 1


@pytest.mark.parametrize(
    ("number", "replicas"),
    [
        (signal.SIGTERM, "1"),
        (signal.SIGUSR1, "2"),
        pytest.param(signal.SIGTERM, "2", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, "1", marks=pytest.mark.slow),
    ],
)
def test_a_signal_before_ranks_are_started_ends_the_launcher_as_stopped(tmp_path, number, replicas):
    """As the first process of a container it would not even have heard it."""
    (tmp_path / "signals.py").write_text(f"import signal\nsignal.raise_signal({int(number)})\n")
    words = (
        "tools/launch.py",
        "--import",
        tmp_path / "signals.py",
        "--replicas",
        replicas,
        "--config",
        QUICKSTART,
    )
    recipe = ("run.device=cpu", f"run.output={tmp_path}/run", "batch.global=64")
    ended = subprocess.run(
        [sys.executable, *words, *recipe], cwd=ROOT, capture_output=True, text=True
    )
    lines = ended.stderr.splitlines()
    assert (ended.returncode, lines[-1:]) == (
        STOPPED,
        ["stopped while no rank was running; the same command goes on"],
    )
    assert not (tmp_path / "run").exists()


def test_a_second_signal_ends_all_at_once(launch):
    launcher = launch.running("unheeding", "--max-restarts", "2")
    launcher.send(signal.SIGINT)
    assert wait_until(launcher.errors)[0].startswith("SIGINT: ")
    time.sleep(1.0)  # sooner, it would be taken for the same signal
    assert launcher.running()
    launcher.send(signal.SIGINT)
    code, _, errors = launch.end(launcher)  # the ranks themselves would go on for longer
    remedy = "ended at once by a second signal; the same command goes on from the last checkpoint"
    assert (code, errors[1:]) == (FAILED, [remedy])


def test_a_rank_that_had_not_begun_has_nothing_to_save(launch):
    """SIGUSR1 ends a program that has not set its handler yet."""
    launcher = launch.running("early", "--max-restarts", "2")
    launcher.send(signal.SIGTERM)
    code, _, errors = launch.end(launcher)
    assert (code, len(errors)) == (STOPPED, 1)


def test_a_launcher_that_hears_nothing_of_the_master_ends(launch):
    """The master's host loses power, or the link is cut: nothing is refused, and these ranks notice
    nothing."""
    master, other = launch.two_hosts("stays", "parallel.silence=5")
    master.send(signal.SIGSTOP)
    code, _, errors = other.end(timeout=5 + 40)  # 10 and what a busy machine adds
    said = "has said nothing for 5 s: it is stopped, or its host or the way there is gone; all ranks here are gone, too"
    assert (code, len(errors)) == (FAILED, 1) and re.fullmatch(
        rf"the launcher at the master \S+ {said}", errors[0]
    )
    assert not any(alive(start["pid"]) for rank in (2, 3) for start in launch.starts(rank))


def test_a_signal_ends_the_wait_for_an_answer(launch):
    with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as stack:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        launcher = launch.start(
            "ends", "--nnodes", "2", "--node-rank", "1", "--master", place, *FOUR
        )
        silent.settimeout(40)
        for _ in "probe", "question":
            stack.enter_context(silent.accept()[0])
        launcher.send(signal.SIGTERM)
        code, _, errors = launch.end(launcher, timeout=25)  # without it 45
    assert (code, errors[1:]) == (
        STOPPED,
        ["stopped while no rank was running; the same command goes on"],
    )


def test_a_third_party_cannot_end_a_run_with_success(launch):
    """It reaches the port, as there is no token, and says that ranks of host 1 are done."""
    port = _free_port()
    started = launch.two_hosts("stays", port=port, POD_TOKEN="")
    for code in (0, False, None):
        said = {"code": code, "line": "done", "last": True, "abrupt": True}
        Board(Hosts(2, 1, "127.0.0.1", port), "").write(0, end=said, port=1)
    time.sleep(3.0)
    assert all(launcher.running() for launcher in started)
    os.kill(launch.starts(1)[0]["pid"], signal.SIGKILL)
    ends = [launch.end(launcher) for launcher in started]
    assert {code for code, _, _ in ends} == {FAILED}
    lines = [line for _, _, errors in ends for line in errors]
    assert not any("done" in line for line in lines)
    assert any(line.startswith("POD_TOKEN is not set: whoever reaches ") for line in lines)


def test_two_hosts_start_fail_and_start_again_together(launch):
    """On one machine: two launchers that meet on the loopback.

    A rank of host 0 fails; host 1's wait for it.
    """
    first, second = map(launch.end, launch.two_hosts("code9", "--max-restarts", "1"))
    assert first[1][0].startswith(
        "4 processes = 4 replicas x 1 stage on 2 hosts, 2 here on host 0: torchrun "
    )
    assert [len(launch.starts(rank)) for rank in range(4)] == [2, 2, 2, 2]
    for code, _, errors in (first, second):
        faults = [line.split(" (")[0] for line in errors if line.startswith("rank 1 failed")]
        assert (code, faults) == (FAILED, ["rank 1 failed with exit code 9"] * 2), errors
    given = [launch.starts(rank)[0]["environment"] for rank in range(4)]
    assert [start["LOCAL_RANK"] for start in given] == ["0", "1", "0", "1"]
    assert len({start["MASTER_PORT"] for start in given}) == 1


def test_wrong_input_on_one_host_ends_the_other_with_the_same_code(launch):
    first, second = map(launch.end, launch.two_hosts("code2", "--max-restarts", "1"))
    assert (first[::2], second[::2]) == ((WRONG_INPUT, ["rank 1 complains"]), (WRONG_INPUT, []))
    assert [len(launch.starts(rank)) for rank in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "environment", "remedy"),
    [
        (TWO, {}, "give all hosts the same --replicas and --stages"),
        (FOUR, {"POD_TOKEN": "another"}, "that --master and POD_TOKEN are the same on all hosts"),
    ],
)
def test_hosts_that_do_not_match_are_refused(launch, arguments, environment, remedy):
    for_host = ("--nnodes", "2", "--master", f"127.0.0.1:{_free_port()}", "--node-rank")
    first = launch.start("ends", *for_host, "0", *FOUR)
    code, _, errors = launch("ends", *for_host, "1", *arguments, **environment)
    assert (code, len(errors)) == (WRONG_INPUT, 1) and errors[0].endswith(remedy)
    if not environment:
        assert launch.end(first)[::2] == (code, errors)


def test_hosts_that_do_not_come(launch):
    place = f"127.0.0.1:{_free_port()}"
    which = f"2 of 3 hosts at {place} (--node-rank 1, 2)"
    hosts = ("--nnodes", "3", "--node-rank", "0", "--master", place)
    code, _, errors = launch("ends", *hosts, "--replicas", "3", seconds=IMPATIENT)
    remedy = f"waited 2 s in vain for {which}; start all hosts, or lower --nnodes"
    assert (code, errors) == (FAILED, [f"waiting for {which}", remedy])
    assert launch.starts(0) == []


@pytest.mark.parametrize(
    ("rank", "listens", "code", "fault"),
    [
        ("1", False, FAILED, "cannot reach the master {} (Connection refused); check "),
        ("1", True, FAILED, "cannot reach the master {} (no answer); check "),
        ("0", True, WRONG_INPUT, "cannot listen at {}: Address already in use; "),
        # 192.0.2.0/24 is for documentation (RFC 5737): the wrong host was given number 0.
        (
            "0",
            None,
            WRONG_INPUT,
            "cannot listen at 192.0.2.77:29500: Cannot assign requested address; give ",
        ),
    ],
)
def test_a_master_that_cannot_be_reached(launch, rank, listens, code, fault):
    """Anything may listen at the port.

    A master that is late is no wrong input, after which schedulers give up.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = "192.0.2.77" if listens is None else f"127.0.0.1:{server.getsockname()[1]}"
        if not listens:
            server.close()
        hosts = ("--nnodes", "2", "--node-rank", rank, "--master", place)
        found, _, errors = launch("ends", *hosts, *FOUR, seconds=IMPATIENT)
    assert (found, len(errors)) == (code, 1) and errors[0].startswith(fault.format(place))

"""poprun's line, corrected: which words it has, where it is found, and which variables are left
out."""

import os
import signal
import subprocess
import sys

import pytest

from common.errors import ConfigError
from tests.recipe.ipu.test_poprun import two_stages
from training import relaunch, stopping

FLAGS = ["--num-replicas", "64", "--ipus-per-replica", "2", "--num-instances", "16"]
SCRIPT = ["train.py", "--config", "configs/pod256.yaml"]
DEFAULTS = {
    "POPDIST_NUM_TOTAL_REPLICAS": "64",
    "POPDIST_NUM_LOCAL_REPLICAS": "64",
    "POPDIST_NUM_IPUS_PER_REPLICA": "1",
}


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--num-replicas", "64"], []),
        (["--num-replicas=64", "--num-instances=1"], []),
        (
            ["--host=a,b", "--num-replicas", "64", "--vipu-partition", "p"],
            ["--host=a,b", "--vipu-partition", "p"],
        ),
        (
            ["--mpi-local-args=-x PATH", "--num-replicas=64", "-vv"],
            ["--mpi-local-args=-x PATH", "-vv"],
        ),
    ],
)
@pytest.mark.parametrize(
    "interpreter", [["python"], ["python3.8", "-u", "-W", "ignore"], ["bash", "-c", "exec $0 $@"]]
)
def test_the_users_other_flags_and_command_stay_as_typed(words, kept, interpreter):
    line = ["poprun", *words, *interpreter, *SCRIPT]
    assert relaunch.corrected(line, FLAGS, SCRIPT) == [
        "poprun",
        *FLAGS,
        *kept,
        *interpreter,
        *SCRIPT,
    ]


def test_a_line_that_is_not_known_is_written_anew():
    assert relaunch.corrected([], FLAGS, SCRIPT) == ["poprun", *FLAGS, sys.executable, *SCRIPT]


def test_the_launchers_variables_are_left_out():
    own = {"OPAL_PREFIX": "/sdk", "IPUOF_VIPU_API_PARTITION_ID": "p", "PATH": "/bin"}
    theirs = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_MCA_ess": "env",
        "PMIX_RANK": "0",
        "PMI_RANK": "0",
        **DEFAULTS,
    }
    assert relaunch.without_launcher({**own, **theirs}) == own


def test_a_run_that_fits_or_has_no_poprun_goes_on():
    relaunch.settle(two_stages(), {})
    relaunch.settle(
        two_stages(),
        {**DEFAULTS, "POPDIST_NUM_IPUS_PER_REPLICA": "2", "POPDIST_NUM_LOCAL_REPLICAS": "16"},
    )
    relaunch.settle(two_stages("run.device=cpu"), DEFAULTS)


@pytest.mark.parametrize(
    ("overrides", "variables", "poprun"),
    [
        (["ipu.relaunch=false"], {}, True),
        ([], {}, False),  # there is no poprun here
        # the user has chosen a number of instances
        ([], {"POPDIST_NUM_LOCAL_REPLICAS": "32"}, True),
        # and here two numbers of replicas
        (
            ["parallel.replicas=32", "batch.global=256"],
            {},
            True,
        ),
    ],
)
def test_otherwise_the_whole_line_is_in_the_refusal(
    overrides, variables, poprun, tmp_path, monkeypatch
):
    program = tmp_path / "poprun"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if poprun else "")
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(sys, "argv", SCRIPT)
    with pytest.raises(ConfigError) as refused:
        relaunch.settle(two_stages("data.workers=0", *overrides), {**DEFAULTS, **variables})
    message = str(refused.value)
    assert message.startswith(
        "poprun gives each replica 1 IPU, but parallel.stages is 2; start it as `poprun "
    )
    assert (
        f"{sys.executable} train.py --config configs/pod256.yaml`, or use parallel.stages=auto"
        in message
    )


def test_other_instances_than_the_first_say_nothing(monkeypatch):
    monkeypatch.setattr(sys, "argv", SCRIPT)
    second = {**DEFAULTS, "POPDIST_NUM_LOCAL_REPLICAS": "32", "POPDIST_REPLICA_INDEX_OFFSET": "32"}
    with pytest.raises(ConfigError, match=r"^$"):
        relaunch.settle(two_stages(), second)


def test_a_line_whose_batch_does_not_divide_is_refused_before_it_is_started(tmp_path, monkeypatch):
    (tmp_path / "poprun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "poprun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    three = {**DEFAULTS, "POPDIST_NUM_TOTAL_REPLICAS": "48", "POPDIST_NUM_LOCAL_REPLICAS": "48"}
    with pytest.raises(ConfigError, match="is not a multiple of 4 micro x 48 replicas"):
        relaunch.settle(two_stages(), three)


def test_a_signal_that_came_before_poprun_is_started_again_ends_the_process(
    tmp_path, monkeypatch, capsys
):
    """poprun would not hear of it, and would train until it is killed."""
    (tmp_path / "poprun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "poprun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started"))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(sys, "argv", SCRIPT)
    monkeypatch.setattr(stopping, "_noted", None)
    before = stopping.listen_early()
    try:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            relaunch.settle(two_stages("data.workers=0", "batch.global=768"), DEFAULTS)
    finally:
        stopping.put_back(before)
    assert ended.value.code == 75
    assert (
        capsys.readouterr().err == "stopped while no rank was running; the same command goes on\n"
    )


def test_poprun_is_found_among_the_ancestors_with_its_words(tmp_path):
    program = tmp_path / "poprun"
    program.write_text('#!/bin/sh\n"$@"; exit $?\n')
    program.chmod(0o755)
    code = "import os; from training import relaunch; print(relaunch._find(os.getppid()).words[:3])"
    command = [str(program), "sh", "-c", f"{sys.executable} -c '{code}'; true", "--host", "a"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(["poprun", "sh", "-c"])

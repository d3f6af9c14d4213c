"""The launcher's decisions: refusals, number of replicas, hosts under SLURM, arguments of
poprun."""

import ctypes
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch

from common.errors import UserError
from parallel import hosts
from tests.conftest import QUICKSTART, ROOT
from tools import launch

DONE = 0
WRONG_INPUT = 2
STOPPED = 75


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """tool(name, script): puts a shell script on the PATH, ahead of everything."""

    def make(name, script):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return make


POD = "run.device=ipu optimizer.trust=momentum parallel.stages=2 batch.global=6144 batch.micro=3"
MANY = "batch.global=768 --stages 2"
HOSTS = "--nnodes 2 --node-rank 0 --master"


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (
            "--replicas 4 batch.micro=100",
            f"{QUICKSTART}: batch.global 768 is not a multiple of 100 micro x 4 ",
        ),
        (
            "--nnodes 3 --node-rank 0 --master a --replicas 4",
            "4 processes = 4 replicas x 1 stage do not divide",
        ),
        ("--node-rank 1", "--node-rank and --master go with --nnodes"),
        ("--nnodes 2", "--nnodes 2 also needs --node-rank and --master, "),
        ("--nnodes 2 --node-rank 2 --master a", "--node-rank 2 is none of 0 to 1"),
        (f"{HOSTS} a:b", "--master a:b is not HOST or HOST:PORT"),
        (f"{HOSTS} fd00::1:3", "--master fd00::1:3: write an IPv6 address in"),
        ("--nnodes 0", "run_pod.sh: argument --nnodes: '0' is no number from 1 to"),
        ("--replica 2", "run_pod.sh: unrecognized arguments: --replica"),
        ("--config missing.yaml", "missing.yaml: No such file"),
        (
            "--stages 2 parallel.split=[a,b]",
            "command line: parallel: split names 2 cut points but 2 stages need 1",
        ),
        ("--stages 2 run.sed=1", "command line: run.sed: unknown key; did you mean run.seed?"),
        (
            f"{POD} --replicas 128 --instances 3",
            "--instances 3 does not divide 128 replicas; give a divisor",
        ),
        (
            f"{POD} --replicas 128 --instances 2",
            "one process would have 64 replicas x 2 IPUs = 128, but PopTorch takes a power of two up to 64; "
            "give --instances 4 or another divisor of 128",
        ),
        (
            f"{POD} --replicas 128 ipu.pod=128",
            "128 replicas x 2 IPUs are more than the 128 of ipu.pod; give --replicas 64, or correct ipu.pod",
        ),
        (f"{POD} --replicas 8 --max-restarts 1", "--max-restarts is for CPUs and GPUs"),
        ("--poprun=--host=a", "--poprun goes with run.device=ipu, but run.device is cpu"),
        (
            "run.device=ipu",
            "how many IPUs there are is not known here; give the number of replicas",
        ),
        (
            "run.device=ipu optimizer.trust=momentum --replicas 2",
            "run.device=ipu needs poprun on the PATH",
        ),
        (f"run.device=ipu {HOSTS} a", "poprun itself starts all hosts"),
        (
            "run.device=cuda --replicas 2",
            "2 processes on this host (2 replicas x 1 stage over 1 host) need a GPU",
        ),
    ],
)
def test_faults_are_refused_in_one_line_before_anything_starts(arguments, start, call, monkeypatch):
    monkeypatch.setattr(launch, "_gpus", lambda device: 1 if device == "cuda" else 0)
    fixed = ("--config", QUICKSTART, "batch.global=768", "run.device=cpu")
    code, _, lines = call(launch.main, *fixed, *arguments.split())
    assert (code, len(lines)) == (WRONG_INPUT, 1) and lines[0].startswith(start), lines


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        ("quickstart", MANY, "8 processes = 4 replicas x 2 stages on this host: torchrun "),
        (
            "quickstart",
            f"{MANY} --nnodes 3 --node-rank 1 --master a",
            "= 12 replicas x 2 stages on 3 hosts, 8 here on host 1",
        ),
        (
            "pod16",
            "--stages 4 --replicas 4",
            "the recipe's parallel.split: parallel.split=auto instead): poprun",
        ),
        (
            "pod128",
            "--instances 32",
            "128 IPUs = 64 replicas x 2 stages: poprun --num-replicas 64 ",
        ),
        ("pod256", "", "poprun --num-replicas 128 --ipus-per-replica 2 --num-instances 4 "),
    ],
)
def test_replicas_follow_the_gpus_or_the_pod_and_cuts_the_stages(
    config, arguments, expected, call, monkeypatch
):
    monkeypatch.setattr(launch, "_gpus", lambda device: 8)
    recipe = ROOT / "configs" / f"{config}.yaml"
    code, lines, _ = call(launch.main, "--config", recipe, "--dry-run", *arguments.split())
    assert code == DONE and expected in lines[-1]
    assert ("parallel.replicas=" in lines[-1]) == ("--replicas" in arguments)
    assert lines[-1].endswith("parallel.split=auto") == ("split=auto" in expected)


@pytest.mark.parametrize(
    ("device", "available", "expected"), [("cuda", 3, 3), ("auto", 0, 0), ("cpu", 3, 0)]
)
def test_gpus_are_counted_where_the_recipe_may_use_them(device, available, expected, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: available)
    assert launch._gpus(device) == expected


def test_poprun_gets_replicas_ipus_and_our_arguments(tool, tmp_path):
    tool("poprun", f'for text in "$@"; do printf "%s\\n" "$text"; done > {tmp_path}/said; exit 75')
    recipe = str(ROOT / "configs" / "pod16.yaml")
    command = [
        sys.executable,
        "-m",
        "tools.launch",
        "--config",
        recipe,
        "--replicas",
        "8",
        "--instances",
        "4",
    ]
    command.append("--poprun=--host=a,b --mpi-local-args='-x PATH'")
    ended = subprocess.run([*command, "run.output=/a b"], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (STOPPED, "")
    assert (tmp_path / "said").read_text().splitlines() == [
        "--num-replicas",
        "8",
        "--ipus-per-replica",
        "2",
        "--num-instances",
        "4",
        "--host=a,b",
        "--mpi-local-args=-x PATH",
        sys.executable,
        str(ROOT / "train.py"),
        "--config",
        recipe,
        "run.output=/a b",
        "parallel.replicas=8",
    ]


def test_a_signal_before_poprun_is_started_ends_the_launcher_as_stopped(tool, tmp_path):
    """poprun would not hear of it, and would train until it is killed."""
    tool("poprun", f"touch {tmp_path}/started; exit 1")
    (tmp_path / "signals.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    recipe = str(ROOT / "configs" / "pod16.yaml")
    command = [
        sys.executable,
        "tools/launch.py",
        "--import",
        str(tmp_path / "signals.py"),
        "--config",
        recipe,
    ]
    ended = subprocess.run([*command, "run.output=/a b"], cwd=ROOT, capture_output=True, text=True)
    lines = ended.stderr.splitlines()
    assert (ended.returncode, lines) == (
        STOPPED,
        ["stopped while no rank was running; the same command goes on"],
    )
    assert not (tmp_path / "started").exists()


def commands_in_the_docs():
    """(IPUs of the POD, command) of docs/ipu.md's table, and of the examples with everything that
    hosts need."""
    text = (ROOT / "docs" / "ipu.md").read_text().replace("\\\n", " ")
    found = re.findall(
        r"^\| (\d+)(?:, four stages)? \| `(\./run_pod\.sh [^`]+)`", text, re.MULTILINE
    )
    examples = re.findall(r"^\./run_pod\.sh .*--poprun=.*$", text, re.MULTILINE)
    assert len(examples) == 2
    return [*found, *zip(("64", "256"), examples)]


@pytest.mark.parametrize(("ipus", "command"), commands_in_the_docs())
def test_the_commands_in_the_docs_take_the_whole_pod_and_compile_once(
    ipus, command, call, monkeypatch
):
    monkeypatch.chdir(ROOT)
    arguments = shlex.split(command)[1:]
    assert any(text.startswith("ipu.executable_cache=") for text in arguments)
    # which glyphs do not have
    arguments = [text for text in arguments if not text.startswith("data.root=")]
    code, lines, _ = call(launch.main, *arguments, "--dry-run", "data.source=glyphs")
    assert code == DONE and f" stages each: {ipus} devices)" in "\n".join(lines)


SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "31234",
}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({**SLURM, "SLURM_JOB_NODELIST": "gpu[07-08]"}, hosts.Hosts(2, 1, "gpu07", 21234)),
        # A batch script, too, has SLURM_NNODES and SLURM_NODEID, but runs on the first node alone.
        ({"SLURM_NNODES": "2", "SLURM_NODEID": "0"}, hosts.Hosts()),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "1"}, hosts.Hosts()),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "16"},
            "SLURM started 16 tasks on 2 nodes; start one each",
        ),
        ({**SLURM, "SLURM_JOB_NODELIST": "x"}, "scontrol cannot expand the nodes 'x'"),
    ],
)
def test_hosts_under_slurm(tool, variables, expected):
    tool("scontrol", '[ "$*" = "show hostnames gpu[07-08]" ] && printf "gpu07\\ngpu08\\n"')
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            hosts.find(None, None, None, variables)
    else:
        assert hosts.find(None, None, None, variables) == expected
    assert hosts.find(2, 0, "mine:7", variables) == hosts.Hosts(2, 0, "mine", 7)


def test_run_pod_imports_ours_whatever_lies_in_the_current_folder(tmp_path):
    """Called by a link to a link from another folder, with a recipe that lies there."""
    for name in ("recipe.py", "parallel.py", "yaml.py"):
        (tmp_path / name).write_text("raise SystemExit('a stranger was imported')\n")
    (tmp_path / "own recipe.yaml").write_text(f"extends: {QUICKSTART}\n")
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "pod").symlink_to(ROOT / "run_pod.sh")
    (tmp_path / "pod").symlink_to("a folder/pod")
    command = ["./pod", "--dry-run", "--config", "own recipe.yaml", "run.output=a b"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (DONE, "")
    line = r"^launch     1 process = .* on this host: \S+ \S+train.py --config 'own recipe.yaml' "
    assert re.search(line, ended.stdout, re.MULTILINE)
    assert ended.stdout.endswith("'run.output=a b'\n")

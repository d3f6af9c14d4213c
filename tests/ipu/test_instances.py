"""Runs of several instances under poprun, with its stand-in and the double of PopTorch: whole
commands."""

import os
import subprocess
import sys

import pytest

from engines.ipu_instances import Instances
from parallel.processes import Processes
from tests.conftest import QUICKSTART, ROOT, TINY
from tests.ipu.conftest import DOUBLE
from tests.ipu.test_engine import FLOAT32, LARS, events, moved, trained
from training.checkpoint import CheckpointFolder

pytestmark = [pytest.mark.ipu, pytest.mark.multiprocess]

SHORT = "run.device=ipu run.steps=2 schedule.warmup_steps=1 data.workers=0 average.epoch_decay=0.5 log.every_steps=1"
GLYPHS = "data.source=glyphs data.train_images=100 data.validation_images=50 batch.global=48 batch.micro=4"
RECIPE = (
    *FLOAT32,
    *LARS,
    *SHORT.split(),
    *GLYPHS.split(),
    "batch.evaluation=10",
    "parallel.stages=2",
    "parallel.split=auto",
)
IPUS = {"POPLAR_SDK_ENABLED": "/opt/poplar"}


def command(*start, **environment):
    """Runs a command line with the double in Python's path and the stand-in of poprun in the
    shell's."""
    path = f"{DOUBLE}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(DOUBLE),
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    start = [str(part) for part in start]
    return subprocess.run(
        start, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def train(*overrides):
    return (sys.executable, "train.py", "--config", QUICKSTART, *TINY, *RECIPE, *overrides)


def test_instances_have_the_methods_of_processes_under_their_names():
    own = {name for name in vars(Instances) if callable(getattr(Instances, name))}
    assert own <= set(dir(Processes))


@pytest.mark.slow
def test_two_instances_of_the_launcher_learn_what_one_learns(tiny, double, tmp_path):
    """With twice the replicas: gradients, losses, scores and averages go over both processes, one
    of them writes."""
    start = (ROOT / "run_pod.sh", "--replicas", 4, "--instances", 2, "--config", QUICKSTART)
    done = command(
        *start, *TINY, *RECIPE, f"run.output={tmp_path}/two", **IPUS, PYTHON=sys.executable
    )
    assert done.returncode == 0, done.stderr
    assert "poprun --num-replicas 4 --ipus-per-replica 2 --num-instances 2" in done.stdout
    assert done.stdout.count("done: top1") == 1
    assert "4 replicas (2 stages each: 8 devices)" in done.stdout
    expected, wanted = trained(tiny(*RECIPE, "parallel.replicas=2", f"run.output={tmp_path}/one"))
    found = CheckpointFolder(tmp_path / "two" / "checkpoints", 2, True).load_newest(
        warn=pytest.fail
    )["engine"]
    assert moved(found, expected, "weights") < 1e-5
    assert moved(found, expected, "momentum_buffer") < 1e-3
    logged = events(tmp_path / "two")
    assert [event["event"] for event in logged] == [event["event"] for event in wanted]
    for ours, theirs in zip(logged, wanted):
        for key in ("loss", "top1", "images", "epoch_average"):
            if isinstance(theirs.get(key), (int, float)):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key


def test_a_python_without_packages_gets_the_command_that_installs_them(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = command(ROOT / "run_pod.sh", "--replicas", 2, **IPUS, PYTHON=str(bare))
    assert (
        done.returncode == 2
        and "pip install -r" in done.stderr
        and "requirements-ipu.txt" in done.stderr
    )


def test_stages_are_what_poprun_gives_and_one_instance_prints_the_plan():
    start = ("poprun", "--num-replicas", 4, "--num-instances", 2)
    done = command(*start, *train("parallel.stages=auto", "--dry-run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("48 = 4 micro x 3 accumulation x 4 replicas (4 devices)") == 1


@pytest.mark.parametrize(
    "option", ["--dry-run", pytest.param("run.resume=never", marks=pytest.mark.slow)]
)
def test_the_line_with_popruns_defaults_starts_again_and_trains(tmp_path, option):
    """`poprun --num-replicas 2 python train.py ...`: one IPU a replica, where the recipe has two
    stages."""
    output = f"run.output={tmp_path}/run"
    done = command("poprun", "--num-replicas", 2, *train(option, output))
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    start = "poprun --num-replicas 2 --ipus-per-replica 2 --num-instances "
    assert first.startswith(
        f"poprun gives each replica 1 IPU, but parallel.stages is 2; started again as: {start}"
    )
    assert first.endswith(f" {output}")
    assert "2 replicas (2 stages each: 4 devices)" in done.stdout
    assert done.stdout.count("done: top1") == (option != "--dry-run")


def test_only_the_first_instance_prints_what_is_wrong():
    start = ("poprun", "--num-replicas", 4, "--num-instances", 4)
    for wrong in ("parallel.stages=2", "run.sed=1"):
        done = command(*start, *train(wrong))
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr

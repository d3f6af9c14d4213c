"""Runs of several instances under poprun, with its stand-in and the double of PopTorch: whole commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import evaluate
from tests.conftest import QUICKSTART, ROOT, TINY
from tests.ipu.test_engine import FLOAT32, LARS, events, moved
from training.checkpoint import CheckpointFolder

pytestmark = [pytest.mark.ipu, pytest.mark.multiprocess]

DOUBLE = Path(__file__).with_name("double")
RECIPE = (
    *TINY,
    *FLOAT32,
    *LARS,
    "run.device=ipu",
    "run.steps=2",
    "schedule.warmup_steps=1",
    "data.source=glyphs",
    "data.train_images=100",
    "data.validation_images=50",
    "batch.global=48",
    "batch.micro=4",
    "batch.evaluation=10",
    "data.workers=0",
    "parallel.stages=2",
    "parallel.split=auto",
    "average.epoch_decay=0.5",
    "log.every_steps=1",
)


def command(*start, **environment):
    """Runs a command line with the double in Python's path and the stand-in of poprun in the shell's."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(DOUBLE),
        "PATH": f"{DOUBLE}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return subprocess.run(
        [str(part) for part in start], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def train(*overrides):
    return (sys.executable, "train.py", "--config", QUICKSTART, *RECIPE, *overrides)


def newest(folder):
    return CheckpointFolder(folder / "checkpoints", 2, True).load_newest(warn=pytest.fail)["engine"]


@pytest.fixture(scope="module")
def one_instance(tmp_path_factory):
    """The folder of a run of two replicas in one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    done = command(*train("parallel.replicas=2", f"run.output={folder}"))
    assert done.returncode == 0, done.stderr
    return folder


def test_two_instances_of_the_launcher_learn_what_one_learns(one_instance, tmp_path):
    """With twice the replicas: gradients, losses, scores and averages go over both processes, one of them writes."""
    start = (ROOT / "run_pod.sh", "--replicas", 4, "--instances", 2, "--config", QUICKSTART)
    ipus = {"POPLAR_SDK_ENABLED": "/opt/poplar", "PYTHON": sys.executable}
    done = command(*start, *RECIPE, f"run.output={tmp_path}/two", **ipus)
    assert done.returncode == 0, done.stderr
    assert "poprun --num-replicas 4 --ipus-per-replica 2 --num-instances 2" in done.stdout
    assert done.stdout.count("done: top1") == 1
    assert "4 replicas (2 stages each: 8 devices)" in done.stdout
    found, expected = newest(tmp_path / "two"), newest(one_instance)
    assert moved(found, expected, "weights") < 1e-5
    assert moved(found, expected, "momentum_buffer") < 1e-3
    logged, wanted = events(tmp_path / "two"), events(one_instance)
    assert [event["event"] for event in logged] == [event["event"] for event in wanted]
    for ours, theirs in zip(logged, wanted):
        for key in ("loss", "top1", "images", "epoch_average"):
            if isinstance(theirs.get(key), (int, float)):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key


def test_the_line_as_typed_is_corrected(tmp_path):
    """poprun gives a replica one IPU unless it is told otherwise; the recipe's stages need two."""
    done = command("poprun", "--num-replicas", 2, *train(f"run.output={tmp_path}/run"))
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "`poprun --num-replicas 2 --ipus-per-replica 2 --num-instances N python train.py ...`" in line
    assert "parallel.stages=auto" in line
    assert not (tmp_path / "run").exists()


def test_a_python_without_packages_gets_the_command_that_installs_them(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = command(ROOT / "run_pod.sh", "--replicas", 2, POPLAR_SDK_ENABLED="/opt/poplar", PYTHON=str(bare))
    assert done.returncode == 2 and "pip install -r" in done.stderr and "requirements-ipu.txt" in done.stderr


def test_stages_are_what_poprun_gives():
    done = command("poprun", "--num-replicas", 2, *train("parallel.stages=auto", "--dry-run"))
    assert done.returncode == 0, done.stderr
    assert "48 = 4 micro x 6 accumulation x 2 replicas (2 devices)" in done.stdout


def test_a_checkpoint_scores_on_the_cpu(one_instance, tmp_path, capsys, double):
    """As evaluate.py finds it: the recipe says ipu, the command line cpu."""
    score = ["--checkpoint", str(one_instance), "--output", str(tmp_path)]
    assert [evaluate.main(score), evaluate.main([*score, "run.device=cpu"])] == [0, 0]
    on_ipu, on_cpu = [line for line in capsys.readouterr().out.splitlines() if "trained weights: top1" in line]
    assert on_ipu == on_cpu and "50 images" in on_ipu

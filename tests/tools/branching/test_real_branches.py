"""Branches of a run on digits, trained by train.py itself: as announced, and the same when the
command is killed."""

import json
import os
import signal
import subprocess
import sys

import pytest

from recipe import loading
from tests.conftest import QUICKSTART, ROOT, TINY
from tests.waiting import wait_until
from training.metrics import TIMING_FIELDS, read_events

PER_EPOCH = 59
EPOCHS = 4
BATCH = 24
RECIPE = (
    *TINY,
    f"run.epochs={EPOCHS}",
    "run.threads=1",
    "schedule.warmup_epochs=0.5",
    "schedule.peak=2",
    "log.every_steps=20",
    "checkpoint.keep_last=1000",
)
OPTIONS = ("--branch", "--points", "1", "--share", "0.3", "--json")
# Together 64 steps, which are at most 30 % of 236.
STEPS = 16
BRANCHES = 4


def started(run, output):
    command = [sys.executable, "-m", "tools.batch", str(run), *OPTIONS, "--output", str(output)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def ended(process):
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    return out.splitlines()


def trained(folder):
    """By branch, all that its log has but times."""
    found = {}
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        events = [event for kind in read_events(path).values() for event in kind]
        found[path.name] = [
            {key: each[key] for key in each if key not in TIMING_FIELDS} for each in events
        ]
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("replicas", [1, 2])
def test_branches_of_a_real_run_are_as_announced_and_the_same_when_killed(tmp_path, replicas):
    """At 1 and 2 times the batch from epoch 2 on, by as many processes as the run had."""
    run = tmp_path / "run"
    launch = (
        [str(ROOT / "tools" / "launch.py"), "--replicas", str(replicas)]
        if replicas > 1
        else [str(ROOT / "train.py")]
    )
    config = ["--config", str(QUICKSTART), *RECIPE, f"run.output={run}"]
    subprocess.run([sys.executable, *launch, *config], check=True, stdout=subprocess.DEVNULL)
    undisturbed = ended(started(run, tmp_path / "undisturbed"))
    found = json.loads(undisturbed[-1])
    assert found["cost"]["images"] == BRANCHES * STEPS * BATCH
    (point,) = found["points"]
    assert (point["step"], point["epoch"]) == (2 * PER_EPOCH, 2.0) and 0 < point["loss"] < 2.5
    logs = trained(tmp_path / "undisturbed")
    assert len(logs) == BRANCHES
    for name, events in logs.items():
        assert events[-1]["event"] == "end" and events[-1]["step"] == 2 * PER_EPOCH + STEPS
        starts = json.loads((tmp_path / "undisturbed" / name / "environment.json").read_text())[
            "starts"
        ]
        assert [(each["step"], each["replicas"]) for each in starts] == [(2 * PER_EPOCH, replicas)]
        assert loading.load(tmp_path / "undisturbed" / name / "config.yaml").batch.global_ == BATCH
    # Killed within the second branch, begun again: not a bit is different, and the first is not
    # trained again.
    process = started(run, tmp_path / "killed")
    branch = tmp_path / "killed" / f"step-{2 * PER_EPOCH:08d}-order-1"
    wait_until(lambda: (branch / "metrics.jsonl").exists(), seconds=300)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    again = ended(started(run, tmp_path / "killed"))
    assert json.loads(again[-1]) == found and trained(tmp_path / "killed") == logs
    first = json.loads(
        (
            branch.with_name(branch.name.replace("order-1", "order-0")) / "environment.json"
        ).read_text()
    )
    assert len(first["starts"]) == 1

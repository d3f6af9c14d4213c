"""The state of a run follows from its folder and its lock."""

import subprocess
import sys

import pytest

from tests.tools.reporting.runs import end_event, eval_event, start, train_event, written
from tools.reporting import run


def state(folder):
    return run.state(run.read(folder))


def test_a_finished_run(tmp_path):
    folder = written(tmp_path / "run", [train_event(600), eval_event(600, 0.9), end_event(600, 300.0, 0.9)])
    assert state(folder) == ("finished", "step 600 of 600")
    figures = run.headline(run.read(folder))
    expected = {"top1": 0.9, "best_top1": 0.9, "seconds": 300.0, "steps": 600, "epoch": 10}
    assert {key: figures[key] for key in expected} == expected


def test_a_run_that_was_cut_off_says_how_far_it_came(tmp_path):
    folder = written(tmp_path / "run", [train_event(60), eval_event(60, 0.7), train_event(120), eval_event(120, 0.6)])
    kind, text = state(folder)
    assert kind == "cut off" and text.startswith("at step 120 of 600: ")
    figures = run.headline(run.read(folder))
    assert (figures["top1"], figures["best_top1"], figures["seconds"]) == (0.6, 0.7, 60.0)
    goes_on = written(tmp_path / "run", [train_event(60), end_event(60, 30.0), train_event(120), "garbage"])
    assert state(goes_on).kind == "cut off" and run.read(goes_on).metrics.odd == [4]


def test_a_run_whose_folder_is_locked_is_running(tmp_path):
    """By another process: locks of this one do not count."""
    folder = written(tmp_path / "run", [train_event(60)])
    hold = "import fcntl, sys; s = open(sys.argv[1], 'a'); fcntl.lockf(s, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", hold, folder / "lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert state(folder) == ("running", "step 60 of 600 is logged")
        process.communicate(b"\n")
    assert state(folder).kind == "cut off"


@pytest.mark.parametrize(
    ("skipped", "in_row"),
    [
        *(([0, 6, 12, 36], 36), ([0, 6, 12, 35], 23), ([0, 0, 0, 24], 24), ([0, 0, 0, 21], 21)),
        *(([0, 0, 0, 20], None), ([0, 6, 12, 24], None), ([6, 12, 18, 18], None)),
    ],
)
def test_a_run_of_skipped_updates_failed(tmp_path, skipped, in_row):
    """By the recipe: more than 20 in a row. The log tells of 6, 6, 6 and 24 updates at a time."""
    steps = (6, 12, 18, 42)
    events = [train_event(step, skipped_steps=count) for step, count in zip(steps, skipped)]
    found = state(written(tmp_path / "run", events))
    assert found.kind == ("failed" if in_row else "cut off")
    assert in_row is None or f": the last {in_row} updates had gradients" in found.text


def test_the_batch_is_that_of_the_recipe(tmp_path):
    alone = written(tmp_path / "a")
    assert run.division(run.read(alone)) == (
        "24 = 12 micro x 2 accumulation x 1 replica (1 device); with replicas: auto, as one replica divides it"
    )
    noted = written(tmp_path / "c", starts=[start(replicas=1), start(replicas=2), start()])
    assert run.division(run.read(noted)) == "24 = 12 micro x 1 accumulation x 2 replicas (2 devices)"
    ranks = written(tmp_path / "b", overrides=["parallel.replicas=2", "parallel.stages=2"])
    assert run.division(run.read(ranks)) == "24 = 12 micro x 1 accumulation x 2 replicas (2 stages each: 4 devices)"


def test_without_events_a_run_is_not_begun_and_without_a_recipe_the_rest_is_left(tmp_path):
    assert state(written(tmp_path / "run")).kind == "not begun"
    folder = written(tmp_path / "run", [train_event(60), eval_event(60)])
    (folder / "config.yaml").write_text("modl: {}\n")
    found = run.read(folder)
    assert found.recipe is None and "modl: unknown key" in found.complaint
    assert run.total_steps(found) is None and run.headline(found)["top1"] == 0.5


def test_the_device_is_that_of_the_newest_start(tmp_path):
    starts = [start(), start(devices=["H100", "H100", "A100"])]
    assert run.device(run.read(written(tmp_path / "a", starts=starts))) == "2 x H100, A100"
    assert run.device(run.read(written(tmp_path / "b", starts=starts, overrides=["run.device=cpu"]))).startswith("CPU")
    assert run.device(run.read(written(tmp_path / "c", starts=()))) is None

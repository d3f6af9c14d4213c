"""A sweep loses and repeats nothing when it or its trials are killed, stopped or fail."""

import contextlib
import json
import os
import shlex
import signal
import sqlite3
import subprocess
import time

import pytest

from tests.conftest import QUICKSTART
from tests.tools.sweeping import double
from tests.tools.sweeping.sweeps import DONE, FAILED, STOPPED, WRONG_INPUT, is_gone, reached
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize("outlived", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kill_nine_amid_a_trial_loses_and_repeats_nothing(some, outlived):
    """Args: outlived: by its trial, as where a process cannot be made to end with its parent."""
    some.killed_at(trial=1, evaluations=2)
    before = some.stored()
    assert some.states() == ["COMPLETE", "RUNNING"]
    if outlived:
        command = (some.folder / "logs" / "0001.log").read_text().splitlines()[0].removeprefix("$ ")
        orphan = subprocess.Popen(shlex.split(command), env={**os.environ, "DOUBLE_SECONDS": "0.4"})
        wait_until(lambda: some.processes() == [1, 2])
    assert some("--trials", "3")[0] == DONE
    assert not outlived or orphan.wait(timeout=60) == 0
    after = some.stored()
    assert len(after) == 3 and after[0] == before[0]
    assert after[1] == ("COMPLETE", reached(before[1][2]), before[1][2])
    starts = some.starts()[1]
    assert (
        starts[1]["epoch"] >= 1
        and len([each for each in starts if each["epoch"] < double.EPOCHS]) == 2
    )
    assert before[1][2].items() <= starts[1]["values"].items()


def test_a_signal_lets_the_trial_save_and_the_same_command_goes_on(some):
    process = some.start("--trials", "2", "--json", DOUBLE_SLOW="1", DOUBLE_SECONDS="0.5")
    wait_until(lambda: some.evaluations(1) >= 1)
    os.kill(process.pid, signal.SIGINT)
    process.join(240)
    assert process.exitcode == STOPPED and '"running": 1}' in some.output.read_text()
    parameters = some.stored()[1][2]
    assert some("--trials", "2")[0] == DONE
    assert some.processes() == [1, 2] and some.starts()[1][1]["epoch"] >= 1
    assert some.stored()[1] == ("COMPLETE", reached(parameters), parameters)


def test_a_second_signal_ends_the_trials_at_once_and_a_second_sweep_is_refused(some):
    process = some.start(DOUBLE_SECONDS="60")
    wait_until(lambda: (some.run(0) / "starts").exists())
    code, _, (error,) = some()
    assert (
        code == WRONG_INPUT
        and "in use by another sweep; wait for it, or choose another folder" in error
    )
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(1)  # sooner, it would be taken for the same signal
    assert process.is_alive()
    os.kill(process.pid, signal.SIGTERM)
    process.join(50)  # the trials would go on for longer
    assert process.exitcode == STOPPED
    assert is_gone(some.starts()[0][0]["pid"])
    assert some.states() == ["RUNNING"]


def test_a_trial_that_fails_is_reported_by_its_last_line_and_the_others_go_on(some, monkeypatch):
    line = "step 7: the weights are lost; start a new run with a lower schedule.peak"
    for above, state, trials in (("0.88", DONE, "4"), ("0", FAILED, "2")):
        monkeypatch.setenv("DOUBLE_FAILS_ABOVE", above)
        some.folder = some.folder.with_name(above)
        code, out, err = some("--json", "--trials", trials)
        rows = json.loads(out[-1])["leaderboard"]
        failing = [
            row["trial"] for row in rows if row["parameters"]["optimizer.momentum"] > float(above)
        ]
        assert code == state and 0 < len(failing) <= 4
        assert {
            row["trial"]: row["reason"] for row in rows if row["state"] == "failed"
        } == dict.fromkeys(failing, line)
        assert {row["state"] for row in rows if row["trial"] not in failing} <= {"complete"}
    assert (
        f"no trial is complete; the last says: {line}" in err[0]
        and not (some.folder / "best.yaml").exists()
    )


def test_input_that_is_wrong_for_all_trials_stops_the_sweep_and_spends_none(
    some, monkeypatch, tmp_path
):
    """Two trials are enough to know; once the input is right, the same command trains them and the
    rest."""
    needed = tmp_path / "images"
    monkeypatch.setenv("DOUBLE_NEEDS", str(needed))
    for _ in range(2):
        code, _, (error,) = some("--json")
        assert code == WRONG_INPUT
        assert (
            f"data.root {needed}: no such folder; give data.root=FOLDER; then repeat the command"
            in error
        )
        assert some.states() == ["RUNNING"] * 2 and some.starts() == {}
    needed.mkdir()
    assert some("--trials", "3")[0] == DONE
    assert some.states() == ["COMPLETE"] * 3 and some.processes() == [1] * 3


@pytest.mark.parametrize("number", ["0", "1"])  # before any is complete, and after
def test_input_that_is_wrong_for_one_trial_fails_that_trial(some, monkeypatch, tmp_path, number):
    monkeypatch.setenv("DOUBLE_NEEDS", str(tmp_path / "images"))
    monkeypatch.setenv("DOUBLE_NEEDS_IN", number)
    code, data = some.data("--trials", "2")
    failed, reasons = (
        [row[key] for row in data["leaderboard"] if row["reason"]] for key in ("trial", "reason")
    )
    assert (code, failed) == (DONE, [int(number)])
    assert reasons[0].endswith("images: no such folder; give data.root=FOLDER")


def test_a_trial_whose_process_is_killed_from_outside_goes_on(some, monkeypatch):
    monkeypatch.setenv("DOUBLE_KILLED", "yes")
    code, out, _ = some("--trials", "1")
    assert code == DONE
    assert "trial 0 was ended by signal 9; it goes on from its last checkpoint" in out
    assert [start["epoch"] for start in some.starts()[0]] == [0, 2]
    assert some.states() == ["COMPLETE"]


def test_a_trial_of_a_recipe_that_always_begins_anew_goes_on_nonetheless(
    some, monkeypatch, tmp_path
):
    monkeypatch.setenv("DOUBLE_KILLED", "yes")
    never = tmp_path / "never.yaml"
    never.write_text(f"extends: {QUICKSTART}\nrun: {{resume: never}}\n")
    some.file.write_text(some.file.read_text().replace(str(QUICKSTART), str(never)))
    assert some("--trials", "1")[0] == DONE
    assert [start["epoch"] for start in some.starts()[0]] == [0, 2]
    assert some.states() == ["COMPLETE"]


def test_a_study_that_was_lost_is_made_again_from_the_runs(some):
    assert some("--trials", "2")[0] == DONE
    before = some.stored()
    (some.folder / "study.db").unlink()
    assert some("--trials", "2")[0] == DONE
    assert some.stored() == before
    assert some.processes() == [1] * 2


def test_a_trial_that_was_complete_when_the_sweep_was_killed_is_not_pruned(some):
    """By its last evaluation it is worse than the median, but no trial is pruned by that."""
    some.define("pruner: median\npruner_startup_trials: 1\npruner_warmup: 3")
    assert some("--trials", "2")[0] == DONE
    before = some.stored()
    worse = min(before, key=lambda number: before[number][1])
    with contextlib.closing(sqlite3.connect(some.folder / "study.db")) as study:
        study.execute(
            "UPDATE trials SET state = 'RUNNING', datetime_complete = NULL WHERE number = ?",
            (worse,),
        )
        study.execute(
            "DELETE FROM trial_values WHERE trial_id IN (SELECT trial_id FROM trials WHERE number = ?)",
            (worse,),
        )
        study.commit()
    assert some("--trials", "2")[0] == DONE
    assert some.stored() == before and some.processes() == [1, 1]


def test_a_full_disk_is_one_line_and_the_sweep_goes_on_later(some, small_disk):
    disk = small_disk("400k")
    some.folder = disk / "found"
    filler = disk / "filler"
    filler.write_bytes(bytes(230_000))
    code, _, (error,) = some()
    assert code == FAILED and "then rerun the same command: it goes on" in error
    filler.unlink()
    assert some("--trials", "2")[0] == DONE
    assert some.states() == ["COMPLETE"] * 2

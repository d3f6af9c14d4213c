"""A sweep loses and repeats nothing when it or its trials are killed, stopped or fail."""

import json
import os
import shlex
import signal
import subprocess
import time

import pytest

from tests.tools.sweeping import double
from tests.tools.sweeping.sweeps import DONE, FAILED, STOPPED, WRONG_INPUT, Sweep, is_gone, reached, wait_for


@pytest.mark.slow
def test_a_sweep_killed_again_and_again_ends_as_the_undisturbed_one(undrawn, some, tmp_path, capfd):
    """Same parameters, values and states; no finished trial runs again, and a cut-off one goes on where it was."""
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Sweep(tmp_path / "undisturbed", capfd)
    undisturbed.define("pruner: median\npruner_startup_trials: 2", "best_top1")
    some.define("pruner: median\npruner_startup_trials: 2", "best_top1")
    assert undisturbed()[0] == DONE
    cut_off = []
    for trial, evaluations in ((0, 2), (1, 1), (3, 1)):
        some.killed_at(trial, evaluations)
        state, _, parameters = some.stored()[trial]
        assert state == "RUNNING"
        cut_off.append((trial, parameters, len(some.starts()[trial])))
    code, out, _ = some("--json")
    assert code == DONE
    assert some.stored() == undisturbed.stored()
    assert json.loads(out[-1])["counts"]["running"] == 0
    starts = some.starts()
    for trial, parameters, before in cut_off:
        later = starts[trial][before]
        assert later["epoch"] >= 1, "it went on from its checkpoint"
        assert {key: later["values"][key] for key in parameters} == parameters
    killed = [trial for trial, _, _ in cut_off]
    assert [len(each) for number, each in starts.items() if number not in killed] == [1] * (4 - len(killed))


def test_kill_nine_amid_a_trial_loses_and_repeats_nothing(undrawn, some):
    some.killed_at(trial=2, evaluations=2)
    before = some.stored()
    assert [before[number][0] for number in range(3)] == ["COMPLETE", "COMPLETE", "RUNNING"]
    code, out, _ = some("--json")
    assert code == DONE
    after = some.stored()
    assert {number: after[number] for number in range(2)} == {number: before[number] for number in range(2)}
    assert after[2] == ("COMPLETE", reached(before[2][2]), before[2][2])
    assert [len(each) for each in some.starts().values()] == [1, 1, 2, 1]
    assert some.starts()[2][1]["epoch"] >= 1
    assert len(after) == len(json.loads(out[-1])["leaderboard"]) == 4


def test_a_signal_lets_the_trial_save_and_the_same_command_goes_on(undrawn, some):
    process = some.start("--json", DOUBLE_SLOW="1", DOUBLE_SECONDS="0.5")
    wait_for(lambda: some.evaluations(1) >= 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == STOPPED
    assert err.splitlines() == ["SIGINT: 1 of 4 trials are done; the same command goes on"]
    assert json.loads(out.splitlines()[-1])["counts"]["running"] == 1
    parameters = some.stored()[1][2]
    assert some()[0] == DONE
    assert [len(each) for each in some.starts().values()] == [1, 2, 1, 1]
    assert some.starts()[1][1]["epoch"] >= 1
    assert some.stored()[1] == ("COMPLETE", reached(parameters), parameters)


def test_a_second_signal_ends_the_trials_at_once(undrawn, some):
    process = some.start(DOUBLE_SECONDS="60")
    wait_for(lambda: (some.run(0) / "starts").exists())
    process.send_signal(signal.SIGTERM)
    time.sleep(1)  # sooner, it would be taken for the same signal
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=50)  # they would go on for longer
    assert process.returncode == STOPPED
    assert is_gone(some.starts()[0][0]["pid"])
    assert some.stored()[0][0] == "RUNNING"


def test_a_trial_that_outlived_its_sweep_is_waited_for_and_not_trained_twice(undrawn, some):
    """As where a process cannot be told to end with its parent."""
    some.killed_at(trial=0, evaluations=1)
    command = (some.folder / "logs" / "0000.log").read_text().splitlines()[0]
    assert command.startswith("$ ")
    orphan = subprocess.Popen(shlex.split(command[2:]), env={**os.environ, "DOUBLE_SECONDS": "0.4"})
    wait_for(lambda: len(some.starts()[0]) == 2)
    assert some("--trials", "1")[0] == DONE
    assert orphan.wait(timeout=60) == 0
    assert [start["epoch"] for start in some.starts()[0]][1] >= 1
    assert len([start for start in some.starts()[0] if start["epoch"] < double.EPOCHS]) == 2
    assert some.stored()[0][0] == "COMPLETE"


def test_two_sweeps_on_one_folder_the_second_is_refused(undrawn, some):
    process = some.start(DOUBLE_SECONDS="5")
    try:
        wait_for(lambda: (some.run(0) / "starts").exists())
        code, _, err = some()
    finally:
        process.kill()
        process.communicate()
    assert code == WRONG_INPUT
    assert len(err) == 1 and "in use by another sweep; wait for it, or choose another folder" in err[0]


def test_a_trial_that_fails_is_told_by_its_last_line_and_the_others_go_on(undrawn, some, monkeypatch):
    monkeypatch.setenv("DOUBLE_FAILS_ABOVE", "0.88")
    code, out, err = some("--json")
    data = json.loads(out[-1])
    failing = [number for number, (_, _, values) in some.stored().items() if values["optimizer.momentum"] > 0.88]
    assert (code, err) == (DONE, [])
    assert 0 < len(failing) < 4
    failed = [row for row in data["leaderboard"] if row["state"] == "failed"]
    assert sorted(row["trial"] for row in failed) == failing
    assert {row["reason"] for row in failed} == {
        "step 7: the weights are lost; start a new run with a lower schedule.peak"
    }
    assert data["counts"]["complete"] == 4 - len(failing)


def test_where_nothing_is_complete_the_command_fails_and_says_why(undrawn, some, monkeypatch):
    monkeypatch.setenv("DOUBLE_FAILS_ABOVE", "0")
    code, out, err = some("--json", "--trials", "2")
    assert code == FAILED
    assert len(err) == 1 and "no trial is complete; the last says: step 7: the weights are lost" in err[0]
    assert json.loads(out[-1])["best"] is None
    assert not (some.folder / "best.yaml").exists()


def test_input_that_is_wrong_for_all_trials_stops_the_sweep_and_spends_none(undrawn, some, monkeypatch, tmp_path):
    """Two trials are enough to know; once it is mended, the same command trains them and the rest."""
    needed = tmp_path / "images"
    monkeypatch.setenv("DOUBLE_NEEDS", str(needed))
    for _ in range(2):
        code, _, err = some("--json")
        assert (code, len(err)) == (WRONG_INPUT, 1)
        assert f"data.root {needed}: no such folder; give data.root=FOLDER; then repeat the command" in err[0]
        assert [state for state, _, _ in some.stored().values()] == ["RUNNING"] * 2
        assert some.starts() == {}
    needed.mkdir()
    code, out, _ = some("--json")
    assert code == DONE
    assert json.loads(out[-1])["counts"] == {"complete": 4, "pruned": 0, "impossible": 0, "failed": 0, "running": 0}
    assert [len(each) for each in some.starts().values()] == [1] * 4


def test_trials_that_run_beside_those_with_wrong_input_save_and_go_on_later(undrawn, some, monkeypatch, tmp_path):
    """With three at once the first trains, two seconds an epoch; the others complain once its first is saved. Whether a
    fourth begins between the two complaints depends on who is faster."""
    monkeypatch.setenv("DOUBLE_NEEDS", str(tmp_path / "images"))
    monkeypatch.setenv("DOUBLE_NEEDS_IN", "12")
    monkeypatch.setenv("DOUBLE_REFUSES_AFTER", str(some.folder / "trials" / "0000" / "checkpoint"))
    monkeypatch.setenv("DOUBLE_SECONDS", "2")
    assert some("--workers", "3")[0] == WRONG_INPUT
    states = [state for state, _, _ in some.stored().values()]
    assert states in (["RUNNING"] * 3, ["RUNNING"] * 4)
    assert 1 <= some.evaluations(0) < double.EPOCHS
    (tmp_path / "images").mkdir()
    monkeypatch.setenv("DOUBLE_SECONDS", "0")
    assert some()[0] == DONE
    assert some.starts()[0][1]["epoch"] >= 1
    assert {state for state, _, _ in some.stored().values()} == {"COMPLETE"}


def test_input_that_is_wrong_for_one_trial_fails_that_trial(undrawn, some, monkeypatch, tmp_path):
    monkeypatch.setenv("DOUBLE_NEEDS", str(tmp_path / "images"))
    for number in ("0", "3"):  # before any is complete, and after
        some.folder = some.folder.with_name(number)
        monkeypatch.setenv("DOUBLE_NEEDS_IN", number)
        code, out, err = some("--json")
        rows = {row["trial"]: row for row in json.loads(out[-1])["leaderboard"]}
        assert (code, err) == (DONE, [])
        assert {trial for trial, row in rows.items() if row["state"] == "failed"} == {int(number)}
        assert rows[int(number)]["reason"].endswith("images: no such folder; give data.root=FOLDER")


def test_the_only_trial_fails_where_its_input_is_wrong(undrawn, some, monkeypatch, tmp_path):
    monkeypatch.setenv("DOUBLE_NEEDS", str(tmp_path / "images"))
    code, _, err = some("--trials", "1")
    assert code == FAILED and "no trial is complete; the last says: " in err[0] and "no such folder" in err[0]


def test_a_trial_whose_process_is_killed_from_outside_goes_on(undrawn, some, monkeypatch):
    monkeypatch.setenv("DOUBLE_KILLED", "yes")
    code, out, _ = some("--trials", "1")
    assert code == DONE
    assert "trial 0 was ended by signal 9; it goes on from its last checkpoint" in out
    assert [start["epoch"] for start in some.starts()[0]] == [0, 2]
    assert some.stored()[0][0] == "COMPLETE"


def test_a_study_that_was_lost_is_made_again_from_the_runs(undrawn, some):
    assert some()[0] == DONE
    before = some.stored()
    (some.folder / "study.db").unlink()
    assert some()[0] == DONE
    assert some.stored() == before
    assert [len(each) for each in some.starts().values()] == [1] * 4


def test_a_full_disk_is_told_in_one_line_and_the_sweep_goes_on_later(undrawn, some, small_disk):
    disk = small_disk("400k")
    some.folder = disk / "found"
    filler = disk / "filler"
    filler.write_bytes(bytes(230_000))
    code, _, err = some()
    assert code == FAILED
    assert len(err) == 1 and "then rerun the same command: it goes on" in err[0]
    filler.unlink()
    assert some("--trials", "2")[0] == DONE
    assert [state for state, _, _ in some.stored().values()] == ["COMPLETE"] * 2

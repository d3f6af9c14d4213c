"""A sweep runs each trial once, whatever ends it in between, and says what came of it.

Its trials are trained by a double of train.py, which keeps train.py's promises in milliseconds; the last test trains.
"""

import csv
import json
import os
import shlex
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel.parent_death import bound_to_parent
from recipe import loading
from tests.conftest import QUICKSTART, ROOT, TINY
from tests.tools.sweeping import double
from tests.tools.sweeping.conftest import migrations_loaded_once  # noqa: F401 (a fixture for all tests here)
from tools import sweep
from tools.sweeping import picture, scheduler

DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 75
DOUBLE = str(ROOT / "tests" / "tools" / "sweeping" / "double.py")
FILE = """
recipe: {recipe}
overrides: [run.epochs=4, schedule.warmup_epochs=1]
trials: 4
seed: 3
metric: {metric}
{more}
space:
  optimizer.momentum: {{low: 0.8, high: 0.95}}
  schedule.peak: {{low: 0.5, high: 8, log: true}}
"""
# What `python -m tools.sweep` runs, but for the program that trains.
DRIVE = "import sys\nfrom tools import sweep\nsys.exit(sweep.main(sys.argv[2:], trainer=[sys.argv[1]]))\n"


class Sweep:
    """A sweep file and its folder."""

    def __init__(self, path, capfd):
        self.folder, self.file, self._capfd = path / "found", path / "some.yaml", capfd
        self.define()

    def define(self, more="", metric="top1", text=FILE):
        self.file.write_text(text.format(recipe=QUICKSTART, metric=metric, more=more))

    def arguments(self, *more):
        return ["--config", str(self.file), "--output", str(self.folder), *more]

    def __call__(self, *more):
        """Exit code, lines of stdout, lines of stderr of the command in this process."""
        self._capfd.readouterr()
        code = sweep.main(self.arguments(*more), trainer=[DOUBLE])
        captured = self._capfd.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    def start(self, *more, **environment):
        """The command in a process of its own."""
        return subprocess.Popen(
            bound_to_parent([sys.executable, "-c", DRIVE, DOUBLE, *self.arguments(*more)]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def killed_at(self, trial, evaluations):
        """The command is killed when a trial has that many evaluations; then the trial's process is gone, too."""
        process = self.start(DOUBLE_SLOW=str(trial), DOUBLE_SECONDS="1")
        wait_for(lambda: self.evaluations(trial) >= evaluations)
        process.kill()
        process.communicate()
        pid = self.starts()[trial][-1]["pid"]
        wait_for(lambda: is_gone(pid), seconds=5)
        assert self.evaluations(trial) < double.EPOCHS, "it died with the sweep, not because it was done"

    def run(self, number):
        return self.folder / "trials" / f"{number:04d}"

    def starts(self):
        """Trial -> what each process that trained it noted as it began."""
        paths = sorted(self.folder.glob("trials/*/starts"))
        return {int(path.parent.name): [json.loads(line) for line in path.read_text().splitlines()] for path in paths}

    def evaluations(self, number):
        path = self.run(number) / "metrics.jsonl"
        return path.read_text().count('"eval"') if path.exists() else 0

    def stored(self):
        """The trials as SQLite has them, read without Optuna: number -> state, value, parameters."""
        with sqlite3.connect(self.folder / "study.db") as database:
            states = dict(database.execute("select number, state from trials"))
            values = dict(database.execute("select number, value from trials join trial_values using (trial_id)"))
            parameters = database.execute(
                "select number, param_name, param_value from trials join trial_params using (trial_id)"
            )
            found = {number: {} for number in states}
            for number, name, value in parameters:
                found[number][name] = value
        database.close()
        return {number: (states[number], values.get(number), found[number]) for number in states}


@pytest.fixture
def some(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(scheduler, "_LOOK_SECONDS", 0.02)
    return Sweep(tmp_path, capfd)


@pytest.fixture
def undrawn(monkeypatch):
    """To draw takes longer than all trials together."""
    monkeypatch.setattr(picture, "draw", lambda *arguments: None)


def wait_for(condition, seconds=240):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def is_gone(pid):
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def reached(parameters):
    return double.top1(parameters["optimizer.momentum"], parameters["schedule.peak"], double.EPOCHS)


def test_all_trials_run_once_and_the_best_becomes_a_recipe(some):
    code, out, err = some("--json")
    data = json.loads(out[-1])
    assert (code, err) == (DONE, [])
    assert data["counts"] == {"complete": 4, "pruned": 0, "impossible": 0, "failed": 0, "running": 0}
    assert data["trials"] == 4
    assert [len(starts) for starts in some.starts().values()] == [1] * 4
    stored = some.stored()
    by_value = sorted(stored, key=lambda number: -reached(stored[number][2]))
    assert [row["trial"] for row in data["leaderboard"]] == by_value
    assert [row["value"] for row in data["leaderboard"]] == [reached(stored[number][2]) for number in by_value]
    assert [row["parameters"] for row in data["leaderboard"]] == [stored[number][2] for number in by_value]
    with open(some.folder / "leaderboard.csv", newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [(int(row["rank"]), int(row["trial"]), float(row["top1"])) for row in table] == [
        (rank, number, reached(stored[number][2])) for rank, number in enumerate(by_value, start=1)
    ]
    best = loading.load(some.folder / "best.yaml")
    trained = [f"{key}={value}" for key, value in stored[by_value[0]][2].items()]
    assert best == loading.load(
        QUICKSTART, ["run.epochs=4", "schedule.warmup_epochs=1", "run.name=some-best", *trained]
    )
    assert (some.folder / "importance.png").read_bytes().startswith(b"\x89PNG")


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


def test_the_median_pruner_ends_what_is_worse_than_half(undrawn, some, monkeypatch):
    """The double's curves never cross, so each decision can be made again from the parameters alone."""
    some.define("pruner: median\npruner_startup_trials: 2\npruner_warmup: 1\nsampler: random")
    expected, rows = {}, {}
    for folder in ("fast", "slow"):  # where a trial is over before it can be asked to end, it is pruned nevertheless
        some.folder = some.folder.with_name(folder)
        code, out, _ = some("--json", "--trials", "6")
        assert code == DONE
        rows = {row["trial"]: row for row in json.loads(out[-1])["leaderboard"]}
        expected = decisions({number: values for number, (_, _, values) in some.stored().items()})
        assert {number: rows[number]["state"] for number in sorted(rows)} == expected
        pruned = next(number for number, state in expected.items() if state == "pruned")
        assert rows[pruned]["reason"] == "worse than the median after 2 evaluations"
        monkeypatch.setenv("DOUBLE_SLOW", str(pruned))
        monkeypatch.setenv("DOUBLE_SECONDS", "1")
    assert rows[pruned]["epochs"] < double.EPOCHS


def decisions(parameters):
    """Decision of the median pruner on each trial, where two trials must be complete before."""
    states, complete = {}, []
    for number, values in parameters.items():
        worse = len(complete) >= 2 and reached(values) < statistics.median(complete)
        states[number] = "pruned" if worse else "complete"
        if not worse:
            complete.append(reached(values))
    return states


def test_two_workers_run_two_trials_at_once_each_once(undrawn, some, monkeypatch):
    monkeypatch.setenv("DOUBLE_SECONDS", "0.2")
    assert some("--workers", "2")[0] == DONE
    starts = some.starts()
    assert [len(each) for each in starts.values()] == [1] * 4
    assert {state for state, _, _ in some.stored().values()} == {"COMPLETE"}
    end = (some.run(0) / "checkpoint").stat().st_mtime
    assert starts[1][0]["time"] < end, "the second began before the first was done"


CHANGES = (
    ("high: 0.95", "high: 0.9", "space: optimizer.momentum: high is 0.95 there, 0.9 here"),
    ("seed: 3", "seed: 4", "seed is 3 there, 4 here"),
    ("seed: 3", "sampler: random\nseed: 3", 'sampler is "tpe" there, "random" here'),
    ("run.epochs=4", "run.epochs=5", "the recipe's run.epochs is 4.0 there, 5.0 here"),
    ("  schedule.peak:", "  optimizer.weight_decay:", "space: schedule.peak is only there"),
)


def test_a_sweep_may_grow_but_a_changed_one_is_refused_by_the_name_of_what_changed(undrawn, some):
    assert some("--trials", "1")[0] == DONE
    text, first = some.file.read_text(), some.stored()
    for before, after, difference in CHANGES:
        some.file.write_text(text.replace(before, after))
        code, _, err = some()
        assert code == WRONG_INPUT
        assert err == [
            f"{some.folder} belongs to another sweep: {difference}; choose another folder by --output FOLDER"
        ]
        assert some.stored() == first
    some.file.write_text("# a comment\n" + text.replace("trials: 4", "trials: 2"))
    assert some("data.root=/elsewhere")[0] == DONE
    assert len(some.stored()) == 2
    some.file.write_text(text)
    assert some()[0] == DONE
    after = some.stored()
    assert len(after) == 4 and after[0] == first[0]
    assert [len(each) for each in some.starts().values()] == [1] * 4


def test_impossible_combinations_end_their_trial_and_not_the_sweep(undrawn, some):
    some.define(text=FILE + "  batch.global: {{choices: [96, 100]}}\n  batch.micro: {{choices: [32, 50]}}\n")
    code, out, _ = some("--json")
    assert code == DONE
    assert out[0].startswith("note: 8 of 16 combinations are impossible, e.g.: batch.global 96 is not a multiple of 50")
    rows = json.loads(out[-1])["leaderboard"]
    for row in rows:
        fits = row["parameters"]["batch.global"] % row["parameters"]["batch.micro"] == 0
        assert row["state"] == ("complete" if fits else "impossible")
        assert fits or "is not a multiple of" in row["reason"]
    assert sorted(some.starts()) == sorted(row["trial"] for row in rows if row["state"] == "complete")


def test_a_folder_of_any_name_will_do(undrawn, some):
    some.folder = some.folder.with_name("a folder: 50% #1 – día?")
    assert some("--trials", "1")[0] == DONE
    assert loading.load(some.folder / "best.yaml").run.epochs == 4
    shutil.move(some.folder, some.folder.with_name("moved"))
    some.folder = some.folder.with_name("moved")
    assert some("--trials", "2")[0] == DONE
    assert [len(each) for each in some.starts().values()] == [1, 1]


def test_what_is_no_folder_for_a_sweep_is_refused_in_one_line(undrawn, some, tmp_path):
    some.folder.mkdir()
    (some.folder / "photo.jpg").write_text("")
    assert "holds files that are no sweep" in some()[2][0]
    some.folder = tmp_path / "file"
    some.folder.write_text("")
    assert "a file is in the way" in some()[2][0]
    some.folder = Path("/proc/found")
    code, _, err = some()
    assert (code, len(err)) == (WRONG_INPUT, 1)
    assert err[0].startswith("/proc/found: cannot be made or written: ") and err[0].endswith(
        "choose a folder by --output FOLDER"
    )
    some.folder = tmp_path / "broken"
    assert some("--trials", "1")[0] == DONE
    (some.folder / "study.db").write_text("garbage")
    code, _, err = some()
    assert code == WRONG_INPUT and len(err) == 1 and "study.db: no study" in err[0]


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


@pytest.mark.slow
def test_two_trials_of_the_quickstart_are_trained(tmp_path, capfd):
    file = tmp_path / "real.yaml"
    overrides = "\n".join(f"  - {each}" for each in TINY)
    file.write_text(
        f"recipe: {QUICKSTART}\noverrides:\n{overrides}\ntrials: 2\nsampler: grid\nmetric: loss\n"
        "space: {optimizer.momentum: {choices: [0.0, 0.9]}}\n"
    )
    assert sweep.main(["--config", str(file), "--output", str(tmp_path / "found"), "--json"]) == DONE
    data = json.loads(capfd.readouterr().out.splitlines()[-1])
    losses = {}
    for number in (0, 1):
        folder = tmp_path / "found" / "trials" / f"{number:04d}"
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        recipe = loading.load(folder / "config.yaml")
        losses[recipe.optimizer.momentum] = [event["loss"] for event in events if event["event"] == "eval"][-1]
    assert {row["parameters"]["optimizer.momentum"]: row["value"] for row in data["leaderboard"]} == losses
    assert data["best"]["value"] == min(losses.values())

"""A sweep runs each trial once, whatever ends it in between, and says what came of it.

Its trials are trained by a double of train.py, which keeps train.py's promises in milliseconds; the last test trains.
"""

import csv
import json
import shutil
import statistics
from pathlib import Path

import pytest

from recipe import loading
from tests.conftest import QUICKSTART, TINY
from tests.tools.sweeping import double
from tests.tools.sweeping.sweeps import (
    DONE,
    FILE,
    WRONG_INPUT,
    reached,
)
from tools import sweep


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

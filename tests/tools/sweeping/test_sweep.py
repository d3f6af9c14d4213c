"""A sweep runs each trial once and ranks what came of them.

Its trials are trained by a double of train.py, which keeps train.py's promises in milliseconds; the
last test trains.
"""

import contextlib
import csv
import json
import shutil
import statistics
from pathlib import Path

import pytest

from recipe import loading
from tests.conftest import QUICKSTART, TINY
from tests.tools.sweeping import double
from tests.tools.sweeping.sweeps import DONE, FILE, WRONG_INPUT, reached
from tools import sweep
from tools.sweeping.candidates import load_candidates
from tools.sweeping.definition import read
from tools.sweeping.folder import SweepFolder
from tools.sweeping.report import _best_recipe, draw_picture
from tools.sweeping.trials import Record
from training.metrics import read_events


def test_all_trials_run_once_and_the_best_becomes_a_recipe(some):
    code, data = some.data()
    assert (code, data["trials"]) == (DONE, 4)
    assert data["counts"] == {
        "complete": 4,
        "pruned": 0,
        "impossible": 0,
        "failed": 0,
        "running": 0,
    }
    assert some.processes() == [1] * 4
    stored = some.stored()
    ranked = sorted(
        ((reached(values), number, values) for number, (_, _, values) in stored.items()),
        reverse=True,
    )
    assert [
        (row["value"], row["trial"], row["parameters"]) for row in data["leaderboard"]
    ] == ranked
    table = list(csv.DictReader((some.folder / "leaderboard.csv").read_text().splitlines()))
    assert [(int(row["rank"]), int(row["trial"]), float(row["top1"])) for row in table] == [
        (rank, number, value) for rank, (value, number, _) in enumerate(ranked, start=1)
    ]
    trained = [f"{key}={value}" for key, value in ranked[0][2].items()]
    assert loading.load(some.folder / "best.yaml") == loading.load(
        QUICKSTART, ["run.epochs=4", "schedule.warmup_epochs=1", "run.name=some-best", *trained]
    )
    assert (some.folder / "importance.png").read_bytes().startswith(b"\x89PNG")


def test_trials_of_a_mirrored_recipe_have_no_mirror(some, undrawn, tmp_path):
    """All trials would have the same one, and take each other's checkpoints for their own."""
    mirrored = tmp_path / "mirrored.yaml"
    mirrored.write_text(
        f"extends: {QUICKSTART}\ncheckpoint: {{mirror: {tmp_path / 'elsewhere'}}}\n"
    )
    some.file.write_text(some.file.read_text().replace(str(QUICKSTART), str(mirrored)))
    code, data = some.data()
    assert (code, data["counts"]["complete"]) == (DONE, 4)
    logs = [log.read_text() for log in (some.folder / "logs").iterdir()]
    assert len(logs) == 4 and all("checkpoint.mirror=null" in log for log in logs)


def test_the_picture_marks_the_best_trial_in_each_panel(tmp_path, monkeypatch):
    figures = []

    def save(figure, place, **_):
        figures.append(figure)
        Path(place).touch()

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
    file = tmp_path / "some.yaml"
    space = "{schedule.peak: {low: 0.5, high: 8, log: true}, batch.global: {choices: [32, 64]}}"
    file.write_text(f"recipe: {QUICKSTART}\ntrials: 3\nmetric: top1\nspace: {space}\n")
    trials = [(0, 0.5, 4.0, 32), (1, 0.9, 2.0, 64), (2, 0.7, 1.0, 32)]
    records = [
        Record(
            number,
            "complete",
            value,
            parameters={"schedule.peak": peak, "batch.global": batch},
            epochs=3.0,
            seconds=1.0,
            reason=None,
        )
        for number, value, peak, batch in trials
    ]
    draw_picture(tmp_path / "picture.png", read(file, []), records, None)
    panels = {axis.get_title(): axis for axis in figures[0].axes}
    stars = {
        title: [tuple(line.get_xydata()[0]) for line in axis.lines if line.get_marker() == "*"]
        for title, axis in panels.items()
        if axis.lines
    }
    assert stars == {
        "history": [(1, 0.9)],
        "schedule.peak": [(2.0, 0.9)],
        "batch.global": [(1, 0.9)],
    }


def test_the_best_recipe_is_the_one_that_was_trained(tmp_path):
    """Values of the recipe file are written where they were swept, or where another kind of section
    replaces them."""
    base = loading.load(QUICKSTART).optimizer
    file = tmp_path / "some.yaml"
    file.write_text(
        f"recipe: {QUICKSTART}\ntrials: 1\nspace: {{optimizer.momentum: {{choices: [{base.momentum}]}}}}\n"
    )
    overrides = [
        "run.steps=7", "schedule.peak_per_image=0.1", "optimizer.name=sgd",
        f"optimizer.weight_decay={base.weight_decay}", "data.source=folder", 'data.root="a: b"',
        "data.image_sizes=[[0, 16], [2, 28]]",
    ]  # fmt: skip
    candidates = load_candidates(read(file, overrides))
    with contextlib.closing(SweepFolder(tmp_path / "found", candidates)) as folder:
        parameters = {"optimizer.momentum": base.momentum}
        best = {"trial": 0, "value": 0.5, "parameters": parameters, "epochs": 1.0, "seconds": 1.0}
        folder.best.write_text(_best_recipe(folder, candidates, best))
    expected = loading.load(
        QUICKSTART, [*overrides, f"optimizer.momentum={base.momentum}", "run.name=some-best"]
    )
    assert loading.load(folder.best) == expected


def test_the_median_pruner_ends_what_is_worse_than_half(undrawn, some, monkeypatch):
    """The double's curves never cross, so each decision can be made again from the parameters
    alone."""
    some.define("pruner: median\npruner_startup_trials: 2\npruner_warmup: 1\nsampler: random")
    for folder in ("fast", "slow"):
        # where a trial is over before it can be asked to end, it is pruned nevertheless
        some.folder = some.folder.with_name(folder)
        code, data = some.data("--trials", "6")
        assert code == DONE
        rows = {row["trial"]: row for row in data["leaderboard"]}
        states = {}
        complete = []
        for number, (_, _, values) in some.stored().items():
            worse = len(complete) >= 2 and reached(values) < statistics.median(complete)
            states[number] = "pruned" if worse else "complete"
            complete += [] if worse else [reached(values)]
        assert {number: row["state"] for number, row in rows.items()} == states
        pruned = min(number for number, state in states.items() if state == "pruned")
        assert rows[pruned]["reason"] == "worse than the median after 2 evaluations"
        monkeypatch.setenv("DOUBLE_SLOW", str(pruned))
        monkeypatch.setenv("DOUBLE_SECONDS", "1")
    assert rows[pruned]["epochs"] < double.EPOCHS


def test_two_workers_run_two_trials_at_once_each_once(undrawn, some, monkeypatch):
    monkeypatch.setenv("DOUBLE_SECONDS", "0.2")
    assert some("--workers", "2")[0] == DONE
    assert some.processes() == [1] * 4 and set(some.states()) == {"COMPLETE"}
    end = (some.run(0) / "checkpoint").stat().st_mtime
    assert some.starts()[1][0]["time"] < end, "the second began before the first was done"


CHANGES = (
    ("high: 0.95", "high: 0.9", "space: optimizer.momentum is "),
    ("seed: 3", "sampler: random\nseed: 3", 'sampler is "tpe" there, "random" here'),
    ("run.epochs=4", "run.epochs=5", "the recipe's run.epochs is 4.0 there, 5.0 here"),
    ("  schedule.peak:", "  optimizer.weight_decay:", "space: schedule.peak is "),
)


def test_a_sweep_may_grow_and_move_but_a_changed_one_is_refused_by_the_name_of_what_changed(
    undrawn, some
):
    assert some("--trials", "1")[0] == DONE
    text = some.file.read_text()
    first = some.stored()
    for before, after, difference in CHANGES:
        some.file.write_text(text.replace(before, after))
        code, _, err = some()
        assert code == WRONG_INPUT and err[0].startswith(
            f"{some.folder} belongs to another sweep: {difference}"
        )
        assert err[0].endswith("here; choose another folder by --output FOLDER")
        assert some.stored() == first
    some.file.write_text("# a comment\n" + text.replace("trials: 4", "trials: 2"))
    some.folder = Path(shutil.move(some.folder, some.folder.with_name("moved: 50% #1 – día?")))
    assert some("data.workers=1")[0] == DONE
    assert len(some.stored()) == 2
    assert some.stored()[0] == first[0] and some.processes() == [1] * 2
    assert loading.load(some.folder / "best.yaml").run.epochs == 4


def test_impossible_combinations_end_their_trial_and_not_the_sweep(undrawn, some):
    some.define(
        text=FILE + "  batch.global: {{choices: [96, 100]}}\n  batch.micro: {{choices: [32, 50]}}\n"
    )
    code, data = some.data()
    assert code == DONE
    complete = []
    for row in data["leaderboard"]:
        fits = row["parameters"]["batch.global"] % row["parameters"]["batch.micro"] == 0
        assert row["state"] == ("complete" if fits else "impossible")
        assert fits or "is not a multiple of" in row["reason"]
        complete += [row["trial"]] if fits else []
    assert sorted(some.starts()) == sorted(complete)


def test_what_is_no_folder_for_a_sweep_is_refused_in_one_line(undrawn, some, tmp_path):
    strange, file, broken = (tmp_path / name for name in ("strange", "file", "broken"))
    strange.mkdir()
    for path in (strange / "photo.jpg", file):
        path.write_text("")
    some.folder = broken
    assert some("--trials", "1")[0] == DONE
    (broken / "study.db").write_text("garbage")
    for some.folder, fault in (
        (strange, "holds files that are no sweep"),
        (file, "cannot be written: "),
        (Path("/proc/found"), "cannot be written: "),
        (broken, "study.db: no study"),
    ):
        code, _, (error,) = some()
        assert code == WRONG_INPUT and error.startswith(str(some.folder))
        assert fault in error and error.endswith("choose another folder by --output FOLDER")


@pytest.mark.slow
def test_two_trials_of_the_quickstart_are_trained(some, capfd):
    overrides = "".join(f"\n  - {each}" for each in TINY)
    some.define(text=f"recipe: {{recipe}}\noverrides:{overrides}\nsampler: grid\nmetric: loss\n"
                "space: {{optimizer.momentum: {{choices: [0.0, 0.9]}}}}\n")  # fmt: skip
    assert sweep.main(some.arguments("--json")) == DONE
    data = json.loads(capfd.readouterr().out.splitlines()[-1])
    losses = {}
    for number in (0, 1):
        recipe = loading.load(some.run(number) / "config.yaml")
        losses[recipe.optimizer.momentum] = read_events(some.run(number))["eval"][-1]["loss"]
    assert {
        row["parameters"]["optimizer.momentum"]: row["value"] for row in data["leaderboard"]
    } == losses
    assert data["best"]["value"] == min(losses.values())

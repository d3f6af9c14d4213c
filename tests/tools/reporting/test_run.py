"""The state of a run follows from its folder and its lock."""

import subprocess
import sys

import pytest

from recipe import loading
from tests.conftest import QUICKSTART, ROOT
from tests.tools.reporting.runs import end_event, eval_event, start, train_event, written
from tools.reporting import run
from tools.reporting.sections import differences, settings


def state(folder):
    return run.state(run.read(folder))


def test_a_finished_run(tmp_path):
    folder = written(
        tmp_path / "run", [train_event(600), eval_event(600, 0.9), end_event(600, 300.0, 0.9)]
    )
    assert state(folder) == ("finished", "step 600 of 600")
    figures = run.headline(run.read(folder))
    expected = {"top1": 0.9, "best_top1": 0.9, "seconds": 300.0, "steps": 600, "epoch": 10}
    assert {key: figures[key] for key in expected} == expected


def test_of_five_classes_or_fewer_no_top5_is_shown(tmp_path):
    """Every class is among the five likeliest."""
    events = [train_event(600), eval_event(600), end_event(600, 300.0)]
    for classes, top5 in ((5, None), (6, 0.9)):
        keys = ("data.source=glyphs", f"model.classes={classes}")
        folder = written(tmp_path / str(classes), events, keys)
        assert run.headline(run.read(folder))["top5"] == top5


def test_a_run_that_was_cut_off_says_how_far_it_came(tmp_path):
    folder = written(
        tmp_path / "run",
        [train_event(60), eval_event(60, 0.7), train_event(120), eval_event(120, 0.6)],
    )
    kind, text = state(folder)
    assert kind == "cut off" and text.startswith("at step 120 of 600: ")
    figures = run.headline(run.read(folder))
    assert (figures["top1"], figures["best_top1"], figures["seconds"]) == (0.6, 0.7, 60.0)
    others = [
        eval_event(60, 0.9),
        eval_event(120, 0.3, validation_set=1),
        eval_event(180, 0.2, validation_set=1),
    ]
    assert run.headline(run.read(written(tmp_path / "run", others)))["best_top1"] == 0.3, (
        "of the newest images"
    )
    goes_on = written(
        tmp_path / "run", [train_event(60), end_event(60, 30.0), train_event(120), "garbage"]
    )
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
        ([0, 6, 12, 36], 36),
        ([0, 6, 12, 35], 23),
        ([0, 0, 0, 24], 24),
        ([0, 0, 0, 21], 21),
        ([0, 0, 0, 20], None),
        ([0, 6, 12, 24], None),
        ([6, 12, 18, 18], None),
    ],
)
def test_a_run_of_skipped_updates_failed(tmp_path, skipped, in_row):
    """By the recipe: more than 20 in a row. The log tells of 6, 6, 6 and 24 updates at a time."""
    steps = (6, 12, 18, 42)
    events = [train_event(step, skipped_steps=count) for step, count in zip(steps, skipped)]
    found = state(written(tmp_path / "run", events))
    assert found.kind == ("failed" if in_row else "cut off")
    assert in_row is None or f": the last {in_row} updates had gradients" in found.text


@pytest.mark.parametrize("noted", [True, False])
def test_skipped_updates_of_several_steps_failed_a_run_too(tmp_path, noted):
    """Of two steps each, 15 from line to line.

    Older logs leave it to the recipe how many there were.
    """
    keys = ("batch.schedule=[[0, 48]]",)
    for skipped, kind in (([0, 15, 30], "failed"), ([0, 15, 29], "cut off")):
        events = []
        for step, count in zip((60, 90, 120), skipped):
            events.append(
                train_event(
                    step, skipped_steps=count, batch=48, **({"updates": 15} if noted else {})
                )
            )
        events[0].update({"updates": 30} if noted else {})
        found = state(written(tmp_path / kind, events, keys))
        assert found.kind == kind and (
            kind == "cut off" or ": the last 30 updates had" in found.text
        )


def test_the_batch_is_that_of_the_recipe(tmp_path):
    alone = written(tmp_path / "a")
    assert run.division(run.read(alone)) == (
        "24 = 12 micro x 2 accumulation x 1 replica (1 device); with replicas: auto, as one replica divides it"
    )
    noted = written(tmp_path / "c", starts=[start(replicas=1), start(replicas=2), start()])
    assert (
        run.division(run.read(noted)) == "24 = 12 micro x 1 accumulation x 2 replicas (2 devices)"
    )
    ranks = written(tmp_path / "b", overrides=["parallel.replicas=2", "parallel.stages=2"])
    assert (
        run.division(run.read(ranks))
        == "24 = 12 micro x 1 accumulation x 2 replicas (2 stages each: 4 devices)"
    )


def test_an_elastic_run_with_a_minimum_is_divided_where_nothing_noted_its_replicas(tmp_path):
    elastic = ["parallel.elastic=true", "exchange.order=tree", "parallel.minimum=2"]
    assert run.division(run.read(written(tmp_path / "a", overrides=elastic))).endswith(
        "as one replica divides it"
    )


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
    assert run.device(
        run.read(written(tmp_path / "b", starts=starts, overrides=["run.device=cpu"]))
    ).startswith("CPU")
    assert run.device(run.read(written(tmp_path / "c", starts=()))) is None


def test_a_start_that_trained_nothing_has_no_step(tmp_path):
    """Three starts: the second found its recipe refused. What is no count is not taken for one."""
    noted = [start(step=0, replicas=2), start(), start(step=120, replicas=4)]
    odd = [start(step=odd, replicas=odd) for odd in ("many", None, -1, 1.5, True)]
    found = run.starts_in(written(tmp_path / "run", starts=[*noted, *odd]))
    counts = [(each.get("step"), each.get("replicas")) for each in found]
    assert counts == [(0, 2), (None, None), (120, 4), *[(None, None)] * 5]
    assert run.resumed_at(found) == [120]


@pytest.mark.parametrize("name", ["quickstart", "pod16", "ablation/bs768_rmsprop"])
def test_the_settings_alone_make_the_recipe_again(name):
    """Laid over nothing but the names, they give an equal recipe: none is missing."""
    recipe = loading.load(ROOT / "configs" / f"{name}.yaml")
    found = settings(recipe)
    names = [
        f"{part}.name={getattr(recipe, part).name}"
        for part in ("run", "model", "optimizer", "schedule")
    ]
    rest = [
        f"{setting[0]}={quoted(setting[1])}"
        for setting in found
        if not setting[0].endswith(".name")
    ]
    assert loading.loads("", "nothing", [*names, *rest]) == recipe
    assert all(setting[1] != setting[2] and setting[3] for setting in found)


def quoted(value):
    return (
        f"'{value}'"
        if value.replace(".", "", 1).isalpha() and value not in ("true", "false", "null")
        else value
    )


def test_the_defaults_are_those_of_the_name():
    """B0's own size is no setting of a recipe that names B0, nor is SGD's momentum of one that
    names SGD."""
    overrides = [
        "run.epochs=1",
        "schedule.peak=1",
        "model.name=efficientnet_b0",
        "optimizer.name=sgd",
    ]
    found = {setting[0] for setting in settings(loading.loads("", "x", overrides))}
    assert found == {override.partition("=")[0] for override in overrides}


def test_only_the_keys_that_differ_are_listed_and_a_peak_that_follows_the_batch():
    rule = ["schedule.batch_rule=linear", "schedule.reference_batch=64"]
    first, second, third = (
        loading.load(QUICKSTART, [*rule, *overrides])
        for overrides in (
            ["batch.global=64"],
            ["batch.global=64", "run.name=b", "run.output=/elsewhere"],
            [
                "batch.global=128",
                "optimizer.momentum=0.8",
                "data.crop_area=[0.5, 1]",
                "optimizer.clip_norm=1e-5",
            ],
        )
    )
    assert differences([first, second]) == []
    assert differences([first, second, third]) == [
        ("batch.global", ["64", "64", "128"]),
        ("optimizer.clip_norm", ["null", "null", "1e-05"]),
        ("optimizer.momentum", ["0.9", "0.9", "0.8"]),
        ("data.crop_area", ["[0.75, 1]", "[0.75, 1]", "[0.5, 1]"]),
        ("peak learning rate, as it follows", ["2", "2", "4"]),
    ]

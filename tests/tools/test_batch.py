"""python -m tools.batch: what other batches would cost a run, against the equations and on a
machine."""

import json
import os
import re

import pytest

from recipe import loading
from tests.conftest import QUICKSTART, ROOT
from tools import batch
from tools.planning import batches, machine, scaling, workload
from tools.planning.batches import Interval

OWN = 64


def event(step, images=None, error=10.0):
    scale = (
        {} if images is None else {"noise_scale": {"images": images, "error": error, "signal": 1.0}}
    )
    return {"event": "train", "step": step, "epoch": step / 22, **scale}


@pytest.fixture
def run(tmp_path):
    """A folder of a run with these events: run(event, ..., overrides=...)."""

    def made(*events, overrides=()):
        recipe = loading.load(QUICKSTART, [f"run.output={tmp_path}", *overrides])
        (tmp_path / "config.yaml").write_text(loading.dump(recipe))
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events))
        return str(tmp_path)

    return made


def test_a_steady_noise_scale_gives_the_published_curve():
    """(updates / least updates - 1)(images / least images - 1) = 1, with the critical batch as
    their quotient."""
    steady = [Interval(1.0, 100, OWN, 300.0, 0.0), Interval(2.0, 50, OWN, 300.0, 0.0)]
    least_updates = batches.updates(steady, 10**12)
    least_images = batches.updates(steady, 1) * 1 - least_updates
    assert batches.critical(steady) == pytest.approx(300.0)
    assert least_images / least_updates == pytest.approx(300.0, rel=1e-9)
    for other in (16, 300, 5000):
        needed = batches.updates(steady, other)
        assert (needed / least_updates - 1) * (needed * other / least_images - 1) == pytest.approx(
            1.0, rel=1e-6
        )
    assert batches.updates(steady, OWN) == 150


def test_intervals_are_between_lines_and_those_of_a_batch_that_grows_have_fewer_updates():
    """Lines before the first noise scale take that one."""
    events = [event(10), event(30, 50.0), event(35, 50.0), {**event(55, 80.0), "batch": 2 * OWN}]
    found = batches.intervals(events, loading.load(QUICKSTART, []))
    assert [each[1:4] for each in found] == [
        (10, 64, 50.0),
        (20, 64, 50.0),
        (5, 64, 50.0),
        (10, 128, 80.0),
    ]
    expected = 35 + 10 * (1 + 80 / OWN) / (1 + 80 / (2 * OWN))
    assert batches.updates(found, OWN) == pytest.approx(expected)


@pytest.mark.parametrize("noted", [True, False])
def test_updates_that_an_epoch_cuts_short_are_counted_as_they_were(noted):
    """Epochs of 44 steps of 32 images; from step 125 on an update has 8 steps, and the last of an
    epoch 4 (or 7, first, as the schedule begins within the epoch). Lines at the ends of epochs have
    the batch of that last update."""
    recipe = loading.load(QUICKSTART, ["batch.global=32", "batch.schedule=[[0, 32], [4000, 256]]"])
    counts = [44, 44, 38, 6, 6, 6]
    events = []
    for epoch, count in enumerate(counts, start=1):
        line = {
            "event": "train",
            "step": 44 * epoch,
            "epoch": float(epoch),
            "batch": 128 if epoch > 2 else 32,
        }
        line["noise_scale"] = {"images": 300.0, "error": 1.0}
        events.append({**line, "updates": count} if noted else line)
    found = batches.intervals(events, recipe)
    assert [each.updates for each in found] == counts and sum(counts) == 144
    assert [each.updates * each.batch for each in found] == pytest.approx([44 * 32] * 6)


def test_a_noise_scale_that_was_lost_is_unknown():
    """It may be anything from none, at which updates alone count, to one at which images alone
    count."""
    events = [event(10), event(40, 300.0), event(60), event(65, 300.0)]
    found = batches.intervals(events, loading.load(QUICKSTART, []))
    assert [each.known for each in found] == [True, True, False, True]
    (lost,) = (each for each in found if not each.known)
    assert [batches.updates([lost], 4 * OWN, errors) for errors in (-1.0, 1.0)] == [20, 5]
    assert batches.is_predictable(found) and not batches.is_predictable(found[1:3] + [lost] * 2)


def test_a_cost_on_a_machine_has_the_sizes_of_the_images_of_its_epochs():
    """A quarter of four epochs with small images, in one line or in four.

    Each update has its size's seconds.
    """
    recipe = loading.load(QUICKSTART, ["data.image_sizes=[[0, 16], [1, 32], [9, 64]]"])
    place = machine.load("two_cores")
    small, large = (
        scaling.predict(recipe, place, 2, workload.of(recipe, size)).seconds for size in (16, 32)
    )
    whole = [Interval(4.0, 100, OWN, 300.0, 1.0)]
    by_epoch = [Interval(epoch, 25, OWN, 300.0, 1.0) for epoch in (1.0, 2.0, 3.0, 4.0)]
    for run in (whole, by_epoch):
        found = batches.cost(run, recipe, OWN, place, 2)
        assert found.seconds == pytest.approx(25 * small + 75 * large) and small < large


def test_a_cost_has_the_range_of_the_standard_error_and_on_a_machine_seconds():
    run = [Interval(1.0, 100, OWN, 300.0, 60.0)]
    place = machine.load("two_cores")
    found = batches.cost(run, loading.load(QUICKSTART, []), 640, place, 2)
    expected = [100 * (1 + noise / 640) / (1 + noise / OWN) for noise in (360.0, 240.0)]
    assert (
        found.updates_range == pytest.approx(expected) and expected[0] < found.updates < expected[1]
    )
    plan = loading.load(QUICKSTART, ["batch.global=640"])
    row = scaling.predict(plan, place, 2, workload.of(plan))
    assert (found.images, found.seconds) == pytest.approx(
        (found.updates * 640, found.updates * row.seconds)
    )


def test_the_command_prints_a_table_draws_and_ends_with_json(run, tmp_path, call):
    folder = run(event(22), event(44, 300.0), event(66, 600.0, 30.0))
    picture = tmp_path / "batch.png"
    options = [
        "--machine",
        "two_cores",
        "--replicas",
        "2",
        "--picture",
        picture,
        "--json",
        "--batches",
        "64,1024",
    ]
    code, lines, _ = call(batch.main, folder, *options)
    data = json.loads(lines.pop())
    assert code == 0 and [each["batch"] for each in data["costs"]] == [64, 1024]
    assert data["costs"][0]["updates"] == 66 and data["batch"] == OWN
    assert any("600 ± 30 by epoch 3" in line for line in lines) and "times on 2 replicas" in lines
    assert picture.read_bytes().startswith(b"\x89PNG")
    costs = json.loads(call(batch.main, folder, "--json")[1][-1])["costs"]
    assert [(each["batch"], each["seconds"]) for each in costs] == [
        (16 << power, None) for power in range(7)
    ]


@pytest.mark.parametrize(
    ("starts", "line"),
    [
        ([{"replicas": 2}, {"replicas": 4}, {}], "times on 4 replicas"),
        ([{}], "times on 1 replica"),
    ],
)
def test_times_are_those_of_the_replicas_that_the_newest_session_had(
    run, tmp_path, call, starts, line
):
    """A recipe with `replicas: auto` keeps it, also where a launcher has started several."""
    folder = run(event(44, 300.0))
    (tmp_path / "environment.json").write_text(json.dumps({"starts": starts}))
    _, lines, errors = call(batch.main, folder, "--machine", "two_cores")
    assert errors == [] and line in lines
    assert (
        "times on 3 replicas"
        in call(batch.main, folder, "--machine", "two_cores", "--replicas", "3")[1]
    )


def test_a_pipelined_run_is_predicted_for_batches_that_its_micro_batch_does_not_divide(run, call):
    """Its blocks are cut as the run cuts them, whatever the batch."""
    folder = run(event(44, 300.0), overrides=["parallel.stages=2", "batch.micro=32"])
    code, lines, errors = call(
        batch.main, folder, "--machine", "two_cores", "--batches", "16,48,128", "--json"
    )
    assert (code, errors) == (0, [])
    assert all(each["seconds"] > 0 for each in json.loads(lines[-1])["costs"])


def test_updates_of_larger_batches_are_bounds_and_the_known_bias_is_printed(run, call):
    """The errors that were measured: docs/results/ladder2.md."""
    _, lines, _ = call(batch.main, run(event(44, 300.0)), "--json", "--batches", "32,64,128")
    data = json.loads(lines.pop())
    assert [each["upper_bound"] for each in data["costs"]] == [False, False, True]
    assert sum("<=" in line for line in lines) == 1
    assert data["bias"] == batches.BIAS and f"{batches.BIAS}." in " ".join(lines)
    page = (ROOT / "docs" / "results" / "ladder2.md").read_text()
    errors = re.search(r"as `tools.batch` predicts, the errors are ([\d, and]+) %", page)[1]
    assert errors == "13, 70, 95 and 96" and "70 to 96 %" in batches.BIAS
    _, lines, _ = call(batch.main, run(event(44, 300.0)), "--json", "--batches", "64")
    assert json.loads(lines.pop())["bias"] is None and not any("<=" in line for line in lines)


def test_nothing_is_predicted_from_a_noise_scale_that_is_not_told_from_zero(run, tmp_path, call):
    folder = run(event(22, 300.0, 60.0), event(66, 2259.0, 2259.0), event(110, 700.0, 351.0))
    picture = tmp_path / "batch.png"
    code, lines, _ = call(
        batch.main, folder, "--json", "--machine", "two_cores", "--picture", picture
    )
    data = json.loads(lines.pop())
    assert code == 0 and data["costs"] == [] and data["critical_batch"] is None
    assert [each["known"] for each in data["run"]] == [True, False, False]
    text = "\n".join(lines)
    assert (
        "critical   unknown; noise scale 300 ± 60 by epoch 1, unknown by epoch 3, unknown by epoch 5"
        in text
    )
    assert "2,259" not in text and "350" not in text and "nothing is predicted" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("batch.doc", "batch.doc: no kind of picture; name it like batch.png"),
        ("nowhere/batch.png", "; make it, or name another file by --picture"),
        ("taken.png", "taken.png: is a folder; name a file in it by --picture"),
    ],
)
@pytest.mark.parametrize("way", [[], ["--branch"]])
def test_an_impossible_picture_is_refused_before_anything_is_read_or_trained(
    tmp_path, call, name, fault, way
):
    (tmp_path / "taken.png").mkdir()
    code, lines, (error,) = call(
        batch.main, tmp_path / "no run", *way, "--picture", tmp_path / name
    )
    assert (code, lines) == (2, []) and fault in error


def test_an_old_picture_is_replaced_not_written_over(run, tmp_path, call):
    picture = tmp_path / "batch.png"
    picture.write_text("old")
    os.link(picture, tmp_path / "old")
    assert call(batch.main, run(event(44, 300.0)), "--picture", picture)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG") and (tmp_path / "old").read_text() == "old"


@pytest.mark.parametrize(
    ("place", "fault"),
    [("", "log.noise_scale=true"), ("/nothing", "nothing/config.yaml: No such file")],
)
def test_what_has_no_noise_scale_or_run_is_refused(run, call, place, fault):
    code, _, (error,) = call(batch.main, run(event(22)) + place)
    assert code == 2 and fault in error

"""python -m tools.batch: what other batches would cost a run, against the equations and on a machine."""

import json

import pytest

from recipe import loading
from tests.conftest import QUICKSTART
from tools import batch
from tools.planning import batches, machine, scaling, workload
from tools.planning.batches import Interval

OWN = 64


def event(step, images=None, error=10.0):
    scale = {} if images is None else {"noise_scale": {"images": images, "error": error, "signal": 1.0}}
    return {"event": "train", "step": step, "epoch": step / 22, **scale}


@pytest.fixture
def run(tmp_path):
    """A folder of a run with these events: run(event, ...)."""

    def made(*events):
        recipe = loading.load(QUICKSTART, [f"run.output={tmp_path}"])
        (tmp_path / "config.yaml").write_text(loading.dump(recipe))
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events))
        return str(tmp_path)

    return made


def test_a_steady_noise_scale_gives_the_published_curve():
    """(updates / least updates - 1)(images / least images - 1) = 1, with the critical batch as their quotient."""
    steady = [Interval(1.0, 100, OWN, 300.0, 0.0), Interval(2.0, 50, OWN, 300.0, 0.0)]
    least_updates = batches.updates(steady, 10**12)
    least_images = batches.updates(steady, 1) * 1 - least_updates
    assert batches.critical(steady) == pytest.approx(300.0)
    assert least_images / least_updates == pytest.approx(300.0, rel=1e-9)
    for other in (16, 300, 5000):
        needed = batches.updates(steady, other)
        assert (needed / least_updates - 1) * (needed * other / least_images - 1) == pytest.approx(1.0, rel=1e-6)
    assert batches.updates(steady, OWN) == 150
    assert batches.updates(steady, 300) == pytest.approx(150 * 2 / (1 + 300 / 64))


def test_intervals_are_those_between_lines_and_early_ones_take_the_first_that_is_known():
    found = batches.intervals([event(10), event(30, 50.0), event(35), event(60, 80.0)], OWN)
    assert [(each.updates, each.noise) for each in found] == [(10, 50.0), (20, 50.0), (5, 50.0), (25, 80.0)]


def test_updates_of_a_batch_that_grows_are_fewer_than_its_steps():
    (before, after) = batches.intervals([event(10, 50.0), {**event(30, 50.0), "batch": 2 * OWN}], OWN)
    assert (before.updates, before.batch, after.updates, after.batch) == (10, OWN, 10, 2 * OWN)
    expected = 10 + 10 * (1 + 50 / OWN) / (1 + 50 / (2 * OWN))
    assert batches.updates([before, after], OWN) == pytest.approx(expected)


def test_a_cost_has_the_range_of_the_standard_error_and_on_a_machine_seconds():
    run, place = [Interval(1.0, 100, OWN, 300.0, 60.0)], machine.load("two_cores")
    found = batches.cost(run, loading.load(QUICKSTART, []), 640, place, 2)
    expected = [100 * (1 + noise / 640) / (1 + noise / OWN) for noise in (360.0, 240.0)]
    assert found.updates_range == pytest.approx(expected) and expected[0] < found.updates < expected[1]
    plan = loading.load(QUICKSTART, ["batch.global=640"])
    row = scaling.predict(plan, place, 2, workload.of(plan))
    assert found.images == found.updates * 640
    assert found.seconds == pytest.approx(found.updates * row.seconds)


def test_the_command_prints_a_table_draws_and_ends_with_json(run, tmp_path, capsys):
    folder, picture = run(event(22), event(44, 300.0), event(66, 600.0, 30.0)), tmp_path / "batch.png"
    options = ["--machine", "two_cores", "--replicas", "2", "--picture", str(picture), "--json", "--batches", "64,1024"]
    assert batch.main([folder, *options]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    data = json.loads(last)
    assert [each["batch"] for each in data["costs"]] == [64, 1024]
    assert data["costs"][0]["updates"] == 66 and data["batch"] == OWN
    assert any("600 ± 30 by epoch 3" in line for line in lines) and "times on 2 replicas" in lines
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert batch.main([folder, "--json"]) == 0
    costs = json.loads(capsys.readouterr().out.splitlines()[-1])["costs"]
    assert [(each["batch"], each["seconds"]) for each in costs] == [(16 << power, None) for power in range(7)]


@pytest.mark.parametrize(("place", "fault"), [("", "log.noise_scale=true"), ("/nothing", "nothing: no run folder;")])
def test_what_has_no_noise_scale_or_run_is_refused(run, capsys, place, fault):
    assert batch.main([run(event(22)) + place]) == 2
    assert fault in capsys.readouterr().err

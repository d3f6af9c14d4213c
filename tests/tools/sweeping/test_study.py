"""Draws are a function of the seed and of the trials before; how far a trial is follows from its
metrics."""

import contextlib
import json
import math
import shutil
import sqlite3

import optuna
import pytest

from common.errors import ConfigError
from recipe.loading import load
from tests.conftest import QUICKSTART
from tools.sweeping.definition import read
from tools.sweeping.study import Study
from tools.sweeping.trials import COMPLETE, FAILED, IMPOSSIBLE, PRUNED, RUNNING, Progress, progress

SPACE = "{optimizer.momentum: {low: 0.1, high: 0.9}, optimizer.weight_decay: {low: 1e-6, high: 1e-3, log: true}}"


@pytest.fixture
def study(tmp_path):
    """study(more, space, name): that of a sweep in a file; the same name opens it again."""
    opened = []

    def make(more="trials: 50", space=SPACE, name="study"):
        (tmp_path / "some.yaml").write_text(
            f"recipe: {QUICKSTART}\nmetric: top1\n{more}\nspace: {space}\n"
        )
        opened.append(Study(tmp_path / f"{name}.db", read(tmp_path / "some.yaml")))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def value(parameters):
    """Momentum alone matters."""
    return 1 - (parameters["optimizer.momentum"] - 0.3) ** 2


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The file of a study of four trials, of which the last one runs."""
    place = tmp_path_factory.mktemp("begun")
    (place / "some.yaml").write_text(
        f"recipe: {QUICKSTART}\nmetric: top1\ntrials: 50\nspace: {SPACE}\n"
    )
    study = Study(place / "study.db", read(place / "some.yaml"))
    carry_on(study, 3)
    study.begin()
    study.close()
    return place / "study.db"


def carry_on(study, trials):
    """Runs a study on to a number of trials, all complete."""
    for number in [*study.cut_off(), *(None for _ in range(trials - len(study.records())))]:
        number = study.begin() if number is None else number
        study.end(number, COMPLETE, value(study.records()[number].parameters), 1.0, 1.0)
    return [(each.parameters, each.value) for each in study.records()]


@pytest.mark.parametrize("sampler", [pytest.param("random", marks=pytest.mark.slow), "tpe"])
def test_draws_are_a_function_of_the_seed_and_survive_cuts(study, sampler):
    """Beyond TPE's first ten trials, which are random."""
    more = f"trials: 50\nsampler: {sampler}"
    expected = carry_on(study(more, name="one"), 12)
    for trials in (3, 11):
        again = study(more, name="other")
        carry_on(again, trials)
        again.begin()  # cut off before it has run
        again.close()
    assert carry_on(study(more, name="other"), 12) == expected
    drawn = {str(parameters) for parameters, _ in expected}
    assert len(drawn) == 12
    assert not drawn & {
        str(parameters) for parameters, _ in carry_on(study(f"{more}\nseed: 1", name="seed"), 2)
    }


def test_numbers_have_six_digits_and_are_even_on_a_logarithmic_scale(study):
    some = study()
    carry_on(some, 12)  # the last two are drawn by TPE
    for _ in range(18):
        some.begin()
    decays = [each.parameters["optimizer.weight_decay"] for each in some.records()]
    assert all(1e-6 <= decay <= 1e-3 and float(f"{decay:.6g}") == decay for decay in decays)
    assert 4 <= sum(math.log10(decay) < -4.5 for decay in decays) <= 26


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_no_combination_is_trained_twice_while_there_are_others(study, sampler):
    space = (
        "{optimizer.momentum: {choices: [0.1, 0.2, 0.3]}, model.norm: {choices: [group, layer]}}"
    )
    found = carry_on(study(f"trials: 6\nsampler: {sampler}", space), 6)
    assert len({str(parameters) for parameters, _ in found}) == 6


def test_values_come_back_as_they_were_given(study):
    given = {
        "data.crop_area": ("{choices: [[0.5, 1], [0.75, 1]]}", [[0.5, 1], [0.75, 1]]),
        "optimizer.clip_norm": ("{choices: [null, 1.5]}", [None, 1.5]),
        "batch.global": ("{low: 32, high: 96, step: 32, integer: true}", [32, 64, 96]),
        "optimizer.momentum": ("{low: 0.1, high: 0.7, step: 0.2}", [0.1, 0.3, 0.5, 0.7]),
    }
    space = ", ".join(f"{key}: {axis}" for key, (axis, _) in given.items())
    some = study("trials: 20\nsampler: random", f"{{{space}}}")
    for _ in range(20):
        some.begin()
    for key, (_, values) in given.items():
        assert {repr(each.parameters[key]) for each in some.records()} == {
            repr(each) for each in values
        }


def test_states_and_reasons_are_kept(study, tmp_path):
    some = study()
    for state in (COMPLETE, PRUNED, IMPOSSIBLE, FAILED):
        number = some.begin()
        some.end(
            number,
            state,
            0.5 if state == COMPLETE else None,
            2.0,
            3.0,
            None if state == COMPLETE else "why",
        )
    some.report(some.begin(), 0, 0.25)
    some.close()
    found = study().records()
    assert [each.state for each in found] == [COMPLETE, PRUNED, IMPOSSIBLE, FAILED, RUNNING]
    assert [each.value for each in found] == [0.5, None, None, None, 0.25]
    assert [each.reason for each in found] == [None, "why", "why", "why", None]
    assert [(each.epochs, each.seconds) for each in found] == [(2.0, 3.0)] * 4 + [(None, None)]
    opened = optuna.load_study(study_name="some", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert [each.value for each in opened.trials[:2]] == [0.5, None], (
        "Optuna opens it by the name of the sweep"
    )
    opened._storage._backend.engine.dispose()


@pytest.mark.parametrize(
    "edit",
    [
        *(f"number = {number} WHERE number = 3" for number in (0, 1, 4, -1, "NULL", "'x'", 0.5)),
        "number = 1 WHERE number = 0",
        "number = number + 1",
    ],
)
def test_a_study_whose_trials_were_numbered_by_hand_is_refused(study, begun, tmp_path, edit):
    """Optuna keeps one trial of each number, so a running trial with the number of another hid that
    one."""
    shutil.copy(begun, tmp_path / "study.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        connection.execute(f"UPDATE trials SET {edit}")
        connection.commit()
    with pytest.raises(
        ConfigError, match=r"study\.db: no study of this sweep \(.*\); remove it, or choose another"
    ):
        study()


def test_importances_need_enough_trials_that_differ(study):
    some = study("trials: 50\nsampler: random")
    carry_on(some, 9)
    assert some.importances() is None
    carry_on(some, 16)
    shares = some.importances()
    assert sum(shares.values()) == pytest.approx(1)  # of float64
    assert shares["optimizer.momentum"] > 0.7


EVENTS = [
    {"event": "train", "step": 60, "epoch": 2.9, "seconds": 2.5},
    {"event": "eval", "step": 22, "epoch": 1.0, "top1": 0.5, "top5": 1.0, "loss": 2.0},
    {
        "event": "eval",
        "step": 44,
        "epoch": 2.0,
        "top1": 0.7,
        "loss": 1.5,
        "epoch_average": {"top1": 0.35, "loss": 1.5},
    },
    {
        "event": "eval",
        "step": 66,
        "epoch": 3.0,
        "top1": 0.6,
        "loss": None,
        "epoch_average": {"top1": 0.3},
    },
]
END = json.dumps({"event": "end", "step": 66, "seconds": 3.5}) + "\n"


def reached(folder, metric="top1", length="run.epochs=3", tail=""):
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in EVENTS) + tail
    )
    return progress(folder, metric, load(QUICKSTART, [length, "schedule.warmup_epochs=0"]))


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("top1", [0.5, 0.7, 0.6]),
        ("best_top1", [0.5, 0.7, 0.7]),
        ("loss", [2.0, 1.5, math.nan]),
        ("epoch_average.top1", [math.nan, 0.35, 0.3]),
        ("step_average.loss", [math.nan] * 3),
    ],
)
def test_a_metric_has_a_value_at_each_evaluation(tmp_path, metric, values):
    assert reached(tmp_path, metric).values == pytest.approx(values, rel=0, abs=0, nan_ok=True)


def test_the_best_score_begins_anew_with_other_validation_images(tmp_path):
    events = [{**EVENTS[1], "validation_set": 1}, {**EVENTS[2], "top1": 0.4, "validation_set": 1}]
    tail = "".join(json.dumps({**event, "step": 88}) + "\n" for event in events)
    assert reached(tmp_path, "best_top1", tail=tail).values == (0.5, 0.7, 0.7, 0.5, 0.5)


@pytest.mark.parametrize(
    ("length", "final"),
    [
        ("run.epochs=3", True),
        ("run.epochs=4", False),
        ("run.steps=66", True),
        ("run.images=4225", False),
    ],
)
def test_the_last_evaluation_of_a_run_is_recognized(tmp_path, length, final):
    """66 steps of 64 images are 4224."""
    assert reached(tmp_path, length=length).last_is_final == final


def test_a_run_that_is_not_there_or_is_being_written_is_no_fault(tmp_path):
    assert progress(tmp_path, "top1", load(QUICKSTART)) == Progress()
    for tail, expected in ((END[:20], (False, 3.0, 2.5)), (END, (True, 3.0, 3.5))):
        assert reached(tmp_path, tail=tail)[2:] == expected

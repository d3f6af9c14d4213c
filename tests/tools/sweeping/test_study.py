"""Draws are a function of the seed and of the trials before; importances need enough trials."""

import contextlib
import math
import sqlite3

import optuna
import pytest

from recipe.errors import ConfigError
from tests.conftest import QUICKSTART
from tools.sweeping.definition import read
from tools.sweeping.study import Study
from tools.sweeping.trials import COMPLETE, FAILED, IMPOSSIBLE, PRUNED, RUNNING

SPACE = "{optimizer.momentum: {low: 0.1, high: 0.9}, optimizer.weight_decay: {low: 1e-6, high: 1e-3, log: true}}"


@pytest.fixture
def study(tmp_path):
    """study(more, space, name): that of a sweep in a file; the same name opens it again."""
    opened = []

    def make(more="trials: 50", space=SPACE, name="study"):
        (tmp_path / "some.yaml").write_text(f"recipe: {QUICKSTART}\nmetric: top1\n{more}\nspace: {space}\n")
        opened.append(Study(tmp_path / f"{name}.db", read(tmp_path / "some.yaml")))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def value(parameters):
    """Momentum alone matters."""
    return 1 - (parameters["optimizer.momentum"] - 0.3) ** 2


def carry_on(study, trials):
    """Runs a study on to a number of trials, all complete."""
    for number in [*study.cut_off(), *(None for _ in range(trials - len(study.records())))]:
        number = study.begin() if number is None else number
        study.end(number, COMPLETE, value(study.record(number).parameters), 1.0, 1.0)
    return [(each.parameters, each.value) for each in study.records()]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
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
    assert not drawn & {str(parameters) for parameters, _ in carry_on(study(f"{more}\nseed: 1", name="seed"), 2)}


def test_tpe_learns_where_the_best_is_and_draws_evenly_on_a_logarithmic_scale(study):
    """At random, draws are 0.25 from the best momentum on average, and the mean of 15 varies by 0.045."""
    drawn = [parameters for parameters, _ in carry_on(study(), 30)]
    assert sum(abs(each["optimizer.momentum"] - 0.3) for each in drawn[15:]) / 15 < 0.15
    decays = [each["optimizer.weight_decay"] for each in drawn]
    assert all(1e-6 <= decay <= 1e-3 and float(f"{decay:.6g}") == decay for decay in decays)
    assert 4 <= sum(math.log10(decay) < -4.5 for decay in decays) <= 26


@pytest.mark.parametrize("sampler", ["random", "tpe", "grid"])
def test_no_combination_is_trained_twice_while_there_are_others(study, sampler):
    space = "{optimizer.momentum: {choices: [0.1, 0.2, 0.3]}, model.norm: {choices: [group, layer]}}"
    found = carry_on(study(f"trials: 6\nsampler: {sampler}", space), 6)
    assert len({str(parameters) for parameters, _ in found}) == 6


def test_values_come_back_as_they_were_given(study):
    space = (
        "{data.crop_area: {choices: [[0.5, 1], [0.75, 1]]}, optimizer.clip_norm: {choices: [null, 1.5]}, "
        "batch.global: {low: 32, high: 96, step: 32, integer: true}, "
        "optimizer.momentum: {low: 0.1, high: 0.7, step: 0.2}}"
    )
    some = study("trials: 20\nsampler: random", space)
    for _ in range(20):
        some.begin()
    for key, values in (
        ("data.crop_area", [[0.5, 1], [0.75, 1]]),
        ("optimizer.clip_norm", [None, 1.5]),
        ("batch.global", [32, 64, 96]),
        ("optimizer.momentum", [0.1, 0.3, 0.5, 0.7]),
    ):
        drawn = [each.parameters[key] for each in some.records()]
        assert {repr(each) for each in drawn} == {repr(each) for each in values}


def test_states_and_reasons_are_kept(study, tmp_path):
    some = study()
    for state in (COMPLETE, PRUNED, IMPOSSIBLE, FAILED):
        number = some.begin()
        some.end(number, state, 0.5 if state == COMPLETE else None, 2.0, 3.0, None if state == COMPLETE else "why")
    some.report(some.begin(), 0, 0.25)
    some.close()
    found = study().records()
    assert [each.state for each in found] == [COMPLETE, PRUNED, IMPOSSIBLE, FAILED, RUNNING]
    assert [each.value for each in found] == [0.5, None, None, None, 0.25]
    assert [each.reason for each in found] == [None, "why", "why", "why", None]
    assert [(each.epochs, each.seconds) for each in found] == [(2.0, 3.0)] * 4 + [(None, None)]
    opened = optuna.load_study(study_name="some", storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert [each.value for each in opened.trials[:2]] == [0.5, None], "Optuna opens it by the name of the sweep"
    opened._storage._backend.engine.dispose()


def test_importances_need_enough_trials_that_differ(study):
    some = study("trials: 50\nsampler: random")
    carry_on(some, 9)
    assert some.importances() is None
    carry_on(some, 16)
    shares = some.importances()
    assert sum(shares.values()) == pytest.approx(1)  # of float64
    assert shares["optimizer.momentum"] > 0.7


_EDITS = (  # benchmarks.fuzz tries many more
    'UPDATE trial_user_attributes SET value_json = \'{"state": "splendid"}\'',
    'UPDATE trial_user_attributes SET value_json = \'{"state": "complete", "seconds": "long"}\'',
    "UPDATE trial_user_attributes SET value_json = '" + "[" * 5000 + "'",
    "UPDATE trial_params SET param_value = 9e99",
    "UPDATE trials SET number = 7",
    "UPDATE study_directions SET direction = 'MINIMIZE'",
    "DELETE FROM trial_values",
    "DELETE FROM trials",
    "DROP TABLE trials",
)


@pytest.mark.parametrize("edit", _EDITS)
def test_a_study_that_was_changed_by_hand_is_refused_in_one_line(study, tmp_path, edit):
    some = study()
    carry_on(some, 2)
    some.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as connection:
        connection.execute(edit)
        connection.commit()
    with pytest.raises(ConfigError) as refusal:
        study()
    assert str(refusal.value).startswith(f"{tmp_path / 'study.db'}: no study of this sweep (")
    assert str(refusal.value).endswith("; remove it, or choose another folder by --output FOLDER")

"""What a run says at its end: scores, rates, and what went wrong in it."""

import re

import pytest

from recipe import loading
from tests.conftest import QUICKSTART, TINY
from training import ending
from training.ending import Ending
from training.progression import Progression

SCORES = {
    "top1": 0.5,
    "top5": 0.9,
    "loss": 1.0,
    "step_average": {"top1": 0.75, "top5": 1.0, "loss": 0.5},
}


def ended(*overrides, updates=10, total=10, **state):
    """A run of 10 steps of 24 images in 20 s, 4 of which were no training."""
    known = {
        "step": 10,
        "seconds": 20.0,
        "paused": 4.0,
        "scores": SCORES,
        "best_top1": 0.5,
        "best_of_all": 0.75,
    }
    progression = Progression(**{**known, "best_weights": "step_average", **state})
    return Ending(loading.load(QUICKSTART, [*TINY, *overrides]), progression, updates, total)


def test_rates_count_all_the_time_and_waiting_is_a_share_of_training():
    values = ending.values_of(ended(waited=1.6))
    assert values["images_per_second"] == 24 * 10 / 20
    assert values["data_wait"] == pytest.approx(1.6 / 16)
    assert (values["input_bound"], values["workers_needed"]) == (False, None)
    assert values["step_average"] == SCORES["step_average"] and "epoch_average" not in values


def test_the_last_line_has_the_best_weights_and_each_average():
    (line,) = ending.lines(ended())
    assert line.startswith(
        "done: top1 50.00%  top5 90.00%  best top1 75.00% (step average)  step average 75.00%  "
    )
    assert line.endswith("12 img/s with evaluation and checkpoints")


def test_a_run_that_waits_for_images_is_told_how_many_workers_keep_up():
    """Three quarters of the 16 s of training: four times the two workers."""
    run = ended("data.workers=2", waited=12.0)
    _, line = ending.lines(run)
    assert (
        line.startswith("input-bound: 75% of the training time")
        and "data.workers=8 would keep up" in line
    )
    assert ending.values_of(run)["workers_needed"] == 8


@pytest.mark.parametrize(("skipped", "most"), [(5, False), (6, True)])
def test_skipped_updates_are_counted_and_most_of_them_are_worth_a_word(skipped, most):
    lines = ending.lines(ended(skipped=skipped))
    assert lines[0].endswith(f"  {skipped} of 10 updates skipped")
    assert [line.startswith("most updates were skipped: ") for line in lines[1:]] == [True] * most


def test_with_a_batch_schedule_updates_are_not_steps():
    """10 steps in 5 updates, of which 3 were left out."""
    lines = ending.lines(ended("batch.schedule=[[0, 24], [96, 48]]", skipped=3, updates=5))
    assert re.search(r"  3 updates skipped$", lines[0])
    assert lines[1].startswith("most updates were skipped: ")


@pytest.mark.parametrize(("found_nothing", "early"), [(1, False), (2, True)])
def test_a_run_that_lost_patience_says_so_first(found_nothing, early):
    lines = ending.lines(ended("evaluation.patience=2", without_better=found_nothing, total=40))
    said = "ended at step 10 of 40: 2 evaluations without a better top1 than 75.00% (evaluation.patience)"
    assert (lines[0] == said) == early
    assert lines[early].startswith("done: top1")

"""Updates of a run whose batch grows."""

import pytest

from recipe import loading
from recipe.batch import describe, divide
from recipe.course import Course
from recipe.errors import ConfigError
from tests.conftest import QUICKSTART

GROWING = "batch.schedule=[[0,64],[700,128],[1600,256]]"


def recipe(*overrides):
    return loading.load(QUICKSTART, overrides)


def test_updates_take_as_many_steps_as_the_schedule_says_but_end_with_epochs_changes_and_the_run():
    """Steps of 64 images: two at a time from step 11 (700 / 64 rounded up) on, four from 25 on; epochs of 8 steps."""
    found = list(Course(recipe(GROWING), 8, 39).updates())
    assert [update.steps for update in found] == [*[1] * 11, 2, 2, 1, *[2] * 4, 1, 4, 3, 4, 3]
    assert [update.number for update in found] == list(range(len(found)))
    assert [update.end for update in found[:-1]] == [update.step for update in found[1:]]
    assert found[-1].end == 39 and {8, 16, 24, 32} <= {update.end for update in found}


@pytest.mark.parametrize("start", [0, 5, 11, 13, 24, 29, 36, 39])
def test_a_resumed_run_has_the_rest_of_the_updates(start):
    course = Course(recipe(GROWING), 8, 39)
    assert list(course.updates(start)) == [update for update in course.updates() if update.step >= start]


def test_without_a_schedule_every_step_is_an_update():
    found = list(Course(recipe(), 22, 50).updates(20))
    assert [(each.step, each.steps, each.number, each.end) for each in found[:2]] == [(20, 1, 20, 21), (21, 1, 21, 22)]
    assert len(found) == 30


def test_a_multiple_of_steps_is_reached_once():
    found = list(Course(recipe(GROWING), 8, 39).updates())
    assert [update.end for update in found if update.reaches(10)] == [10, 20, 32]
    assert sum(update.reaches(8) for update in found) == 4


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("[]", "pairs"),
        ("[[0,64,1]]", "pairs"),
        ("[[10,64]]", "begin at 0"),
        ("[[0,64],[500,128],[500,256]]", "each later pair after"),
        ("[[0,64],[500,100]]", "100 is not a multiple of global 64"),
        ("[[0,32]]", "32 is not a multiple of global 64"),
    ],
)
def test_schedules_that_cannot_be(schedule, words):
    with pytest.raises(ConfigError, match=words):
        recipe(f"batch.schedule={schedule}")


@pytest.mark.parametrize(
    "overrides",
    [
        ("exchange.order=tree",),
        ("exchange.delay=1",),
        ("exchange.method=topk",),
        ("exchange.method=local",),
        ("exchange.method=half",),
        ("model.norm=batch",),
    ],
)
def test_what_a_growing_batch_does_not_go_with(overrides):
    with pytest.raises(ConfigError, match=r"batch\.schedule .*; use "):
        divide(recipe(GROWING, *overrides))


def test_the_plan_has_a_line_about_it():
    assert "growing    64 from 0 images on, 128 from 700 images on" in describe(recipe(GROWING))
    assert "growing" not in describe(recipe())
    divide(recipe(GROWING, "exchange.method=auto"))

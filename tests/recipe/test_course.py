"""Updates of a run whose batch grows."""

import pytest

from recipe import loading
from recipe.batch import describe
from recipe.course import Course
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
    plain = list(Course(recipe(), 22, 50).updates(start))
    assert [(each.step, each.steps, each.number) for each in plain] == [(step, 1, step) for step in range(start, 50)]


def test_a_multiple_of_steps_is_reached_once():
    found = list(Course(recipe(GROWING), 8, 39).updates())
    assert [update.end for update in found if update.reaches(10)] == [10, 20, 32]
    assert sum(update.reaches(8) for update in found) == 4


NOISE = ("batch.schedule=noise", "batch.largest=300")


def test_the_batch_follows_the_noise_scale_at_the_ends_of_epochs_up_to_its_bound():
    """Epochs of 8 steps of 64 images: 64, then 128 and 256; 512 would be above the bound."""
    course, grown = Course(recipe(*NOISE), 8, 39), []
    for update in course.updates():
        if course.may_grow(update.end):
            noise, error = {8: (128.0, 1.0), 16: (140.0, 11.0), 24: (900.0, 1.0)}[update.end]
            grown.append((update.end, course.grow(update.end, noise, error)))
    assert grown == [(8, None), (16, 128), (24, 256)]
    assert course.growth == [(16, 2), (24, 4)]
    by_pairs = Course(recipe(GROWING), 8, 39)
    assert not any(by_pairs.may_grow(step) for step in range(40)) and by_pairs.growth == []
    updates = list(Course(recipe(*NOISE), 8, 39, course.growth).updates())
    assert [update.steps for update in updates] == [*[1] * 16, *[2] * 4, 4, 4, 4, 3]
    for start in (0, 15, 16, 20, 24, 28):
        resumed = Course(recipe(*NOISE), 8, 39, [list(each) for each in course.growth])
        assert list(resumed.updates(start)) == [update for update in updates if update.step >= start]


def test_the_plan_has_a_line_about_it():
    assert "growing    64 from 0 images on, 128 from 700 images on" in describe(recipe(GROWING))
    assert "growing    64 at first, doubled up to 300 as the noise scale allows" in describe(recipe(*NOISE))
    assert "growing" not in describe(recipe())

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
    updates = list(Course(recipe(*NOISE), 8, 39, course.growth).updates())
    assert [update.steps for update in updates] == [*[1] * 16, *[2] * 4, 4, 4, 4, 3]
    for start in (0, 15, 16, 20, 24, 28):
        resumed = Course(recipe(*NOISE), 8, 39, [list(each) for each in course.growth])
        assert list(resumed.updates(start)) == [update for update in updates if update.step >= start]


def test_pairs_do_not_follow_the_noise_scale():
    course = Course(recipe(GROWING), 8, 39)
    assert not any(course.may_grow(step) for step in range(40)) and course.growth == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["batch.schedule=noise"], "needs largest"),
        (["batch.largest=128"], "no schedule noise"),
        (["batch.schedule=noise", "batch.largest=127"], "cannot grow"),
        ([*NOISE, "log.noise_scale=false"], "log.noise_scale=auto"),
        ([*NOISE, "batch.micro=64"], "lower batch.micro"),
    ],
)
def test_what_the_noise_scale_cannot_be_followed_with(overrides, words):
    with pytest.raises(ConfigError, match=words):
        divide(recipe(*overrides))


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
    assert "growing    64 at first, doubled up to 300 as the noise scale allows" in describe(recipe(*NOISE))
    assert "growing" not in describe(recipe())
    divide(recipe(GROWING, "exchange.method=auto"))

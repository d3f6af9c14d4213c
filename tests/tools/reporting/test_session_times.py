"""The time of a run is accounted for whole, session by session."""

from dataclasses import astuple

import pytest

from tests.tools.reporting.runs import end_event, train_event, written
from tools.reporting import run, sections
from tools.reporting.session_times import session_times


def times(tmp_path, *events, starts=()):
    return session_times(run.read(written(tmp_path / "run", events)).metrics, starts, 24)


def test_training_waiting_and_the_rest_are_the_whole_time(tmp_path):
    """6 updates of 24 images at 48 images a second are 3 s, of which a tenth was waited; 4 s passed
    until the line."""
    lines = [train_event(6 * n, seconds=4.0 * n) for n in (1, 2)]
    (whole,) = times(tmp_path, *lines, end_event(12, 10.0))
    assert astuple(whole) == pytest.approx((0, 12, 2 * 2.7, 2 * 0.3, 2 * 1.0 + 2.0))
    assert whole.total == pytest.approx(10.0)
    row = ("1", "0 to 12", "0:00:10", "0:00:05 (54%)", "0:00:01 (6%)", "0:00:04 (40%)")
    assert sections.of_run(run.read(tmp_path / "run"))["time"]["rows"] == [row]
    assert times(tmp_path) == []


def parts_of(sessions):
    return [
        (each.first, each.last, round(each.computing + each.waiting, 9), round(each.rest, 9))
        for each in sessions
    ]


def test_the_steps_between_the_last_line_of_a_session_and_its_end_are_training_of_that_session(
    tmp_path,
):
    """Half a second each, and no evaluation: saved by a signal at step 9, and once more at 10 and
    11."""
    lines = [train_event(6), train_event(12)]
    whole = [(0, 9, 4.5, 0.0), (9, 12, 1.5, 0.0)]
    assert parts_of(times(tmp_path, *lines, starts=[{"step": 0}, {"step": 9}])) == whole
    short = [(0, 9, 4.5, 0.0), (9, 10, 0.5, 0.0), (10, 11, 0.5, 0.0), (11, 12, 0.5, 0.0)]
    assert (
        parts_of(times(tmp_path, *lines, starts=[{"step": step} for step in (0, 9, 10, 11)]))
        == short
    )
    first = [(0, 4, 2.0, 0.0), (4, 6, 1.0, 0.0)]  # before there was a line
    assert parts_of(times(tmp_path, train_event(6), starts=[{"step": 0}, {"step": 4}])) == first


def test_each_session_has_the_pace_of_its_own_lines(tmp_path):
    """The second is twice as fast. 2 s of evaluation follow the first line."""
    lines = [train_event(6), train_event(12, seconds=7.25, images_per_second=96.0)]
    found = parts_of(times(tmp_path, *lines, starts=[{"step": 0}, {"step": 9}]))
    assert found == [(0, 9, 4.5, 0.0), (9, 12, 0.75, 2.0)]


def test_the_steps_between_the_last_line_and_an_early_end_are_training(tmp_path):
    """evaluation.patience: 2 steps after the last line, of 0.5 s each, and an evaluation of 3 s;
    resumed in between."""
    events = [train_event(6), end_event(8, 7.0)]
    assert parts_of(times(tmp_path, *events)) == [(0, 8, 4.0, 3.0)]
    found = parts_of(times(tmp_path, *events, starts=[{"step": 0}, {"step": 7}]))
    assert found == [(0, 7, 3.5, 0.0), (7, 8, 0.5, 3.0)]


def test_a_clock_that_is_not_finite_or_runs_back_is_passed_over(tmp_path):
    lines = [
        train_event(6, seconds=4.0),
        train_event(12, images_per_second=None),
        train_event(18, seconds=2.0),
    ]
    (part,) = times(tmp_path, *lines)
    assert part.computing + part.waiting + part.rest == pytest.approx(4.0)

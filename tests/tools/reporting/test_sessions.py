"""Where sessions began, and where their time went: it is accounted for whole."""

import pytest

from tests.tools.reporting.runs import end_event, start, train_event, written
from tools.reporting.metrics import read
from tools.reporting.run import resumed_at, starts_in
from tools.reporting.timing import as_rows, session_times

BATCH = 24


def test_a_start_that_trained_nothing_has_no_step(tmp_path):
    """Three starts: the second found its recipe refused. What is no count is not taken for one."""
    noted = [start(step=0, replicas=2), start(), start(step=120, replicas=4)]
    odd = [start(step=odd, replicas=odd) for odd in ("many", None, -1, 1.5, True)]
    found = starts_in(written(tmp_path / "run", starts=[*noted, *odd]))
    counts = [(each.get("step"), each.get("replicas")) for each in found]
    assert counts == [(0, 2), (None, None), (120, 4), *[(None, None)] * 5]
    assert resumed_at(found) == [120]


@pytest.mark.parametrize("content", ["", "[]", '{"starts": 3}', '{"starts": ["odd"]}'])
def test_an_environment_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "environment.json").write_text(content)
    assert starts_in(tmp_path) == []


def times(tmp_path, *events, starts=()):
    return session_times(read(written(tmp_path / "run", events) / "metrics.jsonl"), starts, BATCH)


def test_training_waiting_and_the_rest_are_the_whole_time(tmp_path):
    """6 updates of 24 images at 48 images a second are 3 s, of which a tenth was waited; 4 s passed until the line."""
    lines = [train_event(6 * n, seconds=4.0 * n) for n in (1, 2)]
    parts = times(tmp_path, *lines, end_event(12, 10.0))
    assert parts == [(0, 12, pytest.approx(2 * 2.7), pytest.approx(2 * 0.3), pytest.approx(2 * 1.0 + 2.0))]
    assert as_rows(parts) == [["1", "0 to 12", "0:00:10", "0:00:05 (54%)", "0:00:01 (6%)", "0:00:04 (40%)"]]
    assert times(tmp_path) == []


def test_a_session_that_begins_within_a_window_of_the_log_trained_only_its_part_of_it(tmp_path):
    """Saved by a signal at step 9: the line of step 12 tells of 3 updates of this session, which took 1.5 s."""
    lines = [train_event(6, seconds=3.0), train_event(12, seconds=6.0)]
    first, second = times(tmp_path, *lines, starts=[{"step": 0}, {"step": 9}])
    assert (first.first, first.last, second.first, second.last) == (0, 9, 9, 12)
    assert first.computing + first.waiting == pytest.approx(3.0)
    assert second.computing + second.waiting == pytest.approx(1.5)


def test_a_clock_that_is_not_finite_or_runs_back_is_passed_over(tmp_path):
    lines = [train_event(6, seconds=4.0), train_event(12, images_per_second=None), train_event(18, seconds=2.0)]
    (part,) = times(tmp_path, *lines)
    assert part.seconds == pytest.approx(4.0)

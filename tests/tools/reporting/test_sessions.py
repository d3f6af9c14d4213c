"""Where sessions began is read from what TensorBoard's writer itself wrote; the time is accounted for whole."""

import datetime
import json

import pytest

from tests.tools.reporting.runs import end_event, start, train_event, written
from tools.reporting.metrics import read
from tools.reporting.sessions import Start, resumed_at, spent, starts

BATCH = 24


def at(seconds):
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(timespec="seconds")


def test_the_step_of_each_session_is_what_the_writer_was_told(tmp_path, monkeypatch):
    """Three starts: of the second no file exists, as of one that found its recipe refused."""
    import time

    from torch.utils.tensorboard import SummaryWriter

    folder = written(tmp_path / "run", starts=[start(at(1000)), start(at(2000)), start(at(3000))])
    for seconds, step in ((1000.4, 0), (3000.9, 120)):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: seconds)
        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        writer.add_scalar("train/loss", 1.0, step + 6)
        writer.close()
    found = starts(folder)
    assert [each.step for each in found] == [0, None, 120]
    assert resumed_at(found) == [120]


@pytest.mark.parametrize("content", ["", "[]", '{"starts": 3}', '{"starts": ["odd"]}'])
def test_an_environment_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "environment.json").write_text(content)
    assert starts(tmp_path) == []


def logged(tmp_path, *events):
    return read(written(tmp_path / "run", events) / "metrics.jsonl")


def test_training_waiting_and_the_rest_are_the_whole_time(tmp_path):
    """6 updates of 24 images at 48 images a second are 3 s, of which a tenth was waited; 4 s passed until the line."""
    lines = [train_event(6 * n, seconds=4.0 * n) for n in (1, 2)]
    (part,) = spent(logged(tmp_path, *lines, end_event(12, 10.0)), [], BATCH)
    assert (part.first, part.last) == (0, 12)
    assert part.computing == pytest.approx(2 * 2.7)
    assert part.waiting == pytest.approx(2 * 0.3)
    assert part.rest == pytest.approx(2 * 1.0 + 2.0), "with what came after the last line"
    assert part.seconds == pytest.approx(10.0)


def test_a_session_that_begins_within_a_window_of_the_log_trained_only_its_part_of_it(tmp_path):
    """Saved by a signal at step 9: the line of step 12 tells of 3 updates of this session, which took 1.5 s."""
    begun = [Start({}, 0), Start({}, 9)]
    metrics = logged(tmp_path, train_event(6, seconds=3.0), train_event(12, seconds=6.0))
    first, second = spent(metrics, begun, BATCH)
    assert (first.first, first.last, second.first, second.last) == (0, 9, 9, 12)
    assert first.computing + first.waiting == pytest.approx(3.0)
    assert second.computing + second.waiting == pytest.approx(1.5)


def test_a_clock_that_is_not_finite_or_runs_back_is_passed_over(tmp_path):
    lines = [train_event(6, seconds=4.0), train_event(12, images_per_second=None), train_event(18, seconds=2.0)]
    (part,) = spent(logged(tmp_path, *lines), [], BATCH)
    assert part.seconds == pytest.approx(4.0)


def test_nothing_logged_is_no_time(tmp_path):
    assert spent(logged(tmp_path), [], BATCH) == []


def test_starts_without_a_time_are_starts_all_the_same(tmp_path):
    folder = written(tmp_path / "run", starts=[start("yesterday"), start()])
    assert [each.step for each in starts(folder)] == [None, None]
    assert json.loads((folder / "environment.json").read_text())["starts"][0] == starts(folder)[0].environment

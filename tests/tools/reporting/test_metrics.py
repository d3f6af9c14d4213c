"""Events are read as they are, also those that are still being written, damaged or not finite."""

import json
import math

import pytest

from tests.tools.reporting.runs import end_event, eval_event, train_event
from tools.reporting.metrics import read


@pytest.fixture
def file(tmp_path):
    def write(*lines):
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return path

    return write


def test_numbers_come_back_in_columns(file):
    found = read(file(train_event(6), eval_event(6, step_average={"top1": 0.25}), train_event(12), end_event(12, 6.0)))
    assert list(found.train["step"]) == [6, 12]
    assert list(found.train["loss"]) == [2 / 6, 2 / 12]
    assert list(found.train["trust/blocks.1.conv.weight"]) == [0.02, 0.02]
    assert list(found.evaluation["step_average/top1"]) == [0.25]
    assert found.end["seconds"] == 6.0 and found.step == 12 and found.odd == []


def test_what_is_null_or_missing_is_a_gap(file):
    found = read(file(train_event(1, loss=None), train_event(2, extra=7), train_event(3)))
    assert [math.isnan(value) for value in found.train["loss"]] == [True, False, False]
    assert [math.isnan(value) for value in found.train["extra"]] == [True, False, True]
    assert len(found.train["nowhere"]) == 3 and not found.train.has("nowhere")
    assert found.train.has("extra")


def test_a_line_that_is_being_written_is_no_fault_but_others_are(file):
    found = read(
        file(train_event(1), "garbage\n", '["a list"]\n', '{"event": "train"}\n', train_event(2), '{"event": "tr')
    )
    assert list(found.train["step"]) == [1, 2]
    assert found.odd == [2, 3, 4]


def test_no_file_is_no_events(tmp_path):
    found = read(tmp_path / "metrics.jsonl")
    assert (len(found.train), len(found.evaluation), found.step, found.end) == (0, 0, 0, None)


def test_a_run_that_goes_on_after_its_end_is_not_finished(file):
    assert read(file(train_event(1), end_event(1, 0.5), train_event(2))).end is None

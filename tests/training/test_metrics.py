"""metrics.jsonl: what is written is what is read, also while it is written, cut off, damaged or not
finite."""

import json
import math
import os

import pytest

from common.errors import UserError
from training.metrics import Metrics, last_events, lines, read_events

TRAIN = {"event": "train", "step": 2, "loss": 0.5}
EVAL = {"event": "eval", "step": 2, "top1": 0.25}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path, *events, keep=0):
    """Writes events behind the first `keep` bytes; the file's length then."""
    metrics = Metrics(path, keep)
    for event in events:
        metrics.write(event)
    position = metrics.position()
    metrics.close()
    return position


def test_events_are_one_object_a_line_and_a_resumed_run_goes_on_behind_those_it_keeps(path):
    keep = write(path, TRAIN)
    assert write(path, EVAL, keep=keep) == path.stat().st_size > keep == len(json.dumps(TRAIN)) + 1
    assert write(path, {**EVAL, "top1": 0.5}, keep=keep) == path.stat().st_size
    assert read_events(path.parent) == {"train": [TRAIN], "eval": [{**EVAL, "top1": 0.5}]}
    write(path, EVAL, keep=10**6)  # shorter than the checkpoint knows: nothing is padded
    assert [line.event["event"] for line in lines(path)] == ["train", "eval", "eval"]


def test_the_position_is_on_the_disk_before_a_checkpoint_relies_on_it(path, monkeypatch):
    metrics = Metrics(path, 0)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    metrics.write(TRAIN)
    assert synced == []
    assert [metrics.position()] == synced == [path.stat().st_size]
    metrics.close()


def test_numbers_that_json_does_not_know_become_null(path):
    write(
        path, {**TRAIN, "loss": math.nan, "lr": math.inf, "trust": {"stem": -math.inf, "head": 0.5}}
    )
    expected = {**TRAIN, "loss": None, "lr": None, "trust": {"stem": None, "head": 0.5}}
    assert json.loads(path.read_text()) == expected == last_events(path)["train"]


@pytest.mark.parametrize(
    "line",
    ["5", '{"step": 9}', '{"event": "eval"}', '{"event": [], "step": 9}', '"\xff"', "[" * 200_000, '{"event": "a", '
     '"step": true}', '{"event": "a", "step": -1}', '{"event": "a", "step": 1, "loss": 1e999}'],
    ids=lambda line: line[:40],
)  # fmt: skip
def test_a_line_that_is_no_event_is_found_and_refused_or_passed_over(path, line):
    path.write_text(
        "\n".join([json.dumps(TRAIN), line, json.dumps(EVAL), json.dumps(EVAL)[:9]]), "latin-1"
    )
    # without the last one, which was cut off
    assert list(lines(path)) == [(1, TRAIN), (2, None), (3, EVAL)]
    assert last_events(path) == {"train": TRAIN, "eval": EVAL}
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not a line of metrics; remove it"):
        read_events(path.parent)


def test_a_missing_file_has_no_events_and_is_refused_where_a_run_must_be(path):
    assert last_events(path) == {}
    with pytest.raises(UserError, match=r"metrics.jsonl: no such file; name a run folder"):
        read_events(path.parent)
    path.touch()
    assert last_events(path) == read_events(path.parent) == {}


def test_a_file_that_is_there_and_cannot_be_read_is_not_called_missing(path):
    path.mkdir()
    with pytest.raises(UserError, match=r"metrics.jsonl: Is a directory; make it a readable file$"):
        read_events(path.parent)

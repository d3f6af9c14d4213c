"""How far a run is, read from its metrics while they are written."""

import json

import pytest

from recipe.loading import load
from tests.conftest import QUICKSTART
from tools.sweeping.trials import Progress, progress

EVENTS = [
    {"event": "eval", "step": 22, "epoch": 1.0, "top1": 0.5, "top5": 1.0, "loss": 2.0},
    {"event": "eval", "step": 44, "epoch": 2.0, "top1": 0.7, "loss": 1.5, "epoch_average": {"top1": 0.35, "loss": 1.5}},
    {"event": "eval", "step": 66, "epoch": 3.0, "top1": 0.6, "loss": None, "epoch_average": {"top1": 0.3}},
]


def written(folder, tail=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in EVENTS) + tail)
    return folder


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("top1", [0.5, 0.7, 0.6]),
        ("best_top1", [0.5, 0.7, 0.7]),
        ("loss", [2.0, 1.5, None]),
        ("epoch_average.top1", [None, 0.35, 0.3]),
        ("step_average.loss", [None, None, None]),
    ],
)
def test_a_metric_has_a_value_at_each_evaluation(tmp_path, metric, values):
    assert progress(written(tmp_path), metric, load(QUICKSTART)).values == values


@pytest.mark.parametrize(
    ("length", "final"),
    [("run.epochs=3", True), ("run.epochs=4", False), ("run.steps=66", True), ("run.images=4225", False)],
)
def test_the_last_evaluation_of_a_run_is_recognized(tmp_path, length, final):
    """66 steps of 64 images are 4224."""
    assert progress(written(tmp_path), "top1", load(QUICKSTART, [length])).last_is_final == final


def test_a_run_that_is_not_there_or_is_being_written_is_no_fault(tmp_path):
    recipe = load(QUICKSTART)
    assert progress(tmp_path, "top1", recipe) == Progress()
    end = json.dumps({"event": "end", "step": 9, "seconds": 3.5}) + "\n"
    for tail, expected in ((end[:20], (False, 3.0, None)), (end, (True, 3.0, 3.5))):
        reached = progress(written(tmp_path, tail), "top1", recipe)
        assert (reached.ended, reached.epochs, reached.seconds) == expected

"""How far a run is, read from its metrics while they are written."""

import json

import pytest

from recipe.loading import load
from tests.conftest import QUICKSTART
from tools.sweeping.trials import progress

SCORES = [(0.5, 2.0), (0.7, 1.5), (0.6, None)]


def event(number, top1, loss):
    values = {"event": "eval", "step": 22 * number, "epoch": float(number), "top1": top1, "top5": 1.0, "loss": loss}
    return values if number < 2 else {**values, "epoch_average": {"top1": top1 / 2, "top5": 1.0, "loss": loss}}


@pytest.fixture
def write(tmp_path):
    """write(events, tail): a run folder with these metrics."""

    def make(events, tail=""):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events) + tail)
        return tmp_path

    return make


EVENTS = [event(number, *scores) for number, scores in enumerate(SCORES, start=1)]


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
def test_a_metric_has_a_value_at_each_evaluation(write, metric, values):
    assert progress(write(EVENTS), metric, load(QUICKSTART)).values == values


@pytest.mark.parametrize(
    ("length", "final"),
    [("run.epochs=3", True), ("run.epochs=4", False), ("run.steps=66", True), ("run.images=4225", False)],
)
def test_the_last_evaluation_of_a_run_is_known_as_such(write, length, final):
    """66 steps of 64 images are 4224."""
    assert progress(write(EVENTS), "top1", load(QUICKSTART, [length])).last_is_final == final


def test_a_run_that_is_not_there_or_is_being_written_is_no_fault(write, tmp_path):
    recipe = load(QUICKSTART)
    assert progress(tmp_path / "nowhere", "top1", recipe) == ([], False, False, None, None)
    cut = json.dumps({"event": "end", "step": 9, "seconds": 3.5})
    reached = progress(write(EVENTS, cut[:20]), "top1", recipe)
    assert (reached.ended, reached.epochs, reached.seconds) == (False, 3.0, None)
    reached = progress(write(EVENTS, cut + "\n"), "top1", recipe)
    assert (reached.ended, reached.epochs, reached.seconds) == (True, 3.0, 3.5)

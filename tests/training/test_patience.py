"""Runs that end once evaluations have found nothing better for some time (evaluation.patience)."""

import pytest

from common.errors import DataError
from tests.conftest import TINY
from tests.training.scripted import ScriptedEngine
from training.loop import TrainingError
from training.progression import Progression

HITS = {2: 3, 4: 5, 6: 5, 8: 4, 10: 9, 12: 9}  # of ten images, by steps done
OFTEN = ("evaluation.every_epochs=0.34", "checkpoint.every_epochs=0.34")  # every two steps of six


class Scored(ScriptedEngine):
    """Has HITS."""

    def evaluate_step(self, batch):
        counts = super().evaluate_step(batch)
        return counts._replace(top1=counts.top1 - len(self.steps) + HITS[len(self.steps)])


@pytest.mark.parametrize(("patience", "end"), [(1, 6), (2, 8), (3, 12), (None, 12)])
def test_a_run_ends_after_so_many_evaluations_without_a_better_one(start, patience, end):
    """An equal score is not better. With three the ninth hit comes in time."""
    engine = Scored()
    lines = []
    events = start(engine, *OFTEN, f"evaluation.patience={patience or 'null'}", say=lines.append)
    assert engine.steps == list(range(end))
    last = [(event["event"], event["step"]) for event in events if event["event"] != "train"][-3:]
    assert last == [("eval", end), ("checkpoint", end), ("end", end)]
    assert start.steps("train") == sorted({4, min(8, end), end}), "the end has a line of its own"
    best = max(HITS[step] for step in HITS if step <= end) / 10
    assert (events[-1]["best_top1"], events[-1]["images"]) == (best, end * 24)
    assert (6 if end < 12 else 12) in start.saved(), (
        "the best checkpoint is kept, of equals the newest"
    )
    early = f"ended at step {end} of 12: {patience} evaluation{'s' * (patience != 1)} without a better top1 than 50.00%"
    assert any(early in line for line in lines) == (end < 12)


def test_an_early_end_reports_the_steps_since_the_last_line(start):
    """All updates were skipped; nobody would know without a line, and the run would count as a good
    one."""
    lines = []
    keys = (*OFTEN, "evaluation.patience=1", "log.every_steps=100")
    start(
        Scored(finite=lambda step: False), *keys, "precision.max_skipped_steps=6", say=lines.append
    )
    (line,) = start.events("train")
    assert (line["step"], line["skipped_steps"], line["loss"]) == (6, 6, sum(range(6)) / 6)
    assert any("6 of 6 updates skipped" in text for text in lines)
    assert any("most updates were skipped" in text for text in lines)


@pytest.mark.parametrize(
    ("engine", "error", "fault"),
    [
        (
            {"finite": lambda step: False},
            TrainingError,
            "step 6: the last 6 updates had gradients that are not finite",
        ),
        ({"images": 0}, DataError, "step 6: no image of the last 6 steps can be read"),
    ],
)
def test_an_early_end_is_no_end_of_a_run_that_fails(start, engine, error, fault):
    keys = (*OFTEN, "evaluation.patience=1", "log.every_steps=100", "precision.max_skipped_steps=5")
    with pytest.raises(error, match=fault):
        start(Scored(**engine), *keys)


@pytest.mark.parametrize("stopped", [2, 4, 6, 8])
def test_a_resumed_run_ends_where_it_would_have(start, stopped):
    """From the checkpoint of any step; from the last one, after which it was killed, without
    another update."""
    start(
        Scored(), *OFTEN, "evaluation.patience=2", f"run.steps={stopped}", "checkpoint.keep_last=9"
    )
    content = start.content()
    engine = Scored()
    engine.load_state_dict(content["engine"])
    progression = Progression(**content["progression"])
    assert (progression.step, progression.without_better) == (
        stopped,
        {2: 0, 4: 0, 6: 1, 8: 2}[stopped],
    )
    events = start(engine, *OFTEN, "evaluation.patience=2", progression=progression)
    assert engine.steps == list(range(8))
    assert (events[-1]["event"], events[-1]["step"], events[-1]["best_top1"]) == ("end", 8, 0.5)


def test_a_run_that_ended_early_is_finished(session):
    """A rate too small to change a score."""
    keys = (*TINY, "evaluation.patience=2", "evaluation.every_epochs=0.01", "schedule.peak=1e-12")
    keys = (
        *keys,
        "schedule.peak_per_image=null",
        "precision.weights=float32",
        "average.epoch_decay=null",
    )
    first = session(*keys)
    assert "ended at step 3 of 8: 2 evaluations without a better top1 than" in first
    assert "this run is finished" in session(*keys)

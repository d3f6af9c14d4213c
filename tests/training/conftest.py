"""Runs of the loop alone."""

import json

import pytest

from recipe.batch import Lengths
from tests.training.scripted import EMPTY
from training.checkpoint import CheckpointFolder
from training.loop import Progression, Trainer
from training.monitor import Metrics, Monitor, Progress

SIX_STEPS_AN_EPOCH = (
    *("batch.global=24", "run.steps=12", "log.every_steps=4"),
    *("schedule.peak=3", "schedule.power=2", "schedule.final_ratio=1e-5", "schedule.warmup_steps=2"),
)


@pytest.fixture
def start(tiny, tmp_path):
    """start(engine, *overrides): trains by the loop, 6 steps an epoch, and gives the events."""

    def run(engine, *overrides, progression=None, say=lambda line: None, flops_per_image=lambda epoch: 1e6):
        recipe = tiny(*SIX_STEPS_AN_EPOCH, *overrides)
        lengths = Lengths(steps_per_epoch=6, dropped=0, total=recipe.run.steps, warmup=2)
        metrics = Metrics(tmp_path / "metrics.jsonl", 0)
        monitor = Monitor(metrics, Progress(lengths.total, say), ())
        checkpoints = CheckpointFolder(tmp_path / "checkpoints", recipe.checkpoint.keep_last, True)
        progression = progression or Progression()
        trainer = Trainer(
            recipe, lengths, engine, [EMPTY], checkpoints, monitor, progression, flops_per_image, ["cat", "dog"],
            tmp_path / "trace",
        )  # fmt: skip
        try:
            trainer.run(iter([EMPTY] * 100))
        finally:
            monitor.close()
        return events()

    def events(*kinds):
        found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        return [event for event in found if not kinds or event["event"] in kinds]

    run.events = events
    run.steps = lambda *kinds: [event["step"] for event in events(*kinds)]
    run.saved = lambda: [manifest.step for manifest in CheckpointFolder(tmp_path / "checkpoints", 9, True).manifests()]
    run.content = lambda: CheckpointFolder(tmp_path / "checkpoints", 9, True).load_newest(warn=pytest.fail)
    return run

"""A run to branch from, as its folder shows it: 20 epochs of 59 steps of 24 digits, of which some
were saved."""

import functools
import json

import pytest
import torch

from common.json_io import json_text
from recipe import loading
from tests.conftest import QUICKSTART, TINY
from tools.branching import session
from training.checkpoint import CheckpointFolder

BATCH = 24
PER_EPOCH = 59
EPOCHS = 20
TOTAL = PER_EPOCH * EPOCHS
RATE = 3000.0  # images a second
PAUSE = 2.0  # seconds of an evaluation
RECIPE = (
    *TINY,
    f"run.epochs={EPOCHS}",
    "schedule.warmup_epochs=2",
    "schedule.peak=2",
    "checkpoint.keep_last=1000",
)
PROGRESSION = {
    "images_digest": "a-b",
    "rounding": 3,
    "seconds": 9.0,
    "loss": 4.0,
    "steps_in_window": 2,
}


def run_in(place, *overrides, saved=range(1, EPOCHS + 1), name="run", repeated=0, **topology):
    """The folder of a run in another folder, with checkpoints of those epochs.

    Its command was repeated so often once it was finished."""
    folder = place / name
    folder.mkdir()
    recipe = loading.load(QUICKSTART, [*RECIPE, f"run.output={folder}", *overrides])
    text = loading.dump(recipe)
    (folder / "config.yaml").write_text(text)
    lines = []
    seconds = 0.0
    for epoch in range(1, EPOCHS + 1):
        seconds += PER_EPOCH * BATCH / RATE + PAUSE
        event = {"step": epoch * PER_EPOCH, "epoch": float(epoch)}
        pace = {"images_per_second": RATE, "data_wait": 0.1, "seconds": seconds}
        lines += [
            {"event": "train", **event, **pace, "skipped_steps": 0},
            {"event": "eval", **event, "loss": 1.0},
        ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    starts = [{"step": 0, "replicas": 1, "stages": 1, **topology}, *[{}] * repeated]
    (folder / "environment.json").write_text(json_text({"starts": starts}))
    checkpoints = CheckpointFolder(folder / "checkpoints", 1000, True)
    for epoch in saved:
        step = epoch * PER_EPOCH
        content = {
            "recipe": text,
            "engine": {"weights": {"w": torch.full((3,), float(step))}},
            "progression": {"step": step, **PROGRESSION},
            "classes": list("0123456789"),
        }
        checkpoints.save(step, content, None)
    return folder


@pytest.fixture
def make_run(tmp_path):
    """make_run(*overrides, ...): as `run_in`, in the test's own folder."""
    return functools.partial(run_in, tmp_path)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """A run for tests that only read it."""
    return run_in(tmp_path_factory.mktemp("untouched"))


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(session, "_POLL_SECONDS", 0.01)

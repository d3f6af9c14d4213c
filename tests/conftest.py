"""Shared by all tests: a small recipe, and one thread: threads that share busy cores wait for each other."""

from pathlib import Path

import pytest
import torch

from recipe import loading

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"

# A quarter of a million parameters on digits: a step takes milliseconds.
TINY = (
    "model.width=0.25",
    "model.depth=0.1",
    "model.image_size=16",
    "batch.global=24",
    "batch.micro=12",
    "batch.evaluation=180",
    "run.steps=8",
    "schedule.warmup_steps=2",
    "log.every_steps=2",
    "log.tensorboard=false",
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def tiny():
    """tiny(*overrides): the quickstart recipe shrunk to milliseconds a step, with overrides laid over it."""

    def load(*overrides):
        return loading.load(QUICKSTART, [*TINY, *overrides])

    return load

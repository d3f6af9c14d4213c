"""What several ranks cannot run is refused in one line and with 2, and no rank waits for another."""

import functools
import os

import numpy as np
import pytest
from PIL import Image

from tests import ranks

pytestmark = pytest.mark.multiprocess

WRONG_INPUT = 2
TWO_STAGES = ("parallel.stages=2", "parallel.split=[blocks.3.0]")


def refusal(size, *overrides, by_each=False, **options):
    """The one line of all ranks, which all end with 2; by_each: each prints it, as they have not met."""
    ended = ranks.train(size, *overrides, **options)
    assert [rank.code for rank in ended] == [WRONG_INPUT] * len(ended), ended
    lines = [line for rank in ended for line in rank.errors]
    assert len(lines) == (len(ended) if by_each else 1) and len(set(lines)) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("ours", "theirs", "key", "remedy"),
    [
        (
            TWO_STAGES,
            ("parallel.split=[blocks.2.0]",),
            "parallel.split is ['blocks.3.0'] on rank 0, ['blocks.2.0'] here",
            "the same files and overrides",
        ),
        # They would not even form the same groups.
        ((), TWO_STAGES, "rank 1 has parallel.stages 2, rank 0 1", "the same recipe"),
    ],
)
def test_ranks_with_different_recipes(tmp_path, ours, theirs, key, remedy):
    line = refusal(2, *ours, f"run.output={tmp_path / 'run'}", per_rank={1: theirs})
    assert "rank 1 has " in line and key in line and line.endswith(f"give all hosts {remedy}")
    assert not (tmp_path / "run").exists()


def images(folder, count):
    for split in ("train", "val"):
        for kind in ("a", "b"):
            (folder / "images" / split / kind).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "images" / split / kind / f"{number}.png")


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((14, 15), ("rank 1 finds 30 training and 30 validation images of 2 classes, rank 0 28 and 28 of 2 ",)),
        pytest.param((14, 0), ("images", "no such folder"), marks=pytest.mark.slow),
        ((5, 5), ("10", "batch.global")),  # known once the ranks have met, and then known to all: one says it
    ],
)
def test_ranks_that_find_different_or_too_few_images(tmp_path, counts, words):
    """The same path, which is another disk on each host."""
    for rank, count in enumerate(counts):
        (tmp_path / str(rank)).mkdir()
        if count:
            images(tmp_path / str(rank), count)
    folder = ("data.source=folder", "data.root=images", "model.classes=2", "batch.global=24", "batch.micro=4")
    enter = functools.partial(_enter, tmp_path)
    line = refusal(2, *folder, f"run.output={tmp_path / 'run'}", sabotage=enter)
    assert all(word in line for word in words), line


def _enter(folder, rank):
    os.chdir(folder / str(rank))


def test_a_cut_that_cannot_be(tmp_path):
    recipe = ("parallel.stages=2", "parallel.split=[blocks.3.0]", "parallel.recompute=[blocks.9.0]")
    assert "parallel.recompute" in refusal(2, *recipe, f"run.output={tmp_path / 'run'}")


def test_a_world_that_makes_no_whole_replicas(tmp_path):
    line = refusal(3, *TWO_STAGES, f"run.output={tmp_path / 'run'}", by_each=True)
    assert "3 processes are not a multiple of 2 stages; start 2 or 4, " in line


def _lose_patience(rank):
    from parallel import processes

    processes._RENDEZVOUS_SECONDS = 1.0


@pytest.mark.parametrize(
    "address", ["127.0.0.1", pytest.param("no.such.host.invalid", marks=pytest.mark.slow)], ids=["absent", "unknown"]
)
def test_a_master_that_cannot_be_reached(tmp_path, address):
    """Rank 0 was never started, or its name is wrong."""
    options = {"only": (1,), "sabotage": _lose_patience, "MASTER_ADDR": address, "MASTER_PORT": "1"}
    line = refusal(2, f"run.output={tmp_path / 'run'}", **options)
    assert f"rank 1 (replica 1, stage 0) did not meet all 2 ranks at {address}:1 within 1 s (" in line

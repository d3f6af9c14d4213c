"""What several ranks cannot run is refused in one line and with 2, and no rank waits for
another."""

import functools
import os

import pytest

from tests import ranks
from tests.pictures import write_pictures

pytestmark = pytest.mark.multiprocess

WRONG_INPUT = 2
TWO_STAGES = ("parallel.stages=2", "parallel.split=[blocks.3.0]")


def refusal(size, *overrides, **options):
    """The one line of all ranks, which all end with 2."""
    ended = ranks.train(size, *overrides, POD_LAUNCHER="1", **options)
    assert [rank.code for rank in ended] == [WRONG_INPUT] * len(ended), ended
    (line,) = [line for rank in ended for line in rank.errors]
    return line


@pytest.mark.parametrize(
    ("size", "overrides", "of_rank_1", "words"),
    [
        (
            2,
            TWO_STAGES,
            ("parallel.split=[blocks.2.0]",),
            ("['blocks.2.0'] here; give all hosts the same files",),
        ),
        (
            2,
            (),
            TWO_STAGES,
            ("rank 1 has parallel.stages 2, rank 0 1", "; give all hosts the same recipe"),
        ),
        (2, (*TWO_STAGES, "parallel.recompute=[blocks.9.0]"), (), ("parallel.recompute",)),
        (
            3,
            TWO_STAGES,
            (),
            ("3 ranks were started, no multiple of 2 stages; ", "./run_pod.sh --replicas 1 or 2, "),
        ),
        (
            2,
            ("exchange.order=fast", "batch.global=60"),
            (),
            (
                "batch.global 60 is not a multiple of 20 micro x 2 ",
                "; 2 ranks were started, as many as --replicas ",
            ),
        ),
    ],
)
def test_recipes_that_differ_and_stages_that_cannot_be(tmp_path, size, overrides, of_rank_1, words):
    line = refusal(size, *overrides, f"run.output={tmp_path / 'run'}", per_rank={1: of_rank_1})
    assert all(word in line for word in words), line
    assert not of_rank_1 or not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (
            (14, 15),
            (
                "rank 1 finds 30 training and 30 validation images of 2 classes, rank 0 28 and 28 of 2 ",
            ),
        ),
        # known once the ranks have met, and then known to all: one says it
        (
            (5, 5),
            ("10", "batch.global"),
        ),
    ],
)
def test_ranks_that_find_different_or_too_few_images(tmp_path, counts, words):
    """The same path, which is another disk on each host."""
    for rank, count in enumerate(counts):
        write_pictures(tmp_path / str(rank) / "images", train=count, val=count)
    folder = (
        "data.source=folder",
        "data.root=images",
        "model.classes=2",
        "batch.global=24",
        "batch.micro=4",
    )
    line = refusal(
        2, *folder, f"run.output={tmp_path / 'run'}", sabotage=functools.partial(enter, tmp_path)
    )
    assert all(word in line for word in words), line


def enter(folder, rank):
    os.chdir(folder / str(rank))

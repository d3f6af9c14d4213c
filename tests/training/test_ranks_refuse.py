"""What several ranks cannot run is refused in one line and with 2, and no rank waits for another."""

import fcntl
import functools
import os

import numpy as np
import pytest
from PIL import Image

from tests import ranks
from tests.conftest import QUICKSTART

pytestmark = pytest.mark.multiprocess

WRONG_INPUT = 2
TWO_STAGES = ("parallel.stages=2", "parallel.split=[blocks.3.0]")


def refusal(size, *overrides, **options):
    """The one line of all ranks, which all end with 2."""
    ended = ranks.train(size, *overrides, **options)
    assert [rank.code for rank in ended] == [WRONG_INPUT] * len(ended), ended
    lines = [line for rank in ended for line in rank.errors]
    assert len(lines) == 1, lines
    return lines[0]


def refusal_by_each(size, *overrides, **options):
    """The line that each rank says for itself: they have not met."""
    ended = ranks.train(size, *overrides, **options)
    assert [rank.code for rank in ended] == [WRONG_INPUT] * len(ended), ended
    assert [rank.errors for rank in ended] == [ended[0].errors] * len(ended)
    assert len(ended[0].errors) == 1, ended[0].errors
    return ended[0].errors[0]


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ((), ("schedule.peak=1.5",), "schedule.peak is 2.0 on rank 0, 1.5 here"),
        ((), ("data.workers=1",), "data.workers is 0 on rank 0, 1 here"),
        (
            TWO_STAGES,
            ("parallel.split=[blocks.2.0]",),
            "parallel.split is ['blocks.3.0'] on rank 0, ['blocks.2.0'] here",
        ),
    ],
)
def test_ranks_with_different_recipes(tmp_path, ours, theirs, difference):
    line = refusal(4, *ours, f"run.output={tmp_path / 'run'}", per_rank={2: theirs})
    remedy = "give all hosts the same files and overrides"
    assert line == f"{QUICKSTART}: rank 2 has another recipe than rank 0: {difference}; {remedy}"
    assert not (tmp_path / "run").exists()


def test_ranks_with_different_stages(tmp_path):
    """They would not even form the same groups."""
    line = refusal(4, f"run.output={tmp_path / 'run'}", per_rank={2: TWO_STAGES})
    assert line == f"{QUICKSTART}: rank 2 has parallel.stages 2, rank 0 1; give all hosts the same recipe"


def images(folder, count):
    for split in ("train", "val"):
        for kind in ("a", "b"):
            (folder / "images" / split / kind).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "images" / split / kind / f"{number}.png")


def change_folder(folder, rank):
    os.chdir(folder / str(rank))


FOLDER = ("data.source=folder", "data.root=images", "model.classes=2", "batch.global=24", "batch.micro=4")


def test_ranks_that_find_different_data(tmp_path):
    """The same path, which is another disk on each host."""
    for rank, count in ((0, 14), (1, 15)):
        images(tmp_path / str(rank), count)
    line = refusal(2, *FOLDER, f"run.output={tmp_path / 'run'}", sabotage=functools.partial(change_folder, tmp_path))
    assert line.startswith("rank 1 finds 30 training and 30 validation images of 2 classes, rank 0 28 and 28 of 2 ")


def test_data_that_one_rank_does_not_find(tmp_path):
    images(tmp_path / "0", 14)
    (tmp_path / "1").mkdir()
    line = refusal(2, *FOLDER, f"run.output={tmp_path / 'run'}", sabotage=functools.partial(change_folder, tmp_path))
    assert "images" in line


def test_fewer_images_than_a_step(tmp_path):
    """Known once the ranks have met, and then known to all: one says it."""
    images(tmp_path / "0", 5)
    images(tmp_path / "1", 5)
    sabotage = functools.partial(change_folder, tmp_path)
    line = refusal(2, *FOLDER, f"run.output={tmp_path / 'run'}", sabotage=sabotage)
    assert "10" in line and "batch.global" in line


def test_a_run_folder_in_use(tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / "lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        line = refusal(2, f"run.output={tmp_path / 'run'}")
    assert line.startswith(f"{QUICKSTART}: {tmp_path / 'run'} is in use by another process; ")


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (("parallel.split=[blocks.9.0]",), "parallel.split: "),
        (("parallel.split=[preprocess]",), "parallel.split: "),
        (("parallel.split=[stem]",), "parallel.split: the stage of preprocess has no parameters; "),
        (("parallel.recompute=[blocks.9.0]",), "parallel.recompute: "),
        (
            ("parallel.split=auto", "parallel.schedule=interleaved", "parallel.virtual_stages=6"),
            "parallel.stages: 12 parts are more than the 9 blocks that have parameters",
        ),
        (
            ("parallel.split=[blocks.4.0,blocks.3.0,blocks.5.0]", "parallel.schedule=interleaved"),
            "parallel.split: ",
        ),
    ],
    ids=["unknown", "empty", "nothing to learn", "recomputed", "too many", "order"],
)
def test_cuts_that_cannot_be(tmp_path, overrides, complaint):
    line = refusal(2, "parallel.stages=2", *overrides, f"run.output={tmp_path / 'run'}")
    assert line.startswith(f"{QUICKSTART}: {complaint}")


def test_weights_of_another_model(tmp_path):
    (tmp_path / "none.safetensors").write_bytes(b"")
    line = refusal(2, f"model.init_from={tmp_path / 'none.safetensors'}", f"run.output={tmp_path / 'run'}")
    assert "none.safetensors" in line


def test_a_world_that_makes_no_whole_replicas(tmp_path):
    line = refusal_by_each(3, *TWO_STAGES, f"run.output={tmp_path / 'run'}")
    assert line.startswith(f"{QUICKSTART}: 3 processes are not a multiple of 2 stages; start 2 or 4, ")
    line = refusal_by_each(3, "parallel.replicas=2", f"run.output={tmp_path / 'run'}")
    assert line.startswith(f"{QUICKSTART}: 3 processes were started, but 2 replicas x 1 stages = 2; ")


def lose_patience(rank):
    from parallel import processes

    processes._MEETING_SECONDS = 1.0


@pytest.mark.parametrize("address", ["127.0.0.1", "no.such.host.invalid"])
def test_a_master_that_cannot_be_reached(tmp_path, address):
    """Rank 0 was never started, or its name is wrong."""
    options = {"only": (1,), "sabotage": lose_patience, "MASTER_ADDR": address, "MASTER_PORT": "1"}
    line = refusal(2, f"run.output={tmp_path / 'run'}", **options)
    assert line.startswith(
        f"{QUICKSTART}: rank 1 (replica 1, stage 0) did not meet all 2 ranks at {address}:1 within 1 s ("
    )

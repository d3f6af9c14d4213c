"""Runs with residuals and late gradients that are stopped or killed end with the bits of the
undisturbed run."""

import functools
import os
import signal

import pytest
import torch

from tests import ranks
from tests.tensors import assert_bitwise_equal, flat
from tests.training.test_resume import before_call
from tests.training.test_several_ranks import (
    FAILED,
    TWO_STAGES,
    assert_same_outcome,
    train_to_the_end,
    train_until,
)

pytestmark = pytest.mark.multiprocess

GTOPK = (  # ranks.RECIPE asks for the tree, which is for dense gradients
    "exchange.order=fast",
    "exchange.method=gtopk",
    "exchange.density=0.05",
    "exchange.density_warmup=[0.3]",
    "exchange.compress=update",
)
LATE_GTOPK = ("exchange.compress=gradient", "exchange.delay=1")


def replica_files(folder):
    """{name: {kind: {parameter: tensor}}} of the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*.json")).stem
    paths = sorted((folder / "checkpoints").glob(f"{newest}.replica-*.pt"))
    return {path.name: torch.load(path, weights_only=True)["state"] for path in paths}


# Calls before which the last rank or the main one dies, mostly within the writing of a checkpoint.
KILLS = [(-1, "step", 2), (0, "fsync", 3), (0, "rename", 4), (0, "fsync", 6), (-1, "step", 3)]


def die(who, moment, number, rank):
    if rank == who:
        before_call(
            pytest.MonkeyPatch(),
            moment,
            number,
            functools.partial(os.kill, os.getpid(), signal.SIGKILL),
        )


@pytest.mark.slow  # test_resume.py kills one process, the last test resumes residuals
def test_twenty_kills_leave_no_trace_over_changing_topologies(tmp_path):
    """On one to four processes, 10 steps in each topology with a checkpoint at each.

    Ranks that are left end, too.
    """
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    recipe = (*ranks.SMALL, *GTOPK, *LATE_GTOPK, "checkpoint.every_epochs=0.2", "run.epochs=8")
    for end, size, stages in ((10, 1, ()), (20, 2, ()), (30, 2, TWO_STAGES), (40, 4, TWO_STAGES)):
        for folder, kills in ((whole, ()), (killed, KILLS)):
            overrides = (*recipe, *stages, f"run.output={folder}")
            for rank, moment, number in kills:
                who = rank % size
                ended = ranks.train(
                    size, *overrides, sabotage=functools.partial(die, who, moment, number)
                )
                codes = [rank.code for rank in ended]
                assert codes.pop(who) == -signal.SIGKILL and codes == [FAILED] * (size - 1), ended
            if end == 40:
                train_to_the_end(size, *overrides)
            else:
                train_until(end, size - 1, size, *overrides)
    assert_same_outcome(killed, whole)
    found = replica_files(killed)
    expected = replica_files(whole)
    assert len(found) == 2
    assert_bitwise_equal(found, expected)
    assert any(tensor.any() for tensor in flat(found).values())


def test_replicas_may_come_and_go(tmp_path):
    """Two, then four, then one: each goes on with its share of what the others had kept."""
    place = (*ranks.SMALL, f"run.output={tmp_path / 'run'}")
    first = train_until(2, 0, 2, *GTOPK, *place)
    second = train_until(first + 2, 3, 4, *GTOPK, *place)
    lines = train_to_the_end(1, *GTOPK, *place)
    assert f"resuming at step {second} of 10" in lines
    assert list(replica_files(tmp_path / "run")) == ["step-00000010.replica-0000.pt"]

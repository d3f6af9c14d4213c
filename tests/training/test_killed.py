"""Runs with residuals and late gradients that are stopped or killed end with the bits of the undisturbed run.

Both change their topology at the same steps: what a sparse exchange learns depends on the replicas.
"""

import functools
import itertools
import os
import random
import signal
import sys
import threading
from typing import NamedTuple

import pytest
import torch

from tests import ranks
from tests.tensors import assert_bitwise_equal, flat
from tests.training.test_several_ranks import FAILED, TWO_STAGES, assert_same_outcome, train_to_the_end, train_until
from training.checkpoint import CheckpointFolder

pytestmark = pytest.mark.multiprocess

GTOPK = (
    # ranks.RECIPE asks for the tree, which is for dense gradients
    "exchange.order=fast", "exchange.method=gtopk", "exchange.density=0.05", "exchange.density_warmup=[0.3]",
    "exchange.momentum_correction=true", "exchange.factor_masking=true",
)  # fmt: skip
# A checkpoint at each step, so that every session can be killed within the writing of one.
RECIPE = (*ranks.SMALL, *GTOPK, "exchange.delay=1", "checkpoint.every_epochs=0.2")
LATE = ("exchange.order=fast", "exchange.delay=2")
WRITES = 9  # calls that bring a checkpoint to the disk: three for each of its files, of which there are at least three


class Stretch(NamedTuple):
    """Steps up to `end` in one topology. saving: kills within a checkpoint's writing; running: at other moments."""

    replicas: int
    stages: int
    end: int
    saving: int
    running: int

    @property
    def size(self):
        return self.replicas * self.stages

    def overrides(self, folder):
        return (*RECIPE, *(TWO_STAGES if self.stages == 2 else ()), f"run.output={folder}")


class Blow(NamedTuple):
    """Who is killed: at call number `write` of the checkpoint after `step`, or `delay` seconds after `step` begins."""

    rank: int
    step: int
    write: int = 0
    delay: float = 0.0


def replica_files(folder):
    """{name: {kind: {parameter: tensor}}} of the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*.json")).stem
    paths = sorted((folder / "checkpoints").glob(f"{newest}.replica-*.pt"))
    return {path.name: torch.load(path, weights_only=True)["state"] for path in paths}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def strike(blow, rank):
    """Has this process kill itself as `blow` says, and before the step after the next one at the latest."""
    if rank != blow.rank:
        return
    ranks.before_step(blow.step + 2, die)
    if blow.write:
        ranks.before_step(blow.step, functools.partial(die_within_a_checkpoint, blow.write))
    else:
        ranks.before_step(blow.step, threading.Timer(blow.delay, die).start)


def die_within_a_checkpoint(write):
    save, calls = CheckpointFolder.save, itertools.count(1)

    def deadly(function, *arguments):
        if next(calls) == write:
            die()
        return function(*arguments)

    def saved(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("fsync", "replace"):
                patch.setattr(os, name, functools.partial(deadly, getattr(os, name)))
            return save(*arguments)

    CheckpointFolder.save = saved


def finish(stretch, folder, last):
    """The last session of a stretch is stopped at its end; that of the run ends by itself."""
    if last:
        train_to_the_end(stretch.size, *stretch.overrides(folder))
    else:
        train_until(stretch.end, stretch.size - 1, stretch.size, *stretch.overrides(folder))


def kill(stretch, folder, saves, draws):
    """One session that is killed at a moment that is drawn. Ranks that are left end, too."""
    saved = [manifest.step for manifest in CheckpointFolder(folder / "checkpoints", 2, True).manifests()]
    step = max(saved, default=0) + draws.randint(1, 2)
    assert step + 2 <= stretch.end, "lengthen the stretch"
    write, delay = draws.randint(1, WRITES), draws.uniform(0, 0.1)
    blow = Blow(0, step, write=write) if saves else Blow(draws.randrange(stretch.size), step, delay=delay)
    ended = ranks.train(stretch.size, *stretch.overrides(folder), sabotage=functools.partial(strike, blow))
    codes = [rank.code for rank in ended]
    assert codes.pop(blow.rank) == -signal.SIGKILL, (blow, ended)
    assert codes == [FAILED] * len(codes), (blow, ended)


def assert_killed_ends_as_undisturbed(tmp_path, stretches, seed):
    draws = random.Random(seed)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for stretch in stretches:
        finish(stretch, whole, last=stretch is stretches[-1])
        for saves in draws.sample([True, False], counts=stretch[-2:], k=sum(stretch[-2:])):
            kill(stretch, killed, saves, draws)
        finish(stretch, killed, last=stretch is stretches[-1])
    assert_same_outcome(killed, whole)
    found, expected = replica_files(killed), replica_files(whole)
    assert found.keys() == expected.keys() and len(found) == stretches[-1].replicas
    assert_bitwise_equal(found, expected)
    assert any(tensor.any() for tensor in flat(found).values())


@pytest.mark.slow
def test_eighteen_kills_leave_no_trace_over_changing_topologies(tmp_path, monkeypatch):
    """On one to four processes, eight of them within the writing of a checkpoint."""
    monkeypatch.setattr(sys.modules[__name__], "RECIPE", (*RECIPE, "run.epochs=16"))
    stretches = [
        Stretch(1, 1, end=20, saving=2, running=3),
        Stretch(2, 1, end=40, saving=2, running=2),
        Stretch(1, 2, end=60, saving=2, running=2),
        Stretch(2, 2, end=80, saving=2, running=3),
    ]
    assert_killed_ends_as_undisturbed(tmp_path, stretches, seed=0)


@pytest.mark.slow  # test_replicas_may_come_and_go resumes residuals
@pytest.mark.parametrize(
    ("size", "overrides", "files"),
    [
        pytest.param(4, (*TWO_STAGES, *GTOPK), 2, id="gtopk over two stages"),
        pytest.param(2, (*GTOPK, "exchange.delay=1", "exchange.pattern=butterfly"), 2, id="gtopk one step late"),
        pytest.param(2, LATE, 0, id="dense two steps late"),
    ],
)
def test_a_stopped_run_ends_bit_for_bit_as_an_undisturbed_one(tmp_path, size, overrides, files):
    whole, stopped, overrides = tmp_path / "whole", tmp_path / "stopped", (*ranks.SMALL, *overrides)
    train_to_the_end(size, *overrides, f"run.output={whole}")
    saved = train_until(3, size - 1, size, *overrides, f"run.output={stopped}")
    lines = train_to_the_end(size, *overrides, f"run.output={stopped}")
    assert f"resuming at step {saved} of 10" in lines
    assert_same_outcome(stopped, whole)
    found, expected = replica_files(stopped), replica_files(whole)
    assert len(found) == files
    assert all(state.keys() == {"residual", "velocity"} for state in found.values())
    assert_bitwise_equal(found, expected)
    assert not files or any(tensor.any() for tensor in flat(found).values())


def test_replicas_may_come_and_go(tmp_path):
    """Two, then four, then one: each goes on with its share of what the others had kept."""
    place = (*ranks.SMALL, f"run.output={tmp_path / 'run'}")
    first = train_until(2, 0, 2, *GTOPK, *place)
    second = train_until(first + 2, 3, 4, *GTOPK, *place)
    lines = train_to_the_end(1, *GTOPK, *place)
    assert f"resuming at step {second} of 10" in lines
    assert list(replica_files(tmp_path / "run")) == ["step-00000010.replica-0000.pt"]

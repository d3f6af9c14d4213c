"""Runs that train a part of the model: stopped and resumed, on replicas and stages, and started
from weights."""

import pytest
import torch

from tests import ranks
from tests.training.test_resume import Outcome
from tests.training.test_several_ranks import STOPPED, TWO_STAGES, in_this_process, train_to_the_end
from training.weights import read

pytestmark = pytest.mark.multiprocess

PART = (*ranks.SMALL, "log.noise_scale=false", "model.train=[stem, head]")


@pytest.fixture(scope="module")
def one(tmp_path_factory, _one_thread):
    """Folder of the run in one process."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    train_to_the_end(1, *PART, f"run.output={folder}")
    return folder


def test_a_stopped_run_goes_on_to_equal_bits(one, tmp_path):
    given = (*PART, f"run.output={tmp_path / 'run'}")
    assert in_this_process(*given, stop_at=4).code == STOPPED
    train_to_the_end(1, *given)
    Outcome(tmp_path / "run").assert_same(Outcome(one))


@pytest.mark.parametrize("stages", [pytest.param((), marks=pytest.mark.slow), TWO_STAGES], ids=len)
def test_two_ranks_are_one_process(one, tmp_path, stages):
    """Each of two stages has something to train: the stem, and the head."""
    train_to_the_end(2, *PART, *stages, f"run.output={tmp_path / 'run'}")
    two = Outcome(tmp_path / "run")
    whole = Outcome(one)
    assert two.of("train") == whole.of("train")
    assert two.tensors() == whole.tensors()


def test_a_stage_without_anything_to_train_is_refused(tmp_path):
    ended = ranks.train(
        2, *PART, "model.train=classifier", "parallel.stages=2", f"run.output={tmp_path / 'run'}"
    )
    assert [rank.code for rank in ended] == [2, 2]
    words = "has nothing that model.train names; use parallel.stages=1, or cut within what is trained (parallel.split)"
    assert [words in line for rank in ended for line in rank.errors] == [True]


def test_the_other_weights_are_those_that_the_run_starts_from(one, tmp_path):
    keys = (
        *PART,
        "model.train=classifier",
        f"model.init_from={one}",
        "run.seed=3",
        f"run.output={tmp_path / 'run'}",
    )
    train_to_the_end(1, *keys)
    start = read(str(one)).tensors
    end = Outcome(tmp_path / "run").engine["weights"]
    for name, tensor in end.items():
        same = torch.equal(tensor.float(), start[name].float())
        assert same != name.startswith("head.classifier."), name

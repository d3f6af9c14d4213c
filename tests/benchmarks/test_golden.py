"""Golden sums are of every bit that a run leaves, and of the program in the checkout that is named."""

import subprocess

import pytest
import torch

from benchmarks import golden
from benchmarks.golden import Case
from recipe.errors import UserError


def sum_of(folder, content):
    torch.save(content, folder / "step-00000001.pt")
    return golden._sum([folder / "step-00000001.pt"])


def test_one_bit_of_one_weight_changes_the_sum(tmp_path):
    weights = torch.arange(8.0).half()
    before = sum_of(tmp_path, {"engine": {"weights": {"a": weights}, "step": 3}})
    assert sum_of(tmp_path, {"engine": {"step": 3, "weights": {"a": weights.clone()}}}) == before
    weights.view(torch.int16)[5] ^= 1
    assert sum_of(tmp_path, {"engine": {"weights": {"a": weights}, "step": 3}}) != before


def test_a_tensor_of_another_name_or_shape_changes_the_sum(tmp_path):
    sums = {
        sum_of(tmp_path, {"weights": {"a": torch.zeros(4)}}),
        sum_of(tmp_path, {"weights": {"b": torch.zeros(4)}}),
        sum_of(tmp_path, {"weights": {"a": torch.zeros(2, 2)}}),
        sum_of(tmp_path, {"weights": {"a": torch.zeros(4, dtype=torch.int32)}}),
    }
    assert len(sums) == 4


def test_a_revision_is_checked_out_for_the_time_being():
    with golden.checkout_of("HEAD") as checkout:
        assert (checkout / "train.py").read_text() == git("show", "HEAD:train.py")
        assert str(checkout) in git("worktree", "list")
    assert not checkout.exists() and str(checkout) not in git("worktree", "list")


def test_an_unknown_revision_is_named():
    with pytest.raises(UserError, match="--against no-such-revision"), golden.checkout_of("no-such-revision"):
        pass


@pytest.mark.slow
def test_the_sum_is_that_of_the_run():
    first, again = (golden.digest(golden.ROOT, Case()) for _ in range(2))
    assert first == again
    assert golden.digest(golden.ROOT, Case(("run.seed=1",))) != first


def test_a_run_that_fails_is_an_error():
    with pytest.raises(UserError, match=r"model\.width"):
        golden.digest(golden.ROOT, Case(("model.width=-1",)))


def git(*arguments):
    return subprocess.run(
        ["git", "-C", str(golden.ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout

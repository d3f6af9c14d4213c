"""Golden sums are of every bit that a run leaves, and of the program in the checkout that is
named."""

import subprocess

import pytest
import torch

from benchmarks import golden
from benchmarks.golden import Case, digest_of
from common.errors import UserError


def test_a_bit_a_name_a_shape_or_a_type_changes_the_digest():
    weights = torch.arange(8.0).half()
    before = digest_of([{"engine": {"weights": {"a": weights}, "step": 3}}])
    assert digest_of([{"engine": {"step": 3, "weights": {"a": weights.clone()}}}]) == before
    flipped = weights.clone()
    flipped.view(torch.int16)[5] ^= 1
    others = [
        {"a": flipped},
        {"b": weights},
        {"a": weights.view(2, 4)},
        {"a": weights.view(torch.int16)},
    ]
    assert len({before, *(digest_of([{"engine": {"weights": each}}]) for each in others)}) == 5


def test_a_revision_is_checked_out_for_the_time_being():
    with golden.checkout_of("HEAD") as checkout:
        assert (checkout / "train.py").read_text() == git("show", "HEAD:train.py")
        assert str(checkout) in git("worktree", "list")
    assert not checkout.exists() and str(checkout) not in git("worktree", "list")
    with pytest.raises(UserError, match="--against no-such-revision"), golden.checkout_of(
        "no-such-revision"
    ):
        pass


@pytest.mark.slow
def test_the_sum_is_that_of_the_run_and_a_run_that_fails_is_an_error():
    first, again = (golden.digest(golden.ROOT, Case()) for _ in range(2))
    assert first == again
    assert golden.digest(golden.ROOT, Case(("run.seed=1",))) != first
    with pytest.raises(UserError, match=r"model\.width"):
        golden.digest(golden.ROOT, Case(("model.width=-1",)))


def git(*arguments):
    return subprocess.run(
        ["git", "-C", str(golden.ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout

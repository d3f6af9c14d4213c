"""Whole runs with sparse and with late gradients: what is stopped and resumed ends as if it had not been."""

import pytest

from tests.tensors import assert_bitwise_equal, flat
from tests.training.test_killed import GTOPK, replica_files
from tests.training.test_several_ranks import TWO_STAGES, assert_same_outcome, train_to_the_end, train_until

pytestmark = pytest.mark.multiprocess

LATE = ("exchange.order=fast", "exchange.delay=2")


@pytest.mark.parametrize(
    ("size", "overrides", "files"),
    [
        pytest.param(4, (*TWO_STAGES, *GTOPK), 2, id="gtopk over two stages"),
        pytest.param(2, (*GTOPK, "exchange.delay=1", "exchange.pattern=butterfly"), 2, id="gtopk one step late"),
        pytest.param(2, LATE, 0, id="dense two steps late"),
    ],
)
@pytest.mark.slow  # test_killed.py proves it for one step late, and the next test over changing replicas
def test_a_stopped_run_ends_bit_for_bit_as_an_undisturbed_one(tmp_path, size, overrides, files):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train_to_the_end(size, *overrides, f"run.output={whole}")
    saved = train_until(3, size - 1, size, *overrides, f"run.output={stopped}")
    said = train_to_the_end(size, *overrides, f"run.output={stopped}")
    assert f"resuming at step {saved} of 10" in said
    assert_same_outcome(stopped, whole)
    found, expected = replica_files(stopped), replica_files(whole)
    assert len(found) == files
    assert all(state.keys() == {"residual", "velocity"} for state in found.values())
    assert_bitwise_equal(found, expected)
    assert not files or any(tensor.any() for tensor in flat(found).values())


def test_replicas_may_come_and_go(tmp_path):
    """Two, then four, then one: each goes on with its share of what the others had kept."""
    place = f"run.output={tmp_path / 'run'}"
    first = train_until(2, 0, 2, *GTOPK, place)
    second = train_until(first + 2, 3, 4, *GTOPK, place)
    said = train_to_the_end(1, *GTOPK, place)
    assert f"resuming at step {second} of 10" in said
    assert list(replica_files(tmp_path / "run")) == ["step-00000010.replica-0000.pt"]

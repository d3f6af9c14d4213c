"""Whole runs with sparse and with late gradients: what is stopped and resumed ends as if it had not been."""

import pytest
import torch

from tests.training.test_resume import Outcome
from tests.training.test_several_ranks import TWO_STAGES, assert_same_outcome, train_to_the_end, train_until

pytestmark = pytest.mark.multiprocess

FAST = ("exchange.order=fast",)  # ranks.RECIPE asks for the tree, which is for dense gradients
GTOPK = (
    *FAST, "exchange.method=gtopk", "exchange.density=0.05", "exchange.density_warmup=[0.3]",
    "exchange.momentum_correction=true", "exchange.factor_masking=true",
)  # fmt: skip
LATE = (*FAST, "exchange.delay=2")


def replica_files(folder):
    """{name: {kind: {parameter: tensor}}} of the newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*.json")).stem
    paths = sorted((folder / "checkpoints").glob(f"{newest}.replica-*.pt"))
    return {path.name: torch.load(path, weights_only=True)["state"] for path in paths}


@pytest.mark.parametrize(
    ("size", "overrides", "files"),
    [
        pytest.param(4, (*TWO_STAGES, *GTOPK), 2, id="gtopk over two stages"),
        pytest.param(
            2,
            (*GTOPK, "exchange.delay=1", "exchange.pattern=butterfly"),
            2,
            id="gtopk one step late",
            marks=pytest.mark.slow,
        ),
        pytest.param(2, LATE, 0, id="dense two steps late", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_ends_bit_for_bit_as_an_undisturbed_one(tmp_path, size, overrides, files):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train_to_the_end(size, *overrides, f"run.output={whole}")
    saved = train_until(3, size - 1, size, *overrides, f"run.output={stopped}")
    said = train_to_the_end(size, *overrides, f"run.output={stopped}")
    assert f"resuming at step {saved} of 10" in said
    assert_same_outcome(stopped, Outcome(whole))
    kept, expected = replica_files(stopped), replica_files(whole)
    assert len(kept) == files and kept.keys() == expected.keys()
    for name, state in kept.items():
        assert state.keys() == {"residual", "velocity"}
        for kind, tensors in state.items():
            assert any(tensor.any() for tensor in tensors.values())
            assert all(torch.equal(tensor, expected[name][kind][key]) for key, tensor in tensors.items())


def test_replicas_may_come_and_go(tmp_path):
    """Two, then four, then one: each goes on with its share of what the others had kept."""
    place = f"run.output={tmp_path / 'run'}"
    first = train_until(2, 0, 2, *GTOPK, place)
    second = train_until(first + 2, 3, 4, *GTOPK, place)
    said = train_to_the_end(1, *GTOPK, place)
    assert f"resuming at step {second} of 10" in said
    assert list(replica_files(tmp_path / "run")) == ["step-00000010.replica-0000.pt"]

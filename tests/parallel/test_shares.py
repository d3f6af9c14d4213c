"""How stages share the values to send: as many as each has of the largest of the whole model."""

import pytest
import torch

from parallel import sparse_exchange
from parallel.sparse_exchange import StageShares, divided
from tests.parallel import threads


def values_of(rank, length):
    """Even ranks, the first stage, have smaller values than the others."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(length, generator=generator) * (0.7 if rank % 2 == 0 else 1.0)


def share(rank, size, lengths, count):
    stage = rank % 2
    own = values_of(rank, lengths[stage])
    return StageShares(len(own), 2, stage, "everyone")(own, count)


@pytest.mark.parametrize("lengths", [(30_000, 20_000), (600_000, 400_000)])
def test_stages_send_as_many_as_they_have_of_the_largest(lengths):
    """Two replicas of two stages; the second pair of lengths is sampled.

    The bins are an eighth wide, and 2^18 of 400,000 values have 2 % above the threshold to within 2 %.
    """
    count = sum(lengths) // 50
    found = threads.run(4, share, lengths, count)
    assert all(each == found[0] for each in found)
    assert sum(found[0]) == count
    both = torch.cat([values_of(rank, lengths[rank % 2]) for rank in range(4)]).abs()
    threshold = both.topk(2 * count).values[-1]
    expected = [(values_of(stage, lengths[stage]).abs() >= threshold).sum().item() for stage in range(2)]
    assert found[0][0] == pytest.approx(expected[0], abs=0.05 * count)
    assert found[0][1] == pytest.approx(expected[1], abs=0.05 * count)
    assert found[0] != [count * length // sum(lengths) for length in lengths]


@pytest.mark.parametrize("count", [3, 4, 10, 37, 99, 100])
def test_shares_add_up(count):
    """Whatever has to be rounded; no stage goes without."""
    histograms = torch.zeros(3, sparse_exchange._BINS, dtype=torch.float64)
    histograms[0, 5:9], histograms[1, 7:12], histograms[2, 3] = 10, 8, 20
    found = divided(histograms, count)
    assert sum(found) == count and min(found) >= 1


def test_the_largest_bins_come_first():
    histograms = torch.zeros(2, sparse_exchange._BINS, dtype=torch.float64)
    histograms[0, 100], histograms[0, 90], histograms[1, 95] = 4, 50, 6
    assert divided(histograms, 10) == [4, 6]
    assert divided(histograms, 7) == [4, 3]
    assert divided(histograms, 60) == [54, 6]


def test_a_gradient_of_zeros_is_shared_by_size():
    histograms = torch.zeros(2, sparse_exchange._BINS, dtype=torch.float64)
    histograms[0, 0], histograms[1, 0] = 300, 100
    assert divided(histograms, 40) == [30, 10]

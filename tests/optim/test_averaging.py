"""Averages of weights against their closed form in float64."""

import pytest
import torch

from optim.averaging import WeightAverage


def closed_form(series, decay):
    """Sum of decay^(n - k) w_k over their sum, in float64."""
    shares = torch.tensor([decay ** (len(series) - 1 - k) for k in range(len(series))], dtype=torch.float64)
    return sum(share * weights.double() for share, weights in zip(shares, series)) / shares.sum()


def series(count, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("decay", [0.5, 0.97, 0.9999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_average_is_the_weighted_mean_of_all_weights(decay, dtype):
    """Each step rounds once to float32, so 50 steps differ by at most 50 x 2^-24 of the largest value, some 1e-5."""
    weights = series(50, 7, 3, dtype=dtype)
    average = WeightAverage(decay, [weights[0]])
    for number, each in enumerate(weights, 1):
        average.add([each])
        torch.testing.assert_close(average.tensors[0].double(), closed_form(weights[:number], decay), rtol=0, atol=1e-5)
    assert average.count == 50


def test_the_first_weights_are_the_first_average_exactly():
    weights = series(1, 1000)
    average = WeightAverage(0.9999, weights)
    average.add(weights)
    assert torch.equal(average.tensors[0], weights[0])


def test_it_differs_from_the_published_offline_average_only_by_the_share_of_the_first():
    """The published form starts from the first checkpoint at its full weight: a share of 0.97^(n - 1)."""
    weights = series(350, 5)
    published = weights[0].double()
    for each in weights[1:]:
        published = 0.97 * published + 0.03 * each.double()
    average = WeightAverage(0.97, [weights[0]])
    for each in weights:
        average.add([each])
    bound = 2 * 0.97**349 * max(each.abs().max().item() for each in weights)
    torch.testing.assert_close(average.tensors[0].double(), published, rtol=0, atol=bound + 1e-5)


def test_a_skipped_update_changes_no_bit():
    weights = series(3, 1000)
    average = WeightAverage(0.9, weights[:1])
    average.add(weights[:1])
    average.add(weights[1:2])
    before = average.tensors[0].clone()
    average.add(weights[2:], counts=torch.tensor(False))
    assert torch.equal(average.tensors[0], before) and average.count == 2


def test_an_average_that_began_with_skipped_updates_begins_with_the_first_that_counts():
    weights = series(2, 10)
    average = WeightAverage(0.9, weights[:1])
    average.add(weights[:1], counts=torch.tensor(False))
    assert average.count == 0 and not average.tensors[0].any()
    average.add(weights[1:], counts=torch.tensor(True))
    assert torch.equal(average.tensors[0], weights[1])


def test_several_tensors_are_averaged_each_by_itself():
    first, second = series(2, 4), series(2, 2, 3)
    average = WeightAverage(0.5, [first[0], second[0]])
    for pair in zip(first, second):
        average.add(pair)
    torch.testing.assert_close(average.tensors[0], (first[0] + 2 * first[1]) / 3)
    torch.testing.assert_close(average.tensors[1], (second[0] + 2 * second[1]) / 3)

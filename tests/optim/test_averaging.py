"""Averages of weights against their closed form in float64."""

import pytest
import torch

from optim.averaging import WeightAverage


def series(count, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("decay", [0.5, 0.97, 0.9999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_average_is_the_weighted_mean_of_all_weights(decay, dtype):
    """Of two tensors, each by itself.

    The first weights are the first average exactly. Each step rounds once to float32, so 50 steps
    differ by at most 50 x 2^-24 of the largest value, some 1e-5.
    """
    weights = series(50, 7, 3, dtype=dtype)
    others = series(50, 4)
    average = WeightAverage(decay, [weights[0], others[0]])
    for number, each in enumerate(zip(weights, others), 1):
        average.add(each)
        shares = torch.tensor(
            [decay ** (number - 1 - k) for k in range(number)], dtype=torch.float64
        )
        for tensor, added in zip(average.tensors, (weights, others)):
            expected = (
                sum(share * value.double() for share, value in zip(shares, added)) / shares.sum()
            )
            torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-5)
        assert number > 1 or torch.equal(average.tensors[0], weights[0].float())
    assert average.count == 50


def test_skipped_updates_change_no_bit_wherever_they_are():
    first, weights, others = series(3, 1000)
    average = WeightAverage(0.9, [first])
    average.add([first], counts=torch.tensor(False))
    assert average.count == 0 and not average.tensors[0].any()
    average.add([weights], counts=torch.tensor(True))
    assert torch.equal(average.tensors[0], weights)
    average.add([first])
    before = average.tensors[0].clone()
    average.add([others], counts=torch.tensor(False))
    assert torch.equal(average.tensors[0], before) and average.count == 2

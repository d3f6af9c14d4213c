"""The linear theory that stands beside the measured cost of late gradients."""

import math

import pytest

from benchmarks.evidence.staleness import largest_stable_rate


@pytest.mark.parametrize(
    ("momentum", "delay", "known"),
    [
        *((0.0, delay, 2 * math.sin(math.pi / (4 * delay + 2))) for delay in (1, 16)),
        *((momentum, 0, 2 * (1 + momentum)) for momentum in (0.5, 0.9)),
        (0.5, 1, None),
        (0.9, 4, None),
        (0.9, 16, None),
    ],
)
def test_a_weight_that_is_trained_so_goes_out_of_bounds_above_it_only(momentum, delay, known):
    """10 % below and above, and 3,000 steps at most: they shrink or grow by orders of magnitude.

    Closed forms: without momentum 2 sin(pi / (4 delay + 2)), without delay 2 (1 + momentum), that
    of the heavy ball (Polyak 1964).
    """

    def last(rate):
        weights = [1.0] * (delay + 1)
        velocity = 0.0
        for _ in range(3000):
            velocity = momentum * velocity + weights[-1 - delay]
            weights.append(weights[-1] - rate * velocity)
            if abs(weights[-1]) > 1e6:
                break
        return max(abs(weight) for weight in weights[-100:])

    limit = largest_stable_rate(momentum, delay)
    assert known is None or limit == pytest.approx(known, abs=1e-6)
    assert last(0.9 * limit) < 1e-3 and last(1.1 * limit) > 1e3

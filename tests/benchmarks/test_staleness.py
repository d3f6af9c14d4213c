"""The linear theory that stands beside the measured cost of late gradients."""

import math

import pytest

from benchmarks.evidence.staleness import largest_stable_rate


@pytest.mark.parametrize("delay", [1, 2, 4, 16])
def test_without_momentum_it_is_the_known_closed_form(delay):
    """2 sin(pi / (4 delay + 2)), of w' = w - rate w_late."""
    assert largest_stable_rate(0.0, delay) == pytest.approx(2 * math.sin(math.pi / (4 * delay + 2)), abs=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_without_delay_it_is_that_of_the_heavy_ball(momentum):
    """2 (1 + momentum), Polyak 1964."""
    assert largest_stable_rate(momentum, 0) == pytest.approx(2 * (1 + momentum), abs=1e-6)


@pytest.mark.parametrize(("momentum", "delay"), [(0.5, 1), (0.9, 1), (0.9, 4), (0.9, 16)])
def test_a_weight_that_is_trained_so_goes_out_of_bounds_above_it_only(momentum, delay):
    """10 % below and above, and 3,000 steps: they shrink or grow by orders of magnitude."""

    def last(rate):
        weights, velocity = [1.0] * (delay + 1), 0.0
        for _ in range(3000):
            velocity = momentum * velocity + weights[-1 - delay]
            weights.append(weights[-1] - rate * velocity)
        return max(abs(weight) for weight in weights[-100:])

    limit = largest_stable_rate(momentum, delay)
    assert last(0.9 * limit) < 1e-3 and last(1.1 * limit) > 1e3

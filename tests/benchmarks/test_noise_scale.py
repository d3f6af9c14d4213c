import pytest

from benchmarks import noise_scale


def test_of_four_updates_the_measured_one_counts_a_quarter():
    # an outlier moves no median
    turns = [(1.04, 1.0, 1.0, 1.0), (9.0, 1.0, 0.5, 1.0), (1.04, 9.0, 1.0, 1.0)]
    assert noise_scale.added(turns) == pytest.approx(0.01)

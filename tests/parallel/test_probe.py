"""What a message costs: fitted as it should be, and the same on all ranks."""

import time

import numpy
import pytest
import torch
from torch import distributed

from parallel import bruck, probe
from parallel.costs import Link
from tests import world

SIZES = (8, 4096, 65536, 262144)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "link", [Link(2e-4, 8e-9), Link(0.05, 1e-9), Link(3e-5, 4e-6), Link(0.125, 0.0)]
)
def test_messages_of_one_link_give_that_link(link):
    """Float64 with times in a range of 1 to 10,000: errors of 1e-16, some digits lost in the
    determinant."""
    assert probe.fit(SIZES, [link.message(size) for size in SIZES]) == pytest.approx(
        link, rel=1e-6, abs=1e-15
    )
    # one time is all latency
    assert probe.fit(SIZES[:1], [0.125]) == pytest.approx(Link(0.125, 0.0), rel=1e-5)


@pytest.mark.parametrize(
    "times", [(2.3e-3, 9e-4, 1.5e-3), (1.15e-4, 2.7e-3, 1.5e-2), (1.15e-3, 1.3e-3, 2.2e-3)]
)
def test_no_link_nearby_fits_disturbed_times_better(times):
    """The problem is convex.

    The first has a negative time per byte by plain least squares, the second a negative latency.
    """

    def error(latency, seconds_per_byte):
        return sum(
            ((latency + size * seconds_per_byte) / time - 1) ** 2
            for size, time in zip(SIZES[1:], times)
        )

    found = probe.fit(SIZES[1:], times)
    assert min(found) >= 0
    for step in numpy.ndindex(3, 3):
        other = numpy.maximum(0.0, found + (numpy.array(step) - 1) * (1e-6, 1e-11))
        assert error(*other) >= error(*found) - 1e-12


@pytest.mark.parametrize(
    ("times", "link"),
    [
        ((2.3e-3, 9e-4, 1.5e-3), Link(0.0010797714544323132, 9.863960761158571e-10)),
        ((1.15e-4, 2.7e-3, 1.5e-2), Link(0.0, 3.576510059680058e-08)),
        ((1.15e-3, 1.3e-3, 2.2e-3), Link(0.0010965364983192927, 4.048477086099929e-09)),
        ((3e-3, 2e-3, 1e-3), Link(0.0013469387755102043, 0.0)),
    ],
)
def test_disturbed_times_give_the_link_of_an_independent_solver(times, link):
    """Stored results of scipy.optimize.nnls (1.17.1) for the same relative errors, in float64."""
    assert probe.fit(SIZES[1:], times) == pytest.approx(link, rel=1e-9, abs=1e-18)


def test_a_single_rank_has_no_link(monkeypatch):
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 1)
    assert probe.measure(None, CPU) == Link(0.0, 0.0)


def measured_slowly(rank, size, lates, per_byte):
    """The links, and how many messages this rank sent for each.

    Rank 1 is late, for which its neighbours wait, but not rank 3.
    """
    transfer = bruck.transfer
    found = []
    for late in lates:
        sent = []

        def slow(rounds, group, late=late, sent=sent):
            sent.append(rounds)
            if rank == 1:
                time.sleep(late + rounds[0][0].nbytes * per_byte)
            transfer(rounds, group)

        bruck.transfer = slow
        found.append((probe.measure(None, CPU), len(sent)))
    return found


@pytest.mark.multiprocess
def test_the_slowest_rank_counts_and_a_slow_link_does_not_take_long():
    """A loopback of a busy machine adds to a link of 1 MB/s, which decides what is found.

    Where it adds to small messages most, the fit takes from large ones. It may spoil one of three
    measurements, not all.
    """
    lates = (0.0005, 0.02)
    for _ in range(3):
        results = world.run(4, measured_slowly, lates, 1e-6)
        links = [[link for link, _ in found] for found in results]
        assert all(each == links[0] for each in links)
        # Eight messages of each size up to 65536 bytes, at most; one more size would be 2 s.
        assert {messages for found in results for _, messages in found} <= {8, 16, 24, 32}
        exact = [(late + 0.0655, link) for late, link in zip(lates, links[0])]
        if all(
            0.9 * due < link.message(65536) < 10 * due and 0.7e-6 < link[1] < 1e-5
            for due, link in exact
        ):
            return
    raise AssertionError(links)

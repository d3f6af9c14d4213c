"""What a message costs: fitted as it should be, and the same on all ranks."""

import time

import numpy
import pytest
import scipy.optimize
import torch
from torch import distributed

from parallel import bruck, probe
from parallel.costs import Link
from tests import world

SIZES = (8, 4096, 65536, 262144)


@pytest.mark.parametrize("link", [Link(2e-4, 8e-9), Link(0.05, 1e-9), Link(3e-5, 4e-6)])
def test_messages_of_one_link_give_that_link(link):
    """Float64 with times in a range of 1 to 10,000: errors of 1e-16, some digits lost in the determinant."""
    assert probe.fit(SIZES, [link.message(size) for size in SIZES]) == pytest.approx(link, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("base", [(2e-3, 1e-3, 2e-3), (1e-4, 3e-3, 2e-2), (1e-3, 1.5e-3, 3e-3)])
def test_fit_of_disturbed_times_is_that_of_scipy(base, seed):
    """The first would have a negative time per byte by plain least squares, the second a negative latency."""
    sizes = numpy.array(SIZES[1:])
    seconds = numpy.array(base) * numpy.random.default_rng(seed).uniform(0.7, 1.4, 3)
    matrix = numpy.stack([1 / seconds, sizes / seconds], axis=1)
    scale = numpy.array([1.0, 1e-6])
    expected = scipy.optimize.nnls(matrix * scale, numpy.ones(3))[0] * scale
    assert probe.fit(sizes, list(seconds)) == pytest.approx(tuple(expected), rel=1e-6, abs=1e-15)


def test_one_time_is_all_latency():
    assert probe.fit([8], [0.125]) == Link(0.125, 0.0)


def assert_once(right, measure, tries=3):
    """That one of several measurements is right: a busy machine may spoil one, what measures wrongly spoils all."""
    found = []
    while not (found and right(found[-1])):
        assert len(found) < tries, found
        found.append(measure())


def measured(rank, size):
    return probe.measure(None, torch.device("cpu"))


def measured_slowly(rank, size, lates, per_byte):
    """The links, and how many messages this rank sent for each. Rank 1 is late, for which its neighbours wait, but not
    rank 3."""
    transfer, found = bruck.transfer, []
    for late in lates:
        sent = []

        def slow(rounds, group, late=late, sent=sent):
            sent.append(rounds)
            if rank == 1:
                time.sleep(late + rounds[0][0].nbytes * per_byte)
            transfer(rounds, group)

        bruck.transfer = slow
        found.append((probe.measure(None, torch.device("cpu")), len(sent)))
    return found


@pytest.mark.multiprocess
def test_all_ranks_find_the_same_link():

    def measure():
        links = world.run(3, measured)
        assert len(set(links)) == 1
        assert links[0].message(8) > 0 and links[0].seconds_per_byte >= 0
        return links[0]

    assert_once(lambda link: link.message(8) < 0.1 and link.seconds_per_byte < 1e-6, measure)


def test_a_single_rank_has_no_link(monkeypatch):
    monkeypatch.setattr(distributed, "get_world_size", lambda group: 1)
    assert measured(0, 1) == Link(0.0, 0.0)


@pytest.mark.multiprocess
def test_the_slowest_rank_counts_and_a_slow_link_does_not_take_long():
    """A loopback of a busy machine adds to a link of 1 MB/s, which decides what is found. Where it adds to small
    messages most, the fit takes from large ones."""
    lates = (0.0005, 0.02)

    def measure():
        results = world.run(4, measured_slowly, lates, 1e-6)
        links = [[link for link, _ in found] for found in results]
        assert all(each == links[0] for each in links)
        # Eight messages of each size up to 65536 bytes, at most; one more size would be 2 s.
        assert {messages for found in results for _, messages in found} <= {8, 16, 24, 32}
        return links[0]

    def as_made(links):
        return all(
            0.9 * (late + 0.0655) < link.message(65536) < 10 * (late + 0.0655) and 0.7e-6 < link.seconds_per_byte < 1e-5
            for late, link in zip(lates, links)
        )

    assert_once(as_made, measure)

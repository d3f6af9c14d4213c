"""Shares that follow given speeds: no clock is read."""

import itertools

import pytest

from parallel.speeds import Speeds
from recipe.shares import even


def followed(times, replicas, count=24, least=1):
    """The numbers of micro batches of the replicas after each of `times`, seconds a micro batch,
    and the lines."""
    speeds = Speeds(least)
    shares = even(count, replicas)
    counts = []
    said = []
    for seconds in times:
        found, lines = speeds.follow(shares, seconds)
        shares = found or shares
        assert list(itertools.chain(*shares)) == list(range(count))
        counts.append([len(share) for share in shares])
        said.append(lines)
    return counts, said


def test_a_replica_at_half_speed_gets_half_as_much_and_all_again_when_it_has_recovered():
    """24 = 10 + 10 + 4 would be 8 s at the slow one; 9, 9 and 6 would be 12 s."""
    counts, said = followed([(1, 1, 1), (1, 1, 2), (1, 1, 2), (1, 1, 1)], 3)
    assert counts[0] == [8, 8, 8] and counts[1] == counts[2] and counts[3] == counts[0]
    assert max(map(float.__mul__, map(float, counts[1]), (1.0, 1.0, 2.0))) == 10.0
    slow, shares = said[1]
    assert slow == "replica 2 has become slow: 2000 ms a micro batch, the median replica 1000 ms"
    assert shares.startswith("micro batches of the replicas from here on: ") and shares.endswith(
        "; 38% less time"
    )
    assert said[0] == said[2] == []
    assert said[3][0].startswith("replica 2 is no longer slow: 1000 ms")


@pytest.mark.parametrize(
    ("times", "moves"), [((1.0, 1.04), False), ((1.0, 1.3), True), ((1.0, 1.09), False)]
)
def test_shares_stay_where_little_would_be_won(times, moves):
    """Of 100 micro batches; a replica that is 9 % slower costs 4 %."""
    (counts,), _ = followed([times], 2, count=100)
    assert (counts != [50, 50]) == moves


def test_a_pipeline_stays_filled_and_of_many_replicas_the_range_is_printed():
    (counts,), (lines,) = followed([[0.001] * 9 + [1.0]], 10, count=40, least=2)
    assert counts[-1] == 2 and min(counts) == 2
    assert f": {min(counts)} to {max(counts)}; " in lines[-1]

"""Shares of the micro batches: each has one owner, and however they are divided the sum is that of
one process."""

import functools
import itertools
import math

import pytest

from recipe.shares import additions, additions_by_leaf, by_speed, halves, subtrees

REPLICAS = range(1, 17)
MOST = 40  # micro batches


def tree_by_counter(leaves):
    """The sum of one process, as the documentation has it: of leaves q 2^p, groups of q as by a
    binary counter, then a perfect binary tree. Nested pairs of leaves."""
    group = leaves
    while group % 2 == 0:
        group //= 2
    sums = []
    for start in range(0, leaves, group):
        counter = []  # sums and their sizes
        for leaf in range(start, start + group):
            counter.append((leaf, 1))
            while len(counter) > 1 and counter[-1][1] == counter[-2][1]:
                (left, size), (right, _) = counter[-2:]
                counter[-2:] = [((left, right), 2 * size)]
        while len(counter) > 1:
            (left, size), (right, more) = counter[-2:]
            counter[-2:] = [((left, right), size + more)]
        sums.append(counter[0][0])
    while len(sums) > 1:
        sums = list(zip(sums[::2], sums[1::2]))
    return sums[0]


def symbolic_sum(numbers):
    """Of a replica's micro batches of one subtree, added as `optim.gradients.TreeSum` does."""
    sums = []
    for number, completed in zip(numbers, additions_by_leaf(len(numbers))):
        sums.append(number)
        for _ in range(completed):
            newer = sums.pop()
            sums[-1] = (sums[-1], newer)
    (found,) = sums
    return found


def symbolic_total(division, count):
    """Of all replicas, added as the exchange does."""
    parts = [subtree for share in division for subtree in subtrees(share, count)]
    sums = [symbolic_sum(part) for part in parts]
    for independent in additions(parts):
        places = [place for pair in independent for place in pair]
        assert len(places) == len(set(places))
        for left, right in independent:
            sums[left] = (sums[left], sums[right])
    return sums[0]


def fewest_sums(count, replicas, most):
    """Partial sums of the best division into shares of at most `most` micro batches: all are
    tried."""

    @functools.lru_cache(maxsize=None)
    def from_(start, left):
        if left == 1:
            return len(subtrees(range(start, count), count)) if count - start <= most else math.inf
        ends = range(start + 1, min(start + most, count - left + 1) + 1)
        return min(len(subtrees(range(start, end), count)) + from_(end, left - 1) for end in ends)

    return from_(0, replicas)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_each_micro_batch_has_one_owner_and_the_sum_is_that_of_one_process(replicas):
    """Even shares, and those of replicas of different speeds."""
    for count in range(replicas, MOST + 1):
        for speeds in ([1.0] * replicas, [1.0 + number % 3 for number in range(replicas)]):
            division = by_speed(count, speeds)
            assert list(itertools.chain(*division)) == list(range(count)) and all(division)
            assert symbolic_total(division, count) == tree_by_counter(count), (count, speeds)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_shares_are_even_and_partial_sums_few(replicas):
    """The least that the shares' sizes allow, but for a third more at worst and 5 % more on
    average. Where as many equal subtrees exist each replica has one."""
    found = []
    best = []
    for count in range(replicas, MOST + 1):
        division = by_speed(count, [1.0] * replicas)
        most = max(map(len, division))
        assert most == -(-count // replicas)
        found.append(sum(len(subtrees(share, count)) for share in division))
        best.append(fewest_sums(count, replicas, most))
        assert best[-1] <= found[-1] <= best[-1] * 4 / 3, count
        if replicas & (replicas - 1) == 0 and count % replicas == 0:
            assert found[-1] == replicas
    assert sum(found) <= 1.05 * sum(best)


@pytest.mark.parametrize("share", list(itertools.combinations(range(0, 25, 3), 2)))
def test_a_partial_sum_is_as_large_as_a_share_allows(share):
    """No two parts of a share are the halves of a subtree: they would be one. 24 leaves: depth
    5."""
    parts = subtrees(range(*share), 24)
    assert list(itertools.chain(*parts)) == list(range(*share))
    every = []
    waiting = [range(24)]
    while waiting:
        every.append(waiting.pop())
        waiting += halves(every[-1]) if len(every[-1]) > 1 else ()
    assert set(parts) <= set(every) and len(every) == 2 * 24 - 1
    assert not any(set(halves(each)) <= set(parts) for each in every if len(each) > 1)


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("count", [12, 40, 768])
@pytest.mark.parametrize(
    "speeds", [(1.0, 0.5), (3.0, 1.0, 2.0), (1.0, 1.0, 0.01), (0.7, 1.3, 1.1, 0.9, 5.0)]
)
def test_the_slowest_replica_is_done_as_early_as_can_be(speeds, count, least):
    """To a hundredth, which buys larger subtrees.

    The best end: the first at which all micro batches could be done.
    """
    division = by_speed(count, speeds, least)
    ends = sorted(number / speed for speed in speeds for number in range(1, count + 1))
    best = next(
        end for end in ends if sum(max(least, int(end * speed + 1e-9)) for speed in speeds) >= count
    )
    best = max(best, least / min(speeds))
    assert max(len(share) / speed for share, speed in zip(division, speeds)) <= best * (1.01 + 1e-9)
    assert min(map(len, division)) >= least and division[-1].stop == count


def test_the_documented_divisions():
    assert by_speed(12, [1.0] * 4) == [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]
    assert [subtrees(share, 24) for share in by_speed(24, [1.0] * 3)][:2] == [
        [range(0, 6), range(6, 8)], [range(8, 9), range(9, 12), range(12, 15), range(15, 16)],
    ]  # fmt: skip
    assert additions([range(0, 6), range(6, 8), range(8, 9), range(9, 12)]) == [
        [(1, 2)],
        [(1, 3)],
        [(0, 1)],
    ]

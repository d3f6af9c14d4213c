"""Which micro batches of a step each replica computes, and the tree in which their gradients are
added up.

The N micro batches of a step are the leaves of a binary tree that N alone decides. A subtree is the
range of its leaves. A replica's share is a range of micro batches: it adds up the gradients of each
largest subtree in it, and the replicas add these partial sums as the tree says. So the bits of the
sum do not depend on the shares.
"""

from __future__ import annotations

import functools
import heapq
from typing import Dict, Iterator, List, Sequence, Tuple

# Share of its time by which a step may be longer for fewer partial sums, which are memory and
# messages.
_LONGER = 0.01


def halves(subtree: range) -> Tuple[range, range]:
    """Return the two parts of a subtree of several leaves.

    They are equal, or where the number is odd the first is the largest power of two below it. So 7
    leaves give ((0+1)+(2+3)) + ((4+5)+6), and 6 give ((0+1)+2) + ((3+4)+5).

    The error of a sum grows with the depth of the tree, ceil(log2(leaves)). Source: Higham, The
    accuracy of floating point summation, SIAM J. Sci. Comput. 14 (1993), pairwise summation.
    """
    # Cutting even numbers in the middle makes the shares of 2, 4, 8 ... replicas whole subtrees.
    leaves = len(subtree)
    if leaves % 2 == 0:
        left = leaves // 2
    else:
        left = 1 << ((leaves - 1).bit_length() - 1)
    return subtree[:left], subtree[left:]


def mean_sums(shares: Sequence[range]) -> float:
    """Return how many partial sums a replica has, on average over all `shares`."""
    micro_batches = shares[-1].stop
    return sum(len(subtrees(share, micro_batches)) for share in shares) / len(shares)


@functools.lru_cache(maxsize=None)
def additions_by_leaf(leaves: int) -> Tuple[int, ...]:
    """Return for each of a tree's `leaves`, in order, how many sums are complete once it is added."""
    if leaves == 1:
        return (0,)
    # The last leaf of the second half completes that half, and then the whole.
    first, second = halves(range(leaves))
    counts = [*additions_by_leaf(len(first)), *additions_by_leaf(len(second))]
    counts[-1] += 1
    return tuple(counts)


def subtrees(share: range, micro_batches: int) -> List[range]:
    """Return the largest subtrees of the tree of `micro_batches` leaves within a share, in order."""

    def within(subtree: range) -> Iterator[range]:
        """Yield those within a `subtree`; its halves, where it is too large."""
        if subtree.start >= share.start and subtree.stop <= share.stop:
            yield subtree
        elif subtree.start < share.stop and subtree.stop > share.start:
            for half in halves(subtree):
                yield from within(half)

    return list(within(range(micro_batches)))


def additions(parts: Sequence[range]) -> List[List[Tuple[int, int]]]:
    """Return the additions that make sum 0 that of the whole tree, in rounds of independent ones.

    Args:
        parts: the subtrees whose sums there are; they follow one another, and cover the tree.

    Returns:
        A list for each round of pairs (i, j): sum j is added to sum i.
    """
    # A sum is named by the place of its leftmost part, into which the others are added.
    places: Dict[range, int] = {part: place for place, part in enumerate(parts)}
    rounds: List[List[Tuple[int, int]]] = []

    def add(subtree: range) -> Tuple[int, int]:
        """Return the place of the subtree's sum, and the rounds until it is there."""
        if subtree in places:
            return places[subtree], 0
        first, second = halves(subtree)
        left, left_rounds = add(first)
        right, right_rounds = add(second)
        # Both sums must be there, so this addition is in the round after the later one.
        done = max(left_rounds, right_rounds)
        while len(rounds) <= done:
            rounds.append([])
        rounds[done].append((left, right))
        return left, done + 1

    add(range(parts[-1].stop))
    return rounds


def even(micro_batches: int, replicas: int, least: int = 1) -> List[range]:
    """Return the shares of replicas that are equally fast: equal ones if `replicas` divides
    `micro_batches`.

    Args:
        micro_batches: of a step.
        replicas: of the run.
        least: micro batches that each replica has at least.
    """
    if micro_batches % replicas:
        return by_speed(micro_batches, [1.0] * replicas, least)
    size = micro_batches // replicas
    return [range(replica * size, (replica + 1) * size) for replica in range(replicas)]


def by_speed(micro_batches: int, speeds: Sequence[float], least: int = 1) -> List[range]:
    """Return the shares of replicas, in order, such that the slowest is done as early as possible,
    to a hundredth.

    Within that, shares end where larger subtrees do: there are fewer partial sums.

    Args:
        micro_batches: of a step.
        speeds: micro batches a second of each replica, in any unit, above 0.
        least: micro batches that each replica has at least; least * len(speeds) <= micro_batches.
    """
    assert least * len(speeds) <= micro_batches, (micro_batches, speeds, least)
    counts = _fastest_counts(micro_batches, speeds, least)
    # How many micro batches each replica may have for the step to end a hundredth later at most.
    fastest = max(size / speed for size, speed in zip(counts, speeds))
    end = fastest * (1 + _LONGER)
    most = [int(end * speed) for speed in speeds]
    shares = []
    start = 0
    for replica, size in enumerate(counts[:-1]):
        # The others must be able to compute what is left, and need their least.
        others = len(speeds) - replica - 1
        most_of_others = sum(most[replica + 1 :])
        earliest = max(start + least, micro_batches - most_of_others)
        latest = min(start + most[replica], micro_batches - least * others)
        possible = range(earliest, latest + 1)
        stop = _cut(possible, start + size, micro_batches)
        shares.append(range(start, stop))
        start = stop
    shares.append(range(start, micro_batches))
    return shares


def _fastest_counts(micro_batches: int, speeds: Sequence[float], least: int) -> List[int]:
    """Return how many micro batches each replica has if each goes to the replica that ends it
    first.
    """
    # Greedy is optimal here: the time of a replica grows with each micro batch by the same amount.
    counts = [least] * len(speeds)
    # (time at which one more micro batch would be done, replica), for each replica.
    ends = [((least + 1) / speed, replica) for replica, speed in enumerate(speeds)]
    heapq.heapify(ends)
    for _ in range(micro_batches - sum(counts)):
        _, first = ends[0]
        counts[first] += 1
        heapq.heapreplace(ends, ((counts[first] + 1) / speeds[first], first))
    return counts


def _cut(leaves: range, wanted: int, micro_batches: int) -> int:
    """Return the leaf before which a share ends: where the largest subtrees do, and of these next
    to `wanted`.
    """
    return min(leaves, key=lambda leaf: (_depth(leaf, micro_batches), abs(leaf - wanted)))


def _depth(leaf: int, micro_batches: int) -> int:
    """Return the depth in the tree at which a cut before `leaf` divides a subtree into its halves.

    A cut at depth d leaves d + 2 partial sums on both of its sides together.
    """
    depth = 0
    subtree = range(micro_batches)
    first, second = halves(subtree)
    # This ends, as every leaf but the first is where some second half begins.
    while second.start != leaf:
        subtree = first if leaf < first.stop else second
        first, second = halves(subtree)
        depth += 1
    return depth

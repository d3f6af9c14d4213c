"""Which micro batches of a step each replica computes, and the tree in which their gradients are added up.

The N micro batches of a step are the leaves of a binary tree that N alone decides. A subtree is the range of its
leaves. A replica's share is a range of micro batches: it adds up the gradients of each largest subtree in it, and the
replicas add these partial sums as the tree says. So the bits of the sum do not depend on the shares.
"""

from __future__ import annotations

import functools
import heapq
from typing import Dict, Iterator, List, Sequence, Tuple

_LONGER = 0.01  # that a step may take for fewer partial sums, which are memory and messages


def halves(subtree: range) -> Tuple[range, range]:
    """The two parts of a subtree of several leaves: equal ones, or where the number is odd a power of two as large as
    possible first. So 7 leaves give ((0+1)+(2+3)) + ((4+5)+6), and 6 give ((0+1)+2) + ((3+4)+5).

    The error of a sum grows with the depth of the tree, ceil(log2(leaves)). Source: Higham, The accuracy of floating
    point summation, SIAM J. Sci. Comput. 14 (1993), pairwise summation.
    """
    leaves = len(subtree)
    left = leaves // 2 if leaves % 2 == 0 else 1 << (leaves - 1).bit_length() - 1
    return subtree[:left], subtree[left:]


def mean_sums(shares: Sequence[range]) -> float:
    """Partial sums of a replica, on average over all."""
    return sum(len(subtrees(share, shares[-1].stop)) for share in shares) / len(shares)


@functools.lru_cache(maxsize=None)
def additions_by_leaf(leaves: int) -> Tuple[int, ...]:
    """How many sums are complete once a leaf is added, for each leaf of a tree in order."""
    if leaves == 1:
        return (0,)
    *before, last = (each for half in halves(range(leaves)) for each in additions_by_leaf(len(half)))
    return (*before, last + 1)


def subtrees(share: range, micro_batches: int) -> List[range]:
    """The largest subtrees of the tree of `micro_batches` leaves within a share, in order."""

    def within(subtree: range) -> Iterator[range]:
        if subtree.start >= share.start and subtree.stop <= share.stop:
            yield subtree
        elif subtree.start < share.stop and subtree.stop > share.start:
            for half in halves(subtree):
                yield from within(half)

    return list(within(range(micro_batches)))


def additions(parts: Sequence[range]) -> List[List[Tuple[int, int]]]:
    """The additions (i, j), sum i += sum j, that make sum 0 that of the whole tree, in rounds of independent ones.

    Args: parts: the subtrees whose sums there are; they follow one another, and cover the tree.
    """
    places: Dict[range, int] = {part: place for place, part in enumerate(parts)}
    rounds: List[List[Tuple[int, int]]] = []

    def add(subtree: range) -> Tuple[int, int]:
        """Place of its sum, and rounds until it is there."""
        if subtree in places:
            return places[subtree], 0
        (left, early), (right, late) = map(add, halves(subtree))
        number = max(early, late)
        rounds.extend([] for _ in range(number + 1 - len(rounds)))
        rounds[number].append((left, right))
        return left, number + 1

    add(range(parts[-1].stop))
    return rounds


def even(micro_batches: int, replicas: int, least: int = 1) -> List[range]:
    """The shares of replicas that are equally fast: equal ones if `replicas` divides `micro_batches`."""
    if micro_batches % replicas:
        return divide(micro_batches, [1.0] * replicas, least)
    own = micro_batches // replicas
    return [range(each * own, (each + 1) * own) for each in range(replicas)]


def divide(micro_batches: int, speeds: Sequence[float], least: int = 1) -> List[range]:
    """The shares of replicas, in order, such that the slowest is done as early as possible, to a hundredth.

    Within that, shares end where larger subtrees do: there are fewer partial sums.

    Args: speeds: of each replica, above 0. least: micro batches of a replica; least * len(speeds) <= micro_batches.
    """
    replicas = range(len(speeds))
    assert least * len(speeds) <= micro_batches, (micro_batches, speeds, least)
    counts = [least for _ in replicas]
    ends = [((least + 1) / speeds[each], each) for each in replicas]  # of one more micro batch on each
    heapq.heapify(ends)
    for _ in range(micro_batches - sum(counts)):
        first = ends[0][1]
        counts[first] += 1
        heapq.heapreplace(ends, ((counts[first] + 1) / speeds[first], first))
    end = max(counts[each] / speeds[each] for each in replicas) * (1 + _LONGER)
    most = [int(end * speed) for speed in speeds]
    shares, start = [], 0
    for each in replicas[:-1]:
        first = max(start + least, micro_batches - sum(most[each + 1 :]))
        last = min(start + most[each], micro_batches - least * (len(speeds) - each - 1))
        stop = min(range(first, last + 1), key=lambda at: (_depth(at, micro_batches), abs(at - start - counts[each])))
        shares.append(range(start, stop))
        start = stop
    return [*shares, range(start, micro_batches)]


def _depth(place: int, micro_batches: int) -> int:
    """Depth in the tree at which a division before leaf `place` cuts a subtree into its halves: it makes as many
    partial sums, and two."""
    subtree, depth = range(micro_batches), 0
    while halves(subtree)[1].start != place:
        subtree = next(half for half in halves(subtree) if half.start < place < half.stop)
        depth += 1
    return depth

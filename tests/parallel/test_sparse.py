"""Sums of sparse vectors: against the same merges of dense vectors."""

import pytest
import torch
from torch import distributed

from parallel import sparse
from parallel.sparse import Sparse, SparseSum
from tests import world
from tests.parallel import threads
from tests.tensors import assert_bitwise_equal

LENGTH = 400
COUNT = 30
GROUP = object()  # of all replicas
WIRES = ("float32", "float16")
CALLS = [(pattern, wire) for pattern in sparse.PATTERNS for wire in WIRES]


def vector(rank, scale=1.0):
    """Entries that meet those of other ranks often: most places are taken by several."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randperm(LENGTH // 3, generator=generator)[:COUNT].sort().values * 3
    return Sparse(indices, torch.randn(COUNT, generator=generator) * scale)


def dense(parts, dtype=torch.float32):
    total = torch.zeros(LENGTH, dtype=dtype)
    for part in parts:
        total.index_add_(0, part.indices, part.values.to(dtype))
    return total


def summed(own, pattern, wire="float32", group=GROUP):
    """This rank's total as a dense vector, what it keeps, and how many entries each part has."""
    scratch = torch.zeros(LENGTH, dtype=torch.int32)
    parts, residual = SparseSum(group, pattern=pattern, wire=wire)(own, scratch)
    assert not scratch.any()
    assert all(len(set(part.indices.tolist())) == len(part.indices) for part in parts)
    return dense(parts), dense(residual, torch.float64), [len(part.indices) for part in parts]


def several(rank, size, calls, group=None):
    """`summed` of each of `calls`, in one start of the ranks."""
    group = distributed.group.WORLD if group == "world" else GROUP
    return [summed(vector(rank), *call, group=group) for call in calls]


def largest_of(total):
    """The largest entries of a dense vector, ties to the lower index, by sorting all."""
    places = total.abs().sort(descending=True, stable=True).indices[:COUNT]
    return torch.zeros(LENGTH).index_copy_(0, places, total[places])


def by_hand(size, pattern):
    """The total, [LENGTH], and who keeps what, float64 [size, LENGTH], by the definition of the
    pattern."""
    vectors = [dense([vector(rank)]) for rank in range(size)]
    kept = torch.zeros(size, LENGTH, dtype=torch.float64)

    def merge(into, other):
        total = vectors[into] + vectors[other]
        vectors[into] = largest_of(total)
        kept[into] += total - vectors[into]

    if pattern == "butterfly":
        # in each round groups of equal vectors are joined: only their first ranks matter
        power = 1 << (size.bit_length() - 1)
        for extra in range(power, size):
            merge(extra - power, extra)
        size = power
    distance = 1
    while distance < size:
        for rank in range(0, size - distance, 2 * distance):
            merge(rank, rank + distance)
        distance *= 2
    return vectors[0], kept


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 16])
def test_gtopk_is_what_merging_by_hand_gives_and_topk_the_sum_in_the_order_of_ranks(size):
    """Also who keeps what: rank 0 of a merge; and all ranks have the total with the same bits."""
    whole = (dense(map(vector, range(size))), torch.zeros(size, LENGTH, dtype=torch.float64))
    wanted = {
        "gather": (*whole, size),
        **{name: (*by_hand(size, name), 1) for name in ("tree", "butterfly")},
    }
    for rank, found in enumerate(threads.run(size, several, [(pattern,) for pattern in wanted])):
        for (total, kept, parts), (sums, left, counts) in zip(wanted.values(), found):
            assert_bitwise_equal(sums, total)
            assert counts == [COUNT] * parts
            torch.testing.assert_close(left, kept[rank], rtol=0, atol=0)


SCALES = (1.0, 1.0, 2.0**12, 2.0**-9)


def one_after_the_other(rank, size, wire, scales):
    """Sums by owners, each with the regions and the magnitude that the one before left."""
    made = SparseSum(GROUP, pattern="owners", wire=wire)
    scratch = torch.zeros(LENGTH, dtype=torch.int32)
    totals = [made(vector(rank, scale), scratch) for scale in scales]
    return [tuple(map(dense, total)) for total in totals], made._owned._borders


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_owners_find_the_largest_of_the_whole_sum_wherever_regions_end(size):
    """By sorting the sum in the order of ranks; a rank keeps its own entries that are not in the
    result."""
    expected = largest_of(dense(map(vector, range(size))))
    for rank, (totals, borders) in enumerate(
        threads.run(size, one_after_the_other, "float32", SCALES)
    ):
        own = dense([vector(rank)])
        for scale, (total, left) in zip(SCALES, totals):
            assert_bitwise_equal(total, scale * expected)
            assert_bitwise_equal(left, scale * torch.where(expected != 0, 0.0, own))
        counts = torch.bincount(
            torch.searchsorted(borders, expected.nonzero()[:, 0], right=True), minlength=size
        )
        assert counts.max() - counts.min() <= 1


def test_owners_that_round_give_the_same_bits_whatever_came_before():
    """A resumed run has only the second of two sums."""
    for ((first, _), (second, _)), _ in threads.run(3, one_after_the_other, "int4", (1.0, 1.0)):
        assert_bitwise_equal(first, second)


@pytest.mark.multiprocess
def test_ranks_that_send_by_gloo_get_the_same():
    """Five: no power of two, so ranks take every part of a tree and a butterfly."""
    for found, expected in zip(
        world.run(5, several, CALLS, "world"), threads.run(5, several, CALLS)
    ):
        for (total, kept, counts), (other, others_kept, others_counts) in zip(found, expected):
            assert_bitwise_equal(
                {"total": total, "kept": kept}, {"total": other, "kept": others_kept}
            )
            assert counts == others_counts


def words_sent(rank, size, pattern, wire):
    """int32 words of each message that this rank sends."""
    total = SparseSum(GROUP, pattern=pattern, wire=wire)
    words = []
    for name in ("_send", "_swap"):
        send = getattr(total, name)
        setattr(
            total,
            name,
            lambda message, *rest, send=send: (words.append(len(message)), send(message, *rest))[1],
        )
    total(vector(rank), torch.zeros(LENGTH, dtype=torch.int32))
    return words


@pytest.mark.parametrize("wire,words", [("float32", 60), ("float16", 46)])
def test_messages_are_packed(wire, words):
    """8 bytes an entry, or 6 and a word for the exponent; log2 P messages from each in the
    butterfly."""
    assert threads.run(4, words_sent, "butterfly", wire) == [[words, words]] * 4
    assert threads.run(4, words_sent, "tree", wire) == [
        [words, words],
        [words, 1],
        [words, 1, words],
        [words, 1],
    ]
    # Ranks 4 and 5 hand theirs in, and are sent the result.
    assert [len(each) for each in threads.run(6, words_sent, "butterfly", wire)] == [
        3,
        3,
        2,
        2,
        1,
        1,
    ]


def few_or_faulty(rank, size):
    """One value and zeros, at places that other ranks fill; and values that are not finite."""
    few = Sparse(torch.arange(COUNT), torch.zeros(COUNT))
    few.values[rank] = 1.0 + rank
    faulty = vector(rank)
    faulty.values[0] = float("nan")
    faulty.values[1] = float("inf")
    return [(summed(few, *call)[0], summed(faulty, *call)[2]) for call in CALLS]


def test_zeros_take_no_place_twice_and_values_that_are_not_finite_end_no_rank():
    """A step of another stage may have to be left out: this one's exchange has to come to its
    end."""
    for ranks in threads.run(5, few_or_faulty):
        for total, counts in ranks:
            assert total[:COUNT].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0] + [0.0] * (COUNT - 5)
            assert set(counts) == {COUNT}

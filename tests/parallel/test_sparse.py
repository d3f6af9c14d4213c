"""Sums of sparse vectors: against the same merges in plain Python, and with gradients that are chosen to break them."""

import functools

import numpy as np
import pytest
import torch
from torch import distributed

from parallel import sparse
from parallel.messages import Wire
from parallel.sparse import Sparse, SparseSum
from tests import world
from tests.parallel import threads
from tests.parallel.test_sparse_exchange import create
from tests.tensors import assert_bitwise_equal

LENGTH, COUNT = 400, 30
GROUP = object()  # of all replicas
WIRES = {"float32": torch.float32, "float16": torch.float16}


def vector(rank, seed=0, length=LENGTH, count=COUNT, scale=1.0):
    """Entries that meet those of other ranks often: most places are taken by several."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    indices = torch.randperm(length // 3, generator=generator)[:count].sort().values * 3
    return Sparse(indices, torch.randn(count, generator=generator) * scale)


def dense(parts, length=LENGTH, dtype=torch.float32):
    total = torch.zeros(length, dtype=dtype)
    for part in parts:
        total.index_add_(0, part.indices, part.values.to(dtype))
    return total


def summed(rank, size, pattern, wire, seed=0, scale=1.0, count=COUNT, group=GROUP):
    """This rank's total as a dense vector, what it keeps, and how many int32 words it sends."""
    own = vector(rank, seed, scale=scale, count=count)
    scratch = torch.zeros(LENGTH, dtype=torch.int32)
    total = SparseSum(group, pattern=pattern, wire=WIRES[wire])(own, scratch)
    assert not scratch.any()
    assert all(len(set(part.indices.tolist())) == len(part.indices) for part in total.parts)
    return dense(total.parts), dense(total.residual, dtype=torch.float64), [len(part.indices) for part in total.parts]


def several(rank, size, calls):
    """`summed` of each of `calls`, in one start of the ranks."""
    return [summed(rank, size, *call) for call in calls]


def merged(left, right, count):
    """Two {index: float32} as one, and what falls out of it: by sorting all."""
    union = {index: left.get(index, np.float32(0)) + right.get(index, np.float32(0)) for index in {**left, **right}}
    order = sorted(union, key=lambda index: (-abs(union[index]), index))
    return {index: union[index] for index in order[:count]}, {index: union[index] for index in order[count:]}


def by_hand(size, pattern):
    """The total, and who keeps what: {index: value} each, by the definition of the pattern."""
    vectors = [dict(zip(part.indices.tolist(), part.values.numpy())) for part in map(vector, range(size))]
    kept = [[] for _ in range(size)]

    def merge(into, other):
        vectors[into], rest = merged(vectors[into], vectors[other], COUNT)
        kept[into].append(rest)

    power = 1 << (size.bit_length() - 1)
    if pattern == "butterfly":  # in each round groups of equal vectors are joined: only their first ranks matter
        for extra in range(power, size):
            merge(extra - power, extra)
        size = power
    distance = 1
    while distance < size:
        for rank in range(0, size - distance, 2 * distance):
            merge(rank, rank + distance)
        distance *= 2
    return vectors[0], kept


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16])
def test_gtopk_is_what_merging_by_hand_gives(size):
    """Also who keeps what: rank 0 of a merge; and all ranks have the total with the same bits."""
    patterns = ("tree", "butterfly")
    by_rank = threads.run(size, several, [(pattern, "float32") for pattern in patterns])
    for pattern, ranks in zip(patterns, zip(*by_rank)):
        expected, kept = by_hand(size, pattern)
        total = torch.zeros(LENGTH)
        for index, value in expected.items():
            total[index] = float(value)
        for rank, (found, left, counts) in enumerate(ranks):
            assert_bitwise_equal(found, total)
            assert counts == [COUNT]
            rest = torch.zeros(LENGTH, dtype=torch.float64)
            for entries in kept[rank]:
                for index, value in entries.items():
                    rest[index] += float(value)
            torch.testing.assert_close(left, rest, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_topk_is_the_sum_in_the_order_of_ranks(size):
    expected = dense(map(vector, range(size)))
    for found, left, counts in threads.run(size, summed, "gather", "float32"):
        assert_bitwise_equal(found, expected)
        assert not left.any() and counts == [COUNT] * size


SCALES = (1.0, 1.0, 2.0**12, 2.0**-9)


def one_after_the_other(rank, size):
    """Sums by owners, each with the regions and the magnitude that the one before left."""
    made = SparseSum(GROUP, pattern="owners", wire=torch.float32)
    scratch = torch.zeros(LENGTH, dtype=torch.int32)
    totals = [made(vector(rank, scale=scale), scratch) for scale in SCALES]
    return [(dense(total.parts), dense(total.residual)) for total in totals], made._owned._borders


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16])
def test_owners_find_the_largest_of_the_whole_sum_wherever_regions_end(size):
    """By sorting the sum in the order of ranks; a rank keeps its own entries that are not in the result."""
    whole = dense(map(vector, range(size)))
    order = sorted(range(LENGTH), key=lambda index: (-whole[index].abs().item(), index))
    expected = torch.zeros(LENGTH)
    expected[order[:COUNT]] = whole[order[:COUNT]]
    ranks = threads.run(size, one_after_the_other)
    for rank, (totals, borders) in enumerate(ranks):
        own = dense([vector(rank)])
        for scale, (total, left) in zip(SCALES, totals):
            assert_bitwise_equal(total, scale * expected)
            assert_bitwise_equal(left, scale * torch.where(expected != 0, 0.0, own))
        counts = torch.bincount(torch.searchsorted(borders, expected.nonzero()[:, 0], right=True), minlength=size)
        assert counts.max() - counts.min() <= 1


def again_in_few_bits(rank, size):
    """Two sums by owners with one object: what is resumed has only the second."""
    made = SparseSum(GROUP, pattern="owners", wire=4)
    scratch = torch.zeros(LENGTH, dtype=torch.int32)
    return [dense(made(vector(rank), scratch).parts) for _ in range(2)]


def test_owners_that_round_give_the_same_bits_whatever_came_before():
    for first, second in threads.run(3, again_in_few_bits):
        assert_bitwise_equal(first, second)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32])
def test_nothing_is_lost(size):
    """sum(vectors) = total + sum(kept): up to the rounding of float32 sums of 32 values below 16, 2^-20 each.

    Also with float16 on the wire, whose own rounding is 2^-7 of such values.
    """
    given = dense((vector(rank, 3) for rank in range(size)), dtype=torch.float64)
    by_rank = threads.run(size, several, [(pattern, wire, 3) for pattern in sparse.PATTERNS for wire in WIRES])
    for ranks in zip(*by_rank):
        assert all(torch.equal(total, ranks[0][0]) for total, _, _ in ranks)
        found = ranks[0][0].double() + sum(kept for _, kept, _ in ranks)
        torch.testing.assert_close(found, given, rtol=0, atol=32 * 2**-20 if size > 1 else 0)


def by_gloo(rank, size, calls):
    """`several`, through torch.distributed."""
    return [summed(rank, size, *call, group=distributed.group.WORLD) for call in calls]


@pytest.mark.multiprocess
def test_ranks_that_send_by_gloo_get_the_same():
    """Five: no power of two, so ranks take every part of a tree and a butterfly."""
    size = 5
    calls = [(pattern, wire) for pattern in sparse.PATTERNS for wire in WIRES]
    for found, expected in zip(world.run(size, by_gloo, calls), threads.run(size, several, calls)):
        for (total, kept, counts), (other, others_kept, others_counts) in zip(found, expected):
            assert_bitwise_equal({"total": total, "kept": kept}, {"total": other, "kept": others_kept})
            assert counts == others_counts


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e30])
def test_float16_takes_values_of_any_size(scale):
    """The largest goes as a float16 near 2^15, so that each is off by 2^-11 of itself or 2^-24 of the largest."""
    calls = [(pattern, wire, 0, scale) for pattern in sparse.PATTERNS for wire in ("float32", "float16")]
    totals = [total for total, _, _ in threads.run(4, several, calls)[3]]
    for exact, found in zip(totals[::2], totals[1::2]):
        both = (found != 0) & (exact != 0)  # rounding may let another entry be among the largest
        assert both.sum() > 0.9 * (exact != 0).sum()
        torch.testing.assert_close(found[both], exact[both], rtol=3 * 2**-11, atol=4 * scale * 2**-11)


def test_float16_with_an_odd_number_of_entries():
    total, _, counts = threads.run(3, summed, "butterfly", "float16", 0, 1.0, 31)[2]
    assert counts == [31] and (total != 0).sum() == 31


def words_sent(rank, size, pattern, wire):
    """int32 words that this rank puts on the wire."""
    total = SparseSum(GROUP, pattern=pattern, wire=WIRES[wire])
    words = []
    send, swap = total._send, total._swap
    total._send = lambda message, replica: (words.append(len(message)), send(message, replica))[1]
    total._swap = lambda message, *rest: (words.append(len(message)), swap(message, *rest))[1]
    total(vector(rank), torch.zeros(LENGTH, dtype=torch.int32))
    return words


@pytest.mark.parametrize("wire,words", [("float32", 60), ("float16", 46)])
def test_messages_are_packed(wire, words):
    """8 bytes an entry, or 6 and a word for the exponent; log2 P messages from each in the butterfly."""
    assert threads.run(4, words_sent, "butterfly", wire) == [[words, words]] * 4
    assert threads.run(4, words_sent, "tree", wire) == [[words, words], [words, 1], [words, 1, words], [words, 1]]
    # Ranks 4 and 5 hand theirs in, and are told the result.
    assert [len(each) for each in threads.run(6, words_sent, "butterfly", wire)] == [3, 3, 2, 2, 1, 1]


def test_float16_on_odd_values_is_exact_where_they_are_float16():
    part = Sparse(torch.tensor([4, 1, 7]), torch.tensor([0.5, -3.0, 1024.0]))
    message, lost = Wire(torch.float16).pack(part)
    again = Wire(torch.float16).unpack(message, 3)
    assert_bitwise_equal(again.values, part.values)
    assert_bitwise_equal(again.indices, part.indices)
    assert not lost.values.any()


def zeros_summed(rank, size, pattern):
    """Fewer values than entries: the others are zeros, at places that other ranks fill."""
    own = Sparse(torch.arange(COUNT), torch.zeros(COUNT))
    own.values[rank] = 1.0 + rank
    scratch = torch.zeros(LENGTH, dtype=torch.int32)
    total = SparseSum(GROUP, pattern=pattern, wire=torch.float32)(own, scratch)
    assert all(len(set(part.indices.tolist())) == COUNT for part in total.parts)
    return dense(total.parts)


@pytest.mark.parametrize("pattern", sparse.PATTERNS)
def test_zeros_among_the_entries_take_no_place_twice(pattern):
    for total in threads.run(5, zeros_summed, pattern):
        assert total[:COUNT].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0] + [0.0] * (COUNT - 5)


def not_finite(rank, size, pattern, wire):
    own = vector(rank)
    own.values[0], own.values[1] = float("nan"), float("inf")
    total = SparseSum(GROUP, pattern=pattern, wire=WIRES[wire])
    return len(total(own, torch.zeros(LENGTH, dtype=torch.int32)).parts[0].indices)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("pattern", sparse.PATTERNS)
def test_values_that_are_not_finite_end_no_rank(pattern, wire):
    """A step of another stage may have to be left out: this one's exchange has to come to its end."""
    assert threads.run(3, not_finite, pattern, wire) == [COUNT] * 3


# Gradients that are chosen to break it --------------------------------------------------------------------------

REPLICAS, STEPS, PLACES = 12, 2, 300

# Gradients of a replica: `shared` is the same on all of them, `own` is not.
KINDS = {
    "identical": lambda rank, shared, own: shared,
    "disjoint": lambda rank, shared, own: torch.where(torch.arange(PLACES) % REPLICAS == rank, own, 0.0),
    "opposite": lambda rank, shared, own: shared if rank % 2 else -shared,
    "one against all": lambda rank, shared, own: shared if rank else own - (REPLICAS - 1) * shared,
    "zeros": lambda rank, shared, own: torch.zeros(PLACES),
    "fewer than k": lambda rank, shared, own: torch.where(torch.arange(PLACES) == 5 * rank, 1.0, 0.0),
    "one alone": lambda rank, shared, own: own if rank == 7 else torch.zeros(PLACES),
    "ties": lambda rank, shared, own: 3 * own.sign(),
}
CASES = [
    (kind, pattern, wire, count, seed)
    for kind in KINDS
    for pattern in ("tree", "butterfly")
    for wire in WIRES
    for count in (1, 31, PLACES - 1)
    for seed in range(4)
]
FEW = [case for case in CASES if case[4] == 0 and (case[3] == 31 or case[0] == "one against all")]


@functools.lru_cache(maxsize=None)
def drawn(number, seed, step):
    """float32 [PLACES]: whole numbers, of which float32 holds all sums exactly."""
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * number + step)
    return (torch.randn(PLACES, generator=generator) * torch.logspace(0, 2, PLACES)).round()


def gradient(rank, kind, seed, step):
    return KINDS[kind](rank, drawn(REPLICAS, seed, step), drawn(rank, seed, step))


def exchanged(rank, size, cases):
    """Of each case: the updates of all steps, and what this replica keeps."""
    found = []
    for kind, pattern, wire, count, seed in cases:
        exchange = create(REPLICAS, PLACES, pattern, density=count / PLACES, wire=wire)
        updates = [gradient(rank, kind, seed, step).clone() for step in range(STEPS)]
        for step, buffer in enumerate(updates):
            exchange(buffer, step, torch.tensor(1.0))
        found.append((torch.stack(updates), exchange.residual))
    return found


@pytest.mark.parametrize("cases", [FEW, pytest.param(CASES, marks=pytest.mark.slow)], ids=["few", "all"])
def test_twelve_replicas_lose_no_gradient_and_agree_on_every_bit(cases):
    """sum(gradients) = sum of updates + sum(residuals), exactly."""
    assert (len(FEW), len(CASES)) == (40, 384)
    for case, *found in zip(cases, *threads.run(REPLICAS, exchanged, cases)):
        kind, _, _, count, seed = case
        updates, _ = found[0]
        for others, _ in found:
            assert_bitwise_equal(others, updates)
        given = [gradient(rank, kind, seed, step).double() for rank in range(REPLICAS) for step in range(STEPS)]
        kept = sum(residual.double() for _, residual in found)
        assert torch.equal(updates.double().sum(0) + kept, sum(given)), case
        assert (updates != 0).sum(1).max() <= count, case

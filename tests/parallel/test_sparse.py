"""Sums of sparse vectors: against the same merges in plain Python, and with gradients that are chosen to break them."""

import functools

import numpy as np
import pytest
import torch
from torch import distributed

from parallel import sparse
from parallel.sparse import Sparse, SparseSum
from tests import world
from tests.parallel import threads
from tests.parallel.test_sparse_exchange import create
from tests.tensors import assert_bitwise_equal

LENGTH, COUNT = 400, 30
GROUP = object()  # of all replicas
WIRES = ("float32", "float16")


def vector(rank, seed=0, count=COUNT, scale=1.0):
    """Entries that meet those of other ranks often: most places are taken by several."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    indices = torch.randperm(LENGTH // 3, generator=generator)[:count].sort().values * 3
    return Sparse(indices, torch.randn(count, generator=generator) * scale)


def dense(parts, dtype=torch.float32):
    total = torch.zeros(LENGTH, dtype=dtype)
    for part in parts:
        total.index_add_(0, part.indices, part.values.to(dtype))
    return total


def summed(rank, size, pattern, wire="float32", own=None, group=GROUP, **drawn):
    """This rank's total as a dense vector, what it keeps, and how many entries each part has."""
    scratch = torch.zeros(LENGTH, dtype=torch.int32)
    own = vector(rank, **drawn) if own is None else own
    parts, residual = SparseSum(group, pattern=pattern, wire=wire)(own, scratch)
    assert not scratch.any()
    assert all(len(set(part.indices.tolist())) == len(part.indices) for part in parts)
    return dense(parts), dense(residual, torch.float64), [len(part.indices) for part in parts]


def several(rank, size, calls, group=None, **drawn):
    """`summed` of each of `calls`, in one start of the ranks."""
    group = distributed.group.WORLD if group == "world" else GROUP
    return [summed(rank, size, *call, group=group, **drawn) for call in calls]


def several_of(drawn):
    return functools.partial(several, **drawn)


def merged(left, right):
    """Two {index: float32} as one, and what falls out of it: by sorting all."""
    union = {index: left.get(index, np.float32(0)) + right.get(index, np.float32(0)) for index in {**left, **right}}
    order = sorted(union, key=lambda index: (-abs(union[index]), index))
    return {index: union[index] for index in order[:COUNT]}, {index: union[index] for index in order[COUNT:]}


def by_hand(size, pattern):
    """The total, and who keeps what: float64 [LENGTH] each, by the definition of the pattern."""
    vectors = [dict(zip(part.indices.tolist(), part.values.numpy())) for part in map(vector, range(size))]
    kept = torch.zeros(size, LENGTH, dtype=torch.float64)

    def merge(into, other):
        vectors[into], rest = merged(vectors[into], vectors[other])
        for index, value in rest.items():
            kept[into, index] += float(value)

    if pattern == "butterfly":  # in each round groups of equal vectors are joined: only their first ranks matter
        power = 1 << (size.bit_length() - 1)
        for extra in range(power, size):
            merge(extra - power, extra)
        size = power
    distance = 1
    while distance < size:
        for rank in range(0, size - distance, 2 * distance):
            merge(rank, rank + distance)
        distance *= 2
    total = torch.zeros(LENGTH)
    for index, value in vectors[0].items():
        total[index] = float(value)
    return total, kept


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 16])
def test_gtopk_is_what_merging_by_hand_gives_and_topk_the_sum_in_the_order_of_ranks(size):
    """Also who keeps what: rank 0 of a merge; and all ranks have the total with the same bits."""
    whole = (dense(map(vector, range(size))), torch.zeros(size, LENGTH, dtype=torch.float64))
    wanted = {"gather": (*whole, size), **{name: (*by_hand(size, name), 1) for name in ("tree", "butterfly")}}
    for rank, found in enumerate(threads.run(size, several, [(pattern,) for pattern in wanted])):
        for (total, kept, parts), (sums, left, counts) in zip(wanted.values(), found):
            assert_bitwise_equal(sums, total)
            assert counts == [COUNT] * parts
            torch.testing.assert_close(left, kept[rank], rtol=0, atol=0)


SCALES = (1.0, 1.0, 2.0**12, 2.0**-9)


def one_after_the_other(rank, size):
    """Sums by owners, each with the regions and the magnitude that the one before left."""
    made = SparseSum(GROUP, pattern="owners", wire="float32")
    scratch = torch.zeros(LENGTH, dtype=torch.int32)
    totals = [made(vector(rank, scale=scale), scratch) for scale in SCALES]
    return [tuple(map(dense, total)) for total in totals], made._owned._borders


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_owners_find_the_largest_of_the_whole_sum_wherever_regions_end(size):
    """By sorting the sum in the order of ranks; a rank keeps its own entries that are not in the result."""
    whole = dense(map(vector, range(size)))
    order = sorted(range(LENGTH), key=lambda index: (-whole[index].abs().item(), index))
    expected = torch.zeros(LENGTH)
    expected[order[:COUNT]] = whole[order[:COUNT]]
    for rank, (totals, borders) in enumerate(threads.run(size, one_after_the_other)):
        own = dense([vector(rank)])
        for scale, (total, left) in zip(SCALES, totals):
            assert_bitwise_equal(total, scale * expected)
            assert_bitwise_equal(left, scale * torch.where(expected != 0, 0.0, own))
        counts = torch.bincount(torch.searchsorted(borders, expected.nonzero()[:, 0], right=True), minlength=size)
        assert counts.max() - counts.min() <= 1


def again_in_few_bits(rank, size):
    """Two sums by owners with one object: a resumed run has only the second."""
    made = SparseSum(GROUP, pattern="owners", wire="int4")
    scratch = torch.zeros(LENGTH, dtype=torch.int32)
    return [dense(made(vector(rank), scratch)[0]) for _ in range(2)]


def test_owners_that_round_give_the_same_bits_whatever_came_before():
    for first, second in threads.run(3, again_in_few_bits):
        assert_bitwise_equal(first, second)


CALLS = [(pattern, wire) for pattern in sparse.PATTERNS for wire in WIRES]


@pytest.mark.multiprocess
def test_ranks_that_send_by_gloo_get_the_same():
    """Five: no power of two, so ranks take every part of a tree and a butterfly."""
    for found, expected in zip(world.run(5, several, CALLS, "world"), threads.run(5, several, CALLS)):
        for (total, kept, counts), (other, others_kept, others_counts) in zip(found, expected):
            assert_bitwise_equal({"total": total, "kept": kept}, {"total": other, "kept": others_kept})
            assert counts == others_counts


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_float16_takes_values_of_any_size(scale):
    """The largest goes as a float16 near 2^15, so that each is off by 2^-11 of itself or 2^-24 of the largest."""
    totals = [total for total, _, _ in threads.run(4, several_of({"scale": scale}), CALLS)[3]]
    for exact, found in zip(totals[::2], totals[1::2]):
        both = (found != 0) & (exact != 0)  # rounding may let another entry be among the largest
        assert both.sum() > 0.9 * (exact != 0).sum()
        torch.testing.assert_close(found[both], exact[both], rtol=3 * 2**-11, atol=4 * scale * 2**-11)


def words_sent(rank, size, pattern, wire):
    """int32 words that this rank puts on the wire."""
    total = SparseSum(GROUP, pattern=pattern, wire=wire)
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
    # Ranks 4 and 5 hand theirs in, and are sent the result.
    assert [len(each) for each in threads.run(6, words_sent, "butterfly", wire)] == [3, 3, 2, 2, 1, 1]


def few_or_faulty(rank, size, calls):
    """One value and zeros, at places that other ranks fill; and values that are not finite."""
    few = Sparse(torch.arange(COUNT), torch.zeros(COUNT))
    few.values[rank] = 1.0 + rank
    faulty = vector(rank)
    faulty.values[0], faulty.values[1] = float("nan"), float("inf")
    return [(summed(rank, size, *call, own=few)[0], summed(rank, size, *call, own=faulty)[2]) for call in calls]


def test_zeros_take_no_place_twice_and_values_that_are_not_finite_end_no_rank():
    """A step of another stage may have to be left out: this one's exchange has to come to its end."""
    for ranks in threads.run(5, few_or_faulty, CALLS):
        for total, counts in ranks:
            assert total[:COUNT].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0] + [0.0] * (COUNT - 5)
            assert set(counts) == {COUNT}


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
    *((kind, pattern, wire, 31) for kind in KINDS for pattern in ("tree", "butterfly") for wire in WIRES),
    *(
        ("one against all", pattern, wire, count)
        for pattern in ("tree", "owners")
        for wire in WIRES
        for count in (1, 299)
    ),
]


@functools.lru_cache(maxsize=None)
def drawn(number, step):
    """float32 [PLACES]: whole numbers, of which float32 holds all sums exactly."""
    generator = torch.Generator().manual_seed(100 * number + step)
    return (torch.randn(PLACES, generator=generator) * torch.logspace(0, 2, PLACES)).round()


def gradient(rank, kind, step):
    return KINDS[kind](rank, drawn(REPLICAS, step), drawn(rank, step))


def exchanged(rank, size):
    """Of each case: the updates of all steps, and what this replica keeps."""
    found = []
    for kind, pattern, wire, count in CASES:
        exchange = create(REPLICAS, PLACES, pattern, density=count / PLACES, wire=wire)
        updates = [gradient(rank, kind, step).clone() for step in range(STEPS)]
        for step, buffer in enumerate(updates):
            exchange(buffer, step, torch.tensor(1.0))
        found.append((torch.stack(updates), exchange.residual))
    return found


def test_twelve_replicas_lose_no_gradient_and_agree_on_every_bit():
    """sum(gradients) = sum of updates + sum(residuals), exactly."""
    for case, *found in zip(CASES, *threads.run(REPLICAS, exchanged)):
        kind, _, _, count = case
        updates, _ = found[0]
        for others, _ in found:
            assert_bitwise_equal(others, updates)
        given = [gradient(rank, kind, step).double() for rank in range(REPLICAS) for step in range(STEPS)]
        kept = sum(residual.double() for _, residual in found)
        assert torch.equal(updates.double().sum(0) + kept, sum(given)), case
        assert (updates != 0).sum(1).max() <= count, case

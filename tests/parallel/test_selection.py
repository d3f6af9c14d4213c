"""The k largest of many values: those of a full sort, whatever the values and what a sample of them says."""

import numpy as np
import pytest
import torch

from parallel import selection
from parallel.selection import largest, ranked

CHUNK = selection._CHUNK


def in_order(values, numbers=None):
    """Positions from the largest magnitude to the smallest, by NumPy's sort of floats: NaN first; then by number."""
    values = values.numpy()
    numbers = np.arange(len(values)) if numbers is None else numbers.numpy()
    return np.lexsort((numbers, -np.abs(values), ~np.isnan(values)))


def assert_largest(values, k):
    expected = np.sort(in_order(values)[:k])
    for found in (largest(values, k), selection._largest_by_keys(values, k)):
        assert found.dtype == torch.int64 and found.device == values.device
        assert np.array_equal(found.numpy(), expected), f"{k} of {len(values)}"


def normal(length, seed=0):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def sparse(length, share, seed=1):
    return torch.where(torch.rand(length, generator=torch.Generator().manual_seed(seed)) < share, normal(length), 0.0)


def special(length):
    """Values that a comparison of floats or of bits may put in the wrong place, many times over."""
    tiny = torch.finfo(torch.float32).tiny
    values = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-45, tiny, -tiny, 3.4e38, -3.4e38, 1.0]
    return torch.tensor(values)[torch.randint(len(values), (length,), generator=torch.Generator().manual_seed(2))]


KINDS = {
    "normal": normal,
    "few levels": lambda length: (normal(length) * 4).round(),
    "special": special,
    "subnormal": lambda length: normal(length) * 1e-40,
    "zero": torch.zeros,
    "constant": lambda length: torch.full((length,), -2.5),
    "nan": lambda length: torch.full((length,), torch.nan),
    "half zero": lambda length: sparse(length, 0.5),
    "nearly all zero": lambda length: sparse(length, 0.0005),
    "rising": lambda length: torch.arange(length) + 0.5,
    "falling": lambda length: -torch.arange(length).flip(0).float(),
    "layers of different scale": lambda length: normal(length) * 10.0 ** -(torch.arange(length) // 700 % 7),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_a_few_values(kind):
    for length in (1, 2, 37, 300):
        for k in range(length + 1):
            assert_largest(KINDS[kind](length), k)


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_many_values(kind):
    values = KINDS[kind](2 * CHUNK + 77)
    for share in (0.0, 1e-5, 0.001, 0.25, 0.9, 1.0):
        assert_largest(values, int(share * len(values)))


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_values_on_both_sides_of_a_chunk_s_border(length):
    """And of equal values the first: above the threshold as many as fit, then some of those equal to it."""
    values = normal(length) / 100
    at_borders = [0, CHUNK - 2, CHUNK - 1, CHUNK, CHUNK + 1, length - 1]
    values[[place for place in at_borders if place < length]] = 7.0
    for k in (1, 3, 5, 100, length // 3):
        assert_largest(values, k)
    equal = torch.ones(length)
    equal[-5:] = 2.0
    for k in (3, 5, 6, length // 2 + 1, length - 4):
        assert_largest(equal, k)


@pytest.fixture
def passes(monkeypatch):
    """How many passes over the memory have collected values."""
    calls, collect = [], selection._above
    monkeypatch.setattr(selection, "_above", lambda *args: calls.append(args[1]) or collect(*args))
    return calls


def test_a_sample_may_mislead(passes):
    """Nothing but what the sample sees is large: its threshold is too high, and a second pass finds the others. Or the
    sample sees zeros, and everything else is above: one pass collects too much."""
    values = normal(2 * CHUNK) / 1000
    sampled = selection._sample_positions(len(values))
    values[sampled] += 10
    assert_largest(values, 3 * len(values) // selection._SPACING)
    assert len(passes) == 2
    values = 1 + normal(2 * CHUNK).abs()
    values[sampled] = 0.0
    assert_largest(values, 1000)
    assert len(passes) == 3


def test_zeros_are_not_collected(monkeypatch):
    """Most of a gradient may be 0, and so the threshold: as many zeros as are needed are found without the others."""
    collected, collect = [], selection._above
    monkeypatch.setattr(selection, "_above", lambda *args: collected.append(collect(*args)) or collected[-1])
    values = sparse(1_000_000, 0.0005)
    assert_largest(values, 1000)
    assert [len(indices) for indices, _ in collected] == [values.count_nonzero()]


def test_one_pass_that_collects_little_is_the_rule(passes, monkeypatch):
    """Else all would be found slowly. 1000 of a million are 8 of the sample, which takes 24 to be sure."""
    collected, trim = [], selection._among_largest
    monkeypatch.setattr(
        selection, "_among_largest", lambda magnitudes, k: collected.append(len(magnitudes)) or trim(magnitudes, k)
    )
    for seed in range(20):
        largest(normal(1_000_000, seed), 1000)
    assert len(passes) == 20 and min(collected) >= 1000 and max(collected) < 6000


def test_the_same_every_time_and_values_are_only_read():
    values, others = special(CHUNK + 5), normal(CHUNK + 5)
    before, first = values.clone(), largest(values, 4321)
    largest(others, 77), ranked(values, torch.arange(len(values)), 100)
    assert torch.equal(largest(values, 4321), first)
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize(
    ("values", "k"), [(normal(9)[::2], 1), (normal(9), 10), (normal(9), -1), (normal(9).double(), 1)]
)
def test_what_is_no_buffer_of_float32_or_too_short_is_refused(values, k):
    with pytest.raises(AssertionError):
        largest(values, k)


# Messages -------------------------------------------------------------------------------------------------------


def assert_ranked(values, numbers, k):
    order = in_order(values, numbers)
    for kept, others in (ranked(values, numbers, k), selection._ranked_by_keys(values, numbers, k)):
        assert kept.dtype == others.dtype == torch.int64
        assert np.array_equal(kept.numpy(), np.sort(order[:k]))
        assert np.array_equal(others.numpy(), np.sort(order[k:]))


def numbers_of(length, below, dtype):
    return torch.randperm(below, generator=torch.Generator().manual_seed(3))[:length].to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_ranked_of_a_message(kind, dtype):
    """Every number of a few values; and elements in any order and in ascending order, as in messages."""
    for length in (1, 2, 40):
        for k in range(length + 1):
            assert_ranked(KINDS[kind](length), numbers_of(length, 1000, dtype), k)
    values, numbers = KINDS[kind](12_500), numbers_of(12_500, 1_000_000, dtype)
    for k in (0, 1, 6_250, 12_499, 12_500):
        assert_ranked(values, numbers, k)
    assert_ranked(values, numbers.sort().values, 6_250)


def test_ranked_with_the_highest_numbers():
    numbers = torch.tensor([2**32 - 1, 0, 2**31, 2**31 - 1])
    kept, others = ranked(torch.ones(4), numbers, 2)
    assert (kept.tolist(), others.tolist()) == ([1, 3], [0, 2])
    assert_ranked(torch.ones(4), numbers, 2)


def test_nothing_of_nothing():
    empty = torch.empty(0)
    assert largest(empty, 0).tolist() == []
    assert [each.tolist() for each in ranked(empty, empty.int(), 0)] == [[], []]

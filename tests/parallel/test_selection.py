"""The k largest of many values: those of a full sort, whatever the values and what a sample of them
says."""

import numpy as np
import pytest
import torch

from parallel import selection
from parallel.selection import largest, ranked

CHUNK = selection._CHUNK


def in_order(values, numbers=None):
    """Positions from the largest magnitude to the smallest, by NumPy's sort of floats: NaN first;
    then by number."""
    values = values.numpy()
    numbers = np.arange(len(values)) if numbers is None else numbers.numpy()
    return np.lexsort((numbers, -np.abs(values), ~np.isnan(values)))


def assert_largest(values, *counts):
    """Of each count, by both ways, and the values are only read."""
    order = in_order(values)
    before = values.clone()
    for k in counts:
        expected = np.sort(order[:k])
        for found in (largest(values, k), selection._largest_by_keys(values, k)):
            assert found.dtype == torch.int64 and found.device == values.device
            assert np.array_equal(found.numpy(), expected), f"{k} of {len(values)}"
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))


def assert_ranked(values, numbers, *counts):
    order = in_order(values, numbers)
    for k in counts:
        for kept, others in (
            ranked(values, numbers, k),
            selection._ranked_by_keys(values, numbers, k),
        ):
            assert kept.dtype == others.dtype == torch.int64
            assert np.array_equal(kept.numpy(), np.sort(order[:k]))
            assert np.array_equal(others.numpy(), np.sort(order[k:]))


def normal(length, seed=0):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def sparse(length, share, seed=1):
    return torch.where(
        torch.rand(length, generator=torch.Generator().manual_seed(seed)) < share,
        normal(length),
        0.0,
    )


def special(length):
    """Values that a comparison of floats or of bits may put in the wrong place, many times over."""
    tiny = torch.finfo(torch.float32).tiny
    values = [
        0.0,
        -0.0,
        torch.inf,
        -torch.inf,
        torch.nan,
        -torch.nan,
        1e-45,
        -1e-45,
        tiny,
        -tiny,
        3.4e38,
        -3.4e38,
        1.0,
    ]
    return torch.tensor(values)[
        torch.randint(len(values), (length,), generator=torch.Generator().manual_seed(2))
    ]


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
    "layers of different scale": lambda length: (
        normal(length) * 10.0 ** -(torch.arange(length) // 700 % 7)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_few_values_and_a_share_of_many(kind):
    for length in (1, 2, 37, 300):
        assert_largest(KINDS[kind](length), *range(1, length + 1))
    values = KINDS[kind](2 * CHUNK + 77)
    assert_largest(values, *(int(share * len(values)) for share in (1e-5, 0.001, 0.25, 0.9, 1.0)))


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1])
def test_values_on_both_sides_of_a_chunk_s_border(length):
    """And of equal values the first: above the threshold as many as fit, then some of those equal
    to it."""
    values = normal(length) / 100
    at_borders = [0, CHUNK - 2, CHUNK - 1, CHUNK, CHUNK + 1, length - 1]
    values[[place for place in at_borders if place < length]] = 7.0
    assert_largest(values, 1, 3, 5, 100, length // 3)
    equal = torch.ones(length)
    equal[-5:] = 2.0
    assert_largest(equal, 3, 5, 6, length // 2 + 1, length - 4)


@pytest.fixture
def collected(monkeypatch):
    """How many values each pass over the memory has collected."""
    counts = []
    collect = selection._reaching

    def counted(*args):
        found = collect(*args)
        counts.append(len(found[0]))
        return found

    monkeypatch.setattr(selection, "_reaching", counted)
    return counts


def test_a_sample_may_mislead(collected):
    """Nothing but what the sample sees is large: its threshold is too high, and a second pass finds
    the others. Or the sample sees zeros, and everything else is above: one pass collects too much.
    Zeros are never collected."""
    values = normal(2 * CHUNK) / 1000
    sampled = selection._sample_positions(len(values))
    values[sampled] += 10
    assert_largest(values, 3 * len(values) // selection._SPACING)
    assert len(collected) == 2
    values = 1 + normal(2 * CHUNK).abs()
    values[sampled] = 0.0
    assert_largest(values, 1000)
    values = sparse(1_000_000, 0.0005)
    assert_largest(values, 1000)
    assert collected[2:] == [2 * CHUNK - len(sampled), values.count_nonzero()]


def test_one_pass_that_collects_little_is_the_rule(collected):
    """Else all would be found slowly. 1000 of a million are 8 of the sample, which takes 24 to be
    sure."""
    for seed in range(20):
        largest(normal(1_000_000, seed), 1000)
    assert len(collected) == 20 and min(collected) >= 1000 and max(collected) < 6000


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_ranked_of_a_message(kind, dtype):
    """Every number of a few values; and elements in any order and in ascending order, as in
    messages."""

    def numbers_of(length, below):
        return torch.randperm(below, generator=torch.Generator().manual_seed(3))[:length].to(dtype)

    for length in (1, 2, 40):
        assert_ranked(KINDS[kind](length), numbers_of(length, 1000), *range(1, length + 1))
    values = KINDS[kind](12_500)
    numbers = numbers_of(12_500, 1_000_000)
    assert_ranked(values, numbers, 1, 6_250, 12_499, 12_500)
    assert_ranked(values, numbers.sort().values, 6_250)


def test_ranked_with_the_highest_numbers():
    numbers = torch.tensor([2**32 - 1, 0, 2**31, 2**31 - 1])
    assert_ranked(torch.ones(4), numbers, 2)


def test_on_another_device_the_result_lies_there():
    """The meta device stands for one: its values cannot be read, which would be to wait for a
    GPU."""
    values = torch.empty(40, device="meta")
    for found, size in zip((largest(values, 3), *ranked(values, values.long(), 3)), (3, 3, 37)):
        assert (found.device, found.dtype, found.shape) == (values.device, torch.int64, (size,))

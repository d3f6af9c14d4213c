"""The sketch of a vector: linear, and with the vector's norm."""

import pytest
import torch

from optim import sketch
from optim.sketch import Sketch

CPU, BUCKETS = torch.device("cpu"), 61


def norms(vectors, buckets=BUCKETS):
    """The norm of each row by its sketch, over the true one."""
    count, length = vectors.shape
    places = [[(number * length, length)] for number in range(count)]
    found = Sketch(places, buckets, CPU)(vectors.flatten()).double().norm(dim=1)
    return found / vectors.double().norm(dim=1)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# 300 vectors each; a layer's gradient may be of low rank, or all in few rows or columns.
VECTORS = {
    "noise": lambda: drawn(300, 7000),
    "as long as one row": lambda: drawn(300, 64),
    "one column of 64": lambda: torch.nn.functional.pad(drawn(300, 128, 1), (0, 63)).flatten(1),
    "one column of 144": lambda: torch.nn.functional.pad(drawn(300, 128, 1), (0, 143)).flatten(1),
    "one row of 1024": lambda: torch.nn.functional.pad(drawn(300, 1024), (0, 9 * 1024)),
    "rank one": lambda: (drawn(300, 48, 1, seed=1) * drawn(300, 1, 1792, seed=2)).flatten(1),
    "all equal": lambda: drawn(300, 1).expand(300, 7000).contiguous(),
}


@pytest.mark.parametrize("kind", VECTORS)
def test_the_norm_is_found_to_one_over_the_root_of_twice_the_buckets(kind):
    """The error of a norm, over 300 vectors: no bias beyond 4 standard errors, and at most 1.3 times the deviation.

    Vectors that are multiples of each other have one error, which is within four deviations.
    """
    error = norms(VECTORS[kind]()) - 1
    deviation = (1 / (2 * BUCKETS)) ** 0.5
    if kind == "all equal":
        assert error.abs().max() < 4 * deviation
        return
    # The root of a mean has an expectation below 1, by a quarter of the variance of the square.
    assert abs(error.mean() + deviation**2 / 2) < 4 * 1.3 * deviation / len(error) ** 0.5
    assert error.std() < 1.3 * deviation


def test_more_buckets_are_more_exact():
    coarse, fine = ((norms(drawn(200, 20_000), buckets) - 1).std() for buckets in (17, 1009))
    assert 4 < coarse / fine < 16  # the root of 59 is 7.7


def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches():
    made = Sketch([[(0, 1000)], [(1024, 77), (1152, 3000)]], BUCKETS, CPU)
    parts = [drawn(4200, seed=seed) for seed in range(5)]
    torch.testing.assert_close(made(sum(parts)), sum(map(made, parts)), rtol=0, atol=1e-4)


def test_a_vector_has_its_sketch_wherever_it_lies():
    values = drawn(500)
    first = Sketch([[(0, 500)]], BUCKETS, CPU)(values)
    moved = Sketch([[(0, 128)], [(128, 500)]], BUCKETS, CPU)(torch.cat([drawn(128, seed=1), values]))
    assert torch.equal(moved[1], first[0])


def test_pieces_of_one_vector_do_not_cancel():
    """A vector of 40 equal pieces: had they equal signs, it would be 6 times too long."""
    found = Sketch([[(64 * piece, 50) for piece in range(40)]], BUCKETS, CPU)(drawn(64).repeat(40))
    assert found.norm().item() == pytest.approx(drawn(64)[:50].norm().item() * 40**0.5, rel=4 / (2 * BUCKETS) ** 0.5)


def test_vectors_may_be_longer_than_the_table_of_signs(monkeypatch):
    monkeypatch.setattr(sketch, "_SIGNS", 1000)
    assert (norms(drawn(20, 400_000)) - 1).abs().max() < 0.4

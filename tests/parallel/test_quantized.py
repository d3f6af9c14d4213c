"""Values in few bits, and sums of such: errors within half a step, nothing lost, the same bits
everywhere."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from parallel import costs
from parallel.exchange import Setup
from parallel.messages import Quantizer, Sparse, Wire
from parallel.quantized import QuantizedReduction, QuantizedSum
from tests.parallel import threads
from tests.tensors import assert_bitwise_equal

LENGTH = 3000


def drawn(rank, step=0, length=LENGTH):
    """Of different sizes in different places, as a model's layers."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(length, generator=generator) * torch.logspace(-4, 1, length)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 255, 256, 257, 3000])
def test_a_value_is_off_by_half_a_step_at_most(bits, count):
    """A step is the block's largest over 127 or 7, which the block's largest itself is a multiple
    of."""
    code = Quantizer(bits)
    values = drawn(0, length=count)
    most = 2 ** (bits - 1) - 1
    message = code.encode(values)
    assert message.dtype == torch.uint8 and len(message) == costs.quantized_bytes(count, bits)
    for block, other in zip(
        values.split(costs.BLOCK), code.decode(message, count).split(costs.BLOCK)
    ):
        assert (block - other).abs().max() <= block.abs().max() / most * (0.5 + 1e-5)
        place = block.abs().argmax()
        torch.testing.assert_close(other[place], block[place], rtol=1e-6, atol=0)
    every = torch.arange(-most, most + 1).float() * 0.25
    assert_bitwise_equal(code.decode(code.encode(every), len(every)), every)


@pytest.mark.parametrize(
    "values", [torch.zeros(300), torch.full((300,), 1e-45), torch.tensor([1e38, -3e38, 1.0])]
)
def test_extremes_stay_finite(values):
    found = Quantizer(4).decode(Quantizer(4).encode(values), len(values))
    assert found.isfinite().all() and (found - values).abs().max() <= values.abs().max()


def summed(rank, size, bits, steps):
    made = QuantizedSum("replicas" if size > 1 else None, bits)
    kept = torch.zeros(LENGTH)
    totals = []
    for step in range(steps):
        totals.append(made(drawn(rank, step) + kept, kept))
    return torch.stack(totals), kept


@pytest.mark.parametrize(
    ("size", "bits"),
    [
        *itertools.product((1, 2, 3, 5, 8), (8, 4)),
        (16, 4),  # more replicas than there are blocks that share a scale
        pytest.param(32, 4, marks=pytest.mark.slow),
        pytest.param(32, 8, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost_and_all_have_the_same_bits(size, bits):
    """sum(given) = sum of results + sum of what is kept, to float32 rounding of values up to 50, a
    step of each."""
    steps = 4
    ranks = threads.run(size, summed, bits, steps)
    for totals, _ in ranks:
        assert_bitwise_equal(totals, ranks[0][0])
    given = sum(drawn(rank, step).double() for rank in range(size) for step in range(steps))
    found = ranks[0][0].double().sum(0) + sum(kept.double() for _, kept in ranks)
    torch.testing.assert_close(found, given, rtol=0, atol=size * steps * 50 * 2**-23)


@pytest.mark.parametrize("wire", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 300])
def test_a_sparse_message_is_as_long_as_predicted_and_loses_what_it_says(count, scale, wire):
    """A float16 is off by 2^-11 of itself or 2^-24 of the largest, which goes as one near 2^15."""
    part = Sparse(torch.arange(count) * 3, drawn(1, length=count) * scale)
    form = Wire(wire)
    message, lost = form.pack(part)
    found = form.unpack(message, count)
    assert message.nbytes == 4 * form.words(count) == costs.message_bytes(count, wire)
    assert torch.equal(found.indices, part.indices) and (lost is None) == form.exact
    whole = found.values + (0 if lost is None else lost.values)
    torch.testing.assert_close(whole, part.values, rtol=1e-6, atol=0)
    if wire == "float16" and count:
        largest = part.values.abs().max().item()
        torch.testing.assert_close(found.values, part.values, rtol=2**-11, atol=largest * 2**-24)


def quantized_steps(rank, size, faulty):
    """The sum of each of three steps and the residual after it; in the middle one replica `faulty`
    has an infinity, and None leaves that step out."""
    group, everyone = ("replicas", "everyone") if size > 1 else (None, None)
    setup = Setup(
        batch=None,
        processes=SimpleNamespace(further_group=lambda: everyone),
        gradients=torch.zeros(LENGTH),
        places=(),
        collect=None,
        group=group,
        steps_per_epoch=None,
    )
    exchange = QuantizedReduction(setup, 4)
    found = []
    for step in (0, 1, 2):
        if step == 1 and faulty is None:
            continue
        gradients = drawn(rank, step)
        if step == 1 and rank == faulty:
            gradients[5] = math.inf
        exchange(gradients, step, torch.tensor(8.0))
        found.append((gradients, exchange.state()["residual"].clone()))
    return found


@pytest.mark.parametrize(("size", "faulty"), [(1, 0), (3, 0), (3, 2)])
def test_a_step_that_is_not_finite_leaves_the_residual_of_few_bits_as_it_was(size, faulty):
    """On the replicas whose own gradient was finite as well: the steps around it are those of a run
    without it."""
    expected = threads.run(size, quantized_steps, None)
    for rank, found in enumerate(threads.run(size, quantized_steps, faulty)):
        first, middle, last = found
        assert_bitwise_equal(middle[1], first[1])
        assert first[1].any() and math.isnan(middle[0][0])
        for one, other in zip((first, last), expected[rank]):
            assert_bitwise_equal(one[0], other[0])
            assert_bitwise_equal(one[1], other[1])

"""Values in few bits, and sums of such: errors within half a step, nothing lost, the same bits everywhere."""

from types import SimpleNamespace

import pytest
import torch

from parallel import costs
from parallel.exchange import Setup
from parallel.messages import Quantizer, Sparse, Wire
from parallel.reduce import QuantizedReduction, QuantizedSum
from tests.parallel import threads
from tests.tensors import assert_bitwise_equal

LENGTH = 3000


def drawn(rank, step=0, length=LENGTH):
    """Of different sizes in different places, as a model's layers."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(length, generator=generator) * torch.logspace(-4, 1, length)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 3000])
def test_a_value_is_off_by_half_a_step_at_most(bits, count):
    """A step is the block's largest over 127 or 7, which the block's largest itself is a multiple of."""
    code, values = Quantizer(bits), drawn(0, length=count)
    message = code.encode(values)
    assert message.dtype == torch.uint8 and len(message) == code.bytes(count) == costs.quantized_bytes(count, bits)
    found = code.decode(message, count)
    for block, other in zip(values.split(costs.BLOCK), found.split(costs.BLOCK)):
        step = block.abs().max() / (2 ** (bits - 1) - 1)
        assert (block - other).abs().max() <= step * (0.5 + 1e-5)
        place = block.abs().argmax()
        torch.testing.assert_close(other[place], block[place], rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
def test_every_code_is_given_back(bits):
    most = 2 ** (bits - 1) - 1
    values = torch.arange(-most, most + 1).float() * 0.25
    assert_bitwise_equal(Quantizer(bits).decode(Quantizer(bits).encode(values), len(values)), values)


@pytest.mark.parametrize("values", [torch.zeros(300), torch.full((300,), 1e-45), torch.tensor([1e38, -3e38, 1.0])])
def test_extremes_stay_finite(values):
    found = Quantizer(4).decode(Quantizer(4).encode(values), len(values))
    assert found.isfinite().all() and (found - values).abs().max() <= values.abs().max()


def summed(rank, size, bits, steps):
    group = "replicas" if size > 1 else None
    made, kept, totals = QuantizedSum(group, bits), torch.zeros(LENGTH), []
    for step in range(steps):
        totals.append(made(drawn(rank, step) + kept, kept))
    return totals, kept


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [*range(1, 10), 16, 32])
def test_nothing_is_lost_and_all_have_the_same_bits(size, bits):
    """sum(given) = sum of results + sum of what is kept, to float32 rounding of values up to 50, a step of each."""
    steps = 4
    ranks = threads.run(size, summed, bits, steps)
    for totals, _ in ranks:
        assert_bitwise_equal(torch.stack(totals), torch.stack(ranks[0][0]))
    given = sum(drawn(rank, step).double() for rank in range(size) for step in range(steps))
    found = sum(total.double() for total in ranks[0][0]) + sum(kept.double() for _, kept in ranks)
    torch.testing.assert_close(found, given, rtol=0, atol=size * steps * 50 * 2**-23)


@pytest.mark.parametrize("bits", [8, 4])
def test_errors_are_made_good_later(bits):
    """The same vectors again and again: the mean of the results comes to their sum; each result alone does not."""
    size, steps = 4, 40
    made = threads.run(size, repeated, bits, steps)[0]
    whole = sum(drawn(rank) for rank in range(size))
    first, mean = ((found - whole).norm() / whole.norm() for found in (made[0], torch.stack(made).mean(0)))
    assert mean < 3 * first / steps and first > (0.05 if bits == 4 else 0.003)


def repeated(rank, size, bits, steps):
    made, kept, totals = QuantizedSum("replicas", bits), torch.zeros(LENGTH), []
    for _ in range(steps):
        totals.append(made(drawn(rank) + kept, kept))
    return totals


def reduced(rank, size, divisor, fault=None):
    processes = SimpleNamespace(further_group=lambda: "everyone")
    made = QuantizedReduction(Setup(None, None, processes, torch.empty(LENGTH), (), None, "replicas", None), 4)
    results = []
    for step in range(3):
        buffer = drawn(rank, step) * divisor
        if fault == (step, rank):
            buffer[5] = float("inf")
        before = made.residual.clone()
        made(buffer, step, torch.tensor(divisor))
        results.append((buffer, before, made.residual.clone()))
    return results


def test_what_is_kept_does_not_depend_on_the_loss_scale():
    """Powers of two: the same bits, but for the factor."""
    for one, other in zip(threads.run(2, reduced, 1.0), threads.run(2, reduced, 1024.0)):
        for (result, _, kept), (scaled, _, again) in zip(one, other):
            assert_bitwise_equal(result * 1024, scaled)
            assert_bitwise_equal(kept, again)


def test_a_gradient_that_is_not_finite_changes_nothing():
    for results in threads.run(3, reduced, 1.0, (1, 2)):
        (first, *_), (second, before, after), (third, *_) = results
        assert first.isfinite().all() and second.isnan().any() and third.isfinite().all()
        assert_bitwise_equal(before, after)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 300])
def test_a_sparse_message_in_few_bits(bits, count):
    part = Sparse(torch.arange(count) * 3, drawn(1, length=count))
    wire = Wire(bits)
    message, lost = wire.pack(part)
    found = wire.unpack(message, count)
    assert len(message) == wire.words(count) and 4 * len(message) == costs.message_bytes(count, f"int{bits}")
    assert torch.equal(found.indices, part.indices) and torch.equal(lost.indices, part.indices)
    torch.testing.assert_close(found.values + lost.values, part.values, rtol=1e-6, atol=0)

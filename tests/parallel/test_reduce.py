"""The exchange between processes: exact, alike on all replicas, in one order, early where it may be."""

import math

import pytest
import torch
from torch import distributed, nn

from optim.gradients import TreeSum
from parallel import reduce
from tests import world

pytestmark = pytest.mark.multiprocess

EXACT = [("dense", "fast"), ("dense", "tree")]
ALL = [*EXACT, ("half", "fast"), ("half", "tree")]
UNIT = {torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 2.0**-134)}  # of a rounding: relative, absolute


def create(gradients, places=(), method="dense", order="fast", wire=torch.float16, micro_batches=60, **further):
    return reduce.Reduction(
        gradients, places, None, method=method, order=order, wire=wire, micro_batches=micro_batches, **further
    )


def same_bits(tensors):
    return all(torch.equal(tensor.view(torch.int32), tensors[0].view(torch.int32)) for tensor in tensors)


def random_gradients(rank, length=1003):
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-8, 9, (length,), generator=generator)
    return torch.randn(length, generator=generator) * 2.0**exponents


# Random buffers -------------------------------------------------------------------------------------------------


def sums_of_random(rank, size, variants):
    """For each variant the sum of the replicas' gradients; buckets of 97 elements, which no replica count divides."""
    results = []
    for variant in variants:
        gradients = random_gradients(rank)
        exchange = create(gradients, bucket_bytes=4 * 97, **variant)
        exchange.finish()
        again = random_gradients(rank)
        exchange.finish(again)
        assert torch.equal(gradients, again)
        results.append(gradients)
    return results


@pytest.mark.parametrize("size", [1, 2, 5])
def test_sum_of_float32(size):
    """An element is added size - 1 times in whatever order, with an error of half a unit of float32 each."""
    given = torch.stack([random_gradients(rank) for rank in range(size)]).double()
    bound = (size - 1) * 2.0**-24 * given.abs().sum(0) * 1.001
    results = world.run(size, sums_of_random, [{"method": method, "order": order} for method, order in EXACT])
    for results_of_replicas in zip(*results):
        assert same_bits(results_of_replicas)
        assert ((results_of_replicas[0].double() - given.sum(0)).abs() <= bound).all()


@pytest.mark.parametrize("size", [3, 4])
def test_sum_in_half_is_rounded_twice(size):
    """What a replica sends and what comes back: means over micro batches, so errors count as many times as these."""
    variants = [{"method": "half", "order": "fast", "wire": wire} for wire in UNIT]
    results = world.run(size, sums_of_random, variants)
    own = torch.stack([random_gradients(rank) for rank in range(size)]).double() * size / 60
    for wire, results_of_replicas in zip(UNIT, zip(*results)):
        assert same_bits(results_of_replicas)
        relative, absolute = UNIT[wire]
        first = (own.abs() * relative + absolute).mean(0)
        bound = first + (own.mean(0).abs() + first) * relative + absolute + 2.0**-21 * own.abs().mean(0)
        error = (results_of_replicas[0].double() / 60 - own.mean(0)).abs()
        assert (error <= bound).all()
        assert (error > bound / 4).any()  # so it did travel in this dtype


def allocations(rank, size):
    """Shapes that torch.empty was asked for in three exchanges of 11 buckets."""
    shapes, empty = [], torch.empty
    torch.empty = lambda *shape, **options: shapes.append(shape) or empty(*shape, **options)
    exchange = create(random_gradients(rank), order="tree", bucket_bytes=4 * 97)
    for _ in range(3):
        exchange.finish()
    return shapes


def test_memory_beside_the_buffer_is_that_of_two_buckets():
    assert world.run(2, allocations) == [[(2, 98)] * 2] * 2


def special(rank, size, values):
    gradients = torch.tensor(values[rank])
    create(gradients, method="half", micro_batches=2).finish()
    return gradients


def test_half_passes_on_what_is_not_finite_and_what_is_tiny():
    """The mean of 2 x 40000 fits float16; 70000, inf and NaN are found by a check; 2 ** -24 is its least number."""
    tiny = 2.0**-24
    values = [[40000.0, 70000.0, math.inf, math.nan, tiny, 1.0], [40000.0, 1.0, -math.inf, 1.0, tiny, 2.0]]
    results = world.run(2, special, values)
    for result in results:
        assert result.isfinite().tolist() == [True, False, False, False, True, True]
        assert result[[0, 4, 5]].tolist() == [80000.0, 2 * tiny, 3.0]


def tree_over_replicas(rank, size, leaves):
    mine = leaves.chunk(size)[rank]
    tree = TreeSum(leaves.shape[1], len(mine), torch.device("cpu"))
    for leaf in mine:
        tree.leaf().add_(leaf)
        tree.add()
    create(torch.zeros(leaves.shape[1]), order="tree", bucket_bytes=4 * 100).finish(tree.total)
    return tree.total


def test_dense_tree_continues_the_tree_of_micro_batches():
    leaves = torch.stack([random_gradients(number) for number in range(12)])
    expected = world.run(1, tree_over_replicas, leaves)
    for size in (2, 4):
        assert same_bits([*expected, *world.run(size, tree_over_replicas, leaves)]), size
    rows = leaves[:5]
    odd = ((rows[0] + rows[1]) + (rows[2] + rows[3])) + rows[4]
    assert same_bits([odd, *world.run(5, tree_over_replicas, rows)])


def without_communication(rank, size, method):
    for name in ("all_reduce", "all_to_all_single"):
        setattr(distributed, name, None)
    gradients = random_gradients(rank)
    parameter = nn.Parameter(torch.ones(3))
    exchange = create(gradients, [(0, parameter)], method=method)
    exchange.arm()
    parameter.sum().backward()
    exchange.finish()
    return (
        exchange.overlaps,
        bool(parameter._post_accumulate_grad_hooks),
        torch.equal(gradients, random_gradients(rank)),
    )


@pytest.mark.parametrize(("method", "size"), [("dense", 1), ("half", 1)])
def test_nothing_is_done_where_nothing_is_to_do(method, size):
    assert world.run(size, without_communication, method) == [(False, False, True)] * size


# Backward passes ------------------------------------------------------------------------------------------------


class Replica:
    """A small model with its gradients in a flat buffer, as optim/half_weights.py lays them out."""

    def __init__(self, rank, dtype=torch.float32):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
        self.model = nn.Sequential(*layers).to(dtype)
        self.inputs = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1 + rank)).to(dtype)
        self.places, length = [], 0
        for parameter in self.model.parameters():
            self.places.append((length, parameter))
            length += -(-parameter.numel() // 16) * 16
        self.gradients = torch.zeros(length)
        self.views = [self.gradients[start : start + p.numel()].view(p.shape) for start, p in self.places]
        if dtype == torch.float32:
            for (_, parameter), view in zip(self.places, self.views):
                parameter.grad = view

    def backward(self, number):
        self.model(self.inputs[number]).square().sum().backward()


def early_and_late(rank, size, method, order):
    """(own gradients, sum sent late, sum sent early twice, what happened in the early steps)."""
    events = []
    for name in ("all_reduce", "all_to_all_single"):
        setattr(distributed, name, _recorded(getattr(distributed, name), events))
    replica = Replica(rank)
    first = next(replica.model.parameters())
    first.register_hook(lambda gradient: events.append("first layer"))
    exchange = create(replica.gradients, replica.places, method, order, bucket_bytes=4 * 97)

    def step(arms):
        replica.gradients.zero_()
        replica.backward(0)
        if arms:
            exchange.arm()
        replica.backward(1)
        events.append("end")
        own = replica.gradients.clone()
        exchange.finish()
        return own, replica.gradients.clone()

    own, late = step(arms=False)
    events.clear()
    sums = [step(arms=True)[1] for _ in range(2)]
    return own, late, sums, events


def _recorded(function, events):
    def call(*args, **kwargs):
        events.append("launch")
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(("method", "order"), ALL)
def test_what_is_sent_early_is_what_is_sent_late(method, order):
    """496 elements, 6 buckets: the last layers' are sent before the first layer has its gradient, all before the end.

    The bits are those of the late exchange: the same buckets go through the same additions.
    """
    results = world.run(3, early_and_late, method, order)
    own = torch.stack([result[0] for result in results]).double()
    tolerance = 1e-6 if method == "dense" else 2e-3  # two roundings of 2 ** -11 and some for cancellation
    for _, late, sums, events in results:
        assert same_bits([results[0][1], late, *sums])
        assert (late.double() - own.sum(0)).abs().max() <= tolerance * own.abs().sum(0).max()
        launches = ["launch"] * 6
        if order == "tree":
            assert events == ["first layer", "first layer", "end", *launches] * 2
        else:
            assert events == ["first layer", *launches[:3], "first layer", *launches[3:], "end"] * 2


def orders_that_differ(rank, size):
    """Replica 0 computes the gradient of `left` last, the others that of `right`."""
    left, right = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(2))
    gradients = torch.zeros(8)
    left.grad, right.grad = gradients[:6], gradients[6:]
    exchange = create(gradients, [(0, left), (6, right)], bucket_bytes=4 * 3)
    exchange.arm()
    if rank == 0:
        (right.sum() * (left.sum() * torch.ones(()))).backward()
    else:
        (left.sum() * (right.sum() * torch.ones(()))).backward()
    exchange.finish()
    return gradients


def test_buckets_go_in_one_order_whatever_the_order_of_the_backward_pass():
    for result in world.run(3, orders_that_differ):
        assert result.tolist() == [6.0] * 6 + [18.0] * 2


def without_a_gradient(rank, size):
    """The last backward pass does not reach the middle layer, for which an earlier one has left a gradient."""
    replica = Replica(rank)
    exchange = create(replica.gradients, replica.places, bucket_bytes=4 * 97)
    replica.backward(0)
    own = replica.gradients.clone()
    exchange.arm()
    first, last = replica.model[0], replica.model[4]
    (first(replica.inputs[1]).sum() + last(torch.ones(16)).sum()).backward()
    exchange.finish()
    middle = slice(replica.places[2][0], replica.places[4][0])
    return own[middle], replica.gradients[middle]


def test_a_parameter_without_a_gradient_is_exchanged_too():
    results = world.run(2, without_a_gradient)
    assert all(torch.equal(result[1], results[0][0] + results[1][0]) for result in results)


def collected(rank, size, closes):
    replica = Replica(rank, torch.bfloat16)
    indices, own = [], torch.zeros_like(replica.gradients)

    def collect(index):
        start, parameter = replica.places[index]
        own[start : start + parameter.numel()] += parameter.grad.flatten()
        replica.views[index].add_(parameter.grad)
        parameter.grad = None
        indices.append(index)

    exchange = create(replica.gradients, replica.places, bucket_bytes=4 * 97, collect=collect)
    replica.backward(0)
    assert not indices, "collected while unarmed"
    replica.model.zero_grad()
    exchange.arm()
    if closes:
        exchange.close()
    replica.backward(1)
    exchange.finish()
    return sorted(indices), own, replica.gradients


def test_gradients_are_collected_before_they_are_sent():
    results = world.run(2, collected, False)
    for indices, _, total in results:
        assert indices == list(range(6))
        assert total.any() and torch.equal(total, results[0][1] + results[1][1])
    assert [indices for indices, *_ in world.run(2, collected, True)] == [[], []]


def misused(rank, size):
    replica = Replica(rank)
    exchange = create(replica.gradients, replica.places, bucket_bytes=4 * 97)
    exchange.arm()
    with pytest.raises(AssertionError, match="before the next arm"):
        exchange.arm()
    with pytest.raises(AssertionError, match="has sent parts of the first buffer"):
        exchange.finish(torch.zeros_like(replica.gradients))
    replica.backward(0)
    with pytest.raises(AssertionError, match="came after it was sent"):
        replica.backward(1)
    exchange.finish()


def test_misuse_is_refused():
    world.run(2, misused)

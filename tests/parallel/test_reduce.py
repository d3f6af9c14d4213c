"""The exchange of whole gradients: exact, alike on all replicas, in one order, early where it may
be."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from optim.gradients import TreeSum
from parallel import reduce
from parallel.exchange import Setup
from recipe.exchange import Exchange
from recipe.shares import by_speed, subtrees
from tests.parallel import threads

# of a rounding: relative, absolute
UNIT = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}
VARIANTS = [
    {"order": "fast"},
    {"order": "tree"},
    *({"method": "half", "wire": wire} for wire in UNIT),
]
BUCKET = 4 * 97  # bytes: 97 elements, which no number of replicas divides


def create(gradients, places=(), bucket=BUCKET, micro_batches=60, **section):
    setup = Setup(
        batch=SimpleNamespace(micro_batches=micro_batches),
        processes=None,
        gradients=gradients,
        places=places,
        collect=None,
        group=None,
        steps_per_epoch=None,
    )
    return reduce.Reduction(setup, Exchange(**section), bucket)


def finish(exchange, buffer):
    exchange(buffer, 0, torch.ones(()))


def same_bits(tensors):
    return all(
        torch.equal(tensor.view(torch.int32), tensors[0].view(torch.int32)) for tensor in tensors
    )


def random_gradients(rank, length=1003):
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-8, 9, (length,), generator=generator)
    return torch.randn(length, generator=generator) * 2.0**exponents


# Random buffers -----------------------------------------------------------------------------------


def sums_of_random(rank, size):
    """For each of VARIANTS the sum of the replicas' gradients, twice the same."""
    results = []
    for variant in VARIANTS:
        gradients = random_gradients(rank)
        again = random_gradients(rank)
        exchange = create(gradients, **variant)
        finish(exchange, gradients)
        finish(exchange, again)
        assert torch.equal(gradients, again)
        results.append(gradients)
    return results


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_are_exact_to_their_roundings_and_alike_on_all_replicas(size):
    """Of float32: an element is added size - 1 times in whatever order, with an error of half a
    unit of float32 each.

    In half what a replica sends and what comes back is rounded: means over 60 micro batches, so
    errors count as many times as these.
    """
    sums = list(zip(*threads.run(size, sums_of_random)))
    given = torch.stack([random_gradients(rank) for rank in range(size)]).double()
    assert all(same_bits(each) for each in sums)
    for each in sums[:2]:
        bound = (size - 1) * 2.0**-24 * given.abs().sum(0) * 1.001
        assert ((each[0].double() - given.sum(0)).abs() <= bound).all()
    own = given * size / 60
    for (relative, absolute), each in zip(UNIT.values(), sums[2:]):
        first = (own.abs() * relative + absolute).mean(0)
        bound = (
            first + (own.mean(0).abs() + first) * relative + absolute + 2.0**-21 * own.abs().mean(0)
        )
        error = (each[0].double() / 60 - own.mean(0)).abs()
        assert (error <= bound).all()
        assert (error > bound / 4).any()  # so it did travel in this dtype


def special(rank, size, values):
    gradients = torch.tensor(values[rank])
    finish(create(gradients, method="half", micro_batches=2), gradients)
    return gradients


def test_half_passes_on_what_is_not_finite_and_what_is_tiny():
    """The mean of 2 x 40000 fits float16; 70000, inf and NaN are found by a check; 2 ** -24 is its
    least number."""
    tiny = 2.0**-24
    values = [
        [40000.0, 70000.0, math.inf, math.nan, tiny, 1.0],
        [40000.0, 1.0, -math.inf, 1.0, tiny, 2.0],
    ]
    for result in threads.run(2, special, values):
        assert result.isfinite().tolist() == [True, False, False, False, True, True]
        assert result[[0, 4, 5]].tolist() == [80000.0, 2 * tiny, 3.0]


def tree_sum(leaves):
    tree = TreeSum(leaves.shape[1], torch.device("cpu"))
    tree.begin(len(leaves))
    for leaf in leaves:
        tree.leaf().add_(leaf)
        tree.add()
    return tree.total


def tree_over_replicas(rank, size, leaves, divisions):
    """The sum under each division of the micro batches, which change from step to step."""
    found = []
    exchange = create(torch.zeros(leaves.shape[1]), order="tree")
    for shares in divisions:
        sums = [
            tree_sum(leaves[each.start : each.stop]) for each in subtrees(shares[rank], len(leaves))
        ]
        exchange.set_shares(shares, sums)
        for _ in range(2):  # the memory of the first sum serves for the second
            total = sums[0].clone()
            finish(exchange, total)
        found.append(total)
    return found


@pytest.mark.parametrize("size", [2, 3, 5, 7])
def test_dense_tree_continues_the_tree_of_micro_batches(size):
    """Also where shares are uneven, or of one micro batch."""
    leaves = torch.stack([random_gradients(number) for number in range(13)])
    speeds = ([1.0] * size, [1.0, *[3.0] * (size - 1)], [*[0.1] * (size - 1), 9.0])
    divisions = [by_speed(13, each) for each in speeds]
    for found in threads.run(size, tree_over_replicas, leaves, divisions):
        assert same_bits([tree_sum(leaves), *found])


# Backward passes ----------------------------------------------------------------------------------


class Replica:
    """A small model with its gradients in a flat buffer, as optim/weight_state.py lays them out."""

    def __init__(self, rank):
        generator = torch.Generator().manual_seed(0)
        first, *others = (nn.Linear(*sizes) for sizes in ((8, 16), (16, 16), (16, 4)))
        self.model = nn.Sequential(first, nn.Tanh(), others[0], nn.Tanh(), others[1])
        self.inputs = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1 + rank))
        self.places = []
        length = 0
        for parameter in self.model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
            self.places.append((length, parameter))
            length += -(-parameter.numel() // 16) * 16
        self.gradients = torch.zeros(length)
        for start, parameter in self.places:
            parameter.grad = self.gradients[start : start + parameter.numel()].view(parameter.shape)

    def backward(self, number):
        self.model(self.inputs[number]).square().sum().backward()


def early_and_late(rank, size, section):
    """Own gradients, the sum sent late, that sent early, and how many were launched at what point
    of the early step."""
    launched = reduce.distributed.this.launched
    points = []
    replica = Replica(rank)
    next(replica.model.parameters()).register_hook(lambda gradient: points.append(len(launched)))
    exchange = create(replica.gradients, replica.places, **section)

    def step(arms):
        replica.gradients.zero_()
        replica.backward(0)
        if arms:
            exchange.arm()
        replica.backward(1)
        points.append(len(launched))
        own = replica.gradients.clone()
        finish(exchange, replica.gradients)
        return own, replica.gradients.clone()

    own, late = step(arms=False)
    points.clear(), launched.clear()
    return own, late, step(arms=True)[1], points


@pytest.mark.parametrize(
    ("section", "sent"),
    [({}, [0, 3, 6]), ({"order": "tree"}, [0, 0, 0]), ({"method": "half"}, [0, 5, 11])],
)
def test_what_is_sent_early_is_what_is_sent_late(section, sent):
    """6 buckets: the last layers' are sent before the first layer has its gradient, all before the
    end. The bits are those of the late exchange: the same buckets go through the same additions."""
    results = threads.run(3, early_and_late, section)
    own = torch.stack([result[0] for result in results]).double()
    # two roundings of 2 ** -11 and some for cancellation
    tolerance = 2e-3 if "method" in section else 1e-6
    for _, late, early, points in results:
        assert same_bits([results[0][1], late, early])
        assert (late.double() - own.sum(0)).abs().max() <= tolerance * own.abs().sum(0).max()
        # collectives launched at the first layer of both passes, and at the end
        assert points == sent


def disarmed(rank, size, section):
    """Sums of a step, without and with a backward pass before it that is armed, but does not
    count."""
    replica = Replica(rank)
    found = []
    exchange = create(replica.gradients, replica.places, **section)
    for forgets in (False, True):
        replica.gradients.zero_()
        if forgets:
            exchange.arm()
            if rank:  # it failed before any gradient on replica 0
                replica.backward(1)
            exchange.disarm()
            replica.gradients.zero_()
        exchange.arm()
        replica.backward(0)
        finish(exchange, replica.gradients)
        found.append(replica.gradients.clone())
    return found


@pytest.mark.parametrize("section", [{}, {"order": "tree"}, {"method": "half"}], ids=str)
def test_a_backward_pass_that_does_not_count_leaves_nothing_behind(section):
    for found in threads.run(3, disarmed, section):
        assert same_bits(found)


def orders_that_differ(rank, size):
    """Replica 0 computes the gradients of `left` and `right` in another order than the others; all
    of them that of a single number, which is the last of its bucket, at the end. `idle` has one of
    an earlier backward pass only."""
    sizes = (2, 3, 1, 3)
    idle, left, one, right = (
        nn.Parameter(torch.full((size,), value)) for size, value in zip(sizes, (0.0, 1.0, 1.0, 2.0))
    )
    gradients = torch.zeros(9)
    idle.grad, left.grad, one.grad, right.grad = gradients.split(sizes)
    idle.grad += rank
    exchange = create(gradients, [(0, idle), (2, left), (5, one), (6, right)], 4 * 3)
    exchange.arm()
    first, second = (right, left) if rank == 0 else (left, right)
    (one.sum() * (first.sum() * (second.sum() * torch.ones(())))).backward()
    finish(exchange, gradients)
    return gradients


def test_buckets_go_in_one_order_whatever_the_order_of_the_backward_pass():
    for result in threads.run(3, orders_that_differ):
        assert result.tolist() == [3.0] * 2 + [18.0] * 3 + [54.0] + [9.0] * 3

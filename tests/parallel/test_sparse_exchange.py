"""The sparse exchange over several steps: what is sent, what is kept, and that no gradient is lost."""

import pytest
import torch

from parallel.sparse_exchange import Rules, SparseExchange
from tests.parallel import threads
from tests.tensors import assert_bitwise_equal

LENGTH, COUNT, STEPS = 300, 12, 6
ONE = torch.tensor(1.0)


def rules(pattern="butterfly", density=COUNT / LENGTH, **more):
    return Rules(pattern, torch.float32, density if callable(density) else lambda step: density, **more)


def gradient(rank, step, seed=0):
    """Of different sizes in different places, as a model's layers."""
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * rank + step)
    return torch.randn(LENGTH, generator=generator) * torch.linspace(0.1, 3.0, LENGTH)


class Momentum:
    """A contribution with a state of its own: v = 0.9 v + g."""

    def __init__(self):
        self.velocity = torch.zeros(LENGTH)

    def __call__(self, residual, gradient, divisor, finite):
        if finite:
            self.velocity.mul_(0.9).add_(gradient / divisor)
            residual.add_(self.velocity)

    def state(self):
        return {"velocity": self.velocity}


def create(size, kind, dense=()):
    kind = dict(kind)
    contribution = Momentum() if kind.pop("momentum", False) else None
    masks = kind.pop("masks", False)
    kind["masks"] = lambda density: masks
    group, everyone = ("replicas", "everyone") if size > 1 else (None, None)
    device = torch.device("cpu")
    return SparseExchange(rules(**kind), LENGTH, [LENGTH], 0, dense, group, everyone, device, contribution)


def steps_made(rank, size, kind, steps=STEPS, divisor=1.0, dense=(), faults=()):
    """The updates of each step, and what this rank has kept at the end. faults: (step, rank) of an infinite value."""
    exchange = create(size, kind, dense)
    updates = []
    for step in range(steps):
        buffer = gradient(rank, step) * divisor
        if (step, rank) in faults:
            buffer[7] = float("inf")
        exchange(buffer, step, torch.tensor(divisor))
        updates.append(buffer)
    return updates, exchange.state()


def run(size, *arguments):
    """`steps_made` on each rank; updates must have the same bits on all. Updates, and states by rank."""
    if size == 1:
        ranks = [steps_made(0, 1, *arguments)]
    else:
        ranks = threads.run(size, steps_made, *arguments)
    for updates, _ in ranks:
        for found, expected in zip(updates, ranks[0][0]):
            assert_bitwise_equal(found, expected)
    return ranks[0][0], [state for _, state in ranks]


def all_gradients(size, steps=STEPS):
    return sum(gradient(rank, step).double() for rank in range(size) for step in range(steps))


KINDS = ("gather", "tree", "butterfly")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("size", "momentum"), [*((size, size % 2 == 1) for size in (*range(1, 10), 16, 32)), (4, True)]
)
def test_nothing_is_lost(size, momentum, kind):
    """sum(contributions) = sum of updates + sum(residuals), to the rounding of float32 additions below 64: six steps of
    as many as there are replicas."""
    updates, states = run(size, {"pattern": kind, "momentum": momentum})
    kept = sum(state["residual"].double() for state in states)
    sent = sum(update.double() for update in updates)
    weight = (lambda step: sum(0.9**later for later in range(STEPS - step))) if momentum else lambda step: 1.0
    given = sum(weight(step) * gradient(rank, step).double() for rank in range(size) for step in range(STEPS))
    torch.testing.assert_close(sent + kept, given, rtol=0, atol=max(50, 10 * size) * 2**-18)
    counts = [int((update != 0).sum()) for update in updates]
    assert all(count <= COUNT * (size if kind == "gather" else 1) for count in counts)
    assert min(counts) >= COUNT


def test_the_published_rule_loses_what_is_left_out_of_merges():
    """An entry that is cut in one merge and survives by another is in the result, with one part missing."""
    size = 4
    lost = {}
    for conserve in (True, False):
        updates, states = run(size, {"pattern": "tree", "conserve": conserve})
        found = sum(update.double() for update in updates) + sum(state["residual"].double() for state in states)
        lost[conserve] = (found - all_gradients(size)).abs().sum().item()
    assert lost[True] < 0.01 < 1 < lost[False]


def test_by_the_published_rule_a_replica_keeps_what_it_sent_in_vain():
    """The first step by its definition: the residual is the gradient but for the places of the result it had sent."""
    updates, states = run(3, {"pattern": "tree", "conserve": False}, 1)
    result = updates[0] != 0
    for rank, state in enumerate(states):
        own = gradient(rank, 0)
        sent = torch.zeros(LENGTH, dtype=torch.bool)
        sent[own.abs().topk(COUNT).indices] = True
        assert_bitwise_equal(state["residual"], torch.where(sent & result, 0.0, own))


def test_a_replica_alone_sends_its_largest_and_keeps_the_rest():
    """The definition in three lines of torch."""
    updates, (state,) = run(1, {"pattern": "tree"})
    residual = torch.zeros(LENGTH)
    for step, update in enumerate(updates):
        residual += gradient(0, step)
        largest = residual.abs().topk(COUNT).indices
        expected = torch.zeros(LENGTH).index_copy_(0, largest, residual[largest])
        residual[largest] = 0
        assert_bitwise_equal(update, expected)
    assert_bitwise_equal(state["residual"], residual)


@pytest.mark.parametrize("masks", [False, True])
def test_momentum_of_replicas(masks):
    """v = 0.9 v + g; r = r + v; the largest of r are sent; and masked, v is cleared there."""
    updates, (state,) = run(1, {"pattern": "tree", "momentum": True, "masks": masks})
    velocity, residual = torch.zeros(LENGTH), torch.zeros(LENGTH)
    for step, update in enumerate(updates):
        velocity = 0.9 * velocity + gradient(0, step)
        residual = residual + velocity
        largest = residual.abs().topk(COUNT).indices
        expected = torch.zeros(LENGTH).index_copy_(0, largest, residual[largest])
        residual[largest] = 0
        if masks:
            velocity[largest] = 0
        torch.testing.assert_close(update, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state["velocity"], velocity, rtol=1e-6, atol=1e-6)


def test_dense_steps_with_momentum_of_replicas_are_momentum_sgd():
    """Whole gradients: the update is the momentum of their sum. And what was kept before is sent along."""
    updates, states = run(2, {"density": lambda step: 1.0 if step else 0.04, "momentum": True})
    velocity = torch.zeros(LENGTH)
    total, expected = torch.zeros(LENGTH), torch.zeros(LENGTH)
    for step, update in enumerate(updates):
        velocity = 0.9 * velocity + gradient(0, step) + gradient(1, step)
        total, expected = total + update, expected + velocity
        if step > 0:
            torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)
        if step > 1:
            torch.testing.assert_close(update, velocity, rtol=1e-5, atol=1e-4)
    assert not any(state["residual"].any() for state in states)


def test_the_density_is_that_of_the_step():
    updates, _ = run(2, {"density": lambda step: {0: 0.5, 1: 0.1}.get(step, 0.02)})
    assert [int((update != 0).sum()) for update in updates[:4]] == [150, 30, 6, 6]


@pytest.mark.parametrize("momentum", [False, True])
def test_some_parameters_are_always_sent_whole(momentum):
    """They are what a dense exchange gives, and take no place among the others."""
    whole = (range(3, 10), range(250, 300))
    updates, states = run(3, {"momentum": momentum, "masks": momentum}, STEPS, 1.0, whole)
    places = torch.cat([torch.arange(each.start, each.stop) for each in whole])
    velocity = torch.zeros(LENGTH)
    for step, update in enumerate(updates):
        velocity = 0.9 * momentum * velocity + sum(gradient(rank, step) for rank in range(3))
        torch.testing.assert_close(update[places], velocity[places], rtol=1e-5, atol=1e-5)
        others = update.clone()
        others[places] = 0
        assert (others != 0).sum() == COUNT
    assert not any(state["residual"][places].any() for state in states)


@pytest.mark.parametrize("momentum", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing(momentum):
    """On one replica of three: all see NaN, so that the update is left out; later steps are as if it had not been."""
    kind = {"momentum": momentum, "masks": momentum}
    disturbed, states = run(3, kind, 4, 1.0, (range(20, 30),), ((2, 1),))
    assert disturbed[2].isnan().any()
    again = threads.run(3, steps_left_out, kind)
    for step in (0, 1, 3):
        assert_bitwise_equal(disturbed[step], again[0][0][step])
    for rank, state in enumerate(states):
        for name, tensor in state.items():
            assert_bitwise_equal(tensor, again[rank][1][name])


def steps_left_out(rank, size, kind):
    """Steps 0, 1 and 3 of the same gradients."""
    exchange = create(size, kind, (range(20, 30),))
    updates = {}
    for step in (0, 1, 3):
        updates[step] = gradient(rank, step)
        exchange(updates[step], step, ONE)
    return updates, exchange.state()


def test_a_dense_step_that_is_not_finite_changes_nothing():
    kind = {"density": lambda step: 1.0 if step == 1 else COUNT / LENGTH}
    disturbed, states = run(2, kind, 2, 1.0, (), ((1, 0),))
    _, before = run(2, kind, 1)
    assert disturbed[1].isnan().any()
    for state, expected in zip(states, before):
        assert_bitwise_equal(state["residual"], expected["residual"])


def test_what_is_kept_does_not_depend_on_the_loss_scale():
    """Powers of two: the same bits, but for the factor."""
    plain, states = run(2, {"pattern": "tree"})
    scaled, others = run(2, {"pattern": "tree"}, STEPS, 1024.0)
    for one, other in zip(plain, scaled):
        assert_bitwise_equal(one * 1024.0, other)
    for one, other in zip(states, others):
        assert_bitwise_equal(one["residual"], other["residual"])


@pytest.mark.parametrize("density,count", [(1e-9, 1), (0.999999, LENGTH)])
def test_the_least_is_one_entry_and_the_most_all(density, count):
    updates, _ = run(1, {"density": density}, 1)
    assert (updates[0] != 0).sum() == count

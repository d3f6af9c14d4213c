"""Exchanges that keep a part of the gradient for later steps: what is sent, what is kept, and that
nothing is lost."""

import functools
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from parallel import sparse_exchange
from parallel.exchange import Setup
from parallel.quantized import QuantizedReduction
from parallel.sparse import PATTERNS
from parallel.sparse_exchange import SparseExchange, StageShares, divided
from parallel.topology import Topology
from recipe.exchange import Exchange
from tests.parallel import threads
from tests.tensors import assert_bitwise_equal

LENGTH = 300
COUNT = 12
STEPS = 4
UNIT = 5000  # of the gradients' values, by which tolerances are multiplied


def create(size, pattern="butterfly", momentum=False, places=None, **keys):
    """The exchange of a replica whose epochs have one step.

    Args: pattern: "dense" sends all in 4 bits. places: [(first element, shape)] of parameters.
    """
    merging = {} if pattern == "gather" else {"pattern": pattern}
    keys = {
        "density": COUNT / LENGTH,
        "compress": "update" if momentum else "gradient",
        **merging,
        **keys,
    }
    group, everyone = ("replicas", "everyone") if size > 1 else (None, None)
    processes = SimpleNamespace(
        topology=Topology(), gather=lambda value: [value], further_group=lambda: everyone
    )
    places = [(start, torch.empty(shape)) for start, shape in places or [(0, (1, LENGTH))]]
    replica_update = Momentum() if momentum else None
    setup = Setup(
        batch=None,
        processes=processes,
        gradients=torch.empty(LENGTH),
        places=places,
        collect=None,
        group=group,
        steps_per_epoch=1,
        replica_update=replica_update,
    )
    if pattern == "dense":
        return QuantizedReduction(setup, 4)
    return SparseExchange(setup, Exchange(method="gtopk" if merging else "topk", **keys))


class Momentum:
    """A replica update with a state of its own: v = 0.9 v + g."""

    def __init__(self):
        self.velocity = torch.zeros(LENGTH)

    def __call__(self, residual, gradient, divisor, finite, density):
        if finite:
            self.velocity.mul_(0.9).add_(gradient / divisor)
            residual.add_(self.velocity)

    def state(self):
        return {"velocity": self.velocity}


@functools.lru_cache(maxsize=None)
def drawn(number, step):
    """Of different sizes in different places, as a model's layers; whole numbers, of which float32
    holds all sums."""
    generator = torch.Generator().manual_seed(100 * number + step)
    return (
        torch.randn(LENGTH, generator=generator) * torch.linspace(0.1, 3.0, LENGTH) * UNIT
    ).round()


# Gradients of one of several replicas, chosen to break exchanges: `shared` is the same on all of
# them, `own` is not.
KINDS = {
    "own": lambda rank, size, shared, own: own,
    "identical": lambda rank, size, shared, own: shared,
    "disjoint": lambda rank, size, shared, own: torch.where(
        torch.arange(LENGTH) % size == rank, own, 0.0
    ),
    "opposite": lambda rank, size, shared, own: shared if rank % 2 else -shared,
    "one against all": lambda rank, size, shared, own: (
        shared if rank else own - (size - 1) * shared
    ),
    "fewer than k": lambda rank, size, shared, own: torch.where(
        torch.arange(LENGTH) == 5 * rank, 1.0, 0.0
    ),
    "one alone": lambda rank, size, shared, own: (
        own if rank == size // 2 + 1 else torch.zeros(LENGTH)
    ),
    "ties": lambda rank, size, shared, own: 3 * own.sign(),
}


def gradient(rank, step, kind="own", size=None):
    """size: how many replicas there are; "own" does not depend on it."""
    return KINDS[kind](rank, size, drawn(99, step), drawn(rank, step))


def steps_made(rank, size, keys, steps=range(STEPS), divisor=1.0, faults=(), kind="own"):
    """The updates of each step, and what this rank has kept at the end. faults: (step, rank) of an
    infinite value."""
    exchange = create(size, **keys)
    updates = {}
    for step in steps:
        updates[step] = gradient(rank, step, kind, size) * divisor
        if (step, rank) in faults:
            updates[step][7] = float("inf")
        exchange(updates[step], step, torch.tensor(divisor))
    return updates, exchange.state()


def run(size, *arguments):
    """`steps_made` on each rank; updates must have the same bits on all.

    Updates, and states by rank.
    """
    ranks = (
        threads.run(size, steps_made, *arguments) if size > 1 else [steps_made(0, 1, *arguments)]
    )
    for updates, _ in ranks:
        assert_bitwise_equal(updates, ranks[0][0])
    return ranks[0][0], {rank: state for rank, (_, state) in enumerate(ranks)}


SIZES = (1, 2, 3, 4, 7, 8, 32)
SENT = ({}, {"wire": "float16"})
KEPT = ({}, {"momentum": True, "wire": "float16"}, {"bits": 4})
EXTREMES = [{**sent, "density": count / LENGTH} for sent in SENT for count in (1, 299)]
# more than the 256 values that share a scale
BLOCKS = [{"bits": bits, "density": 270 / LENGTH} for bits in (8, 4)]
# So many threads take long; butterflies have their own way to round.
THIRTY_TWO = [("butterfly", KEPT[2]), ("owners", KEPT[0])]


def is_fast(size, pattern, keys, kind):
    """Whether a case is among those that have each pair of a size, a pattern and a way to send, and
    each kind twice."""
    if size == 12:  # as six, but for one more round
        return False
    if size == 32:
        return (pattern, keys) in THIRTY_TWO
    place = PATTERNS.index(pattern)
    if size == 6 and keys in SENT:
        return (place + list(KINDS).index(kind)) % 4 == 2 * SENT.index(keys)
    if keys in KEPT:
        return (place + KEPT.index(keys) + SIZES.index(size)) % 3 == 0
    if keys in BLOCKS:
        return size in (3, 8) and (place + BLOCKS.index(keys) + size) % 2 == 0
    return True


CASES = [
    pytest.param(*each, marks=() if is_fast(*each) else pytest.mark.slow)
    for each in (
        *product(SIZES, PATTERNS, KEPT, ["own"]),
        *product((6, 12), PATTERNS, SENT, KINDS),
        *product((6, 12), ["tree", "owners"], EXTREMES, ["one against all"]),
        *product((2, 3, 4, 6, 8), PATTERNS, BLOCKS, ["own"]),
    )
]


@pytest.mark.parametrize(("size", "pattern", "keys", "kind"), CASES, ids=str)
def test_nothing_is_lost(size, pattern, keys, kind):
    """sum(contributions) = sum of updates + sum(residuals): exactly, or with momentum and few bits
    to the rounding of float32 additions below 64 units: four steps of as many as there are
    replicas."""
    updates, states = run(size, {"pattern": pattern, **keys}, range(STEPS), 1.0, (), kind)
    found = sum(
        each.double()
        for each in [*updates.values(), *(state["residual"] for state in states.values())]
    )
    momentum = "momentum" in keys
    weights = [
        sum(0.9**later for later in range(STEPS - step)) if momentum else 1.0
        for step in range(STEPS)
    ]
    places = product(range(size), range(STEPS))
    given = sum(weights[step] * gradient(rank, step, kind, size).double() for rank, step in places)
    rounds = momentum or "bits" in keys
    torch.testing.assert_close(
        found, given, rtol=0, atol=max(34, 7 * size) * 2**-18 * UNIT if rounds else 0.0
    )
    counts = [int((update != 0).sum()) for update in updates.values()]
    count = round(keys.get("density", COUNT / LENGTH) * LENGTH)
    assert max(counts) <= count * (size if pattern == "gather" else 1)
    if kind == "own":
        assert min(counts) >= (1 if rounds else count)  # what is rounded may become 0


def test_by_the_published_rule_a_replica_keeps_what_it_sent_in_vain_and_the_rest_is_lost():
    """The residual is the gradient but for the places of the result it had sent;
    `test_nothing_is_lost` conserves."""
    updates, states = run(4, {"pattern": "tree", "conserve": False}, range(1))
    found = updates[0] + sum(state["residual"] for state in states.values())
    assert (found - sum(gradient(rank, 0) for rank in range(4))).abs().sum() > 0.1 * UNIT
    for rank, state in states.items():
        own = gradient(rank, 0)
        sent = torch.zeros(LENGTH, dtype=torch.bool)
        sent[own.abs().topk(COUNT).indices] = True
        assert_bitwise_equal(state["residual"], torch.where(sent & (updates[0] != 0), 0.0, own))


@pytest.mark.parametrize("momentum", [False, True])
def test_a_single_replica_is_the_definition_in_a_few_lines(momentum):
    """v = 0.9 v + g, or g; r = r + v; the largest of r are sent."""
    updates, states = run(1, {"pattern": "tree", "momentum": momentum})
    velocity = torch.zeros(LENGTH)
    residual = torch.zeros(LENGTH)
    for step, update in updates.items():
        velocity = 0.9 * velocity * momentum + gradient(0, step)
        residual = residual + velocity
        largest = residual.abs().topk(COUNT).indices
        expected = torch.zeros(LENGTH).index_copy_(0, largest, residual[largest])
        residual[largest] = 0
        torch.testing.assert_close(update, expected, rtol=1e-6, atol=1e-6 * UNIT)
    for name, wanted in {
        "residual": residual,
        **({"velocity": velocity} if momentum else {}),
    }.items():
        torch.testing.assert_close(states[0][name], wanted, rtol=1e-6, atol=1e-6 * UNIT)


def test_dense_steps_with_momentum_of_replicas_are_momentum_sgd():
    """Whole gradients: the update is the momentum of their sum.

    And what was kept before is sent along.
    """
    updates, states = run(2, {"density_warmup": [0.04], "density": 1.0, "momentum": True})
    velocity = torch.zeros(LENGTH)
    total = torch.zeros(LENGTH)
    expected = torch.zeros(LENGTH)
    for step, update in updates.items():
        velocity = 0.9 * velocity + gradient(0, step) + gradient(1, step)
        total = total + update
        expected = expected + velocity
        if step > 0:
            torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4 * UNIT)
        if step > 1:
            torch.testing.assert_close(update, velocity, rtol=1e-5, atol=1e-4 * UNIT)
    assert not any(state["residual"].any() for state in states.values())


@pytest.mark.parametrize(
    ("densities", "counts"),
    [([0.5, 0.1, 0.02, 0.02], [150, 30, 6, 6]), ([1e-9], [1]), ([0.999999], [LENGTH])],
)
def test_the_density_is_that_of_the_epoch(densities, counts):
    """One entry at least, and all at most."""
    updates, _ = run(2 if len(counts) > 1 else 1, {"density_warmup": densities}, range(len(counts)))
    assert [int((update != 0).sum()) for update in updates.values()] == counts


@pytest.mark.parametrize("momentum", [False, True])
def test_some_parameters_are_always_sent_whole(momentum):
    """They are what a dense exchange gives, and take no place among the others."""
    places = [(0, (1, 3)), (3, (7,)), (10, (1, 240)), (250, (50,))]
    kind = {"momentum": momentum, "places": places, "dense_1d": True, "density": 12 / 243}
    updates, states = run(3, kind)
    whole = torch.cat([torch.arange(3, 10), torch.arange(250, 300)])
    velocity = torch.zeros(LENGTH)
    for step, update in updates.items():
        velocity = 0.9 * momentum * velocity + sum(gradient(rank, step) for rank in range(3))
        torch.testing.assert_close(update[whole], velocity[whole], rtol=1e-5, atol=1e-5 * UNIT)
        assert (update.index_fill(0, whole, 0.0) != 0).sum() == 12
    assert not any(state["residual"][whole].any() for state in states.values())


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"density_warmup": [0.04, 0.04, 1.0]},
        {"pattern": "dense"},
        {"momentum": True, "places": [(0, (1, 20)), (20, (10,)), (30, (1, 270))]},
    ],
    ids=str,
)
def test_a_gradient_that_is_not_finite_changes_nothing(kind):
    """On one replica of three: all see NaN, so that the update is left out; later steps are as if
    it had not been."""
    kind = {**kind, "dense_1d": True}
    disturbed, states = run(3, kind, range(4), 1.0, ((2, 1),))
    assert disturbed[2].isnan().any()
    undisturbed, expected = run(3, kind, (0, 1, 3))
    assert_bitwise_equal({step: disturbed[step] for step in undisturbed}, undisturbed)
    assert_bitwise_equal(states, expected)


@pytest.mark.parametrize("pattern", ["tree", "dense"])
def test_what_is_kept_does_not_depend_on_the_loss_scale(pattern):
    """Powers of two: the same bits, but for the factor."""
    plain, states = run(2, {"pattern": pattern})
    scaled, others = run(2, {"pattern": pattern}, range(STEPS), 1024.0)
    assert_bitwise_equal({step: update * 1024.0 for step, update in plain.items()}, scaled)
    assert_bitwise_equal(states, others)


# Shares of stages ---------------------------------------------------------------------------------


def values_of(rank, length):
    """Even ranks, the first stage, have smaller values than the others."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(length, generator=generator) * (0.7 if rank % 2 == 0 else 1.0)


def share(rank, size, lengths, count):
    stage = rank % 2
    own = values_of(rank, lengths[stage])
    return StageShares(len(own), 2, stage, "everyone")(own, count)


@pytest.mark.parametrize("lengths", [(30_000, 20_000), (600_000, 400_000)])
def test_stages_send_as_many_as_they_have_of_the_largest(lengths):
    """Two replicas of two stages; the second pair of lengths is sampled.

    The bins are an eighth wide, and 2^18 of 400,000 values have 2 % above the threshold to within 2
    %.
    """
    count = sum(lengths) // 50
    found = threads.run(4, share, lengths, count)
    assert all(each == found[0] for each in found)
    assert sum(found[0]) == count
    both = torch.cat([values_of(rank, lengths[rank % 2]) for rank in range(4)]).abs()
    threshold = both.topk(2 * count).values[-1]
    expected = [
        (values_of(stage, lengths[stage]).abs() >= threshold).sum().item() for stage in range(2)
    ]
    assert found[0] == pytest.approx(expected, abs=0.05 * count)
    assert found[0] != [count * length // sum(lengths) for length in lengths]


@pytest.mark.parametrize(
    ("stages", "shares"),
    [
        # the largest bins come first
        ([{100: 4, 90: 50}, {95: 6}], {10: [4, 6], 7: [4, 3], 60: [54, 6]}),
        ([{0: 300}, {0: 100}], {40: [30, 10]}),  # zeros are shared by size
        ([{5: 10}, {5: 9}], {10: [5, 5]}),  # 5.26 and 4.74
        (
            [{5: 40}, {7: 40}, {3: 20}],
            {3: [1, 1, 1], 10: [1, 8, 1], 99: [40, 40, 19], 100: [40, 40, 20]},
        ),
    ],
)
def test_counts_are_divided_by_magnitude_and_no_stage_goes_without(stages, shares):
    histograms = torch.zeros(len(stages), sparse_exchange._BINS, dtype=torch.float64)
    for stage, bins in enumerate(stages):
        for place, number in bins.items():
            histograms[stage, place] = number
    for count, expected in shares.items():
        assert divided(histograms, count) == expected

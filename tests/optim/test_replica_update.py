"""What replicas add to their residuals, against the optimizers' own steps; and the sketch: linear,
with the norm."""

import pytest
import torch
from torch import nn

from optim import factory, replica_update
from optim.replica_update import Sketch
from optim.weight_state import WeightState
from parallel import sparse
from recipe.optimization import Optimizer
from tests.parallel import threads
from tests.tensors import assert_bitwise_equal

SHAPES = {
    "conv.weight": (24, 16, 3, 3),
    "conv.bias": (24,),
    "norm.weight": (24,),
    "head.weight": (10, 24),
}
STEPS = 5
DIVISOR = 256.0
LR = 0.5
LARS = {"name": "lars", "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02}
OPTIMIZERS = {
    "lars": LARS,
    "lars by momentum": {**LARS, "trust": "momentum"},
    "lars, clipped": {**LARS, "clip_norm": 5.0},
    "lars by momentum, clipped": {**LARS, "trust": "momentum", "clip_norm": 5.0},
    "lars, Nesterov": {**LARS, "nesterov": True},
    "sgd": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01},
    "sgd, Nesterov": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    "sgd, clipped": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 5.0},
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def gradients(step, replica=0):
    generator = torch.Generator().manual_seed(100 * step + replica + 1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def weights_of(section):
    """A WeightState that makes the optimizer's steps itself, and its optimizer."""
    generator = torch.Generator().manual_seed(0)
    made = {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }
    create = lambda named: factory.create(section, named, ["norm.weight"])  # noqa: E731
    options = {"rounding": "nearest", "seed": 0, "clip_norm": section.clip_norm}
    return WeightState(made.items(), create, dtype=torch.float32, **options), create(made)


def updated(state, step, measure=False):
    """The norms of an update that the state makes itself."""
    for view, value in zip(state.gradients.views, gradients(step)):
        view.copy_(value * DIVISOR)
    return state.update(step, LR, torch.tensor(DIVISOR), measure)[1]


class Replica:
    """One of several, and what it has not sent yet."""

    def __init__(self, kind, replicas=1, buckets=61, whole=()):
        section = Optimizer(**(OPTIMIZERS[kind] if isinstance(kind, str) else kind))
        self.weights, optimizer = weights_of(section)
        self.update = self.weights.create_replica_update(
            optimizer,
            clip_norm=section.clip_norm,
            buckets=buckets,
            replicas=replicas,
            add_up=add_up,
            whole=whole,
        )
        self.residual = torch.zeros_like(self.weights.flat)

    def __call__(self, values, finite=True, density=1.0):
        gradient = torch.zeros_like(self.residual)
        for view, value in zip(self.weights._layout.views(gradient), values):
            view.copy_(value * DIVISOR)
        self.update.lr = LR
        self.update(self.residual, gradient, torch.tensor(DIVISOR), torch.tensor(finite), density)


def add_up(tensor):
    sparse.distributed.all_reduce(tensor, group="replicas")


def together(rank, size, kind, buckets=61):
    """What one of several replicas is after two updates, whose weights stay."""
    made = Replica(kind, size, buckets)
    for step in range(2):
        made([value / size for value in gradients(step, rank)])
    return made


def of_the_mean(kind, size):
    """A replica alone with the mean of what the others have."""
    alone = Replica(kind)
    for step in range(2):
        alone(
            [sum(parts) / size for parts in zip(*(gradients(step, rank) for rank in range(size)))]
        )
    return alone


@every_optimizer
def test_a_replica_alone_makes_the_optimizers_steps(kind):
    """To the rounding of a few float32 operations a step; a replica alone has its norms exactly."""
    section = Optimizer(**OPTIMIZERS[kind])
    expected, _ = weights_of(section)
    replica = Replica(kind)
    for step in range(STEPS):
        updated(expected, step)
        replica(gradients(step))
        replica.weights.flat.sub_(replica.residual)
        replica.residual.zero_()
    torch.testing.assert_close(replica.weights.flat, expected.flat, rtol=0, atol=2e-6)
    assert (expected.flat - weights_of(section)[0].flat).abs().max() > 0.01


@every_optimizer
@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_the_parts_of_all_replicas_add_up_to_the_update_of_one(kind, replicas):
    """With so many buckets norms are exact to 1 % each; without a norm to rounding.

    Without the others' part, and with its own norms, a replica alone would be half off and more.
    """
    made = threads.run(replicas, together, kind, 4099)
    alone = of_the_mean(kind, replicas)
    found = sum(replica.residual for replica in made)
    expected = alone.residual
    assert (found - expected).norm() < (
        1e-6 if kind in ("sgd", "sgd, Nesterov") else 0.05
    ) * expected.norm()


def test_all_replicas_take_the_same_ratios_near_those_of_the_mean_gradient():
    made = threads.run(4, together, "lars")
    alone = of_the_mean("lars", 4)
    ratios = [replica.update._ratio for replica in made]
    assert all(torch.equal(each, ratios[0]) for each in ratios)
    assert ratios[0][1:3].tolist() == [1, 1], "those of vectors that are skipped"
    torch.testing.assert_close(ratios[0], alone.update._ratio, rtol=4 / (2 * 61) ** 0.5, atol=0)


@every_optimizer
def test_an_update_that_is_not_finite_changes_nothing(kind):
    replica = Replica(kind)
    replica(gradients(0))
    before = replica.residual.clone(), replica.update.velocity.clone()
    replica([0 * value for value in gradients(1)], finite=False)
    assert_bitwise_equal(replica.residual, before[0])
    assert_bitwise_equal(replica.update.velocity, before[1])


@pytest.mark.parametrize("kind", ["lars", "lars, clipped", "lars by momentum, clipped"])
def test_norms_are_those_of_the_mean_gradient(kind):
    """Of one replica they are exact: over all parameters, before clipping, and the ratios of those
    that have one."""
    replica = Replica(kind)
    replica(gradients(0))
    wanted = updated(weights_of(Optimizer(**OPTIMIZERS[kind]))[0], 0, measure=True)
    found = replica.update.norms(wanted._replace(gradient=torch.zeros(()), trust={}))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


# The sketch.

CPU = torch.device("cpu")
BUCKETS = 61


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
    "one column of 144": lambda: nn.functional.pad(drawn(300, 128, 1), (0, 143)).flatten(1),
    "one row of 1024": lambda: nn.functional.pad(drawn(300, 1024), (0, 9 * 1024)),
    "rank one": lambda: (drawn(300, 48, 1, seed=1) * drawn(300, 1, 1792, seed=2)).flatten(1),
    "all equal": lambda: drawn(300, 1).expand(300, 7000).contiguous(),
}


@pytest.mark.parametrize("kind", VECTORS)
def test_the_norm_is_found_to_one_over_the_root_of_twice_the_buckets(kind):
    """The error of a norm, over 300 vectors: no bias beyond 4 standard errors, and at most 1.3
    times the deviation.

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


def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches_and_of_a_vector_the_same_wherever_it_lies():
    made = Sketch([[(0, 1000)], [(1024, 77), (1152, 3000)]], BUCKETS, CPU)
    parts = [drawn(4200, seed=seed) for seed in range(5)]
    torch.testing.assert_close(made(sum(parts)), sum(map(made, parts)), rtol=0, atol=1e-4)
    moved = Sketch([[(0, 128)], [(128, 1000)]], BUCKETS, CPU)(
        torch.cat([drawn(128, seed=1), parts[0][:1000]])
    )
    assert torch.equal(moved[1], made(parts[0])[0])


def test_pieces_of_one_vector_do_not_cancel():
    """A vector of 40 equal pieces: had they equal signs, it would be 6 times too long."""
    found = Sketch([[(64 * piece, 50) for piece in range(40)]], BUCKETS, CPU)(drawn(64).repeat(40))
    assert found.norm().item() == pytest.approx(
        drawn(64)[:50].norm().item() * 40**0.5, rel=4 / (2 * BUCKETS) ** 0.5
    )


def test_vectors_may_be_longer_than_the_table_of_signs(monkeypatch):
    monkeypatch.setattr(replica_update, "_SIGNS", 1000)
    assert (norms(drawn(20, 400_000)) - 1).abs().max() < 0.4


FULL = {"lars": 9, "sgd": 9, "sgd, Nesterov": 8.1, "lars, Nesterov": 8.1}
WAITS = {1.0: 0, 0.25: 3, 0.1: 9, 0.001: 999}


@pytest.mark.parametrize(
    ("kind", "full", "density", "waits"),
    [
        # Two densities of each kind are fast: with Nesterov momentum the others.
        pytest.param(
            kind, full, density, waits, marks=pytest.mark.slow if (row + column) % 2 else ()
        )
        for row, (kind, full) in enumerate(FULL.items())
        for column, (density, waits) in enumerate(WAITS.items())
    ],
)
def test_momentum_makes_up_for_what_waiting_lacks(kind, full, density, waits):
    """One gradient, then none: in all it moves as far as at density 1, by 1 / (1 - 0.9), and on
    average 9 updates after it came, less what values wait, or at once; with Nesterov momentum,
    whose part of it k updates later is 0.9^(k + 1) but 1 + 0.9 at first, 0.9 / (1 - 0.9) - 0.9.
    What never waits is as late at any density. 200 updates leave less than 1e-7 of it."""
    replica = Replica({**OPTIMIZERS[kind], "weight_decay": 0.0}, whole=["conv.bias"])
    first = gradients(0)
    none = [torch.zeros_like(value) for value in first]
    moved = []
    for step in range(200):
        replica(none if step else first, density=density)
        moved.append(replica.residual.double())
        replica.residual = torch.zeros_like(replica.residual)
    total = sum(moved)
    by_steps = sum(step * each for step, each in enumerate(moved))
    for name, all_of_it, by_step in zip(
        SHAPES, *map(replica.weights._layout.views, (total, by_steps))
    ):
        expected = full if name == "conv.bias" else max(0, full - waits)
        torch.testing.assert_close(by_step, expected * all_of_it, rtol=1e-5, atol=1e-9)
    reference = Replica({**OPTIMIZERS[kind], "weight_decay": 0.0, "nesterov": False})
    reference(gradients(0))
    torch.testing.assert_close(total, 10 * reference.residual.double(), rtol=1e-5, atol=1e-9)

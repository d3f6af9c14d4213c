"""What replicas add to their residuals, against the optimizers' own steps and against float64."""

import pytest
import torch
from torch import nn

from optim import factory
from optim.half_weights import WeightState
from parallel import sparse
from recipe.optimization import Optimizer
from tests.parallel import threads
from tests.tensors import assert_bitwise_equal

SHAPES = {"conv.weight": (24, 16, 3, 3), "conv.bias": (24,), "norm.weight": (24,), "head.weight": (10, 24)}
STEPS, DIVISOR, LR = 5, 256.0, 0.5
LARS = {"name": "lars", "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02}
OPTIMIZERS = {
    "lars": LARS,
    "lars by momentum": {**LARS, "trust": "momentum"},
    "lars, clipped": {**LARS, "clip_norm": 5.0},
    "lars by momentum, clipped": {**LARS, "trust": "momentum", "clip_norm": 5.0},
    "sgd": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01},
    "sgd, clipped": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 5.0},
}
TRUE = torch.tensor(True)


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step, replica=0):
    generator = torch.Generator().manual_seed(100 * step + replica + 1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def weights_of(section):
    """A WeightState that makes the optimizer's steps itself, and its optimizer."""
    made = parameters()
    create = lambda named: factory.create(section, named, ["norm.weight"])  # noqa: E731
    state = WeightState(
        made.items(), create, dtype=torch.float32, rounding="nearest", seed=0, clip_norm=section.clip_norm
    )
    return state, create(made)


class Replica:
    """One of several, and what it has not sent yet."""

    def __init__(self, kind, replicas=1, buckets=61):
        section = Optimizer(**OPTIMIZERS[kind])
        self.weights, optimizer = weights_of(section)
        self.update = self.weights.replica_update(
            optimizer, clip_norm=section.clip_norm, buckets=buckets, replicas=replicas, add_up=add_up
        )
        self.residual = torch.zeros_like(self.weights.flat)

    def __call__(self, values, finite=TRUE):
        gradient = torch.zeros_like(self.residual)
        for view, value in zip(self.weights._layout.views(gradient), values):
            view.copy_(value * DIVISOR)
        self.update.lr = LR
        self.update(self.residual, gradient, torch.tensor(DIVISOR), finite)


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
        alone([sum(parts) / size for parts in zip(*(gradients(step, rank) for rank in range(size)))])
    return alone


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_replica_alone_makes_the_optimizers_steps(kind):
    """To the rounding of a few float32 operations a step; a replica alone has its norms exactly."""
    section = Optimizer(**OPTIMIZERS[kind])
    expected, _ = weights_of(section)
    replica = Replica(kind)
    for step in range(STEPS):
        for view, value in zip(expected.gradients.views, gradients(step)):
            view.copy_(value * DIVISOR)
        expected.update(step, LR, torch.tensor(DIVISOR), measure=False)
        replica(gradients(step))
        replica.weights.flat.sub_(replica.residual)
        replica.residual.zero_()
    torch.testing.assert_close(replica.weights.flat, expected.flat, rtol=0, atol=2e-6)
    assert (expected.flat - weights_of(section)[0].flat).abs().max() > 0.01


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("replicas", [2, 5])
def test_the_parts_of_all_replicas_add_up_to_the_update_of_one(kind, replicas):
    """With so many buckets norms are exact to 1 % each; without a norm to rounding. Without the others' part, and with
    its own norms, a replica alone would be half off and more."""
    made, alone = threads.run(replicas, together, kind, 4099), of_the_mean(kind, replicas)
    found, expected = sum(replica.residual for replica in made), alone.residual
    assert (found - expected).norm() < (1e-6 if kind == "sgd" else 0.05) * expected.norm()


def test_all_replicas_take_the_same_ratios_near_those_of_the_mean_gradient():
    made, alone = threads.run(4, together, "lars"), of_the_mean("lars", 4)
    ratios = [replica.update._ratio for replica in made]
    assert all(torch.equal(each, ratios[0]) for each in ratios)
    assert ratios[0][1:3].tolist() == [1, 1], "those of vectors that are skipped"
    torch.testing.assert_close(ratios[0], alone.update._ratio, rtol=4 / (2 * 61) ** 0.5, atol=0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_update_that_is_not_finite_changes_nothing(kind):
    replica = Replica(kind)
    replica(gradients(0))
    residual, velocity = replica.residual.clone(), replica.update.velocity.clone()
    replica([0 * value for value in gradients(1)], finite=torch.tensor(False))
    assert_bitwise_equal(replica.residual, residual)
    assert_bitwise_equal(replica.update.velocity, velocity)


def test_norms_are_those_of_the_mean_gradient():
    """Of one replica they are exact: over all parameters, and the ratios of those that have one."""
    replica = Replica("lars")
    replica(gradients(0))
    expected, _ = weights_of(Optimizer(**LARS))
    for view, value in zip(expected.gradients.views, gradients(0)):
        view.copy_(value * DIVISOR)
    _, wanted = expected.update(0, LR, torch.tensor(DIVISOR), measure=True)
    found = replica.update.norms(wanted._replace(gradient=torch.zeros(()), trust={}))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)

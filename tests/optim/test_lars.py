"""LARS against float64 loops written from its formulas, against timm, and against LAMB with beta2 = 1."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timm.optim import Lars
from torch import nn

from optim.lars import LARS
from tests.optim.states import lars_step

FORMS = ["gradient", "momentum"]
STEPS = 60
SHAPES = {"conv": (8, 4, 3, 3), "large": (40, 25), "vector": (12,), "plain": (7, 5), "bias": (9,)}
ADAPTED = SimpleNamespace(names=["conv", "large"], adapt=True, decay=0.01, lr_scale=1.0)
ADAPTED_SLOWLY = SimpleNamespace(names=["vector"], adapt=True, decay=0.0, lr_scale=0.3)
SKIPPED = SimpleNamespace(names=["plain"], adapt=False, decay=0.0, lr_scale=1.0)
SKIPPED_SLOWLY = SimpleNamespace(names=["bias"], adapt=False, decay=0.0, lr_scale=0.01)
GROUPS = [ADAPTED, ADAPTED_SLOWLY, SKIPPED, SKIPPED_SLOWLY]
GROUP_OF = {name: group for group in GROUPS for name in group.names}


def varying(step):
    """Up by a factor of twenty, then down: momentum with and without the rate inside part ways."""
    return 0.4 * (step + 1) if step < 20 else 8.0 * ((STEPS - step) / 40) ** 2


def initial():
    random = np.random.RandomState(0)
    return {name: random.randn(*shape).astype(np.float32) for name, shape in SHAPES.items()}


def drawn_gradients(step):
    """Magnitudes far apart, as between layers. Small for the skipped, whose step no trust ratio bounds."""
    random = np.random.RandomState(1 + step)
    size = {"conv": 1e-4, "large": 30.0, "vector": 1.0, "plain": 1e-3, "bias": 1e-3}
    return {name: (size[name] * random.randn(*shape)).astype(np.float32) for name, shape in SHAPES.items()}


def as_parameters(arrays):
    return {name: nn.Parameter(torch.tensor(array)) for name, array in arrays.items()}


def optimizer_of(parameters, trust, **options):
    groups = [
        {
            "params": [parameters[name] for name in group.names],
            "weight_decay": group.decay,
            "adapt": group.adapt,
            "lr_scale": group.lr_scale,
        }
        for group in GROUPS
    ]
    return LARS(groups, lr=0.0, momentum=0.885, trust_coefficient=0.01, trust=trust, **options)


def take_steps(optimizer, parameters, rate=varying):
    """Gradients are read and not changed, to the bit."""
    for step in range(STEPS):
        gradients = drawn_gradients(step)
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradients[name])
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        assert all(np.array_equal(parameters[name].grad.numpy(), each) for name, each in gradients.items())


def distance(actual, expected):
    actual = actual.detach().double().numpy()
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("eps", [0.0, 0.1])
@pytest.mark.parametrize("trust", FORMS)
def test_both_forms_follow_their_formulas_at_a_varying_rate(trust, eps):
    """Each float32 step errs by a few 2**-24 of the weights' norm, and momentum carries on errors by at most
    1 / (1 - 0.885) = 8.7: 60 * 8.7 * 2**-24 = 3e-5 if all errors were aligned, a tenth of it as they are not.
    The weights travel: a step off by a thousandth would be seen."""
    parameters = as_parameters(initial())
    optimizer = optimizer_of(parameters, trust, eps=eps)
    take_steps(optimizer, parameters)
    for name, start in initial().items():
        group, w, m = GROUP_OF[name], start.astype(np.float64), np.zeros(SHAPES[name])
        for step in range(STEPS):
            g, lr = drawn_gradients(step)[name].astype(np.float64), varying(step) * group.lr_scale
            w, m, ratio = lars_step(trust, w, g, m, lr, group.decay, group.adapt, eps=eps)
        parameter = parameters[name]
        assert np.linalg.norm(w - start) / np.linalg.norm(w) > 1e-3
        assert distance(parameter, w) < 4e-6
        assert distance(optimizer.state[parameter]["momentum_buffer"], m) < 4e-6
        assert (parameter in optimizer.trust_ratios) == group.adapt
        if group.adapt:
            assert optimizer.trust_ratios[parameter].item() == pytest.approx(ratio, rel=4e-6)


def test_at_a_constant_rate_the_published_form_is_timms():
    """The rate inside the momentum buffer or before it is then the same, as is the skipping of groups without
    weight decay, which timm decides by itself. Both are float32: tolerance as against float64, twice."""
    groups = [ADAPTED, SKIPPED]
    ours, theirs = as_parameters(initial()), as_parameters(initial())
    take_steps(optimizer_of(ours, "gradient", eps=1e-8), ours, rate=lambda step: 2.0)
    peer = Lars(
        [{"params": [theirs[name] for name in group.names], "weight_decay": group.decay} for group in groups],
        lr=2.0,
        momentum=0.885,
        trust_coeff=0.01,
        eps=1e-8,
    )
    for step in range(STEPS):
        for name, gradient in drawn_gradients(step).items():
            theirs[name].grad = torch.tensor(gradient)
        peer.step()
    for group in groups:
        for name in group.names:
            assert distance(ours[name], theirs[name].detach().double().numpy()) < 8e-6


@pytest.mark.parametrize("eps", [1.0, 2.0**-8])
def test_the_momentum_form_is_lamb_with_beta2_of_one(eps):
    """PopART's LAMB in float64: with beta2 = 1 the second moment stays 0, the trust ratio cancels epsilon, and a
    maximal weight norm of 0 turns the ratio off. Tolerance as for the formulas."""
    parameters = as_parameters(initial())
    take_steps(optimizer_of(parameters, "momentum"), parameters)
    beta1, beta2, eta = 0.885, 1.0, 0.01
    for name, group in GROUP_OF.items():
        max_weight_norm = np.inf if group.adapt else 0.0
        w = initial()[name].astype(np.float64)
        first, second = np.zeros_like(w), np.zeros_like(w)
        for step in range(STEPS):
            g = drawn_gradients(step)[name].astype(np.float64)
            first = beta1 * first + (1 - beta1) * g
            second = beta2 * second + (1 - beta2) * g**2
            u = first / (np.sqrt(second) + eps) + group.decay / eps * w
            r1, r2 = min(np.linalg.norm(w), max_weight_norm), np.linalg.norm(u)
            ratio = r1 / r2 if r1 and r2 else 1.0
            lr = varying(step) * group.lr_scale * (eta if group.adapt else eps / (1 - beta1))
            w = w - lr * ratio * u
        assert not second.any()
        assert distance(parameters[name], w) < 4e-6


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize(("w", "g"), [(0.0, 0.0), (0.0, 2.0), (3.0, 0.0)], ids=["both", "weights", "gradient"])
@pytest.mark.parametrize(("trust", "without_norm"), [("gradient", 1.0), ("momentum", 0.25)])
def test_where_a_norm_is_zero_the_ratio_is_the_documented_one(trust, without_norm, w, g, decay):
    """Powers of two and small integers: exact. With weight decay the second form has a direction without a gradient."""
    weight, bare = nn.Parameter(torch.full((4,), w)), nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), g)
    optimizer = LARS([weight, bare], lr=0.5, momentum=0.5, weight_decay=decay, trust_coefficient=0.25, trust=trust)
    optimizer.step()
    ratio = 0.25 / decay if trust == "momentum" and w and decay else without_norm
    direction = (g if trust == "gradient" else 0.5 * g) + decay * w
    assert optimizer.trust_ratios[weight].item() == ratio
    assert weight.tolist() == [w - 0.5 * ratio * direction] * 4
    assert bare.tolist() == [1.0] * 4  # has no gradient


@pytest.mark.parametrize(
    ("count", "w", "g"),
    [(1 << 20, 80.0, 2.0**-10), (1 << 20, 2.0**-10, 80.0), (3, 2.0**-24, 2.0**-24)],
    ids=["weights overflow", "gradients overflow", "both underflow"],
)
@pytest.mark.parametrize("trust", FORMS)
def test_norms_are_taken_in_float32(trust, count, w, g):
    """In float16 the norm of a million 80s is infinite, and that of three smallest numbers is 15 % off. The
    norms are exact to a few 2**-24; the direction of the second form, (1 - 0.5) g, is exact in float16's steps
    because momentum is float32."""
    weight = nn.Parameter(torch.full((count,), w, dtype=torch.float16))
    weight.grad = torch.full((count,), g, dtype=torch.float16)
    optimizer = LARS([weight], lr=0.0, momentum=0.5, trust_coefficient=1.0, trust=trust)
    optimizer.step()
    direction = g if trust == "gradient" else 0.5 * g
    assert optimizer.trust_ratios[weight].dtype == torch.float32
    assert optimizer.trust_ratios[weight].item() == pytest.approx(w / direction, rel=2**-20)
    assert optimizer.state[weight]["momentum_buffer"].dtype == torch.float32

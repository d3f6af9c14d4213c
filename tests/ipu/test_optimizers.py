"""Optimizers on IPUs: PopART's equations, as the double has them, step as this repository's optimizers do on a CPU.

Gradients enter them times the loss scale, summed over micro batches. Both sides are computed in float64.
"""

import pytest
import torch

from optim import factory
from recipe import ipu
from recipe.loading import load
from tests.conftest import QUICKSTART

pytestmark = pytest.mark.ipu

MICRO_BATCHES, STEPS = 8, 40
FULL = ("precision.weights=float32", "precision.compute=float32")


def recipe(*overrides):
    named = any(text.startswith("optimizer.name") for text in overrides)
    trust = () if named else ("optimizer.trust=momentum",)
    return load(QUICKSTART, ["run.device=ipu", *trust, *overrides])


def parameters():
    torch.manual_seed(0)
    shapes = {
        "conv.weight": (12, 5),
        "conv.bias": (12,),
        "norm.weight": (12,),
        "norm.bias": (12,),
        "out.weight": (3, 12),
    }
    return {name: torch.nn.Parameter(0.1 * torch.randn(shape) + 0.5) for name, shape in shapes.items()}


def rates():
    """A warm-up and a decay, so that it matters whether the rate is in the momentum."""
    return [0.4 * min(1, (step + 1) / 10) * (1 - step / STEPS) ** 2 for step in range(STEPS)]


def largest_difference(poptorch, made):
    """Between our optimizer and PopART's after STEPS updates, relative to how far each tensor went. PopART's computes
    without rounding, from gradients times the loss scale, summed over micro batches."""
    from poptorch import updates

    ours, norms, plan = parameters(), {"norm.weight", "norm.bias"}, ipu.optimizer(made)
    before = {name: parameter.detach().clone() for name, parameter in ours.items()}
    optimizer = factory.create(made.optimizer, ours, norms)
    for parameter in ours.values():
        optimizer.state[parameter] = {
            name: torch.full_like(parameter, slot.initial) for name, slot in optimizer.slots.items()
        }
    skipped = factory.skipped_names(made.optimizer, ours, norms)
    assert skipped == {"conv.bias", "norm.weight", "norm.bias"}
    theirs = {name: parameter.detach().double() for name, parameter in ours.items()}
    options = {name: value for name, value in plan.options.items() if not isinstance(value, ipu.Name)}
    members = [
        {"params": [theirs[name] for name in theirs if (name in skipped) == group.skipped], **group.options}
        for group in plan.groups
    ]
    device = getattr(poptorch.optim, plan.name)(members, lr=1.0, **options)
    places = {name: [group.skipped for group in plan.groups].index(name in skipped) for name in theirs}
    groups = {name: device.param_groups[place] for name, place in places.items()}
    types = dict.fromkeys(device.types, torch.float64)
    states = {
        name: updates.new_state(plan.name, groups[name], types, device.bias_correction, theirs[name]) for name in theirs
    }
    random = torch.Generator().manual_seed(1)
    for step, lr in enumerate(rates()):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, parameter in ours.items():
            parts = 0.1 * torch.randn(MICRO_BATCHES, *parameter.shape, generator=random) + 0.05
            parameter.grad = parts.mean(0)
            summed = made.precision.loss_scale * parts.double().sum(0)
            values = {**groups[name], "lr": lr * plan.groups[places[name]].lr_scale}
            gradient = summed / (device.loss_scaling * MICRO_BATCHES)
            updates.apply(plan.name, values, theirs[name], gradient, states[name], updates.nearest)
        optimizer.at_step(step)
        optimizer.step()
    return max(
        ((ours[name].detach() - theirs[name]).norm() / (theirs[name] - before[name]).norm()).item() for name in ours
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer.trust_coefficient=0.05", "optimizer.weight_decay=0.01", "optimizer.skip_lr_scale=0.3"),
        ("optimizer.trust_coefficient=0.05", "optimizer.weight_decay=0", "optimizer.momentum=0"),
        ("optimizer.name=lamb", "optimizer.weight_decay=0.05"),
        ("optimizer.name=sgd", "optimizer.weight_decay=0.01"),
        ("optimizer.name=sgd", "optimizer.momentum=0"),
        ("optimizer.name=rmsprop", "optimizer.weight_decay=0.01"),
        ("optimizer.name=rmsprop", "optimizer.momentum=0"),
    ],
)
@pytest.mark.parametrize("numbers", [FULL, ()], ids=["float32", "float16"])
def test_popart_steps_as_we_do(double, overrides, numbers):
    """Ours adds in float32, to weights of 0.5 steps of 1e-3 and less: each is rounded to 1e-4 of itself at most."""
    assert largest_difference(double, recipe(*overrides, *numbers)) < 1e-4


def test_an_epsilon_of_a_256th_keeps_small_momenta_in_float16():
    """PopART forms m / eps + wd / eps w in float16. At m = 1e-6 float16 has steps of 6e-8, at 256e-6 of 1.2e-7."""
    half, m = torch.float16, torch.full((4096,), 1e-6).uniform_(0.5e-6, 1.5e-6)
    errors = {}
    for eps in (1.0, ipu.optimizer(recipe()).options["eps"]):
        stored = (m / eps).to(half).float() * eps
        errors[eps] = ((stored - m).norm() / m.norm()).item()
    assert errors[1.0] > 0.01 and errors[2.0**-8] < 0.0005


@pytest.mark.parametrize("name", ["lars", "sgd", "rmsprop", "lamb"])
def test_sums_are_float32_and_constants_are_compiled_in(name):
    """The learning rate is neither an option of the constructor here nor constant: it changes with every update."""
    made = recipe(f"optimizer.name={name}", *(["optimizer.trust=momentum"] if name == "lars" else []))
    plan = ipu.optimizer(made)
    assert plan.options["accum_type"] == ipu.Name("torch.float")
    assert plan.options["loss_scaling"] == made.precision.loss_scale
    assert "lr" not in plan.options and "lr" not in plan.constant and "loss_scaling" in plan.constant
    assert set(plan.constant) <= set(plan.options)
    # PopART refuses automatic loss scaling where the scale is constant (automaticlossscaling.cpp).
    assert name != "lars" or "loss_scaling" not in ipu.optimizer(recipe("precision.dynamic_loss_scale=true")).constant
    if name in ("sgd", "rmsprop"):
        # PopTorch takes what is not given for a constant 0 (PopTorch 3.4, python/optim.py).
        assert "momentum" not in ipu.optimizer(recipe(f"optimizer.name={name}", "optimizer.momentum=0")).options

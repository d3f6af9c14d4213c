"""Optimizers on IPUs as plans; tests/ipu/test_engine.py has that they step as this repository's on
a CPU."""

import pytest
import torch

from recipe.ipu import optimizers
from recipe.loading import load
from tests.conftest import QUICKSTART

pytestmark = pytest.mark.ipu


def recipe(*overrides):
    named = any(text.startswith("optimizer.name") for text in overrides)
    trust = () if named else ("optimizer.trust=momentum",)
    return load(QUICKSTART, ["run.device=ipu", *trust, *overrides])


def test_an_epsilon_of_a_256th_keeps_small_momenta_in_float16():
    """PopART forms m / eps + wd / eps w in float16.

    At m = 1e-6 float16 has steps of 6e-8, at 256e-6 of 1.2e-7.
    """
    half = torch.float16
    m = torch.full((4096,), 1e-6).uniform_(0.5e-6, 1.5e-6)
    errors = {}
    for eps in (1.0, optimizers.optimizer(recipe()).options["eps"]):
        stored = (m / eps).to(half).float() * eps
        errors[eps] = ((stored - m).norm() / m.norm()).item()
    assert errors[1.0] > 0.01 and errors[2.0**-8] < 0.0005


@pytest.mark.parametrize("name", ["lars", "sgd", "rmsprop", "lamb"])
def test_sums_are_float32_and_constants_are_compiled_in(name):
    """The learning rate is neither an option of the constructor here nor constant: it changes with
    every update."""
    made = recipe(
        f"optimizer.name={name}", *(["optimizer.trust=momentum"] if name == "lars" else [])
    )
    plan = optimizers.optimizer(made)
    assert plan.options["accum_type"] == optimizers.Name("torch.float")
    assert plan.options["loss_scaling"] == made.precision.loss_scale
    assert (
        "lr" not in plan.options and "lr" not in plan.constant and "loss_scaling" in plan.constant
    )
    assert set(plan.constant) <= set(plan.options)
    # PopART refuses automatic loss scaling where the scale is constant (automaticlossscaling.cpp).
    assert (
        name != "lars"
        or "loss_scaling"
        not in optimizers.optimizer(recipe("precision.dynamic_loss_scale=true")).constant
    )
    if name == "lars":
        # m / eps + wd / eps w, whose eps the trust ratio cancels; where there is none, the rate does
        half = plan
        full = optimizers.optimizer(
            recipe("precision.weights=float32", "precision.compute=float32")
        )
        eps, (adapted, skipped), (expected, plain) = half.options["eps"], half.groups, full.groups
        assert (
            full.options["eps"] == 1
            and eps * adapted.options["weight_decay"] == expected.options["weight_decay"]
        )
        assert adapted.lr_scale == expected.lr_scale and skipped.lr_scale == pytest.approx(
            eps * plain.lr_scale
        )
    if name in ("sgd", "rmsprop"):
        # PopTorch takes what is not given for a constant 0 (PopTorch 3.4, python/optim.py).
        assert (
            "momentum"
            not in optimizers.optimizer(
                recipe(f"optimizer.name={name}", "optimizer.momentum=0")
            ).options
        )

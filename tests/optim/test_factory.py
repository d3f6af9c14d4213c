"""Which parameters get trust ratio and weight decay, and that the recipe's numbers arrive."""

import numpy as np
import pytest
import torch
from torch import nn

from optim import factory
from optim.controls import SGD, Lamb, RMSprop
from recipe.config import Optimizer

NORMS = ["block.norm.weight", "block.norm.bias"]
NAMES = ["stem.weight", "block.norm.weight", "block.norm.bias", "block.biased.weight", "head.weight", "head.bias"]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(3, 4, generator=generator)) for name in NAMES}


def skipped_by(**section):
    """Names in the group without trust ratio, after a look that the two groups share out the parameters."""
    named = parameters()
    optimizer = factory.create(Optimizer(**section), named, NORMS)
    names = {parameter: name for name, parameter in named.items()}
    groups = {True: [], False: []}
    for group in optimizer.param_groups:
        groups[group["adapt"]].extend(names[parameter] for parameter in group["params"])
    assert sorted(groups[True] + groups[False]) == sorted(NAMES)
    return groups[False]


def test_the_published_recipe_skips_all_biases_and_the_scales_of_norms():
    assert skipped_by() == ["block.norm.weight", "block.norm.bias", "head.bias"]


def test_bias_covers_the_biases_of_norms():
    assert skipped_by(skip=["bias"]) == ["block.norm.bias", "head.bias"]


def test_norm_covers_only_the_scales_of_norms():
    assert skipped_by(skip=["norm"]) == ["block.norm.weight"]


def test_an_empty_skip_list_adapts_everything():
    assert skipped_by(skip=[]) == []


@pytest.mark.parametrize("name", ["bias", "a.bias"])
def test_a_bias_is_known_by_the_last_part_of_its_name(name):
    section = Optimizer(skip=["bias"])
    assert factory.skipped_names(section, [name, "bias.weight", "a.unbias", "bias.a"], []) == {name}


def test_a_model_of_biases_only_is_one_group():
    optimizer = factory.create(Optimizer(), {"bias": nn.Parameter(torch.ones(2))}, [])
    assert [group["adapt"] for group in optimizer.param_groups] == [False]


def test_the_numbers_of_the_section_arrive_in_the_groups():
    section = Optimizer(
        momentum=0.8, weight_decay=3e-4, trust_coefficient=0.02, trust="momentum", eps=1e-6, skip_lr_scale=0.25
    )
    optimizer = factory.create(section, parameters(), NORMS)
    adapted, skipped = optimizer.param_groups
    for group in (adapted, skipped):
        assert (group["momentum"], group["trust_coefficient"], group["eps"]) == (0.8, 0.02, 1e-6)
    assert (adapted["adapt"], adapted["weight_decay"], adapted["lr_scale"]) == (True, 3e-4, 1.0)
    assert (skipped["adapt"], skipped["weight_decay"], skipped["lr_scale"]) == (False, 0.0, 0.25)
    assert optimizer.trust == "momentum"


CONTROLS = {"sgd": SGD, "rmsprop": RMSprop, "lamb": Lamb}


@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("skip", [["bias", "norm"], ["bias"], ["norm"], []], ids=str)
def test_a_control_skips_the_same_parameters(name, skip):
    """Of weight decay; of LAMB's trust ratio too."""
    named = parameters()
    optimizer = factory.create(Optimizer(name=name, weight_decay=0.5, skip=skip), named, NORMS)
    assert type(optimizer) is CONTROLS[name]
    names = {parameter: name for name, parameter in named.items()}
    found = {}
    for group in optimizer.param_groups:
        found.update({names[parameter]: group for parameter in group["params"]})
    assert found.keys() == set(NAMES)
    skipped = skipped_by(skip=skip)
    for key, group in found.items():
        assert group["weight_decay"] == (0.0 if key in skipped else 0.5)
        if name == "lamb":
            assert group["always_adapt"] is (key not in skipped)


@pytest.mark.parametrize(
    ("section", "numbers"),
    [
        (
            {"name": "sgd", "momentum": 0.7, "nesterov": True},
            {"momentum": 0.7, "nesterov": True, "dampening": 0, "maximize": False},
        ),
        ({"name": "sgd"}, {"momentum": 0.9, "nesterov": False}),
        (
            {"name": "rmsprop", "momentum": 0.7, "alpha": 0.8, "eps": 0.25},
            {"momentum": 0.7, "alpha": 0.8, "eps": 0.25, "lr_in_momentum": True, "centered": False},
        ),
        ({"name": "rmsprop"}, {"momentum": 0.9, "alpha": 0.9, "eps": 1e-3}),
        (
            {"name": "lamb", "beta1": 0.7, "beta2": 0.8, "eps": 0.25},
            {"betas": (0.7, 0.8), "eps": 0.25, "bias_correction": True, "trust_clip": False, "grad_averaging": True},
        ),
        ({"name": "lamb"}, {"betas": (0.9, 0.999), "eps": 1e-6, "max_grad_norm": None, "decoupled_decay": False}),
    ],
    ids=str,
)
def test_the_numbers_of_a_control_arrive_in_its_groups(section, numbers):
    optimizer = factory.create(Optimizer(**section), parameters(), NORMS)
    assert len(optimizer.param_groups) == 2
    for group in optimizer.param_groups:
        assert {key: group[key] for key in numbers} == numbers


def test_the_defaults_take_the_published_steps():
    """Two updates of the TensorFlow 1 recipe, whose constants stand below, in float64.

    A float32 update errs by a few 2**-24 of the largest weight, 3.
    """
    named = parameters()
    expected = {name: parameter.detach().numpy().astype(np.float64) for name, parameter in named.items()}
    momentum = {name: np.zeros((3, 4)) for name in named}
    optimizer = factory.create(Optimizer(), named, NORMS)
    random = np.random.RandomState(1)
    for lr in (8.485, 2.0):
        for name, parameter in named.items():
            w, g = expected[name], random.randn(3, 4).astype(np.float32).astype(np.float64)
            parameter.grad = torch.from_numpy(g.astype(np.float32))
            if name in ("stem.weight", "block.biased.weight", "head.weight"):
                trust = 0.001 * np.linalg.norm(w) / (np.linalg.norm(g) + 2.5e-6 * np.linalg.norm(w))
                g = trust * (g + 2.5e-6 * w)
            momentum[name] = 0.885 * momentum[name] + lr * g
            expected[name] = w - momentum[name]
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    for name, parameter in named.items():
        scale = np.abs(momentum[name]).max() + 3
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=0, atol=8 * 2**-24 * scale)

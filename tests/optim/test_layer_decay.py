"""Learning rates that decay with the distance from the classifier: timm's scales, for every
optimizer."""

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay

from models.families import depths, timm_name
from models.meta import without_memory
from optim import factory
from optim.weight_state import WeightState
from recipe.config import Model, Optimizer
from tests.optim.states import FORMATS, HIDDEN, SECTIONS, SHAPES, module_parameters, rate, take_step

DECAY = 0.75
# By depth, of which 1 has two parameters, one of them skipped.
DEPTHS = {"conv.weight": 0, "norm.weight": 1, "head.weight": 1, "head.bias": 3}


def of_timm(architecture):
    return {"name": "timm", "architecture": architecture}


@pytest.mark.parametrize(
    ("section", "theirs"),
    [
        (
            {"name": "efficientnet_b0", "norm": "batch", "group_size": 1, "expansion": 6},
            "tf_efficientnet_b0",
        ),
        pytest.param(
            {"name": "efficientnet_b2", "norm": "batch", "group_size": 1, "expansion": 6},
            "efficientnet_b2",
            marks=pytest.mark.slow,
        ),
        (of_timm("vit_tiny_patch16_224"), "vit_tiny_patch16_224"),
        pytest.param(of_timm("convnext_atto"), "convnext_atto", marks=pytest.mark.slow),
        (of_timm("resnet18"), "resnet18"),
        pytest.param(
            of_timm("tf_efficientnetv2_b0"), "tf_efficientnetv2_b0", marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rates_are_those_of_timm(section, theirs):
    """Exactly: both are powers of the same number."""
    if section["name"] == "timm":
        pytest.importorskip("torch.utils.flop_counter", reason="models of timm need torch 2.1")
    section = Model(**section, classes=1000)
    with without_memory():
        model = timm.create_model(theirs)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {}
    for group in param_groups_layer_decay(model, layer_decay=DECAY):
        expected.update({names[id(parameter)]: group["lr_scale"] for parameter in group["params"]})
    found = depths(section)
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in found}
    optimizer = factory.create(
        Optimizer(name="sgd", skip=[], layer_decay=DECAY),
        parameters,
        norm_parameters=(),
        depths=found,
    )
    of_parameter = {
        id(each): group["lr_scale"] for group in optimizer.param_groups for each in group["params"]
    }
    assert {
        timm_name(section, name): of_parameter[id(each)] for name, each in parameters.items()
    } == expected
    assert len(set(expected.values())) > 5 and max(expected.values()) == 1.0


def state(parameters, section, dtype, rounding):
    return WeightState(
        parameters.items(),
        lambda named: factory.create(Optimizer(**section), named, ["norm.weight"], HIDDEN, DEPTHS),
        dtype=dtype,
        rounding=rounding,
        seed=3,
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "rounding", "compute"),
    [
        # LARS and LAMB, with and without OptimizerUpdate, are fast in all formats, each other
        # optimizer in one.
        pytest.param(
            kind,
            *form,
            marks=() if kind in ("lars", "lamb") or number == place % 5 else pytest.mark.slow,
        )
        for place, kind in enumerate(SECTIONS)
        for number, form in enumerate(FORMATS)
    ],
)
def test_each_parameter_steps_as_at_its_own_rate(kind, dtype, rounding, compute):
    """To the bit: the rate is all that differs. Gradients of a parameter depend on no other one."""
    section = SECTIONS[kind]
    parameters = module_parameters(compute)
    decayed = state(parameters, {**section, "layer_decay": DECAY}, dtype, rounding)
    found = []
    for step in range(1, 5):
        take_step(decayed, parameters, step)
        found.append(decayed.state_dict())
    for depth in set(DEPTHS.values()):
        parameters = module_parameters(compute)
        plain = state(parameters, section, dtype, rounding)
        for step in range(1, 5):
            take_step(plain, parameters, step, lr=rate(step) * DECAY ** (3 - depth))
            for slot, tensors in plain.state_dict().items():
                for name in (name for name in SHAPES if DEPTHS[name] == depth):
                    assert_near(found[step - 1][slot][name], tensors[name])


def assert_near(found, expected):
    """Rates are products of three factors in another order, rounded in float64, then to float32:
    one unit apart."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=3 * torch.finfo(found.dtype).eps, atol=1e-7)


@pytest.mark.parametrize("kind", SECTIONS)
def test_without_decay_no_bit_changes(kind):
    states = []
    for section in (SECTIONS[kind], {**SECTIONS[kind], "layer_decay": 1.0}):
        parameters = module_parameters()
        one = state(parameters, section, torch.float32, "nearest")
        for step in range(1, 4):
            take_step(one, parameters, step)
        states.append(one.state_dict())
    for slot, tensors in states[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(states[1][slot][name], tensor), (slot, name)

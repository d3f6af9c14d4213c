"""The optimizers of recipes: against the libraries' own and loops in float64; which parameters are skipped."""

import numpy as np
import pytest
import timm.optim
import torch
from torch import nn

from optim import factory
from optim.adamw import AdamW
from optim.lamb import Lamb
from optim.lars import LARS
from optim.rmsprop import RMSprop
from optim.sgd import SGD
from recipe.config import Optimizer
from tests.optim import states
from tests.optim.states import CONTROLS, SHAPES, SKIPPED, lars_step, random_values, rate, take_step, weight_state

STEPS = 24
KINDS = {"sgd": SGD, "rmsprop": RMSprop, "lamb": Lamb, "adamw": AdamW, "lars": LARS}
every_control = pytest.mark.parametrize("section", CONTROLS.values(), ids=CONTROLS)


def library_optimizer(section, parameters, foreach):
    """As its authors' users make it."""
    usual = [parameter for name, parameter in parameters.items() if name not in SKIPPED]
    decay, momentum = section["weight_decay"], section.get("momentum")
    groups = [{"params": usual}, {"params": [parameters[name] for name in SKIPPED], "weight_decay": 0.0}]
    if section["name"] == "sgd":
        nesterov = section.get("nesterov", False)
        optimizer = torch.optim.SGD(groups, 0.0, momentum=momentum, weight_decay=decay, nesterov=nesterov)
    elif section["name"] == "rmsprop":
        options = {"alpha": section["alpha"], "eps": section["eps"], "momentum": momentum}
        optimizer = timm.optim.RMSpropTF(groups, 0.0, weight_decay=decay, **options)
    else:
        options = {"betas": (section["beta1"], section["beta2"]), "eps": section["eps"], "weight_decay": decay}
        if section["name"] == "lamb":
            groups[0]["always_adapt"] = True
            optimizer = timm.optim.Lamb(groups, 0.0, max_grad_norm=None, **options)
        else:
            optimizer = torch.optim.AdamW(groups, 0.0, **options)
    for group in optimizer.param_groups:
        group["foreach"] = foreach
    return optimizer


@pytest.mark.parametrize("foreach", [False, True], ids=["tensor by tensor", "all at once"])
@every_control
def test_in_float32_a_control_takes_the_steps_of_the_library_bitwise(section, foreach):
    """The same operations in the same order, although the library starts its own state. The norm is that of the
    gradients that came, whatever the optimizer leaves in them: of float32 sums, to a few 2**-24."""
    parameters, others = states.module_parameters(), states.module_parameters()
    state = weight_state(parameters, section, torch.float32, foreach=foreach)
    optimizer = library_optimizer(section, others, foreach)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        states.loss(others, step).backward()
        expected = np.sqrt(sum((other.grad.double() ** 2).sum().item() for other in others.values()))
        optimizer.step()
        _, norms = take_step(state, parameters, step)
        assert norms.gradient.item() == pytest.approx(expected, rel=1e-6)
        for name, other in others.items():
            assert torch.equal(parameters[name], other), (step, name)
    found = state.state_dict()
    for slot in states.slots_of(section):
        for name, other in others.items():
            assert torch.equal(found[slot][name], optimizer.state[other][slot]), (slot, name)


def sgd_step(w, g, lr, t, m, section, decay, adapt):
    g = g + decay * w
    m["first"] = section["momentum"] * m.get("first", 0) + g
    direction = g + section["momentum"] * m["first"] if section.get("nesterov") else m["first"]
    return w - lr * direction


def rmsprop_step(w, g, lr, t, m, section, decay, adapt):
    g = g + decay * w
    m["second"] = section["alpha"] * m.get("second", 1) + (1 - section["alpha"]) * g**2
    m["first"] = section["momentum"] * m.get("first", 0) + lr * g / np.sqrt(m["second"] + section["eps"])
    return w - m["first"]


def lamb_step(w, g, lr, t, m, section, decay, adapt):
    b1, b2 = section["beta1"], section["beta2"]
    m["first"] = b1 * m.get("first", 0) + (1 - b1) * g
    m["second"] = b2 * m.get("second", 0) + (1 - b2) * g**2
    u = m["first"] / (1 - b1**t) / (np.sqrt(m["second"] / (1 - b2**t)) + section["eps"]) + decay * w
    return w - lr * (np.linalg.norm(w) / np.linalg.norm(u) if adapt else 1) * u


def adamw_step(w, g, lr, t, m, section, decay, adapt):
    b1, b2 = section["beta1"], section["beta2"]
    m["first"] = b1 * m.get("first", 0) + (1 - b1) * g
    m["second"] = b2 * m.get("second", 0) + (1 - b2) * g**2
    u = m["first"] / (1 - b1**t) / (np.sqrt(m["second"] / (1 - b2**t)) + section["eps"])
    return (1 - lr * decay) * w - lr * u


FORMULAS = {"sgd": sgd_step, "rmsprop": rmsprop_step, "lamb": lamb_step, "adamw": adamw_step}


@every_control
def test_a_control_is_the_documented_formula(section):
    """In float64, from step 5 on with two left out: the number of a step decides, not how many were taken before.

    A float32 step errs by a few 2**-24 of a weight, 3 at most, and passes errors on with momentum, up to 5 times.
    """
    parameters = states.module_parameters()
    expected = {name: parameter.detach().numpy().astype(np.float64) for name, parameter in parameters.items()}
    moments = {name: {} for name in SHAPES}
    state = weight_state(parameters, section, torch.float32)
    for step in (*range(5, 7), *range(9, STEPS)):
        take_step(state, parameters, step)
        drawn = random_values(1 + step)
        for name, w in expected.items():
            g = drawn[name].numpy().astype(np.float64) + 0.4 * w
            decay = 0.0 if name in SKIPPED else section["weight_decay"]
            options = (section, decay, name not in SKIPPED)
            expected[name] = FORMULAS[section["name"]](w, g, rate(step), step + 1, moments[name], *options)
    for name, parameter in parameters.items():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=0, atol=40 * 2**-24 * 3)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("name", "slot", "start"), [("rmsprop", "square_avg", 1.0), ("lamb", "exp_avg_sq", 0.0)])
def test_second_moments_start_where_the_paper_has_them_and_keep_small_squares(name, slot, start, rounding):
    """The square of 2e-4 is 4e-8, and float16 has nothing between 0 and 6e-8."""
    section = CONTROLS[name]
    parameters = {"head.bias": nn.Parameter(torch.ones(4))}
    state = weight_state(parameters, section, states.HALF, rounding)
    assert state.state_dict()[slot]["head.bias"].tolist() == [start] * 4
    state.load_state_dict({**state.state_dict(), slot: {"head.bias": torch.zeros(4)}})
    take_step(state, parameters, 0, gradients={"head.bias": torch.full((4,), 2e-4)})
    share = 1 - section.get("alpha", section.get("beta2"))
    assert state.state_dict()[slot]["head.bias"].tolist() == pytest.approx([share * 4e-8] * 4, rel=1e-5)


# From the recipe to parameter groups.

NORMS = ["block.norm.weight", "block.norm.bias"]
NAMES = ["stem.weight", *NORMS, "block.biased.weight", "head.weight", "head.bias"]


def created(**section):
    """An optimizer of parameters of those names, the parameters, and each one's group by its name."""
    generator = torch.Generator().manual_seed(0)
    named = {name: nn.Parameter(torch.randn(3, 4, generator=generator)) for name in NAMES}
    optimizer = factory.create(Optimizer(**section), named, NORMS)
    names = {parameter: name for name, parameter in named.items()}
    groups = {names[parameter]: group for group in optimizer.param_groups for parameter in group["params"]}
    assert groups.keys() == named.keys()
    assert type(optimizer) is KINDS[section.get("name", "lars")]
    return optimizer, named, groups


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        (["bias", "norm"], ["block.norm.weight", "block.norm.bias", "head.bias"]),
        (["bias"], ["block.norm.bias", "head.bias"]),
        (["norm"], ["block.norm.weight"]),
        ([], []),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", KINDS)
def test_the_skipped_have_no_decay_and_no_trust_ratio(name, skip, expected):
    """`bias` covers the biases of norms, `norm` only their scales."""
    _, _, groups = created(name=name, weight_decay=0.5, skip=skip)
    for key, group in groups.items():
        assert group["weight_decay"] == (0.0 if key in expected else 0.5)
        for adapts in {"lars": ["adapt"], "lamb": ["always_adapt"]}.get(name, []):
            assert group[adapts] is (key not in expected)


@pytest.mark.parametrize("name", ["bias", "a.bias"])
def test_a_bias_is_known_by_the_last_part_of_its_name(name):
    section = Optimizer(skip=["bias"])
    assert factory.skipped_names(section, [name, "bias.weight", "a.unbias", "bias.a"], []) == {name}
    optimizer = factory.create(section, {name: nn.Parameter(torch.ones(2))}, [])
    assert [group["adapt"] for group in optimizer.param_groups] == [False]


def test_the_numbers_of_lars_arrive_in_its_groups():
    """Those of the controls are in the steps above."""
    numbers = {"momentum": 0.8, "trust_coefficient": 0.02, "eps": 1e-6}
    optimizer, _, groups = created(trust="momentum", skip_lr_scale=0.25, **numbers)
    assert optimizer.trust == "momentum"
    assert (groups["head.weight"]["lr_scale"], groups["head.bias"]["lr_scale"]) == (1.0, 0.25)
    assert all({key: group[key] for key in numbers} == numbers for group in groups.values())


def test_the_defaults_take_the_published_steps():
    """Two updates of the TensorFlow 1 recipe, whose constants stand below, in float64.

    A float32 update errs by a few 2**-24 of the largest weight, 3.
    """
    optimizer, named, _ = created()
    expected = {name: parameter.detach().numpy().astype(np.float64) for name, parameter in named.items()}
    momentum = {name: np.zeros((3, 4)) for name in named}
    random = np.random.RandomState(1)
    for lr in (8.485, 2.0):
        for name, parameter in named.items():
            g = random.randn(3, 4).astype(np.float32)
            parameter.grad = torch.from_numpy(g)
            adapt = name in ("stem.weight", "block.biased.weight", "head.weight")
            expected[name], momentum[name], _ = lars_step(
                "gradient", expected[name], g.astype(np.float64), momentum[name], lr,
                decay=2.5e-6, adapt=adapt, mu=0.885, eta=0.001,
            )  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    for name, parameter in named.items():
        scale = np.abs(momentum[name]).max() + 3
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=0, atol=8 * 2**-24 * scale)

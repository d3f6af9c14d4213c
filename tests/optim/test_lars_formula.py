"""The reference of LARS in float64 against timm, torch and numbers by hand; the fast forms against
it to the bit."""

import pytest
import timm.optim
import torch
from torch import nn

from optim import lars_formula
from optim.lars import LARS
from optim.lars_formula import Hyperparameters
from optim.weight_state import WeightState
from tests.optim.states import FORMS

DOUBLE = torch.float64
STEPS = 12
every_form = pytest.mark.parametrize("form", FORMS)


def drawn(seed, dtype=DOUBLE):
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def run(settings, rates):
    """The weights after updates by the reference, with gradients that depend on the weights."""
    w = drawn(0)
    m = torch.zeros(5, 7, dtype=DOUBLE)
    for step, lr in enumerate(rates):
        w, m, _ = lars_formula.updated(w, m, drawn(1 + step) + 0.2 * w, lr, settings)
    return w


def run_library(create, rates):
    """The same by an optimizer of another library."""
    weight = nn.Parameter(drawn(0))
    optimizer = create([weight])
    for step, lr in enumerate(rates):
        weight.grad = drawn(1 + step) + 0.2 * weight.detach()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("nesterov", [False, True])
def test_at_one_rate_the_first_form_is_that_of_timm(nesterov):
    """timm's rate is outside the momentum. To a few roundings of float64 a step."""
    common = {"momentum": 0.8, "weight_decay": 0.01, "eps": 0.5, "nesterov": nesterov}
    found = run(Hyperparameters(trust_coefficient=0.3, **common), [0.5] * STEPS)
    expected = run_library(
        lambda own: timm.optim.Lars(own, lr=0.5, trust_coeff=0.3, **common), [0.5] * STEPS
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    assert (found - drawn(0)).abs().max() > 0.1


@every_form
def test_without_a_ratio_it_is_torchs_sgd(form):
    """torch's rate is outside the momentum too, in the second form as in torch: there it changes
    from step to step."""
    rates = [0.1 + 0.1 * (step % 3) * (form == "momentum") for step in range(STEPS)]
    settings = Hyperparameters(**FORMS[form], momentum=0.8, weight_decay=0.5, adapt=False)
    nesterov = form == "nesterov"
    expected = run_library(
        lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.8, nesterov=nesterov), rates
    )
    torch.testing.assert_close(run(settings, rates), expected, rtol=0, atol=1e-13)


def test_the_second_form_by_hand():
    """m = (2, 4) / 2 + (4, 4) / 2 = (3, 4);  u = m + w = (6, 8);  |w| = 5, |u| = 10."""
    w, m, g = (
        torch.tensor(values, dtype=DOUBLE) for values in ([3.0, 4.0], [2.0, 4.0], [4.0, 4.0])
    )
    settings = Hyperparameters(
        trust="momentum", momentum=0.5, weight_decay=1.0, trust_coefficient=0.25, eps=2.5
    )
    after = lars_formula.updated(w, m, g, 2.0, settings)
    assert after.momentum.tolist() == [3.0, 4.0]
    assert after.ratio.item() == 0.25 * 5 / (10 + 2.5)
    assert after.weight.tolist() == [3.0 - 2 * 0.1 * 6, 4.0 - 2 * 0.1 * 8]


def test_it_changes_none_of_its_arguments():
    tensors = [drawn(seed) for seed in range(3)]
    before = [tensor.clone() for tensor in tensors]
    for options in FORMS.values():
        lars_formula.updated(*tensors, 0.5, Hyperparameters(**options))
    assert all(torch.equal(*pair) for pair in zip(tensors, before))


# The fast form.


def signs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count,), generator=generator).float() * 2 - 1


MU = 0.75
DECAY = 0.25
COEFFICIENT = 0.5
LR = 0.5
COUNT = 4096
AGREEING = 1536


@pytest.mark.parametrize("compile", [False, True], ids=["plain", "compiled"])
@every_form
def test_where_norms_are_exact_the_fast_forms_take_its_steps_to_the_bit(form, compile):
    """Weights of +-1 and gradients of +-2, of which so many have the weights' sign that float32
    holds the norm of the second form's direction, too: 32. All else is the same operations of
    float32 in the same order. The parameter without a ratio has any values, in several updates."""
    weights = {"adapted": signs(COUNT, 0), "bare": drawn(1, torch.float32)}
    momenta = {name: torch.zeros_like(value) for name, value in weights.items()}
    if form != "momentum":
        momenta["adapted"] = torch.randn(COUNT, generator=torch.Generator().manual_seed(2))
    agreeing = torch.where(torch.arange(COUNT) < AGREEING, 2.0, -2.0)
    settings = Hyperparameters(
        **FORMS[form], momentum=MU, weight_decay=DECAY, trust_coefficient=COEFFICIENT
    )
    settings = {"adapted": settings, "bare": settings._replace(adapt=False)}

    def create(named):
        groups = [{"params": [named["adapted"]]}, {"params": [named["bare"]], "adapt": False}]
        options = {"momentum": MU, "weight_decay": DECAY, "trust_coefficient": COEFFICIENT}
        return LARS(groups, lr=0.0, **FORMS[form], **options)

    parameters = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
    common = {"dtype": torch.float32, "rounding": "nearest", "seed": 0}
    state = WeightState(parameters.items(), create, **common)
    if compile:
        assert "is compiled" in state.compile_update()
    state.load_state_dict({"weights": weights, "momentum_buffer": momenta})
    for step in range(3):
        gradients = {
            "adapted": agreeing * weights["adapted"],
            "bare": drawn(3 + step, torch.float32),
        }
        for view, gradient in zip(state.gradients.views, gradients.values()):
            view.copy_(8 * gradient)
        state.update(step, LR, torch.tensor(8.0), measure=False)
        found = state.state_dict()
        for name in ["adapted", "bare"] if step == 0 else ["bare"]:
            after = lars_formula.updated(
                weights[name], momenta[name], gradients[name], LR, settings[name]
            )
            weights[name] = after.weight
            momenta[name] = after.momentum
            assert torch.equal(found["weights"][name], after.weight), (step, name)
            assert torch.equal(found["momentum_buffer"][name], after.momentum), (step, name)
        if step == 0:
            assert not torch.equal(weights["adapted"].abs(), torch.ones(COUNT)), "it has moved"

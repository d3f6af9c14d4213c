"""SGD, RMSprop and LAMB behind WeightState: against the libraries' own, and against loops in float64."""

import io
import itertools
from functools import partial

import numpy as np
import pytest
import timm.optim
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from optim import factory
from optim.half_weights import WeightState
from recipe.config import Optimizer

HALF, SINGLE = torch.float16, torch.float32
SHAPES = {"conv.weight": (6, 3, 3, 3), "norm.weight": (6,), "head.weight": (10, 6), "head.bias": (10,)}
SKIPPED = ("norm.weight", "head.bias")
STEPS = 24

SECTIONS = {
    "sgd": {"name": "sgd", "momentum": 0.8, "weight_decay": 0.01},
    "sgd, Nesterov": {"name": "sgd", "momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
    "sgd without momentum": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.01},
    "rmsprop": {"name": "rmsprop", "momentum": 0.8, "weight_decay": 0.01, "alpha": 0.7, "eps": 1e-3},
    "rmsprop without momentum": {"name": "rmsprop", "momentum": 0.0, "weight_decay": 0.01, "alpha": 0.7, "eps": 1e-3},
    "lamb": {"name": "lamb", "weight_decay": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-5},
    "lamb without momentum": {"name": "lamb", "weight_decay": 0.05, "beta1": 0.0, "beta2": 0.95, "eps": 1e-5},
    "lamb without decay": {"name": "lamb", "weight_decay": 0.0, "beta1": 0.8, "beta2": 0.95, "eps": 1e-5},
}
SECOND = {"rmsprop": "square_avg", "lamb": "exp_avg_sq"}
IN_FLOAT32 = ("square_avg", "exp_avg_sq", "exp_avg")
FIRST = {"sgd": "momentum_buffer", "rmsprop": "momentum_buffer", "lamb": "exp_avg"}
every_control = pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)


def slots_of(section):
    first = () if section.get("momentum") == 0 else (FIRST[section["name"]],)
    second = (SECOND[section["name"]],) if section["name"] in SECOND else ()
    return {*first, *second}


def random_values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def rate(step):
    """0 first, as in a warm-up; then up and down."""
    return 0.02 * step if step < 8 else 0.3 / step


def module_parameters(compute=SINGLE):
    return {name: nn.Parameter(value.half().to(compute)) for name, value in random_values(0).items()}


def weight_state(parameters, section, dtype=SINGLE, rounding="stochastic", foreach=None):
    def create(named):
        optimizer = factory.create(Optimizer(**section), named, ["norm.weight"])
        for group in optimizer.param_groups:
            group["foreach"] = foreach
        return optimizer

    return WeightState(parameters.items(), create, dtype=dtype, rounding=rounding, seed=3)


def loss(parameters, step):
    """Its gradient depends on the weights: an error in one step shows in all that follow."""
    drawn = random_values(1 + step)
    return sum((w * drawn[name].to(w.dtype) + 0.2 * w * w).sum() for name, w in parameters.items())


def take_step(state, parameters, step, factor=1.0):
    state.gradients.zero()
    (factor * loss(parameters, step)).backward()
    state.gradients.accumulate()
    return state.update(step, rate(step), torch.ones(()), measure=True)


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
        groups[0]["always_adapt"] = True
        betas = (section["beta1"], section["beta2"])
        options = {"betas": betas, "eps": section["eps"], "weight_decay": decay}
        optimizer = timm.optim.Lamb(groups, 0.0, max_grad_norm=None, **options)
    for group in optimizer.param_groups:
        group["foreach"] = foreach
    return optimizer


@pytest.mark.parametrize("foreach", [False, True], ids=["tensor by tensor", "all at once"])
@every_control
def test_in_float32_it_takes_the_steps_of_the_library_bitwise(section, foreach):
    """The same operations in the same order, although the library starts its own state. The norm is that of the
    gradients that came, whatever the optimizer leaves in them: of float32 sums, to a few 2**-24."""
    parameters, others = module_parameters(), module_parameters()
    state = weight_state(parameters, section, foreach=foreach)
    optimizer = library_optimizer(section, others, foreach)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        loss(others, step).backward()
        expected = np.sqrt(sum((other.grad.double() ** 2).sum().item() for other in others.values()))
        optimizer.step()
        _, norms = take_step(state, parameters, step)
        assert norms.gradient.item() == pytest.approx(expected, rel=1e-6)
        assert norms.trust == {}
        for name, other in others.items():
            assert torch.equal(parameters[name], other), (step, name)
    found = state.state_dict()
    assert found.keys() == {"weights", *slots_of(section)}
    for slot in slots_of(section):
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


FORMULAS = {"sgd": sgd_step, "rmsprop": rmsprop_step, "lamb": lamb_step}


@pytest.mark.parametrize("steps", [range(STEPS), [5, 6, 9]], ids=["all steps", "a run from step 5 that left two out"])
@every_control
def test_it_is_the_documented_formula(section, steps):
    """In float64. The number of a step decides, not how many were taken before: bias correction counts all of them.

    A float32 step errs by a few 2**-24 of a weight, 3 at most, and passes errors on with momentum, up to 5 times.
    """
    parameters = module_parameters()
    expected = {name: parameter.detach().numpy().astype(np.float64) for name, parameter in parameters.items()}
    moments = {name: {} for name in SHAPES}
    state = weight_state(parameters, section)
    for step in steps:
        take_step(state, parameters, step)
        drawn = random_values(1 + step)
        for name, w in expected.items():
            g = drawn[name].numpy().astype(np.float64) + 0.4 * w
            decay = 0.0 if name in SKIPPED else section["weight_decay"]
            options = (section, decay, name not in SKIPPED)
            expected[name] = FORMULAS[section["name"]](w, g, rate(step), step + 1, moments[name], *options)
    for name, parameter in parameters.items():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], rtol=0, atol=40 * 2**-24 * 3)


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_lamb_adapts_all_but_the_skipped(decay):
    """Without momentum or decay each element moves by the rate, or by the rate times |w| / sqrt(elements): five times
    the weights, five times the step. Decay, 5 % of a weight, changes that by less than a third."""
    moved = []
    for size in (1, 5):
        parameters = {name: nn.Parameter(size * w) for name, w in random_values(0).items()}
        section = {**SECTIONS["lamb"], "weight_decay": decay, "beta1": 0.0}
        state = weight_state(parameters, section)
        before = state.state_dict()["weights"]
        state.gradients.zero()
        sum(parameter.sum() for parameter in parameters.values()).backward()
        state.gradients.accumulate()
        state.update(0, 0.01, torch.ones(()), measure=False)
        after = state.state_dict()["weights"]
        moved.append({name: (after[name] - before[name]).norm().item() for name in SHAPES})
    for name in SHAPES:
        assert moved[1][name] / moved[0][name] == pytest.approx(1 if name in SKIPPED else 5, rel=1e-4)


@every_control
def test_moments_that_need_it_stay_float32_and_the_rest_is_half(section):
    state = weight_state(module_parameters(), section, HALF)
    saved = state.state_dict()
    for key, tensors in saved.items():
        assert {tensor.dtype for tensor in tensors.values()} == {SINGLE if key in IN_FLOAT32 else HALF}
    assert state.bytes_per_parameter == sum(4 if key in IN_FLOAT32 else 2 for key in saved)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(("name", "start"), [("rmsprop", 1.0), ("lamb", 0.0)])
def test_second_moments_start_where_the_paper_has_them_and_keep_small_squares(name, start, rounding):
    """The square of 2e-4 is 4e-8, and float16 has nothing between 0 and 6e-8."""
    section, slot = SECTIONS[name], SECOND[name]
    parameters = {"head.bias": nn.Parameter(torch.ones(4))}
    state = weight_state(parameters, section, HALF, rounding)
    assert state.state_dict()[slot]["head.bias"].tolist() == [start] * 4
    state.load_state_dict({**state.state_dict(), slot: {"head.bias": torch.zeros(4)}})
    state.gradients.zero()
    (2e-4 * parameters["head.bias"]).sum().backward()
    state.gradients.accumulate()
    state.update(0, 0.0, torch.ones(()), measure=False)
    share = 1 - section.get("alpha", section.get("beta2"))
    assert state.state_dict()[slot]["head.bias"].tolist() == pytest.approx([share * 4e-8] * 4, rel=1e-5)


@every_control
def test_rounding_to_nearest_gives_the_half_of_the_float32_update(section):
    """Bitwise, for one update from the same float16 state; what stays float32 is not rounded."""
    results = []
    for dtype in (HALF, SINGLE):
        parameters = module_parameters()
        state = weight_state(parameters, section, dtype, "nearest")
        take_step(state, parameters, 5)
        results.append(state.state_dict())
    for key, tensors in results[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, results[1][key][name].to(tensor.dtype)), (key, name)


def saved(state):
    """Through a file that may hold only tensors."""
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def bits_of(state):
    """As integers: NaNs and the signs of zeros count."""
    return {
        (key, name): tensor.view(torch.int16 if tensor.dtype == HALF else torch.int32)
        for key, tensors in state.items()
        for name, tensor in tensors.items()
    }


def assert_same_bits(actual, expected):
    actual, expected = bits_of(actual), bits_of(expected)
    assert actual.keys() == expected.keys()
    for key, values in actual.items():
        assert torch.equal(values, expected[key]), key


@pytest.mark.parametrize(("dtype", "compute"), [(HALF, HALF), (SINGLE, SINGLE)], ids=str)
@every_control
def test_a_run_goes_on_bitwise_from_every_step_at_which_it_was_saved(section, dtype, compute):
    """Step 2 is skipped, so a count of the updates made would differ from the number of the step."""
    steps = 6

    def go_on(state, parameters, step):
        finite, _ = take_step(state, parameters, step, torch.nan if step == 2 else 1.0)
        assert finite.item() is (step != 2)

    parameters = module_parameters(compute)
    state = weight_state(parameters, section, dtype)
    files = []
    for step in range(steps):
        files.append(saved(state))
        go_on(state, parameters, step)
    for first, file in enumerate(files):
        resumed_parameters = {name: nn.Parameter(torch.zeros_like(w)) for name, w in parameters.items()}
        resumed = weight_state(resumed_parameters, section, dtype)
        resumed.load_state_dict(file)
        for step in range(first, steps):
            go_on(resumed, resumed_parameters, step)
        assert_same_bits(resumed.state_dict(), state.state_dict())


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@every_control
def test_a_gradient_that_is_not_finite_changes_nothing(section, dtype, bad):
    """Bitwise; and the next step is as if there had been none before it."""
    parameters, undisturbed = module_parameters(), module_parameters()
    state, other = (weight_state(named, section, dtype) for named in (parameters, undisturbed))
    take_step(state, parameters, 3)
    before = state.state_dict()
    finite, _ = take_step(state, parameters, 4, bad)
    assert finite.item() is False
    assert_same_bits(state.state_dict(), before)
    take_step(state, parameters, 5)
    for step in (3, 5):
        take_step(other, undisturbed, step)
    assert_same_bits(state.state_dict(), other.state_dict())


KINDS = ["sgd", "sgd without momentum", "rmsprop", "rmsprop without momentum", "lamb"]


@pytest.mark.parametrize(("given", "kept"), list(itertools.permutations(KINDS, 2)))
def test_the_state_of_an_optimizer_with_other_slots_is_refused_by_name(given, kept):
    """And nothing of it is taken over."""
    state = weight_state(module_parameters(), SECTIONS[kept])
    before = state.state_dict()
    missing = slots_of(SECTIONS[kept]) - slots_of(SECTIONS[given])
    foreign = slots_of(SECTIONS[given]) - slots_of(SECTIONS[kept])
    with pytest.raises(ValueError, match=r"is missing|belongs to") as error:
        state.load_state_dict({key: random_values(7) for key in ("weights", *slots_of(SECTIONS[given]))})
    for slot in missing:
        assert f"{slot} is missing" in str(error.value)
    for slot in foreign:
        assert f"{slot} belongs to another optimizer than {type(state.optimizer).__name__}" in str(error.value)
    assert_same_bits(state.state_dict(), before)


@pytest.mark.parametrize("compute", [SINGLE, HALF], ids=str)
@every_control
def test_nothing_waits_for_the_device(section, compute):
    """On tensors without values, as those that a device has not computed yet, reading one raises."""
    with FakeTensorMode():
        on_device = partial(torch.zeros, dtype=compute, device="cuda")
        parameters = {name: nn.Parameter(on_device(shape)) for name, shape in SHAPES.items()}
        state = weight_state(parameters, section, HALF)
        state.gradients.zero()
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        state.gradients.accumulate()
        finite, _ = state.update(0, 1.0, torch.ones((), device="cuda"), measure=True)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool(finite)

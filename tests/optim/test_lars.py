"""LARS against float64 loops written from its formulas, against timm, and against LAMB with beta2 = 1."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timm.optim import Lars
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from optim.lars import LARS

FORMS = ["gradient", "momentum"]
STEPS = 60
SHAPES = {"conv": (8, 4, 3, 3), "large": (40, 25), "vector": (12,), "plain": (7, 5), "bias": (9,)}
ADAPTED = SimpleNamespace(names=["conv", "large"], adapt=True, decay=0.01, lr_scale=1.0)
ADAPTED_SLOWLY = SimpleNamespace(names=["vector"], adapt=True, decay=0.0, lr_scale=0.3)
SKIPPED = SimpleNamespace(names=["plain"], adapt=False, decay=0.0, lr_scale=1.0)
SKIPPED_SLOWLY = SimpleNamespace(names=["bias"], adapt=False, decay=0.0, lr_scale=0.01)
GROUPS = [ADAPTED, ADAPTED_SLOWLY, SKIPPED, SKIPPED_SLOWLY]


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


def as_parameters(arrays, dtype=torch.float32):
    return {name: nn.Parameter(torch.tensor(array).to(dtype)) for name, array in arrays.items()}


def set_gradients(parameters, arrays):
    for name, parameter in parameters.items():
        parameter.grad = torch.tensor(arrays[name]).to(parameter.dtype)


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


def take_steps(optimizer, parameters, steps, rate=varying):
    for step in steps:
        set_gradients(parameters, drawn_gradients(step))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()


def gradient_form(w, g, m, lr, group, mu, eta, eps):
    """The class's first formula, float64."""
    if not group.adapt:
        m = mu * m + lr * g
        return w - m, m, None
    weight_norm, gradient_norm = np.linalg.norm(w), np.linalg.norm(g)
    ratio = 1.0
    if weight_norm and gradient_norm:
        ratio = eta * weight_norm / (gradient_norm + group.decay * weight_norm + eps)
    m = mu * m + lr * ratio * (g + group.decay * w)
    return w - m, m, ratio


def momentum_form(w, g, m, lr, group, mu, eta, eps):
    """The class's second formula, float64."""
    m = mu * m + (1 - mu) * g
    if not group.adapt:
        return w - lr * m / (1 - mu), m, None
    u = m + group.decay * w
    ratio = eta
    if np.linalg.norm(w) and np.linalg.norm(u):
        ratio = eta * np.linalg.norm(w) / (np.linalg.norm(u) + eps)
    return w - lr * ratio * u, m, ratio


def reference(trust, steps, eps=0.0, rate=varying):
    """Weights and momenta after `steps`, and the last ratios."""
    formula = gradient_form if trust == "gradient" else momentum_form
    weights = {name: array.astype(np.float64) for name, array in initial().items()}
    momenta = {name: np.zeros_like(array) for name, array in weights.items()}
    ratios = {}
    for step in steps:
        gradients = drawn_gradients(step)
        for group in GROUPS:
            for name in group.names:
                g = gradients[name].astype(np.float64)
                lr = rate(step) * group.lr_scale
                weights[name], momenta[name], ratios[name] = formula(
                    weights[name], g, momenta[name], lr, group, 0.885, 0.01, eps
                )
    return weights, momenta, ratios


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
    take_steps(optimizer, parameters, range(STEPS))
    weights, momenta, ratios = reference(trust, range(STEPS), eps)
    start = initial()
    for name, parameter in parameters.items():
        travelled = np.linalg.norm(weights[name] - start[name]) / np.linalg.norm(weights[name])
        assert travelled > 1e-3
        assert distance(parameter, weights[name]) < 4e-6
        assert distance(optimizer.state[parameter]["momentum_buffer"], momenta[name]) < 4e-6
        if ratios[name] is None:
            assert parameter not in optimizer.trust_ratios
        else:
            assert optimizer.trust_ratios[parameter].item() == pytest.approx(ratios[name], rel=4e-6)


def test_at_a_constant_rate_the_published_form_is_timms():
    """The rate inside the momentum buffer or before it is then the same, as is the skipping of groups without
    weight decay, which timm decides by itself. Both are float32: tolerance as against float64, twice."""
    groups = [ADAPTED, SKIPPED]
    ours, theirs = as_parameters(initial()), as_parameters(initial())
    optimizer = optimizer_of(ours, "gradient", eps=1e-8)
    peer = Lars(
        [{"params": [theirs[name] for name in group.names], "weight_decay": group.decay} for group in groups],
        lr=2.0,
        momentum=0.885,
        trust_coeff=0.01,
        eps=1e-8,
    )
    take_steps(optimizer, ours, range(STEPS), rate=lambda step: 2.0)
    for step in range(STEPS):
        set_gradients(theirs, drawn_gradients(step))
        peer.step()
    for group in groups:
        for name in group.names:
            assert distance(ours[name], theirs[name].detach().double().numpy()) < 8e-6


@pytest.mark.parametrize("eps", [1.0, 2.0**-8])
def test_the_momentum_form_is_lamb_with_beta2_of_one(eps):
    """PopART's LAMB in float64: with beta2 = 1 the second moment stays 0, the trust ratio cancels epsilon, and a
    maximal weight norm of 0 turns the ratio off. Tolerance as for the formulas."""
    parameters = as_parameters(initial())
    take_steps(optimizer_of(parameters, "momentum"), parameters, range(STEPS))
    beta1, beta2, eta = 0.885, 1.0, 0.01
    for group in GROUPS:
        max_weight_norm = np.inf if group.adapt else 0.0
        for name in group.names:
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
    """Powers of two and small integers: exact. In the second form weight decay alone gives a direction of norm
    decay * |w|, so only without it is the ratio of zero gradients eta."""
    weight = nn.Parameter(torch.full((4,), w))
    weight.grad = torch.full((4,), g)
    optimizer = LARS([weight], lr=0.5, momentum=0.5, weight_decay=decay, trust_coefficient=0.25, trust=trust)
    optimizer.step()
    ratio = 0.25 / decay if trust == "momentum" and w and decay else without_norm
    direction = (g if trust == "gradient" else 0.5 * g) + decay * w
    assert optimizer.trust_ratios[weight].item() == ratio
    assert weight.tolist() == [w - 0.5 * ratio * direction] * 4


@pytest.mark.parametrize("trust", FORMS)
def test_gradients_are_never_changed(trust):
    """Bitwise; with and without weight decay, adapted and skipped."""
    parameters = as_parameters(initial())
    optimizer = optimizer_of(parameters, trust)
    set_gradients(parameters, drawn_gradients(0))
    before = {name: parameter.grad.clone() for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    for _ in range(2):
        optimizer.step()
    for name, parameter in parameters.items():
        assert torch.equal(parameter.grad, before[name])


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


@pytest.mark.parametrize("trust", FORMS)
def test_nothing_waits_for_the_device(trust):
    """On tensors without values, as those that a device has not computed yet, reading one raises."""
    with FakeTensorMode():
        parameters = {name: nn.Parameter(torch.zeros(shape, device="cuda")) for name, shape in SHAPES.items()}
        optimizer = optimizer_of(parameters, trust)
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            parameters["bias"].sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("trust", FORMS)
def test_a_loaded_optimizer_goes_on_bitwise(trust, dtype):
    """Through a file that may hold only tensors and plain values. Momentum is float32 at any dtype of weights."""
    parameters = as_parameters(initial(), dtype)
    optimizer = optimizer_of(parameters, trust)
    take_steps(optimizer, parameters, range(5))
    file = io.BytesIO()
    torch.save({"weights": parameters, "optimizer": optimizer.state_dict()}, file)
    take_steps(optimizer, parameters, range(5, 10))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = optimizer_of(saved["weights"], trust)
    resumed.load_state_dict(saved["optimizer"])
    take_steps(resumed, saved["weights"], range(5, 10))
    for name, parameter in parameters.items():
        other = saved["weights"][name]
        assert torch.equal(parameter, other)
        buffers = [each.state[weight]["momentum_buffer"] for each, weight in ((optimizer, parameter), (resumed, other))]
        assert [buffer.dtype for buffer in buffers] == [torch.float32] * 2
        assert torch.equal(*buffers)


def test_a_parameter_without_gradient_is_left_alone():
    parameters = as_parameters(initial())
    optimizer = optimizer_of(parameters, "gradient")
    set_gradients(parameters, drawn_gradients(0))
    parameters["conv"].grad = parameters["vector"].grad = None
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 1.0
    optimizer.step()
    assert torch.equal(parameters["conv"], torch.tensor(initial()["conv"]))
    assert torch.equal(parameters["vector"], torch.tensor(initial()["vector"]))
    assert not torch.equal(parameters["large"], torch.tensor(initial()["large"]))


def test_another_form_is_refused():
    with pytest.raises(ValueError, match="'weights' is neither"):
        LARS([nn.Parameter(torch.ones(1))], lr=1.0, trust="weights")

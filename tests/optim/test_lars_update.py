"""LARS in two passes against its formulas in float64, and its backends against each other."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from optim import compilation, lars, layout
from optim.lars import LARS
from optim.lars_update import LarsUpdate, Rules
from optim.weight_state import WeightState
from tests.optim.states import BRAIN, FORMS, HALF, SINGLE, lars_step
from tests.tensors import assert_bitwise_equal

# One parameter fills many rows of 64, one a part of a row, one exactly a row; two have no trust
# ratio.
SHAPES = {
    "conv.weight": (40, 33, 3),
    "conv.bias": (7,),
    "head.weight": (70, 50),
    "norm.weight": (64,),
}
EXEMPT = ("conv.bias", "norm.weight")
MU = 0.9
DECAY = 1e-3
COEFFICIENT = 0.02
EPS = 1e-4
LR_SCALE = 2.0
KINDS = [(SINGLE, HALF), (HALF, HALF), (BRAIN, HALF), (SINGLE, SINGLE)]
every_form = pytest.mark.parametrize("form", FORMS)
every_kind = pytest.mark.parametrize(("compute", "dtype"), KINDS, ids=str)


def parameters_of(dtype):
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def create_lars(form):
    def create(parameters):
        groups = [
            {"params": [parameter for name, parameter in parameters.items() if name not in EXEMPT]},
            {"params": [parameters[name] for name in EXEMPT], "adapt": False, "lr_scale": LR_SCALE},
        ]
        options = {
            "momentum": MU,
            "weight_decay": DECAY,
            "trust_coefficient": COEFFICIENT,
            "eps": EPS,
        }
        return LARS(groups, lr=0.0, **FORMS[form], **options)

    return create


def state_of(form="gradient", compute=SINGLE, dtype=SINGLE, rounding="stochastic", **options):
    parameters = parameters_of(compute)
    state = WeightState(
        parameters.items(), create_lars(form), dtype=dtype, rounding=rounding, seed=3, **options
    )
    return state, parameters


def fill(state, seed, factor=1.0):
    """Gradients of each parameter, in the buffer; returns them in float64."""
    generator = torch.Generator().manual_seed(seed)
    gradients = {}
    for name, view in zip(SHAPES, state.gradients.views):
        view.copy_(torch.randn(view.shape, generator=generator) * factor)
        gradients[name] = view.double().numpy()
    return gradients


def updated(state, steps=2):
    """The state and norms after some updates."""
    for step in range(steps):
        fill(state, 1 + step, 8.0)
        finite, norms = state.update(step, 0.5, torch.tensor(8.0), True)
        assert finite
    return state.state_dict(), norms


def norm_of(tensors):
    return math.sqrt(sum((each**2).sum() for each in tensors))


@pytest.mark.parametrize("clip_norm", [None, 20.0])
@every_form
def test_updates_are_those_of_the_formulas(form, clip_norm):
    """Float32 state: five steps of about five roundings each, of numbers as large as the largest
    weight. So is LARS's own step, which does not clip, and leaves gradients as they are."""
    largest = 1.0
    state, parameters = state_of(form, clip_norm=clip_norm)
    others = parameters_of(SINGLE)
    own = create_lars(form)(others)
    weights = {name: parameter.detach().double().numpy() for name, parameter in parameters.items()}
    momenta = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(5):
        before = dict(weights)
        ratios = {}
        gradients = {name: each / 256 for name, each in fill(state, step, 256.0).items()}
        length = norm_of(gradients.values())
        assert length > 20  # it is clipped
        lr = 0.1 + 0.1 * step
        clip = 1.0 if clip_norm is None else 20 / length
        _, norms = state.update(step, lr, torch.tensor(256.0), True)
        given = {name: torch.tensor(each * clip).float() for name, each in gradients.items()}
        for name, other in others.items():
            other.grad = given[name].clone()
        for group in own.param_groups:
            group["lr"] = lr
        own.step()
        assert all(torch.equal(other.grad, given[name]) for name, other in others.items())
        for name in SHAPES:
            adapt, scale = (False, LR_SCALE) if name in EXEMPT else (True, 1.0)
            weights[name], momenta[name], ratios[name] = lars_step(
                form,
                weights[name],
                gradients[name] * clip,
                m=momenta[name],
                lr=lr * scale,
                decay=DECAY * adapt,
                adapt=adapt,
                mu=MU,
                eta=COEFFICIENT,
                eps=EPS,
            )
            largest = max(largest, np.abs(weights[name]).max())
        for name, parameter in (*parameters.items(), *others.items()):
            np.testing.assert_allclose(
                parameter.detach().numpy(), weights[name], rtol=0, atol=25 * 2.0**-24 * largest
            )
        assert norms.gradient.item() == pytest.approx(length, rel=1e-6)
        assert norms.weight.item() == pytest.approx(norm_of(before.values()), rel=1e-6)
        assert norms.update.item() == pytest.approx(
            norm_of(before[name] - weights[name] for name in SHAPES), rel=1e-5
        )
        assert norms.trust.keys() == {*SHAPES} - {*EXEMPT}
        for name, ratio in norms.trust.items():
            assert ratio.item() == pytest.approx(ratios[name], rel=1e-6)
            assert own.trust_ratios[others[name]].item() == pytest.approx(ratios[name], rel=4e-6)
    for name, momentum in state.state_dict()["momentum_buffer"].items():
        np.testing.assert_allclose(
            momentum.numpy(), momenta[name], rtol=0, atol=25 * 2.0**-24 * largest
        )


@every_form
@every_kind
def test_the_size_of_the_parts_changes_nothing(monkeypatch, form, compute, dtype):
    expected, norms = updated(state_of(form, compute, dtype)[0])
    monkeypatch.setattr(layout, "_CHUNK", 3 * layout.ROW)
    found, other_norms = updated(state_of(form, compute, dtype)[0])
    assert_bitwise_equal(found, expected)
    assert norms[:3] == other_norms[:3]


@pytest.mark.parametrize(
    ("compute", "dtype"), [(SINGLE, HALF), (HALF, HALF), (SINGLE, SINGLE)], ids=str
)
def test_a_gradient_that_is_not_finite_changes_nothing_under_a_mask(compute, dtype):
    """As on devices that are not asked; a CPU, which is, is in test_weight_state.py."""
    state, parameters = state_of(compute=compute, dtype=dtype)
    state._update.host_may_read = False
    updated(state, 1)
    before = state.state_dict()
    weights = {name: each.detach().clone() for name, each in parameters.items()}
    for wrong in (float("nan"), float("inf")):
        fill(state, 2)
        state.gradients.views[2][3, 4] = wrong
        finite, _ = state.update(1, 0.5, torch.ones(()), False)
        assert not finite
        assert_bitwise_equal(state.state_dict(), before)
        assert all(torch.equal(parameters[name], weights[name]) for name in weights)


@pytest.mark.parametrize(("trust", "otherwise"), [("gradient", 1.0), ("momentum", COEFFICIENT)])
def test_where_a_norm_is_zero_the_ratio_is_the_documented_one(trust, otherwise):
    parameters = parameters_of(SINGLE)
    rules = Rules(create_lars(trust)(parameters), parameters, torch.device("cpu"))
    weight, direction = torch.tensor(
        [[0.0, 4.0, 4.0, 4.0], [4.0, 4.0, 0.0, 4.0]], dtype=torch.float64
    )
    assert rules.ratios(weight, direction).tolist() == pytest.approx(
        [otherwise, 1.0, otherwise, 1.0], rel=1e-7
    )


@pytest.mark.parametrize("weight", [2.0**-20, 0.5, 1.0, 1000.0])
@pytest.mark.parametrize("direction", [2.0**-20, 0.5, 1.0, 1000.0])
@pytest.mark.parametrize("trust", ["gradient", "momentum"])
def test_ratios_of_long_and_short_vectors_are_those_of_the_formula(trust, weight, direction):
    """Given as sums of squares; norms are powers of two or small integers, whose squares float64
    holds."""
    parameters = parameters_of(SINGLE)
    rules = Rules(create_lars(trust)(parameters), parameters, torch.device("cpu"))
    squares = (torch.full((4,), norm**2, dtype=torch.float64) for norm in (weight, direction))
    below = direction + EPS + (DECAY * weight if trust == "gradient" else 0.0)
    ratio = COEFFICIENT * weight / below
    assert rules.ratios(*squares).tolist() == pytest.approx([ratio, 1.0, ratio, 1.0], rel=1e-7)


def test_of_sgd_no_parameter_has_a_ratio_and_each_decays_as_its_group():
    parameters = parameters_of(SINGLE)
    first, *others = parameters.values()
    groups = [{"params": [first]}, {"params": others, "weight_decay": 0.0}]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.25)
    rules = Rules(sgd, parameters, torch.device("cpu"))
    assert not rules.by_momentum and rules.adapted == {} and rules.adapt.tolist() == [False] * 4
    assert rules.decay.dtype == SINGLE and rules.decay.tolist() == [0.25, 0.0, 0.0, 0.0]
    expected = {"coefficient": 0.0, "eps": 0.0, "lr_scale": 1.0}
    for name, value in expected.items():
        assert (
            getattr(rules, name).dtype == torch.float64
            and getattr(rules, name).tolist() == [value] * 4
        )
    assert rules.ratios(torch.full((4,), 9.0), torch.full((4,), 4.0)).tolist() == [1.0] * 4


@pytest.mark.parametrize("keys", [{"momentum": 0.5}, {"nesterov": True}], ids=str)
def test_groups_with_another_momentum_are_refused(keys):
    parameters = parameters_of(SINGLE)
    first, *others = parameters.values()
    optimizer = LARS([{"params": [first]}, {"params": others, **keys}], lr=0.1, momentum=0.9)
    with pytest.raises(AssertionError, match="one momentum for all parameters"):
        Rules(optimizer, parameters, torch.device("cpu"))


@every_form
def test_the_largest_gradients_of_float32_are_finite(form):
    """Twice as much would not be, nor their squares."""
    state, parameters = state_of(form)
    before = {name: each.detach().clone() for name, each in parameters.items()}
    fill(state, 1)
    state.gradients.views[0][3, 4, 1] = 3e38
    finite, norms = state.update(0, 0.5, torch.ones(()), True)
    assert finite and norms.gradient.item() == pytest.approx(3e38, rel=1e-6)
    for name, parameter in parameters.items():
        assert parameter.isfinite().all() and not torch.equal(parameter, before[name])


def test_weights_of_the_compute_dtype_are_the_parameters_themselves():
    """No copy of them: float16 weights, momentum and float32 gradients are all that a model needs,
    8 bytes each."""
    state, parameters = state_of(compute=HALF, dtype=HALF)
    assert next(iter(parameters.values())).data_ptr() == state.flat.data_ptr()


@every_form
def test_a_gradient_that_is_short_enough_is_not_clipped(form):
    """Nor made longer: the bits of an update without a limit."""
    assert_bitwise_equal(
        updated(state_of(form, clip_norm=1e6)[0])[0], updated(state_of(form)[0])[0]
    )


@every_form
def test_the_norm_of_an_update_that_is_not_made_is_not_known(form):
    state, _ = state_of(form)
    fill(state, 1)
    state.gradients.flat[3] = float("inf")
    finite, norms = state.update(0, 0.5, torch.tensor(1.0), True)
    assert not finite and norms.update.isnan() and norms.weight.isfinite()


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize(
    ("w", "g"), [(0.0, 0.0), (0.0, 2.0), (3.0, 0.0)], ids=["both", "weights", "gradient"]
)
@pytest.mark.parametrize(("trust", "without_norm"), [("gradient", 1.0), ("momentum", 0.25)])
def test_where_a_norm_is_zero_lars_by_itself_takes_the_documented_ratio(
    trust, without_norm, w, g, decay
):
    """Powers of two and small integers: exact.

    With weight decay the second form has a direction without a gradient.
    """
    weight = nn.Parameter(torch.full((4,), w))
    bare = nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), g)
    optimizer = LARS(
        [weight, bare],
        lr=0.5,
        momentum=0.5,
        weight_decay=decay,
        trust_coefficient=0.25,
        trust=trust,
    )
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
@pytest.mark.parametrize("trust", ["gradient", "momentum"])
def test_lars_by_itself_takes_norms_in_float32(trust, count, w, g):
    """In float16 the norm of a million 80s is infinite, and that of three smallest numbers is 15 %
    off. The norms are exact to a few 2**-24; the direction of the second form, (1 - 0.5) g, is
    exact in float16's steps because momentum is float32."""
    weight = nn.Parameter(torch.full((count,), w, dtype=HALF))
    weight.grad = torch.full((count,), g, dtype=HALF)
    optimizer = LARS([weight], lr=0.0, momentum=0.5, trust_coefficient=1.0, trust=trust)
    optimizer.step()
    direction = g if trust == "gradient" else 0.5 * g
    assert optimizer.trust_ratios[weight].item() == pytest.approx(w / direction, rel=2**-20)
    assert (
        optimizer.trust_ratios[weight].dtype
        == optimizer.state[weight]["momentum_buffer"].dtype
        == SINGLE
    )


# Backends.


def assert_alike(state, parameters, expected, norms, dtype, tolerance=0.0):
    """Rounding may differ in a float32 bit, and then, in float16, once in 2**13 elements by a
    spacing.

    tolerance: of the module's parameters, relative to the weights of which they are copies.
    """
    found, other_norms = updated(state)
    for key in expected:
        for name, tensor in expected[key].items():
            difference = (found[key][name].double() - tensor.double()).abs()
            if dtype == SINGLE:
                assert difference.max() <= 4 * 2.0**-23 * max(1, tensor.abs().max().item())
            else:
                assert (difference > 0).double().mean() <= 2.0**-8
                assert difference.max() <= 2.0**-9 * max(2.0**-14, tensor.abs().max().item())
    for name, parameter in parameters.items():
        weights = found["weights"][name].to(parameter.dtype).float()
        torch.testing.assert_close(parameter.float(), weights, rtol=tolerance, atol=0)
    for one, other in zip(norms[:3], other_norms[:3]):
        assert one.item() == pytest.approx(other.item(), rel=1e-6)
    assert norms.trust.keys() == other_norms.trust.keys()


@every_form
@every_kind
def test_compiled_it_steps_alike(form, compute, dtype):
    expected = updated(state_of(form, compute, dtype)[0])
    state, parameters = state_of(form, compute, dtype)
    assert "is compiled" in state.compile_update()
    assert_alike(state, parameters, *expected, dtype)


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({"CXX": "/no/such/compiler"}, {}),
        ({"CXX": "false"}, {}),
        ({}, {"rounding": "nearest", "dtype": HALF}),
        ({}, {"compute": HALF}),
    ],
    ids=["none", "failing", "nearest", "float16 copies of float32 weights"],
)
def test_what_cannot_be_compiled_steps_uncompiled_and_a_line_says_so(
    monkeypatch, environment, options
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # nothing compiled before
    monkeypatch.setattr(compilation, "library", compilation.library.__wrapped__)
    state, _ = state_of(**options)
    assert state.compile_update().startswith("engine.compile: the update runs uncompiled: ")
    assert_bitwise_equal(updated(state)[0], updated(state_of(**options)[0])[0])


@pytest.fixture
def triton_update(monkeypatch):
    """Triton's kernels: on the CPU by its interpreter."""
    pytest.importorskip("triton")
    from optim.kernels.lars import TritonLarsUpdate

    monkeypatch.setattr(lars, "update_class", lambda device: TritonLarsUpdate)
    return TritonLarsUpdate


@pytest.mark.parametrize(
    ("compute", "dtype", "rounding", "form"),
    [
        (SINGLE, HALF, "stochastic", "momentum"),
        (HALF, HALF, "stochastic", "gradient"),
        (SINGLE, SINGLE, "nearest", "nesterov"),
        pytest.param(BRAIN, HALF, "nearest", "momentum", marks=pytest.mark.slow),
        pytest.param(SINGLE, SINGLE, "nearest", "gradient", marks=pytest.mark.slow),
        pytest.param(SINGLE, HALF, "stochastic", "nesterov", marks=pytest.mark.slow),
        pytest.param(SINGLE, HALF, "stochastic", "gradient", marks=pytest.mark.slow),
        pytest.param(HALF, HALF, "stochastic", "momentum", marks=pytest.mark.slow),
        pytest.param(BRAIN, HALF, "nearest", "gradient", marks=pytest.mark.slow),
        pytest.param(SINGLE, SINGLE, "nearest", "momentum", marks=pytest.mark.slow),
        pytest.param(BRAIN, HALF, "nearest", "nesterov", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_triton_steps_alike(request, form, compute, dtype, rounding):
    """Triton's interpreter cuts off where it should round to bfloat16, which has 8 bits."""
    expected = updated(state_of(form, compute, dtype, rounding, clip_norm=3.0)[0])
    triton_update = request.getfixturevalue("triton_update")
    state, parameters = state_of(form, compute, dtype, rounding, clip_norm=3.0)
    assert isinstance(state._update, triton_update)
    assert_alike(state, parameters, *expected, dtype, 2.0**-7 if compute == BRAIN else 0.0)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, in the interpreter
def test_triton_leaves_out_what_is_not_finite(triton_update):
    state, _ = state_of(compute=HALF, dtype=HALF)
    state._update.host_may_read = False
    updated(state, 1)
    before = state.state_dict()
    fill(state, 2)
    state.gradients.views[3][5] = float("inf")
    finite, _ = state.update(1, 0.5, torch.ones(()), False)
    assert not finite
    assert_bitwise_equal(state.state_dict(), before)


def test_triton_rounds_the_same_values_to_the_same_bits(triton_update, monkeypatch):
    """Without decay, momentum and ratios, and with gradients that are 0, nothing is computed before
    the rounding: the float32 gradients of the second step are what is rounded."""
    results = []
    for kind in (LarsUpdate, triton_update):
        monkeypatch.setattr(lars, "update_class", lambda device, kind=kind: kind)
        parameters = {"a": nn.Parameter(torch.zeros(5000, dtype=HALF))}
        state = WeightState(
            parameters.items(),
            lambda named: LARS([{"params": list(named.values()), "adapt": False}], lr=0.0, momentum=0.0),
            dtype=HALF, rounding="stochastic", seed=5,
        )  # fmt: skip
        values = torch.randn(
            5000, generator=torch.Generator().manual_seed(0)
        ) * 10.0 ** torch.linspace(-9, 6, 5000)
        state.gradients.flat[:5000] = values
        state.update(7, 1.0, torch.ones(()), False)
        results.append(state.state_dict())
    assert_bitwise_equal(results[1], results[0])
    assert len(results[0]["weights"]["a"].unique()) > 2000

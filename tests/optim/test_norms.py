"""Norms of gradients whose squares float32 cannot hold, against float64, in every place that takes
norms."""

import numpy as np
import pytest
import torch
from torch import nn

from optim import lars, norms
from optim.lars import LARS
from optim.norms import clip_factor, norm
from optim.weight_state import WeightState
from tests.optim import states, test_replica_update
from tests.optim.states import SINGLE, lars_step

SHAPES = {"conv.weight": (30, 7, 3), "head.weight": (64,), "zero": (5,)}
MU = 0.9
COEFFICIENT = 0.02
LR = 0.5
# Squares of the first two overflow, of the last two underflow; of 1e-21 they are subnormal, with a
# few bits. NumPy's warning, in Triton's interpreter.
overflows = pytest.mark.filterwarnings("ignore:overflow encountered")
SIZES = (1e30, 3e19, 1e-21, 1e-25, 1e-36)
every_form = pytest.mark.parametrize("trust", ["gradient", "momentum"])


def values_of(seed, size):
    """float32 values of each parameter, whose gradient is `size`; those of "zero" are 0."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * size * (name != "zero")
        for name, shape in SHAPES.items()
    }


def length_of(tensors):
    return np.sqrt(sum((each.double().numpy() ** 2).sum() for each in tensors.values()))


@pytest.fixture(params=["plain", "under a mask", "compiled", "triton"])
def state_of(request, monkeypatch):
    """state_of(trust, weights, clip_norm): a WeightState with LARS, on a backend."""
    if request.param == "triton":
        pytest.importorskip("triton")
        from optim.kernels.lars import TritonLarsUpdate

        monkeypatch.setattr(lars, "update_class", lambda device: TritonLarsUpdate)

    def create(trust, weights, clip_norm=None):
        parameters = {name: nn.Parameter(each.clone()) for name, each in weights.items()}
        options = {"momentum": MU, "trust_coefficient": COEFFICIENT, "trust": trust}
        state = WeightState(
            parameters.items(),
            lambda named: LARS(named.values(), lr=0.0, **options),
            dtype=SINGLE,
            rounding="nearest",
            seed=0,
            clip_norm=clip_norm,
        )
        if request.param == "compiled":
            assert "is compiled" in state.compile_update()
        if request.param == "under a mask":
            state._update.host_may_read = False
            monkeypatch.setattr(norms, "host_may_read", lambda device: False)
        return state

    return create


@overflows
@pytest.mark.parametrize(
    ("size", "trust"),
    [
        # Each size with one way to take the ratio, and each way with sizes at both ends.
        pytest.param(size, trust, marks=() if number % 2 == place else pytest.mark.slow)
        for number, size in enumerate(SIZES)
        for place, trust in enumerate(("gradient", "momentum"))
    ],
)
def test_lars_steps_by_norms_that_float32_squares_would_spoil(state_of, trust, size):
    """Two steps, the second with other gradients; float32 rounding of a few operations.

    Parameters that are 0 have the documented ratio.
    """
    weights = values_of(0, 1.0)
    state = state_of(trust, weights)
    expected = {
        name: (each.double().numpy(), np.zeros(each.shape)) for name, each in weights.items()
    }
    for step in range(2):
        gradients = values_of(1 + step, size)
        for view, gradient in zip(state.gradients.views, gradients.values()):
            view.copy_(gradient)
        finite, found = state.update(step, LR, torch.ones(()), True)
        assert finite
        assert found.gradient.item() == pytest.approx(length_of(gradients), rel=1e-6)
        for name, (w, m) in expected.items():
            g = gradients[name].double().numpy()
            w, m, ratio = lars_step(trust, w, g, m, LR, mu=MU, eta=COEFFICIENT)
            expected[name] = w, m
            assert found.trust[name].item() == pytest.approx(ratio, rel=1e-5)
    for name, each in state.state_dict()["weights"].items():
        np.testing.assert_allclose(each.numpy(), expected[name][0], rtol=0, atol=1e-5)
        assert name == "zero" or not torch.allclose(each, weights[name], atol=1e-3), "it has moved"


@every_form
@pytest.mark.parametrize("size", [3e19, 1e-25])
def test_lars_by_itself_takes_such_norms_too(trust, size):
    weights = values_of(0, 1.0)
    gradients = values_of(1, size)
    parameters = {name: nn.Parameter(each.clone()) for name, each in weights.items()}
    optimizer = LARS(
        parameters.values(), lr=LR, momentum=MU, trust_coefficient=COEFFICIENT, trust=trust
    )
    for name, parameter in parameters.items():
        parameter.grad = gradients[name]
    optimizer.step()
    for name, parameter in parameters.items():
        w, g = (each[name].double().numpy() for each in (weights, gradients))
        expected, _, ratio = lars_step(trust, w, g, np.zeros(w.shape), LR, mu=MU, eta=COEFFICIENT)
        np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=0, atol=1e-5)
        assert optimizer.trust_ratios[parameter].item() == pytest.approx(ratio, rel=1e-5)


@overflows
@pytest.mark.parametrize("size", [1e-25, 1e19, 3e19])
def test_weights_of_such_sizes_have_their_norms(state_of, size):
    """The ratio of a weight's norm to that of a gradient of another size."""
    weights = values_of(0, size)
    gradients = values_of(1, 1.0)
    state = state_of("gradient", weights)
    for view, gradient in zip(state.gradients.views, gradients.values()):
        view.copy_(gradient)
    _, found = state.update(0, LR, torch.ones(()), True)
    assert found.weight.item() == pytest.approx(length_of(weights), rel=1e-6)
    for name in ("conv.weight", "head.weight"):
        ratio = COEFFICIENT * length_of({"": weights[name]}) / length_of({"": gradients[name]})
        assert found.trust[name].item() == pytest.approx(ratio, rel=1e-5)


def test_no_ratio_becomes_infinite(state_of):
    """A gradient of 1e-44 asks for a ratio above the largest number: with infinity the step would
    be NaN."""
    weights = values_of(0, 1.0)
    state = state_of("gradient", weights)
    state.gradients.views[0].fill_(1e-44)
    state.update(0, 10.0, torch.ones(()), False)
    assert all(each.isfinite().all() for each in state.state_dict()["weights"].values())


@pytest.mark.parametrize("size", [1e37, 3e19, 1e-25])
@pytest.mark.parametrize("name", ["sgd without momentum", "lars"])
def test_gradients_of_such_sizes_are_clipped_to_the_limit(name, size):
    """A step against the whole gradient, of the limit's length, or of its own where that is
    shorter. The whole norm of 1e37 is more than float32 has."""
    section = {**states.SECTIONS[name], "weight_decay": 0.0, "skip": [], "clip_norm": 2.0}
    if name == "lars":
        section.update(momentum=0.0, skip=["bias", "norm"], skip_lr_scale=1.0)
    shapes = {f"{number}.bias": (4000,) for number in range(2)}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    before = {name: each.detach().clone() for name, each in parameters.items()}
    state = states.weight_state(parameters, section, SINGLE, "nearest", clip_norm=2.0)
    for number, view in enumerate(state.gradients.views):
        view.fill_(size * (1 + number))
    length = np.sqrt(4000 * 5) * size
    state.update(0, 0.5, torch.ones(()), False)
    for number, (key, each) in enumerate(parameters.items()):
        expected = -0.5 * size * (1 + number) * min(1.0, 2.0 / length)
        np.testing.assert_allclose((each - before[key]).detach().numpy(), expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("lars", 3e19),
        ("lars by momentum", 3e19),
        ("lars, clipped", 3e19),
        ("sgd, clipped", 3e19),
        ("lars", 1e-25),
        ("lars by momentum", 1e-25),
    ],
)
def test_a_replica_that_makes_its_own_update_has_such_norms(kind, size):
    """LARS's steps do not depend on the gradient's size, nor do clipped ones: those of ordinary
    gradients."""
    kind = {**test_replica_update.OPTIMIZERS[kind], "weight_decay": 0.0}
    made = []
    for factor in (1.0, size / test_replica_update.DIVISOR):
        replica = test_replica_update.Replica(kind)
        replica([100 * factor * each for each in test_replica_update.gradients(0)])
        made.append(replica.residual)
    places = replica.weights._layout.places
    for name in ("conv.weight", "head.weight"):
        start, count = places[name]
        one, other = (each[start : start + count] for each in made)
        torch.testing.assert_close(other, one, rtol=1e-4, atol=0)


def test_a_norm_by_itself_is_that_of_float64():
    for size in (1e30, 1.0, 1e-30, 0.0):
        values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * size
        assert norm(values).item() == pytest.approx(values.double().norm().item(), rel=1e-6)
    assert norm(torch.tensor([float("nan")])).isnan() and norm(torch.tensor([float("inf")])).isinf()


def test_a_clip_factor_is_at_most_one_and_nothing_for_what_is_not_finite():
    lengths = torch.tensor([0.0, 1.0, 4.0, 1e40, float("inf")], dtype=torch.float64)
    found = [clip_factor(2.0, each).item() for each in lengths]
    assert found == pytest.approx([1.0, 1.0, 0.5, 2e-40, 0.0], rel=1e-4)

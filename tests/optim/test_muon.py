"""Muon against its closed form, timm, torch and AdamW; which parameters are matrices; its bits on
several threads."""

import collections
import functools

import numpy as np
import pytest
import timm
import timm.optim
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from models.families import build
from models.meta import without_memory
from optim import factory, muon
from optim.muon import COEFFICIENTS, Muon, orthogonalized
from recipe.config import Model, Optimizer
from tests.conftest import ROOT
from tests.optim import states
from tests.optim.states import take_step, weight_state

STEPS = 12
SHAPES = {
    "first": (6, 3, 3, 3), "wide": (5, 4, 3, 3), "tall": (24, 7), "square": (8, 8), "bias": (7,), "last": (10, 6),
}  # fmt: skip
MATRICES = ("wide", "tall", "square")
OTHERS = tuple(name for name in SHAPES if name not in MATRICES)
NUMBERS = {"momentum": 0.9, "ns_steps": 5}
BETAS = (0.8, 0.95)
EPS = 1e-6
DECAY = 0.05


def random_values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }


def polynomial(values, steps):
    """What Newton-Schulz steps make of singular values, float64."""
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    return values


# Making matrices orthogonal -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (6, 6), (2, 40)], ids=str)
@pytest.mark.parametrize("steps", [1, 5, 7])
def test_singular_values_become_those_of_the_polynomial_and_the_vectors_stay(shape, steps):
    """The closed form, by numpy's decomposition.

    Each of 7 steps magnifies errors of float64 by 3.4 at most, so by 5,300 in all, of a few 2e-16.
    """
    drawn = np.random.RandomState(0).randn(3, *shape)
    left, values, right = np.linalg.svd(drawn, full_matrices=False)
    values = values / np.linalg.norm(values, axis=1, keepdims=True)
    expected = left * polynomial(values, steps)[:, None] @ right
    found = orthogonalized(torch.from_numpy(drawn), steps)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-11)


def test_five_steps_bring_singular_values_into_the_published_range():
    """Between 0.5 and 1.5 says the authors' code.

    Above 1 % of the norm they are between 0.68 and 1.14, and smaller ones grow 3.4445^5 = 485
    times.
    """
    values = polynomial(np.linspace(0.01, 1, 100_000), 5)
    assert 0.68 < values.min() < 0.69 and 1.13 < values.max() < 1.14
    found = torch.linalg.svdvals(orthogonalized(torch.diag(torch.linspace(0.02, 1, 16))[None], 5))
    assert found.min() > 0.68 and found.max() < 1.14
    tiny = torch.diag(torch.tensor([1.0, 1e-6]))[None]
    assert torch.linalg.svdvals(orthogonalized(tiny, 5))[0, 1].item() == pytest.approx(
        485e-6, rel=1e-3
    )


@pytest.mark.parametrize("factor", [1e-6, 1e36])
def test_the_size_of_finite_gradients_does_not_matter(factor):
    """Squares of 1e36 are infinite in float32.

    Rounding 2**-24 grows 485 times at most where singular values are small; these are not.
    """
    drawn = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        orthogonalized(drawn * factor, 5), orthogonalized(drawn, 5), rtol=0, atol=1e-5
    )


def test_zeros_stay_zeros():
    assert torch.equal(orthogonalized(torch.zeros(2, 3, 5), 5), torch.zeros(2, 3, 5))


# Steps --------------------------------------------------------------------------------------------


def parameters_of(dtype=torch.float64):
    return {name: nn.Parameter(value.to(dtype)) for name, value in random_values(0).items()}


def muon_of(parameters, **numbers):
    section = Optimizer(
        name="muon",
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
        weight_decay=DECAY,
        **{**NUMBERS, **numbers},
    )
    return factory.create(section, parameters, [], dict.fromkeys(MATRICES, 1))


def steps_of(optimizer, parameters, steps=STEPS):
    """Updates by gradients that depend on the weights, at changing rates."""
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.3 / (1 + step) * group.get("scale", 1.0)
        if isinstance(optimizer, Muon):
            optimizer.at_step(step)
        drawn = random_values(1 + step)
        for name, parameter in parameters.items():
            parameter.grad = (drawn[name] + 0.2 * parameter.detach().double()).to(parameter.dtype)
        optimizer.step()


def assert_close(ours, theirs, names, tolerance):
    """Relative to the largest weight.

    Both in float64, where 12 updates of singular values that grow 485 times carry a rounding of
    2e-16 to 1e-12.
    """
    for name in names:
        largest = theirs[name].detach().abs().max().item()
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_are_those_of_timm(nesterov, monkeypatch):
    """timm rounds the products of matrices to bfloat16, which is not the subject.

    With Nesterov momentum its other parameters take NAdam's steps; here they are AdamW's in any
    case.
    """
    theirs = pytest.importorskip("timm.optim.muon", reason="timm has Muon from 1.0.23 on")
    exact = functools.partial(theirs.zeropower_via_newtonschulz, dtype=torch.float64)
    monkeypatch.setattr(theirs, "zeropower_via_newtonschulz", exact)
    ours = parameters_of()
    expected = parameters_of()
    optimizer = muon_of(ours, nesterov=nesterov)
    common = {
        "lr": 0.0,
        "momentum": NUMBERS["momentum"],
        "betas": BETAS,
        "ns_coefficients": "original",
    }
    groups = [
        {"params": [expected[name] for name in MATRICES], "nesterov": nesterov},
        {"params": [expected["bias"]], "use_fallback": True, "eps": EPS, "weight_decay": 0.0},
        {
            "params": [expected[name] for name in ("first", "last")],
            "use_fallback": True,
            "eps": EPS,
        },
    ]
    reference = timm.optim.Muon(groups, weight_decay=DECAY, **common)
    steps_of(optimizer, ours)
    steps_of(reference, expected)
    assert_close(ours, expected, SHAPES, 1e-11)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("nesterov", [False, True])
def test_steps_of_matrices_are_those_of_torch(nesterov, monkeypatch):
    """In float64, too: torch rounds the products to bfloat16. It takes matrices only."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    ours = parameters_of()
    expected = parameters_of()
    matrices = {name: nn.Parameter(expected[name].detach().flatten(1)) for name in MATRICES}
    options = {
        "momentum": NUMBERS["momentum"],
        "weight_decay": DECAY,
        "adjust_lr_fn": "match_rms_adamw",
    }
    reference = torch.optim.Muon(matrices.values(), lr=0.0, nesterov=nesterov, **options)
    optimizer = muon_of(ours, nesterov=nesterov)
    for step in range(STEPS):
        drawn = random_values(1 + step)
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 0.3 / (1 + step)
        for name, parameter in ours.items():
            parameter.grad = drawn[name]
        for name, matrix in matrices.items():
            matrix.grad = drawn[name].flatten(1)
        optimizer.step()
        reference.step()
    assert_close({name: ours[name].flatten(1) for name in MATRICES}, matrices, MATRICES, 1e-11)


def test_all_other_parameters_take_the_steps_of_adamw_at_their_own_rate():
    """Bitwise, in float32: torch's own function. Only skipped parameters have no weight decay."""
    ours = parameters_of(torch.float32)
    expected = parameters_of(torch.float32)
    groups = [
        {"params": [expected["bias"]], "weight_decay": 0.0, "scale": 0.25},
        {"params": [expected[name] for name in ("first", "last")], "scale": 0.25},
    ]
    reference = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, weight_decay=DECAY)
    steps_of(muon_of(ours, adamw_lr_scale=0.25), ours)
    steps_of(reference, expected)
    for name in OTHERS:
        assert torch.equal(ours[name], expected[name]), name


def test_rates_of_adamw_are_of_use():
    """An element of a step at rate 1 is 0.2 in the root mean square, as about AdamW's, whatever the
    shape; up to the singular values, which are 0.68 to 1.14 instead of 1."""
    parameters = {name: value for name, value in parameters_of().items() if name in MATRICES}
    before = {name: value.detach().clone() for name, value in parameters.items()}
    optimizer = factory.create(
        Optimizer(name="muon", weight_decay=0.0), parameters, [], dict.fromkeys(MATRICES, 1)
    )
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    for name, parameter in parameters.items():
        parameter.grad = random_values(1)[name]
    optimizer.step()
    for name, parameter in parameters.items():
        length = (parameter.detach() - before[name]).square().mean().sqrt().item()
        assert 0.68 * 0.2 < length < 1.14 * 0.2, name


def test_each_group_of_a_convolution_is_a_matrix_of_its_own():
    """As if each were a weight of its own, bitwise. All rows together would be another step."""
    weight = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    gradient = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    whole = nn.Parameter(weight.clone())
    stacked = nn.Parameter(weight.clone())
    parts = {str(number): nn.Parameter(part.clone()) for number, part in enumerate(weight.chunk(2))}
    whole.grad = gradient.clone()
    stacked.grad = gradient.clone()
    for part, own in zip(parts.values(), gradient.chunk(2)):
        part.grad = own.clone()
    for named, groups in (({"weight": whole}, 2), ({"weight": stacked}, 1), (parts, 1)):
        optimizer = factory.create(Optimizer(name="muon"), named, [], dict.fromkeys(named, groups))
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        optimizer.step()
    assert torch.equal(whole, torch.cat(list(parts.values())))
    assert (whole - stacked).abs().max() > 1e-3


# Which parameters are matrices of hidden layers ---------------------------------------------------


def convolutions_of(model):
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
    }


@pytest.mark.parametrize("group_size", [1, 16])
def test_hidden_layers_are_all_convolutions_but_the_first_and_depthwise_ones(group_size):
    """And not the classifier. Groups are the convolution's own."""
    model = build(
        Model(name="efficientnet_b0", width=0.5, depth=0.4, image_size=32, group_size=group_size), 0
    )
    hidden = factory.hidden_layers(model)
    convolutions = convolutions_of(model)
    assert "stem.conv_stem.weight" in convolutions and "head.classifier.weight" in dict(
        model.named_parameters()
    )
    depthwise = {
        name for name, module in convolutions.items() if module.in_channels == module.groups
    }
    assert set(hidden) == set(convolutions) - depthwise - {"stem.conv_stem.weight"}
    assert bool(depthwise) == (group_size == 1)
    assert {name: convolutions[name].groups for name in hidden} == hidden
    assert any(groups > 1 for groups in hidden.values()) == (group_size == 16)


def test_layers_of_any_module_are_taken_in_their_order():
    module = nn.Sequential(
        nn.Embedding(7, 6),
        nn.Linear(6, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 1),
        nn.Linear(1, 4),
        nn.Linear(4, 3),
    )
    assert factory.hidden_layers(module) == {"1.weight": 1}
    assert factory.hidden_layers(nn.Linear(3, 4)) == factory.hidden_layers(nn.LayerNorm(3)) == {}


class Tabled(nn.Module):
    """Torch's attention, transposed convolution in two groups, and between them a table and an
    embedding."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.ones(2, 6))
        self.stem = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=5)
        self.relative_position_bias_table = nn.Parameter(torch.ones(9, 2))
        self.positions = nn.Embedding(7, 6)
        self.own = nn.MultiheadAttention(6, 2)
        self.larger = nn.ConvTranspose2d(6, 4, 2, groups=2)
        self.head = nn.Linear(4, 3)


def test_hidden_layers_are_multiplied_by_and_no_table_or_token_is_one():
    projections = ("attention.q_proj_weight", "attention.k_proj_weight", "attention.v_proj_weight")
    others = ("attention.out_proj.weight", "own.in_proj_weight", "own.out_proj.weight")
    assert factory.hidden_layers(Tabled()) == {
        **dict.fromkeys((*projections, *others), 1),
        "larger.weight": 2,
    }


class Own(nn.Module):
    """A layer of one's own that multiplies by its weight, which nothing tells from a table."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize(
    ("kind", "matrix"), [("spectral_norm", "original"), ("weight_norm", "original1")]
)
def test_a_parametrised_layer_is_a_layer(kind, matrix):
    """The first and the last one count as these, whatever their weights are made of."""
    if not hasattr(parametrizations, kind):
        pytest.skip("torch has weight_norm as a parametrisation from 2.1 on")
    wrapped = getattr(parametrizations, kind)
    layers = [nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Linear(4, 4), nn.Linear(4, 4)]
    module = nn.Sequential(*(wrapped(each) for each in layers))
    names = [f"{number}.parametrizations.weight.{matrix}" for number in (1, 2)]
    assert factory.hidden_layers(module) == dict(zip(names, (2, 1)))


def test_what_a_parametrisation_stores_need_be_no_matrix_of_the_layer():
    class Scaled(nn.Module):
        def right_inverse(self, weight):
            return weight.mean(), weight[0, :1, 0]

        def forward(self, mean, row):
            return mean * row.expand(4, 2, 1).unsqueeze(-1)

    middle = nn.Conv2d(4, 4, 1, groups=2)
    parametrize.register_parametrization(middle, "weight", Scaled())
    assert (
        factory.hidden_layers(nn.Sequential(nn.Conv2d(4, 4, 1), middle, nn.Conv2d(4, 4, 1))) == {}
    )


def test_of_other_modules_matrices_are_not_known():
    """They take AdamW's steps, and are neither the first nor the last layer."""
    others = [nn.LSTM(4, 4), nn.Bilinear(4, 4, 4), Own()]
    module = nn.Sequential(*others, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), *others)
    assert factory.hidden_layers(module) == {"4.weight": 1}


@pytest.mark.parametrize(
    "architecture", ["swin_tiny_patch4_window7_224", "beit_base_patch16_224", "tiny_vit_5m_224"]
)
def test_hidden_layers_of_timms_models_are_weights_of_linear_layers_and_convolutions(architecture):
    with without_memory():
        model = timm.create_model(architecture)
    hidden = factory.hidden_layers(model)
    multiplied = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) and len(module.weight) > getattr(
            module, "groups", 1
        ):
            multiplied[f"{name}.weight"] = getattr(module, "groups", 1)
    first, *between, _ = multiplied
    assert list(hidden) == between and first.startswith("patch_embed.")


def test_a_hidden_layer_that_is_skipped_is_no_matrix():
    """A parameter of two dimensions that is called bias has no weight decay and AdamW's steps."""
    named = {"bias": nn.Parameter(torch.ones(3, 4)), "weight": nn.Parameter(torch.ones(3, 4))}
    optimizer = factory.create(Optimizer(name="muon"), named, [], {"bias": 1, "weight": 1})
    found = {
        id(each): (group["matrices"], group["weight_decay"])
        for group in optimizer.param_groups
        for each in group["params"]
    }
    assert found == {id(named["bias"]): (0, 0.0), id(named["weight"]): (1, 0.1)}


@functools.lru_cache(maxsize=None)
def b4():
    """Weights of a B4 by name, without memory, and its hidden layers."""
    with without_memory():
        model = build(Model(), 0)
    return dict(model.named_parameters()), factory.hidden_layers(model)


@pytest.mark.parametrize(("by_group", "expected"), [(True, 69), (False, 118)])
def test_products_of_a_b4_cost_what_the_page_says(by_group, expected):
    """In GFLOP, as torch counts them; of matrices of one shape once, as counting takes long."""
    flop_counter = pytest.importorskip("torch.utils.flop_counter", reason="newer than torch 2.0.1")
    weights, hidden = b4()
    kinds = collections.Counter()
    for name, groups in hidden.items():
        matrices = groups if by_group else 1
        kinds[
            weights[name].detach().reshape(matrices, len(weights[name]) // matrices, -1).shape
        ] += 1
    flops = 0
    for shape, count in kinds.items():
        with flop_counter.FlopCounterMode(display=False) as counter:
            orthogonalized(torch.empty(shape, device="meta"), 5)
        flops += count * counter.get_total_flops()
    assert flops / 1e9 == pytest.approx(expected, abs=0.5)
    page = (ROOT / "docs" / "optimizer.md").read_text(encoding="utf-8")
    assert f"{expected} GFLOP" in page or f"would be {expected}." in page


# Bits ---------------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    """Sets torch's threads, and those from before when the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_bits_do_not_depend_on_threads(threads, monkeypatch):
    """A library that divides a product of matrices among threads may add in another order: MKL does
    with three threads and these shapes. One thread makes the products; afterwards there are as many
    as before."""
    used = []

    def noted(*arguments):
        used.append(torch.get_num_threads())
        return orthogonalized(*arguments)

    monkeypatch.setattr(muon, "orthogonalized", noted)
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(20, 480, generator=generator) for _ in range(2))
    found = []
    for number in (1, 2, 3, 4):
        threads(number)
        parameter = nn.Parameter(weight.clone())
        parameter.grad = gradient.clone()
        optimizer = factory.create(Optimizer(name="muon"), {"weight": parameter}, [], {"weight": 1})
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        optimizer.step()
        assert torch.get_num_threads() == number
        found.append(parameter.detach())
    assert used == [1, 1, 1, 1]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_the_presence_of_other_parameters_changes_no_bit():
    """So stages of a model take the steps of the whole. Half weights, stochastic rounding."""
    results = []
    for chosen in (tuple(states.SHAPES), ("conv.weight",)):
        parameters = states.module_parameters(names=chosen)
        state = weight_state(parameters, states.MUON)
        for step in range(3):
            take_step(state, parameters, step, gradients=states.random_values(1 + step), lr=0.1)
        results.append({key: tensors["conv.weight"] for key, tensors in state.state_dict().items()})
    for key, tensor in results[0].items():
        assert torch.equal(tensor, results[1][key]), key

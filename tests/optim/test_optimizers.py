"""The optimizers of recipes: against the libraries' own and loops in float64; which parameters are
skipped."""

import importlib.util

import numpy as np
import pytest
import timm
import timm.optim
import torch
from torch import nn

from models.families import build
from models.meta import without_memory
from models.normalization import norm_parameters
from optim import factory
from optim.lars import LARS
from optim.library_optimizers import SGD, AdamW, Lamb, RMSprop
from optim.muon import Muon
from recipe.config import Model, Optimizer
from tests.optim import states
from tests.optim.states import CONTROLS, SKIPPED, lars_step, rate, take_step, weight_state

STEPS = 24
KINDS = {"sgd": SGD, "rmsprop": RMSprop, "lamb": Lamb, "adamw": AdamW, "lars": LARS, "muon": Muon}
every_control = pytest.mark.parametrize("section", CONTROLS.values(), ids=CONTROLS)


def library_optimizer(section, parameters, foreach):
    """As its authors' users make it."""
    usual = [parameter for name, parameter in parameters.items() if name not in SKIPPED]
    groups = [
        {"params": usual},
        {"params": [parameters[name] for name in SKIPPED], "weight_decay": 0.0},
    ]
    kind = section["name"]
    options = {key: value for key, value in section.items() if key != "name"}
    if kind in ("lamb", "adamw"):
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    if kind == "lamb":
        groups[0]["always_adapt"] = True
        options["max_grad_norm"] = None
    kinds = {"sgd": torch.optim.SGD, "rmsprop": timm.optim.RMSpropTF, "lamb": timm.optim.Lamb}
    optimizer = kinds.get(kind, torch.optim.AdamW)(groups, lr=0.0, **options)
    for group in optimizer.param_groups:
        group["foreach"] = foreach
    return optimizer


@pytest.mark.parametrize("foreach", [False, True], ids=["tensor by tensor", "all at once"])
@every_control
def test_in_float32_a_control_takes_the_steps_of_the_library_bitwise(section, foreach):
    """The same operations in the same order, although the library starts its own state.

    The norm is that of the gradients that came, whatever the optimizer leaves in them: of float32
    sums, to a few 2**-24.
    """
    parameters = states.module_parameters()
    others = states.module_parameters()
    state = weight_state(parameters, section, torch.float32, foreach=foreach)
    optimizer = library_optimizer(section, others, foreach)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.zero_grad()
        states.loss(others, step).backward()
        expected = np.sqrt(
            sum((other.grad.double() ** 2).sum().item() for other in others.values())
        )
        optimizer.step()
        _, norms = take_step(state, parameters, step)
        assert norms.gradient.item() == pytest.approx(expected, rel=1e-6)
        for name, other in others.items():
            assert torch.equal(parameters[name], other), (step, name)
    found = state.state_dict()
    for slot in states.slots_of(section):
        for name, other in others.items():
            assert torch.equal(found[slot][name], optimizer.state[other][slot]), (slot, name)


@pytest.mark.parametrize("nesterov", [False, True], ids=["momentum", "Nesterov momentum"])
def test_at_one_rate_lars_takes_the_steps_of_timm(nesterov):
    """timm's rate is outside the momentum, so steps are equal at a constant rate only. timm's run
    in float64 is the reference; ours, in float32, errs by a few roundings a step of numbers up to
    the largest weight."""
    kept = {"momentum": 0.8, "eps": 1e-8, "nesterov": nesterov}
    parameters = states.module_parameters()
    section = {"name": "lars", "weight_decay": 0.01, "trust_coefficient": 0.1, **kept}
    state = weight_state(parameters, section, torch.float32)
    others = {
        name: nn.Parameter(parameter.detach().double()) for name, parameter in parameters.items()
    }
    groups = [
        {
            "params": [other for name, other in others.items() if name not in SKIPPED],
            "weight_decay": 0.01,
        },
        {"params": [others[name] for name in SKIPPED], "weight_decay": 0.0},
    ]
    optimizer = timm.optim.Lars(groups, lr=0.05, trust_coeff=0.1, **kept)
    before = {name: other.detach().clone() for name, other in others.items()}
    for step in range(STEPS):
        optimizer.zero_grad()
        states.loss(others, step).backward()
        optimizer.step()
        take_step(state, parameters, step, lr=0.05)
    largest = max(other.abs().max().item() for other in (*before.values(), *others.values()))
    for name, other in others.items():
        assert (parameters[name] - other).abs().max() <= 5 * STEPS * 2.0**-24 * largest, name
        assert (other - before[name]).abs().max() > 0.1 * before[name].abs().max(), (
            f"{name} has moved"
        )


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("name", "slot", "start"), [("rmsprop", "square_avg", 1.0), ("lamb", "exp_avg_sq", 0.0)]
)
def test_second_moments_start_where_the_paper_has_them_and_keep_small_squares(
    name, slot, start, rounding
):
    """The square of 2e-4 is 4e-8, and float16 has nothing between 0 and 6e-8."""
    section = CONTROLS[name]
    parameters = {"head.bias": nn.Parameter(torch.ones(4))}
    state = weight_state(parameters, section, states.HALF, rounding)
    assert state.state_dict()[slot]["head.bias"].tolist() == [start] * 4
    state.load_state_dict({**state.state_dict(), slot: {"head.bias": torch.zeros(4)}})
    take_step(state, parameters, 0, gradients={"head.bias": torch.full((4,), 2e-4)})
    share = 1 - section.get("alpha", section.get("beta2"))
    assert state.state_dict()[slot]["head.bias"].tolist() == pytest.approx(
        [share * 4e-8] * 4, rel=1e-5
    )


# From the recipe to parameter groups.

NORMS = ["block.norm.weight", "block.norm.bias"]
NAMES = [
    "stem.weight",
    *NORMS,
    "block.biased.weight",
    "bias.weight",
    "a.unbias",
    "bias",
    "head.bias",
]
NAMES += ["block.q_bias", "block.table_bias"]
VECTORS = ["block.q_bias"]  # the others are matrices


def created(**section):
    """An optimizer of parameters of those names, the parameters, and each one's group by its
    name."""
    generator = torch.Generator().manual_seed(0)
    named = {}
    for name in NAMES:
        values = torch.randn(3, 4, generator=generator)
        named[name] = nn.Parameter(values[0] if name in VECTORS else values)
    optimizer = factory.create(Optimizer(**section), named, [*NORMS, *VECTORS])
    names = {parameter: name for name, parameter in named.items()}
    groups = {
        names[parameter]: group for group in optimizer.param_groups for parameter in group["params"]
    }
    assert groups.keys() == named.keys()
    assert type(optimizer) is KINDS[section.get("name", "lars")]
    return optimizer, named, groups


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        (
            ["bias", "norm"],
            ["block.norm.weight", "block.norm.bias", "bias", "head.bias", "block.q_bias"],
        ),
        (["bias"], ["block.norm.bias", "bias", "head.bias", "block.q_bias"]),
        (["norm"], ["block.norm.weight"]),
        ([], []),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", KINDS)
def test_the_skipped_have_no_decay_and_no_trust_ratio(name, skip, expected):
    """`bias` covers the biases of norms, `norm` only their scales.

    A bias is known by the last part of its name, but a table is none.
    """
    _, _, groups = created(name=name, weight_decay=0.5, skip=skip)
    for key, group in groups.items():
        assert group["weight_decay"] == (0.0 if key in expected else 0.5)
        for adapts in {"lars": ["adapt"], "lamb": ["always_adapt"]}.get(name, []):
            assert group[adapts] is (key not in expected)


needs_newer_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch.utils.flop_counter") is None,
    reason="models of timm need torch 2.1",
)
MULTIPLIED = {  # scales of several dimensions
    "resmlp_12_224": (".alpha", ".beta"),
    "fastvit_t8": (".gamma",),
    "swiftformer_xs": (".gamma",),
    "iformer_t": (".gamma",),
    "iformer_h": (".gamma",),
}
# Their scales are in layers that the fast ones have, or have one dimension as theirs.
ALIKE = (
    "convnext_atto",
    "eva02_tiny_patch14_224",
    "caformer_s18",
    "xcit_nano_12_p16_224",
    "cait_xxs24_224",
    "iformer_h",
)


@needs_newer_torch
@pytest.mark.parametrize(
    "architecture",
    [
        "convnextv2_atto",
        "beit_base_patch16_224",
        "inception_next_atto",
        "resmlp_12_224",
        "fastvit_t8",
        "swiftformer_xs",
        "iformer_t",
        *(pytest.param(architecture, marks=pytest.mark.slow) for architecture in ALIKE),
    ],
)
def test_of_timms_models_what_timm_does_not_decay_is_skipped(architecture):
    """All of one dimension, and biases; of more dimensions the scales in layers known by their
    type."""
    if not timm.is_model(architecture):
        pytest.skip(f"timm {timm.__version__} is older than this model")
    with without_memory():
        model = timm.create_model(architecture, num_classes=7)
    named = dict(model.named_parameters())
    undecayed, _ = timm.optim.param_groups_weight_decay(model)
    multiplied = {name for name in named if name.endswith(MULTIPLIED.get(architecture, "-"))}
    expected = multiplied | {
        name for name in named if any(named[name] is each for each in undecayed["params"])
    }
    biases = {name for name in expected if name.split(".")[-1] in ("bias", "q_bias", "v_bias")}
    for skip, names in (
        (["bias", "norm"], expected),
        (["bias"], biases),
        (["norm"], expected - biases),
    ):
        assert (
            factory.skipped_names(Optimizer(skip=skip), named, norm_parameters(model))
            == names
            != set()
        )


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"norm": "layer"},
        {"norm": "batch"},
        {"proxy_norm": True},
        {"norm": "layer", "proxy_norm": True},
    ],
    ids=str,
)
def test_of_efficientnets_biases_and_the_scales_in_norms_are_skipped(keys):
    with without_memory():
        model = build(Model(name="efficientnet_b0", **keys), seed=0)
    named = dict(model.named_parameters())
    biases = {name for name in named if name.endswith(".bias")}
    norms = {name for name in named if name.split(".")[-2].startswith("bn")} - biases
    for skip, names in ((["bias", "norm"], biases | norms), (["bias"], biases), (["norm"], norms)):
        assert (
            factory.skipped_names(Optimizer(skip=skip), named, norm_parameters(model))
            == names
            != set()
        )


def test_the_numbers_of_lars_arrive_in_its_groups():
    """Those of the controls are in the steps above."""
    numbers = {"momentum": 0.8, "trust_coefficient": 0.02, "eps": 1e-6}
    optimizer, _, groups = created(trust="momentum", skip_lr_scale=0.25, **numbers)
    assert optimizer.trust == "momentum"
    assert not any(group["nesterov"] for group in optimizer.param_groups)
    assert all(group["nesterov"] for group in created(nesterov=True)[0].param_groups)
    assert (groups["stem.weight"]["lr_scale"], groups["head.bias"]["lr_scale"]) == (1.0, 0.25)
    assert all({key: group[key] for key in numbers} == numbers for group in groups.values())


def test_the_defaults_take_the_published_steps():
    """Two updates of the TensorFlow 1 recipe, whose constants stand below, in float64.

    A float32 update errs by a few 2**-24 of the largest weight, 3.
    """
    optimizer, named, groups = created()
    expected = {
        name: parameter.detach().numpy().astype(np.float64) for name, parameter in named.items()
    }
    momentum = {name: np.zeros(parameter.shape) for name, parameter in named.items()}
    random = np.random.RandomState(1)
    for lr in (8.485, 2.0):
        for name, parameter in named.items():
            g = random.randn(*parameter.shape).astype(np.float32)
            parameter.grad = torch.from_numpy(g)
            adapt = name in (
                "stem.weight",
                "block.biased.weight",
                "bias.weight",
                "a.unbias",
                "block.table_bias",
            )
            expected[name], momentum[name], _ = lars_step(
                "gradient",
                expected[name],
                g.astype(np.float64),
                m=momentum[name],
                lr=lr,
                decay=2.5e-6,
                adapt=adapt,
                mu=0.885,
                eta=0.001,
            )
            groups[name]["lr"] = lr
        optimizer.step()
    for name, parameter in named.items():
        scale = np.abs(momentum[name]).max() + 3
        np.testing.assert_allclose(
            parameter.detach().numpy(), expected[name], rtol=0, atol=8 * 2**-24 * scale
        )

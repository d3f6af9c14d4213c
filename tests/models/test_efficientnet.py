"""The models against timm's own: same parameters, same numbers, same gradients; and what a pipeline
needs of them."""

import functools
import math

import pytest
import timm
import torch
from timm import layers
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.efficientnet import EfficientNet
from torch import nn

from common.errors import ConfigError
from models.balance import split_names
from models.efficientnet import build, timm_name
from models.normalization import NORMS, BatchNormAct, GroupNormAct, ProxyNormAct, norm_parameters
from recipe.config import Model


def on_meta(**sections):
    """The model's shapes without its numbers."""
    with torch.device("meta"):
        return build(Model(**sections), seed=0)


def convolutions(model):
    return {
        name: block.conv_dw
        for name in model.names
        for block in [model.block(name)]
        if isinstance(getattr(block, "conv_dw", None), nn.Conv2d)
    }


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


STAGES = (
    "ds_r1_k3_s1_e1_c16 ir_r2_k3_s2_e4_c24 ir_r2_k5_s2_e4_c40 ir_r3_k3_s2_e4_c80 ir_r3_k5_s1_e4_c112 "
    + ("ir_r4_k5_s2_e4_c192 ir_r1_k3_s1_e4_c320")
)


def timms_g16(padding, group_sizes=None):
    """timm's EfficientNet of B4's width with timm's own group normalisation; `group_sizes`: of the
    blocks in order.

    Published: groups = max(expanded // 16, 1). The expanded channels are those of timm's depthwise
    model.
    """
    if group_sizes is None:
        with torch.device("meta"):
            depthwise = timms_g16(padding, [1] * 99)
        channels = [block.conv_dw.in_channels for stage in depthwise.blocks for block in stage]
        group_sizes = [expanded // max(expanded // 16, 1) for expanded in channels]
    blocks = decode_arch_def([[f"{stage}_se0.25"] for stage in STAGES.split()], 0.4)
    rounded = functools.partial(round_channels, multiplier=1.4)
    for block, size in zip((block for stage in blocks for block in stage), group_sizes):
        block["group_size"] = size
    norm_layer = functools.partial(layers.GroupNormAct, num_groups=4, eps=1e-3)
    options = {
        "pad_type": "same" if padding == "same" else "",
        "act_layer": nn.SiLU,
        "norm_layer": norm_layer,
    }
    return EfficientNet(blocks, num_features=rounded(1280), round_chs_fn=rounded, **options)


def test_b4_has_the_published_numbers_of_parameters():
    """19,328,168 with groups of 16 and channel divisor 8; the divisor 16 would give 19,420,076.

    Depthwise 19 million (1905.11946, table 2), and the same whatever normalises: two numbers a
    channel. Of its 32 group convolutions `blocks.0.1` has 24 channels, one group: it is dense.
    """
    model = on_meta(name="efficientnet_b4")
    repeats = (2, 4, 4, 6, 6, 8, 2)
    blocks = [
        f"blocks.{stage}.{block}" for stage, length in enumerate(repeats) for block in range(length)
    ]
    assert model.names == ["preprocess", "stem", *blocks, "head"]
    assert count(model) == 19_328_168
    found = convolutions(model)
    assert len(found) == 32
    for name, convolution in found.items():
        assert convolution.groups == max(convolution.in_channels // 16, 1), name
    assert (found["blocks.0.1"].in_channels, found["blocks.0.1"].groups) == (24, 1)
    for norm in ("batch", "group", "layer"):
        assert (
            count(on_meta(name="efficientnet_b4", group_size=1, expansion=6, norm=norm))
            == 19_341_616
        )


@pytest.mark.parametrize(
    ("scale", "prefix"),
    [(0, "tf_"), pytest.param(3, "", marks=pytest.mark.slow), (4, ""), (7, "tf_")],
)
def test_models_of_every_scale_have_timms_parameters_and_buffers(scale, prefix):
    """Depthwise: width, depth and rounding of channels, and every name.

    With groups of 16, among the expanded channels of B7 are multiples of 8 that are none of 16.
    """
    name = f"efficientnet_b{scale}"
    with torch.device("meta"):
        reference = timm.create_model(prefix + name)
    model = on_meta(
        name=name, group_size=1, expansion=6, norm="batch", padding="same" if prefix else "torch"
    )
    state = {timm_name(key): value.shape for key, value in model.state_dict().items()}
    assert state == {key: value.shape for key, value in uncounted(reference.state_dict()).items()}
    for block in convolutions(on_meta(name=name)).values():
        assert block.in_channels % block.groups == 0
        assert block.groups <= max(block.in_channels // 16, 1)


def uncounted(state):
    """timm's state without the count of batches, which nothing of ours needs."""
    return {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}


def test_normalisation_groups_that_do_not_divide_are_the_users_to_mend():
    with pytest.raises(
        ConfigError,
        match=r"model\.norm_groups 5 does not divide a layer of \d+ channels; use model",
    ):
        on_meta(norm_groups=5)
    on_meta(norm_groups=8)


BATCH = {"group_size": 1, "expansion": 6, "norm": "batch", "norm_momentum": 0.1}
B0 = {**BATCH, "name": "efficientnet_b0", "padding": "torch", "norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("theirs", "section", "pixels", "tolerance"),
    [
        (lambda: timms_g16("same"), {"width": 1.4, "depth": 0.4, "padding": "same"}, 57, 1e-10),
        (lambda: timms_g16("torch"), {"width": 1.4, "depth": 0.4, "padding": "torch"}, 57, 1e-10),
        (lambda: timm.create_model("efficientnet_b0"), B0, 64, 1e-8),
    ],
    ids=["g16, same", "g16, torch", "efficientnet_b0"],
)
def test_logits_gradients_and_statistics_are_timms(theirs, section, pixels, tolerance):
    """timm's own model, weights and statistics random, loaded into ours by name, in evaluation and
    training; 57 pixels are odd, which shows a wrong padding.

    The same operations in float64, up to 160 layers of rounding at 1e-16, relative to the largest
    value; with batch normalisation the last channels see 8 pixels, whose variance divides by little
    and so adds three digits.
    """
    ours = build(Model(drop_path=0.0, dropout=0.0, **section), seed=0).double()
    theirs = theirs().double()
    generator = torch.Generator().manual_seed(0)
    for value in theirs.state_dict().values():
        if value.ndim == 1:  # ones and zeros at the start, which would hide a swap
            value.uniform_(0.5, 1.5, generator=generator)
    state = uncounted(theirs.state_dict())
    ours.load_state_dict({key: state.pop(timm_name(key)) for key in ours.state_dict()})
    assert not state
    images = torch.randint(0, 256, (2, 3, pixels, pixels), dtype=torch.uint8, generator=generator)
    weights = torch.randn(2, 1000, dtype=torch.float64, generator=generator)
    pixels = ours.block("preprocess")(images)

    with torch.no_grad():
        assert near(ours.eval()(images), theirs.eval()(pixels), 1e-11)
    logits = ours.train()(images)
    expected = theirs.train()(pixels)
    assert near(logits, expected, 1e-10)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {key: value.grad for key, value in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        assert near(parameter.grad, gradients.pop(timm_name(key)), tolerance), key
    assert not gradients
    state = theirs.state_dict()
    assert all(
        near(value, state[timm_name(key)], 1e-10) for key, value in ours.state_dict().items()
    )


def near(actual, expected, tolerance):
    """Whether no element is off by more than `tolerance` of the largest, which is not 0."""
    largest = expected.abs().max()
    return (
        largest > 0
        and actual.dtype == expected.dtype
        and (actual - expected).abs().max() <= tolerance * largest
    )


def test_weights_are_a_function_of_the_seed():
    model = Model(name="efficientnet_b0", width=0.25, depth=0.1, classes=7)
    built = build(model, seed=5)
    assert built.training and {parameter.dtype for parameter in built.parameters()} == {
        torch.float32
    }
    assert built(torch.zeros(2, 3, 33, 32, dtype=torch.uint8)).shape == (2, 7)
    before = torch.random.get_rng_state()
    first = built.state_dict()
    for seed in (5, 4, 5 + 2**62):
        other = build(model, seed=seed).state_dict()
        assert all(torch.equal(first[key], other[key]) for key in first) == (seed == 5)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("classes", [2, 1000, 5000])
def test_few_classes_start_as_calmly_as_a_thousand(classes):
    """The classifier is uniform to 1 / sqrt(1000), or to 1 / sqrt(classes) where there are more."""
    model = build(Model(name="efficientnet_b0", width=0.25, depth=0.1, classes=classes), seed=0)
    bound = 1 / math.sqrt(max(classes, 1000))
    assert 0.99 * bound < model.block("head").classifier.weight.abs().max() <= bound * (1 + 1e-6)


GROUPED = {"group": {"num_groups": 8, "eps": 0.25}, "layer": {"num_groups": 1, "eps": 0.25}}


@pytest.mark.parametrize(
    ("norm", "proxy"), [("group", False), ("group", True), ("layer", True), ("batch", False)]
)
def test_normalisation_follows_the_recipe(norm, proxy):
    """Proxy normalisation stands where an activation does; where none follows, the bias goes, as in
    the published code. Told apart by timm's names."""
    model = on_meta(
        **{
            "name": "efficientnet_b0",
            "depth": 0.5,
            "norm": norm,
            "norm_groups": 5 if norm == "batch" else 8,
        },
        **{"norm_eps": 0.25, "norm_momentum": 0.125, "proxy_norm": proxy, "proxy_eps": 0.5},
    )
    norms = {name: module for name, module in model.named_modules() if isinstance(module, NORMS)}
    assert all(name.split(".")[-1].startswith("bn") for name in norms)
    for name, module in norms.items():
        active = not (
            name.endswith("bn3") or (name.startswith("blocks.0.") and name.endswith("bn2"))
        )
        expected = {"eps": 0.25, "momentum": 0.125} if norm == "batch" else GROUPED[norm]
        kind = (
            BatchNormAct if norm == "batch" else ProxyNormAct if proxy and active else GroupNormAct
        )
        assert type(module) is kind and module.apply_act == active
        assert {key: getattr(module, key) for key in expected} == expected
        assert getattr(module, "proxy_eps", 0.5) == 0.5
        assert (module.bias is None) == (proxy and not active)
    # They own every parameter with one axis, also the proxy's, but the biases of convolutions and
    # classifier.
    flat = {name for name, parameter in model.named_parameters() if parameter.ndim == 1}
    assert set(norm_parameters(model)) == flat
    owned = {name for name in flat if name.rpartition(".")[0] in norms}
    others = (".se.conv_reduce.bias", ".se.conv_expand.bias", "head.classifier.bias")
    assert owned == {name for name in flat if not name.endswith(others)}
    assert ("head.bn2.proxy_shift" in flat) == proxy


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_model_cut_between_any_two_blocks_computes_the_same(training):
    """The same operations in the same order, random layers included: equality is bitwise.

    State dicts are a partition of the whole model's.
    """
    section = Model(
        name="efficientnet_b0", width=0.25, depth=0.1, classes=10, dropout=0.5, drop_path=0.5
    )
    model = build(section, seed=0).train(training)
    images = torch.randint(
        0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    expected = model(images)
    whole = model.state_dict()
    for cuts in (*([name] for name in model.names[1:]), model.names[1:]):
        parts = [model.part(names) for names in split_names(model.names, cuts)]
        x = images
        for part in parts:
            x = part(x)
        assert torch.equal(x, expected), cuts
        states = [part.state_dict() for part in parts]
        assert [key for state in states for key in state] == list(whole)
        assert all(
            state[key].data_ptr() == whole[key].data_ptr() for state in states for key in state
        )

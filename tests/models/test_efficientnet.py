"""The models against timm's own: same parameters, same numbers, same gradients; and what a pipeline needs of them."""

import functools
import math

import pytest
import timm
import torch
from timm.layers import GroupNormAct
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.efficientnet import EfficientNet, _gen_efficientnet
from torch import nn
from torch.nn import functional as F

from models.efficientnet import build, timm_name
from models.shapes import groups_of
from recipe.config import Model
from recipe.errors import ConfigError
from recipe.network import SCALES


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


def timms(width, depth, expansion, padding, group_sizes, drop_path=0.0):
    """timm's EfficientNet with timm's own group normalisation; `group_sizes`: of the blocks in running order."""
    stages = [
        "ds_r1_k3_s1_e1_c16_se0.25", f"ir_r2_k3_s2_e{expansion}_c24_se0.25", f"ir_r2_k5_s2_e{expansion}_c40_se0.25",
        f"ir_r3_k3_s2_e{expansion}_c80_se0.25", f"ir_r3_k5_s1_e{expansion}_c112_se0.25",
        f"ir_r4_k5_s2_e{expansion}_c192_se0.25", f"ir_r1_k3_s1_e{expansion}_c320_se0.25",
    ]  # fmt: skip
    blocks = decode_arch_def([[stage] for stage in stages], depth)
    rounded = functools.partial(round_channels, multiplier=width)
    for block, size in zip((block for stage in blocks for block in stage), group_sizes):
        block["group_size"] = size
    return EfficientNet(
        blocks,
        num_classes=1000,
        num_features=rounded(1280),
        round_chs_fn=rounded,
        pad_type="same" if padding == "same" else "",
        act_layer=nn.SiLU,
        norm_layer=functools.partial(GroupNormAct, num_groups=4, eps=1e-3),
        drop_path_rate=drop_path,
    )


def g16_sizes(width, depth, expansion):
    """Published: groups = max(expanded // 16, 1). The expanded channels are those of timm's depthwise model."""
    with torch.device("meta"):
        depthwise = timms(width, depth, expansion, "torch", [1] * 99)
    channels = [block.conv_dw.in_channels for stage in depthwise.blocks for block in stage]
    return [expanded // max(expanded // 16, 1) for expanded in channels]


def test_b4_g16_has_the_published_number_of_parameters():
    """19,328,168 with channel divisor 8; the divisor 16 would give 19,420,076."""
    model = on_meta(name="efficientnet_b4")
    assert count(model) == 19_328_168
    names = model.names
    before = sum(count(model.block(name)) for name in names[: names.index("blocks.3.0")])
    assert round(before / 1e6, 1) == 0.6
    assert round((count(model) - before) / 1e6, 1) == 18.8


@pytest.mark.parametrize("prefix", ["", "tf_"])
@pytest.mark.parametrize("name", SCALES)
def test_depthwise_models_have_timms_parameters_and_buffers(name, prefix):
    """Width, depth and rounding of channels, and every name."""
    with torch.device("meta"):
        reference = timm.create_model(prefix + name)
    model = on_meta(name=name, group_size=1, expansion=6, norm="batch", padding="same" if prefix else "torch")
    assert count(model) == count(reference)
    shapes = {timm_name(key): value.shape for key, value in model.named_parameters()}
    assert shapes == {key: value.shape for key, value in reference.named_parameters()}
    state = {timm_name(key): value.shape for key, value in model.state_dict().items()}
    assert state == {key: value.shape for key, value in counted(reference.state_dict()).items()}


def test_b4_g1_has_the_published_number_of_parameters():
    """19 million (1905.11946, table 2), and the same whatever normalises: two numbers a channel."""
    for norm in ("batch", "group", "layer"):
        model = on_meta(name="efficientnet_b4", group_size=1, expansion=6, norm=norm)
        assert count(model) == 19_341_616


def counted(state):
    """timm's state without the count of batches, which nothing of ours needs."""
    return {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}


@pytest.mark.parametrize("name", SCALES)
def test_g16_models_of_every_scale_can_be_built(name):
    """Among the expanded channels of B5 and B7 are multiples of 8 that are none of 16."""
    for block in convolutions(on_meta(name=name)).values():
        assert block.in_channels % block.groups == 0
        assert block.groups <= max(block.in_channels // 16, 1)


def test_b4_convolves_in_groups_of_16_except_where_that_leaves_less_than_two():
    """`blocks.0.1` has 24 channels, one group: it is dense."""
    found = convolutions(on_meta(name="efficientnet_b4"))
    assert len(found) == 32
    for name, convolution in found.items():
        assert convolution.groups == max(convolution.in_channels // 16, 1), name
    assert found["blocks.0.1"].in_channels == 24
    assert found["blocks.0.1"].groups == 1


def test_groups_divide_the_channels_and_hold_at_least_the_asked_size():
    for channels in range(1, 400):
        for size in (1, 2, 3, 16, 64):
            groups = groups_of(channels, size)
            assert channels % groups == 0
            assert groups == max(
                n for n in range(1, channels + 1) if channels % n == 0 and n <= max(channels // size, 1)
            )
    assert groups_of(48, 16) == 3
    assert groups_of(24, 16) == 1
    assert groups_of(40, 1) == 40
    assert groups_of(88, 16) == 4  # five groups would not divide 88


@pytest.mark.parametrize("hundredths", range(25, 201, 7))
def test_widths_in_between_can_be_built(hundredths):
    for group_size, expansion in ((16, 4), (1, 6), (16, 6), (5, 3)):
        on_meta(name="efficientnet_b0", width=hundredths / 100, depth=0.1, group_size=group_size, expansion=expansion)


def test_normalisation_groups_that_do_not_divide_are_the_users_to_mend():
    with pytest.raises(ConfigError, match=r"model\.norm_groups 5 does not divide a layer of \d+ channels; use model"):
        on_meta(norm_groups=5)
    on_meta(norm_groups=8)


@pytest.mark.parametrize("padding", ["same", "torch"])
def test_logits_and_gradients_are_timms(padding):
    """B4's widths at a smaller depth, on 57 pixels: odd sizes show a wrong padding.

    Both compute the same operations in float64, the normalisations by different code: fifty layers of
    rounding at 1e-16, relative to the largest value.
    """
    width, depth = 1.4, 0.4
    ours = build(Model(width=width, depth=depth, padding=padding, drop_path=0.0, dropout=0.0), seed=0).double()
    theirs = timms(width, depth, 4, padding, g16_sizes(width, depth, 4)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():
        if parameter.ndim == 1:  # ones and zeros at the start, which would hide a swap
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    theirs.load_state_dict({timm_name(key): value for key, value in ours.state_dict().items()})
    images = torch.randint(0, 256, (2, 3, 57, 57), dtype=torch.uint8, generator=generator)
    weights = torch.randn(2, 1000, dtype=torch.float64, generator=generator)
    pixels = ours.block("preprocess")(images)

    with torch.no_grad():
        assert near(ours.eval()(images), theirs.eval()(pixels), 1e-11)
    logits, expected = ours.train()(images), theirs.train()(pixels)
    assert near(logits, expected, 1e-11)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {key: value.grad for key, value in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        assert near(parameter.grad, gradients.pop(timm_name(key)), 1e-10), key
    assert not gradients


@pytest.mark.parametrize(
    ("published", "section", "pixels"),
    [
        ("efficientnet_b0", {"name": "efficientnet_b0", "padding": "torch", "norm_eps": 1e-5}, 64),
        ("tf_efficientnet_b0", {"name": "efficientnet_b0", "padding": "same", "norm_eps": 1e-3}, 64),
        ("narrow b4", {"name": "efficientnet_b4", "width": 0.35, "padding": "same", "norm_eps": 1e-3}, 57),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_batch_normalised_model_is_timms(published, section, pixels):
    """timm's own model, weights and statistics random, loaded into ours by name: logits in evaluation and training,
    gradients and new statistics. The same operations in float64, up to 160 layers of rounding at 1e-16, relative to
    the largest value; the last channels see 8 pixels, whose variance divides by little and so adds three digits."""
    section = {"group_size": 1, "expansion": 6, "norm": "batch", "norm_momentum": 0.1, **section}
    ours = build(Model(drop_path=0.0, dropout=0.0, **section), seed=0).double()
    theirs = narrow_b4(section["width"]) if published == "narrow b4" else timm.create_model(published, pretrained=False)
    theirs = theirs.double()
    generator = torch.Generator().manual_seed(0)
    for value in theirs.state_dict().values():
        if value.ndim == 1:  # ones and zeros at the start, which would hide a swap
            value.uniform_(0.5, 1.5, generator=generator)
    state = counted(theirs.state_dict())
    ours.load_state_dict({key: state.pop(timm_name(key)) for key in ours.state_dict()})
    assert not state
    images = torch.randint(0, 256, (2, 3, pixels, pixels), dtype=torch.uint8, generator=generator)
    weights = torch.randn(2, 1000, dtype=torch.float64, generator=generator)
    pixels = ours.block("preprocess")(images)

    with torch.no_grad():
        assert near(ours.eval()(images), theirs.eval()(pixels), 1e-11)
    logits, expected = ours.train()(images), theirs.train()(pixels)
    assert near(logits, expected, 1e-10)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {key: value.grad for key, value in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        assert near(parameter.grad, gradients.pop(timm_name(key)), 1e-8), key
    assert not gradients
    state = theirs.state_dict()
    assert all(near(value, state[timm_name(key)], 1e-10) for key, value in ours.state_dict().items())


def narrow_b4(width):
    return _gen_efficientnet("tf_efficientnet_b4", width, 1.8, pad_type="same", bn_eps=1e-3)


def test_a_batch_normalised_model_is_timms_in_float32():
    """As above, with float32's rounding: 80 layers of 1e-7 that add up at random, times ten."""
    section = {"name": "efficientnet_b0", "padding": "torch", "norm_eps": 1e-5}
    ours = build(Model(group_size=1, expansion=6, norm="batch", **section), seed=0).eval()
    theirs = timm.create_model("efficientnet_b0", pretrained=False).eval()
    theirs.load_state_dict({timm_name(key): value for key, value in ours.state_dict().items()}, strict=False)
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert near(ours(images), theirs(ours.block("preprocess")(images)), 1e-5)


def near(actual, expected, tolerance):
    """Whether no element is off by more than `tolerance` of the largest, which is not 0."""
    largest = expected.abs().max()
    return largest > 0 and actual.dtype == expected.dtype and (actual - expected).abs().max() <= tolerance * largest


@pytest.mark.parametrize("size", [56, 57])
def test_same_padding_is_tensorflows(size):
    """TensorFlow pads max((ceil(n/s) - 1) s + k - n, 0) pixels in all, the odd one at the far edge."""
    model = build(Model(name="efficientnet_b0", depth=0.1), seed=0).double()
    for convolution, channels in (
        (model.block("stem").conv_stem, 3),
        (model.block("blocks.1.0").conv_dw, model.block("blocks.1.0").conv_dw.in_channels),
        (model.block("blocks.2.0").conv_dw, model.block("blocks.2.0").conv_dw.in_channels),
    ):
        kernel, stride = convolution.kernel_size[0], convolution.stride[0]
        assert stride == 2
        x = torch.randn(1, channels, size, size, dtype=torch.float64)
        total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
        padded = F.pad(x, (total // 2, total - total // 2) * 2)
        expected = F.conv2d(padded, convolution.weight, None, stride, 0, 1, convolution.groups)
        torch.testing.assert_close(convolution(x), expected, rtol=1e-13, atol=1e-13)


def test_weights_are_a_function_of_the_seed():
    model = Model(name="efficientnet_b0", width=0.25, depth=0.1)
    first = build(model, seed=5).state_dict()
    torch.manual_seed(1)
    torch.randn(3)
    before = torch.random.get_rng_state()
    second = build(model, seed=5).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    for seed in (4, 5 + 2**32, 5 + 2**62):
        other = build(model, seed=seed).state_dict()
        assert not torch.equal(first["head.classifier.weight"], other["head.classifier.weight"])


def test_weights_start_by_the_published_rules():
    """Normal with variance 2 / fan-out for convolutions, uniform to 1 / sqrt(classes) for the classifier.

    The standard deviation of n normal numbers is off by 5 / sqrt(2 n) of itself in two of a million layers.
    """
    model = build(Model(name="efficientnet_b0"), seed=0)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) > 60
    for module in convolutions:
        fan_out = module.kernel_size[0] ** 2 * module.out_channels / module.groups
        weight = module.weight.detach().double() * math.sqrt(fan_out / 2)
        assert abs(weight.std().item() - 1) < 5 / math.sqrt(2 * weight.numel())
        assert abs(weight.mean().item()) < 5 / math.sqrt(weight.numel())
        assert module.bias is None or not module.bias.any()
    classifier = model.block("head").classifier.weight.detach()
    features, classes = 1280, 1000
    assert classifier.shape == (classes, features)
    assert 0.999 / math.sqrt(classes) < classifier.abs().max() <= 1 / math.sqrt(classes)
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


@pytest.mark.parametrize("classes", [2, 10, 999, 1000, 5000])
def test_few_classes_start_as_calmly_as_a_thousand(classes):
    """Uniform to 1 / sqrt(1000), or to 1 / sqrt(classes) where there are more: the first logits have no opinion."""
    model = build(Model(name="efficientnet_b0", width=0.25, depth=0.1, classes=classes), seed=0)
    weight = model.block("head").classifier.weight.detach()
    bound = 1 / math.sqrt(max(classes, 1000))
    assert 0.99 * bound < weight.abs().max() <= bound * (1 + 1e-6)


def test_blocks_are_named_as_timm_names_them():
    model = on_meta(name="efficientnet_b4")
    repeats = (2, 4, 4, 6, 6, 8, 2)
    blocks = [f"blocks.{stage}.{block}" for stage, length in enumerate(repeats) for block in range(length)]
    assert model.names == ["preprocess", "stem", *blocks, "head"]
    assert "blocks.3.0.conv_pw.weight" in model.state_dict()
    assert model.block("blocks.3.0").conv_dw.stride == (2, 2)


def test_the_model_starts_in_training_mode_with_float32_weights():
    model = build(Model(name="efficientnet_b0", width=0.25, depth=0.1, classes=7), seed=0)
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model(torch.zeros(2, 3, 33, 32, dtype=torch.uint8)).shape == (2, 7)

"""Models of timm as blocks, against the same models as timm runs them; and what is refused."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from common.errors import ConfigError
from models import shapes, timm_model
from models.families import build, timm_name
from models.normalization import norm_parameters
from models.stochastic import Dropout, DropPath, DropPaths
from recipe.config import Model

pytest.importorskip("torch.utils.flop_counter", reason="models of timm need torch 2.1")

CLASSES = 7
# Of the kinds that differ: batch normalisation, stages, tokens with embeddings, layers named by
# letters, channels that branch and meet in timm's own `forward`, and a `forward` that cannot be
# written down.
ARCHITECTURES = {
    "resnet10t": (
        *(f"conv1.{number}" for number in range(7)),
        "joint.7",
        "layer1.0",
        "layer2.0",
        "layer3.0",
        "layer4.0",
        "closing",
    ),
    "convnext_atto": (
        "stem.0",
        "stem.1",
        "stages.0",
        "stages.1",
        "stages.2",
        "stages.3",
        "joint.6",
        "head",
    ),
    "vit_tiny_patch16_224": (
        "patch_embed",
        "joint.1",
        *(f"blocks.{number}" for number in range(12)),
        "closing",
    ),
    "regnety_002": ("stem", "s1", "s2", "s3", "s4", "joint.5", "head"),
    "crossvit_tiny_240": ("whole",),
}
SIZES = {"vit_tiny_patch16_224": 32, "crossvit_tiny_240": 240}


def section(architecture, **keys):
    size = SIZES.get(architecture, 32)
    return Model(
        **{
            "name": "timm",
            "architecture": architecture,
            "classes": CLASSES,
            "image_size": size,
            **keys,
        }
    )


@pytest.fixture(scope="module")
def pairs():
    """(section, model, timm's own with its weights) of an architecture, made once."""
    made = {}

    def pair(architecture):
        if architecture not in made:
            keys = section(architecture)
            model = build(keys, seed=3)
            options = {"img_size": keys.image_size} if architecture.startswith("vit") else {}
            theirs = timm.create_model(architecture, num_classes=CLASSES, **options)
            tensors = {timm_name(keys, name): tensor for name, tensor in model.state_dict().items()}
            counts = {
                name: tensor
                for name, tensor in theirs.state_dict().items()
                if name.endswith("_tracked")
            }
            theirs.load_state_dict({**tensors, **counts})
            made[architecture] = keys, model, theirs
        return made[architecture]

    return pair


def images(keys, count=2):
    generator = torch.Generator().manual_seed(5)
    shape = (count, 3, keys.image_size, keys.image_size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=pytest.mark.slow if SIZES.get(name, 32) > 32 else ())
        for name in ARCHITECTURES
    ],
)
def test_logits_and_gradients_are_timms_to_the_bit(pairs, architecture):
    """The same operations in the same order, in training and in evaluation; so are running
    statistics."""
    keys, model, theirs = pairs(architecture)
    assert tuple(model.names[1:]) == ARCHITECTURES[architecture]
    x = images(keys)
    for train in (True, False):
        model.train(train), theirs.train(train)
        model.zero_grad(), theirs.zero_grad()
        ours = model(x)
        expected = theirs(model.block("preprocess")(x))
        assert torch.equal(ours, expected)
        labels = torch.tensor([1, 4])
        F.cross_entropy(ours, labels).backward()
        F.cross_entropy(expected, labels).backward()
        gradients = {timm_name(keys, name): each.grad for name, each in model.named_parameters()}
        for name, parameter in theirs.named_parameters():
            assert torch.equal(gradients[name], parameter.grad), name
    buffers = {timm_name(keys, name): buffer for name, buffer in model.state_dict().items()}
    for name, buffer in theirs.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            assert torch.equal(buffers[name], buffer), name


def test_size_mean_and_deviation_are_those_of_the_architecture_unless_given():
    keys = Model(name="timm", architecture="vit_tiny_patch16_224")
    assert (keys.image_size, keys.mean, keys.std) == (224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert Model(name="timm", architecture="resnet10t").image_size == 176
    assert Model(name="timm", architecture="resnet10t", image_size=64).image_size == 64
    assert Model(name="timm", architecture="resnet10t").batch_statistics
    assert not Model(name="timm", architecture="convnext_atto").batch_statistics


def test_weights_follow_the_seed_and_nothing_else():
    keys = section("resnet10t")
    torch.manual_seed(1)
    first = build(keys, seed=3).state_dict()
    torch.manual_seed(2)
    drawn = torch.rand(1)
    torch.manual_seed(2)
    again = build(keys, seed=3).state_dict()
    assert torch.equal(torch.rand(1), drawn), "torch's generator is as before"
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = build(keys, seed=4).state_dict()
    assert not torch.equal(first["layer1.0.conv1.weight"], other["layer1.0.conv1.weight"])


@pytest.mark.parametrize("architecture", ["resnet10t", "convnext_atto", "vit_tiny_patch16_224"])
def test_scales_of_norms_are_known_by_type(pairs, architecture):
    _, model, _ = pairs(architecture)
    norms = {name for name in norm_parameters(model) if name.endswith("weight")}
    expected = set()
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and parameter.dim() == 1:
            expected.add(name)
    assert norms == expected and norms


@pytest.mark.parametrize("architecture", ["resnet10t", "vit_tiny_patch16_224"])
def test_stochastic_depth_and_dropout_draw_by_key(architecture):
    model = build(section(architecture, drop_path=0.5, dropout=0.5), seed=3).train()
    paths = [layer for layer in model.draws.layers if isinstance(layer, DropPath)]
    dropouts = [layer for layer in model.draws.layers if isinstance(layer, Dropout)]
    names = [layer.name for layer in model.draws.layers]
    assert paths and len(dropouts) == 1 and len(set(names)) == len(names)
    assert max(layer.rate for layer in paths) == pytest.approx(0.5)
    x = images(section(architecture), count=8)
    with torch.no_grad():
        first = model(x)
        torch.manual_seed(0)
        assert torch.equal(model(x), first), "torch's generator has no part in it"
        model.draws.micro_batch = 1
        assert not torch.equal(model(x), first)
        model.eval()
        assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("swin_tiny_patch4_window7_224", marks=pytest.mark.slow),
        pytest.param("nest_tiny", marks=pytest.mark.slow),
        "tiny_vit_11m_224",
        "dla34",
    ],
)
def test_a_rate_of_zero_is_also_that_of_a_model_with_another_by_default(architecture):
    """0.1, 0.5 and 0.1; DLA has no option for it."""
    keys = section(architecture, image_size=224, drop_path=0)
    with torch.device("meta"):
        model = build(keys, seed=3)
    assert [layer.rate for layer in model.draws.layers] == []


def test_each_call_of_one_layer_has_a_mask_of_its_own():
    """EdgeNeXt's blocks call one twice, as timm draws twice.

    The first call's key is the layer's name; a pass that was broken off changes nothing, and nor do
    evaluations.
    """
    keys = section("edgenext_xx_small", drop_path=0.5)
    model = build(keys, seed=3).train()
    repeated = {
        name: module for name, module in model.named_modules() if isinstance(module, DropPaths)
    }
    assert [len(layer.paths) for layer in repeated.values()] == [2, 2, 2]
    masks = {}

    def note(layer, _, y):
        masks[layer.name] = (y != 0).flatten(1).any(1)

    for layer in model.draws.layers:
        layer.register_forward_hook(note)
    x = images(keys, count=64)
    with torch.no_grad():
        first = model(x)
        for layer in repeated.values():
            one, other = (masks[path.name] for path in layer.paths)
            assert not torch.equal(one, other)
            name = layer.paths[0].name
            rate = layer.paths[0].rate
            assert torch.equal(one, model.draws.keep_mask(name, rate, 64, first) != 0)
            assert "drop_path" in name and not name[-1].isdigit()
        next(iter(repeated.values()))(torch.ones(64, 1))
        assert torch.equal(model(x), first)
        evaluated = model.eval()(x)
        assert torch.equal(model(x), evaluated) and torch.equal(model.train()(x), first)


def test_half_precision_keeps_statistics_in_float32():
    model = build(section("resnet10t"), seed=3).half()
    kinds = {name.split(".")[-1]: tensor.dtype for name, tensor in model.state_dict().items()}
    assert kinds["weight"] == torch.float16
    assert kinds["running_mean"] == kinds["running_var"] == torch.float32


@pytest.mark.parametrize("architecture", ["resnet10t", "convnext_atto"])
def test_a_plan_counts_parameters_and_multiply_adds(architecture):
    """Multiply-adds by the definition of a convolution and of a product, layer by layer."""
    keys = section(architecture)
    model = build(keys, seed=3).eval()
    expected = 0

    def count(module, inputs, output):
        nonlocal expected
        if isinstance(module, nn.Conv2d):
            expected += module.weight[0].numel() * output[0].numel()
        elif isinstance(module, nn.Linear):
            expected += module.in_features * output[0].numel()

    for module in model.modules():
        module.register_forward_hook(count)
    with torch.no_grad():
        model(images(keys, count=1))
    blocks = shapes.blocks(keys, keys.image_size)
    assert list(blocks) == model.names
    assert sum(block.multiply_adds for block in blocks.values()) == expected
    parameters = list(model.parameters())
    assert sum(block.parameters for block in blocks.values()) == sum(
        each.numel() for each in parameters
    )
    assert sum(block.vectors for block in blocks.values()) == sum(
        each.numel() for each in parameters if each.dim() < 2
    )
    assert sum(block.layers for block in blocks.values()) == sum(
        each.dim() >= 2 for each in parameters
    )
    assert blocks[model.names[-1]].output == CLASSES


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        (
            "resnet5O",
            {},
            "model.architecture: timm has no model 'resnet5O'; did you mean resnet50, ",
        ),
        (
            "resnet50.mine",
            {},
            "its weights are named by model.init_from=timm:resnet50.mine, the model by resnet50",
        ),
        ("vgg11", {"drop_path": 0.1}, "model.drop_path 0.1: timm's vgg11 has no stochastic depth"),
        ("vit_tiny_patch16_224", {"image_size": 8}, "its own size is model.image_size=224"),
        ("levit_128s", {"image_size": 224}, "BatchNorm1d) keeps running_mean"),
    ],
)
def test_what_cannot_be_exact_or_built_is_refused_by_name(architecture, keys, message):
    with pytest.raises(ConfigError) as error:
        build(section(architecture, **keys), seed=0)
    assert message in str(error.value)


def test_a_plan_refuses_a_size_that_the_model_does_not_take():
    with pytest.raises(
        ConfigError, match=r"model\.image_size 40: timm's vit_tiny_patch16_224 does not take it"
    ):
        shapes.blocks(section("vit_tiny_patch16_224", image_size=32), 40)


def test_the_name_of_a_model_of_timm_in_the_wrong_key_leads_to_the_right_one():
    with pytest.raises(
        ConfigError, match=r"use model\.name=timm model\.architecture=convnext_atto"
    ):
        Model(name="convnext_atto")


class Tied(nn.Module):
    """Three layers, of which the last has the weight of the first, under another name."""

    def __init__(self, tied):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        if tied:
            self.layers[2].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("tied", "shared"), [(False, set()), (True, {1, 2})])
def test_layers_with_a_weight_in_common_are_not_cut_apart(tied, shared):
    """Each stage would train a copy of its own."""
    model = Tied(tied)
    segments = timm_model._segments(model, torch.fx.symbolic_trace(model).graph)
    segment_of = {node: number for number, segment in enumerate(segments) for node in segment.nodes}
    assert len(segments) == 3
    assert timm_model._shared(model, segments, segment_of) == shared


def test_a_model_whose_written_calls_fail_stays_whole():
    """HRNet passes lists, which torch.fx does not let it change; timm itself takes the size."""
    assert (
        timm_model._plan(
            Model(name="timm", architecture="hrnet_w18_small", image_size=64, classes=CLASSES)
        )
        == []
    )

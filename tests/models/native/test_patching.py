"""Our layers in a whole model: which, that nobody who holds its parameters or names can tell, and
that it computes the same."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.base import BlockList
from models.native.block import NativeHead, NativeInverted, NativeSeparable
from models.native.layers import GroupConv2d, NativeGroupNormAct, NativeProxyNormAct, Pointwise
from models.native.patching import patch
from models.normalization import GroupNormAct, norm_parameters
from models.preprocess import Preprocess
from models.stochastic import Draws
from tests.models.native.exact import assert_no_worse
from tests.models.native.test_block import assert_same, model_of

KINDS = (
    Pointwise,
    GroupConv2d,
    NativeGroupNormAct,
    NativeProxyNormAct,
    NativeSeparable,
    NativeInverted,
    NativeHead,
)


def small(**keys):
    """One block of each stage, two of the later ones."""
    return model_of(**{"width": 0.25, "depth": 0.4, **keys})


def pixels(count, size, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def results(model, images, forward=None):
    """Logits, the gradients of all parameters, and the running statistics."""
    model.draws.step = 3
    model.draws.micro_batch = 1
    model.zero_grad()
    logits = (forward or model)(images)
    logits.backward(
        torch.randn(logits.shape, generator=torch.Generator().manual_seed(3)).to(logits.dtype)
    )
    gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
    statistics = {name: each.clone() for name, each in model.named_buffers() if "running" in name}
    return {"logits": logits.detach(), **gradients, **statistics}


def kinds(model, *types):
    return [name for name, module in model.named_modules() if type(module) in types]


# ---- Which.


def test_layers_are_turned_in_place_and_their_names_returned():
    """Parameters are the same objects under the same names, with the same values."""
    model = small(drop_path=0.2, dropout=0.1)
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    owned = norm_parameters(model)
    norms = kinds(model, GroupNormAct)
    blocks = [name for name in model.names if name.startswith("blocks.")]
    grouped = [name for name, module in model.named_modules() if getattr(module, "groups", 1) > 1]
    names = patch(model)
    assert sorted(names) == sorted(kinds(model, *KINDS)) and len(names) == len(set(names))
    assert kinds(model, NativeGroupNormAct) == norms
    assert kinds(model, NativeSeparable, NativeInverted) == blocks
    # One has 8 channels, in a single group of 8.
    assert set(kinds(model, GroupConv2d)) == set(grouped) - {"blocks.0.0.conv_dw"} != set()
    assert kinds(model, NativeHead) == ["head"]
    assert model.block("preprocess").memory_format == torch.channels_last
    assert all(module is modules[name] for name, module in model.named_modules())
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert_same(model.state_dict(), values)
    assert norm_parameters(model) == owned
    assert patch(model) == []


def test_what_a_model_has_none_of_is_not_replaced():
    """Batch and proxy normalisation keep timm's blocks and our head, depthwise convolutions are
    torch's."""
    model = small(norm="batch")
    patch(model)
    assert kinds(model, GroupConv2d, Pointwise)
    assert not kinds(model, NativeGroupNormAct, NativeSeparable, NativeInverted, NativeHead)
    model = small(proxy_norm=True)
    patch(model)
    assert kinds(model, NativeProxyNormAct) and not kinds(
        model, NativeSeparable, NativeInverted, NativeHead
    )
    model = small(group_size=1)
    patch(model)
    assert kinds(model, NativeInverted) and not kinds(model, GroupConv2d)


@pytest.mark.parametrize(
    "layers",
    [[nn.Conv2d(3, 4, 3)], [nn.Conv2d(3, 16, 1), nn.GroupNorm(4, 16)]],
    ids=["none", "norm"],
)
def test_a_model_that_gains_nothing_stays_as_it_is(layers):
    """None of its layers fits; or a group normalisation is torch's, which loses digits of
    channels-last activations."""
    model = BlockList(
        [("preprocess", Preprocess([0.5] * 3, [0.5] * 3)), ("stem", nn.Sequential(*layers))]
    )
    before = [type(module) for module in model.modules()]
    assert patch(model) == []
    assert [type(module) for module in model.modules()] == before
    assert model.block("preprocess").memory_format == torch.contiguous_format


def test_a_copy_and_a_part_of_a_patched_model_are_patched():
    """As for evaluation, and in a pipeline. Without its first blocks, too."""
    model = small()
    patch(model)
    images = pixels(2, 32)
    model.eval()
    with torch.no_grad():
        expected = model(images)
        assert torch.equal(copy.deepcopy(model)(images), expected)
        cut = model.names.index("blocks.2.0")
        first = model.part(model.names[:cut])
        second = model.part(model.names[cut:])
        assert torch.equal(second(first(images)), expected)
    assert patch(second) == []


# ---- The same numbers.


@pytest.mark.parametrize("sizes", [(6, 32, True), (3, 37, False)], ids=str)
@pytest.mark.parametrize(
    "keys",
    [
        {"norm": "group"},
        {"norm": "layer"},
        {"norm": "batch"},
        {"proxy_norm": True},
        {"group_size": 8},
        {"group_size": 1},
        {"padding": "torch"},
        {"width": 0.5, "padding": "same"},
        {"drop_path": 0.4, "dropout": 0.3},
    ],
    ids=str,
)
def test_a_patched_model_is_as_exact_as_torchs(keys, sizes):
    """Against the same model in float64.

    Of six images of 32 pixels all are convolved side by side, of three of 37 line by line; in
    training, and in evaluation.
    """
    count, size, training = sizes
    plain = small(**keys).train(training)
    ours = copy.deepcopy(plain)
    exact = copy.deepcopy(plain).double()
    assert patch(ours)
    images = pixels(count, size)
    expected = results(exact, images)
    found = results(ours, images)
    assert_no_worse(found, results(plain, images), expected)
    assert found["logits"].is_contiguous()


def test_stochastic_depth_and_dropout_draw_the_same(monkeypatch):
    """The same masks in the same order; there is no other state, torch's generator included."""
    drawn = []
    draw = Draws.keep_mask
    monkeypatch.setattr(
        Draws, "keep_mask", lambda self, *given: drawn.append(given[:3]) or draw(self, *given)
    )
    model = small(drop_path=0.4, dropout=0.3)
    images = pixels(6, 32)
    state = torch.get_rng_state()
    results(model, images)
    before = [*drawn]
    drawn.clear()
    names = [layer.name for layer in model.draws.layers]
    patch(model)
    results(model, images)
    assert len(before) > 2 and drawn == before
    assert (model.draws.step, model.draws.micro_batch) == (3, 1)
    assert [layer.name for layer in model.draws.layers] == names
    assert torch.equal(torch.get_rng_state(), state)


def test_computed_again_a_model_has_the_same_bits():
    """Each block by torch's reentrant checkpoint, with stochastic depth and dropout."""
    model = small(drop_path=0.4, dropout=0.3)
    patch(model)

    def recomputed(images):
        x = model.block("stem")(model.block("preprocess")(images))
        for name in model.names[2:]:
            x = checkpoint(model.block(name), x, use_reentrant=True)
        return x

    assert_same(results(model, pixels(6, 32), recomputed), results(model, pixels(6, 32)))


def test_micro_batches_in_flight_add_up_to_the_same_bits():
    """Forward a, forward b, backward a, backward b; and one after the other."""
    model = small()
    patch(model)
    batches = pixels(6, 32), pixels(3, 37, seed=4)

    def added(in_flight):
        model.zero_grad()
        if in_flight:
            losses = [model(batch).square().sum() for batch in batches]
            for loss in losses:
                loss.backward()
        else:
            for batch in batches:
                model(batch).square().sum().backward()
        return {name: each.grad.clone() for name, each in model.named_parameters()}

    assert_same(added(True), added(False))

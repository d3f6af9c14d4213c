"""Blocks whose layers' kernels work for each other, against timm's; without a GPU, in the
interpreter."""

import copy

import pytest
import torch

from models.efficientnet import build
from recipe.config import Model

pytest.importorskip("triton")

from models.kernels import squeeze
from models.kernels.patching import KERNELS, patch
from tests.models.kernels.test_group_norm import FLOAT32, FORMATS, assert_close, drawn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Blocks with a residual branch, without and with expansion.
BLOCKS = ("blocks.0.1", "blocks.1.1")

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def model_of(**keys):
    section = {
        "name": "efficientnet_b0",
        "width": 0.25,
        "depth": 1.4,
        "image_size": 16,
        "classes": 10,
        **keys,
    }
    model = build(Model(**section), seed=0)
    for name in BLOCKS:
        assert model.block(name).has_skip
    return model


def results(block, x, dy):
    x = x.detach().requires_grad_()
    y = block(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *block.parameters()], dy)]


def pair(name, drop_path=0.0, kernels=("group_norm", "block")):
    """Plain, and with Triton's kernels, by default for its normalisations only, as torch computes
    the rest faster."""
    found = []
    for chosen in ((), kernels):
        model = model_of(drop_path=drop_path)
        patch(model, chosen)
        block = model.block(name).to(DEVICE)
        if drop_path:
            block.drop_path.rate = drop_path  # by depth it would be less
        found.append(block)
    return found


@pytest.mark.parametrize(
    ("name", "drop_path", "layout"),
    [
        (BLOCKS[1], 0.5, FORMATS[1]),
        pytest.param(BLOCKS[0], 0.0, FORMATS[0], marks=pytest.mark.slow),
        *(pytest.param(BLOCKS[0], 0.5, layout, marks=pytest.mark.slow) for layout in FORMATS),
        *(pytest.param(BLOCKS[1], 0.0, layout, marks=pytest.mark.slow) for layout in FORMATS),
    ],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_timms_block(name, drop_path, layout):
    """128 eps of the largest: torch's own float32 is off by up to 60, in gradients of the gates,
    which cancel. Images that are dropped keep the bits of the shortcut."""
    plain, fused = pair(name, drop_path)
    assert type(fused).__bases__ == (type(plain),)
    channels = fused.conv_pw.in_channels
    x, dy = (drawn((8, channels, 3, 3), layout=layout, seed=seed) for seed in (1, 2))
    exact = copy.deepcopy(plain).double().cpu()
    expected = results(exact, x.double().cpu().contiguous(), dy.double().cpu().contiguous())
    actual = results(fused, x, dy)
    assert_close(actual, expected, 128 * FLOAT32)
    if drop_path:
        kept = fused.drop_path.current(x)
        assert 0 < (kept == 0).sum() < len(kept)
        dropped = (kept == 0).nonzero()[0]
        assert torch.equal(actual[0][dropped], x[dropped]) and torch.equal(
            actual[1][dropped], dy[dropped]
        )


@pytest.mark.parametrize("name", ["blocks.1.0", pytest.param("blocks.1.1", marks=pytest.mark.slow)])
def test_all_kernels_together_are_timms_block(name, monkeypatch):
    """Without a residual, and with one.

    Statistics before squeeze and excitation come from the convolution.
    """
    merged = []
    merge = squeeze.merge_statistics
    monkeypatch.setattr(
        squeeze,
        "merge_statistics",
        lambda *given, **named: merged.append(1) or merge(*given, **named),
    )
    plain, fused = pair(name, kernels=KERNELS)
    x = drawn((2, fused.conv_pw.in_channels, 6, 5), layout=torch.channels_last)
    y = fused(x)
    dy = drawn(y.shape, layout=torch.channels_last, seed=2)
    exact = copy.deepcopy(plain).double().cpu()
    expected = results(exact, x.double().cpu().contiguous(), dy.double().cpu().contiguous())
    merged.clear()
    assert_close(results(fused, x, dy), expected, 128 * FLOAT32)
    assert len(merged) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [pytest.param(FORMATS[0], marks=pytest.mark.slow), FORMATS[1]], ids=str
)
def test_gradients_that_others_hold_stay_as_they_are(layout):
    """dy, and those of a gradient that flows on: the expansion writes to a copy, also where its
    input wants none."""
    _, fused = pair("blocks.1.1")
    x, dy = (
        drawn((2, fused.conv_pw.in_channels, 3, 3), layout=layout, seed=seed) for seed in (1, 2)
    )
    before = dy.clone()
    first = results(fused, x, dy)
    second = results(fused, x, dy)
    assert torch.equal(dy, before)
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    y = fused(x)  # which wants no gradient
    assert all(
        torch.equal(one, other)
        for one, other in zip(first[2:], torch.autograd.grad(y, fused.parameters(), dy))
    )


def test_nothing_is_dropped_in_evaluation():
    plain, fused = pair("blocks.1.1", 0.5)
    x = drawn((2, fused.conv_pw.in_channels, 3, 2))
    with torch.no_grad():
        torch.testing.assert_close(fused.eval()(x), plain.eval()(x))


def test_a_mask_that_is_set_is_taken():
    """As compiled blocks do."""
    _, fused = pair("blocks.1.1", 0.5)
    x = drawn((2, fused.conv_pw.in_channels, 4, 4))
    fused.drop_path.mask = torch.zeros(2, device=DEVICE)
    assert torch.equal(fused(x), x)


def test_blocks_keep_their_names_and_others_are_not_replaced():
    model = model_of()
    before = list(model.state_dict())
    blocks = [name for name in model.names if name.startswith("blocks.")]
    assert patch(model, ["block"]) == []  # without the normalisation's kernels
    replaced = patch(model, ["group_norm", "block"])
    assert [name for name in replaced if name in model.names] == blocks
    assert list(model.state_dict()) == before and patch(model, ["block"]) == []
    assert patch(model_of(norm="batch"), ["group_norm", "block"]) == []

"""Dropout and stochastic depth: what their draws depend on, how often they strike, and what
survives."""

import itertools
import math

import pytest
import torch

from models import stochastic
from models.efficientnet import build
from models.stochastic import Draws, Dropout, DropPath
from recipe.config import Model
from recipe.randomness import bits32, key

ONES = torch.ones(4, 1000)


def draws(seed=0, step=0, micro_batch=0):
    result = Draws(seed)
    result.step = step
    result.micro_batch = micro_batch
    return result


def mask(rate=0.5, name="head", count=1000, **place):
    return draws(**place).keep_mask(name, rate, count, ONES)


def test_masks_are_functions_of_seed_step_micro_batch_and_block():
    """By hand, one element at a time, from the hash and Python's integers.

    Recorded: runs must repeat.

    Any two masks of 1000 agree in half, and the share of 100,000 draws that are dropped is the
    rate; both five standard errors off at most.
    """
    draw = key("model", 7, 8, 9, "blocks.0.0")
    expected = [0.0 if bits32(draw, number) < int(0.3 * 2**32) else 1 / 0.7 for number in range(50)]
    actual = mask(0.3, "blocks.0.0", 50, seed=7, step=8, micro_batch=9)
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=1e-7, atol=0)
    assert "".join("01"[value > 0] for value in actual[:20]) == "10111110111110101111"
    places = itertools.product((0, 1), (0, 2), (0, 1), ("head", "blocks.3.0"))
    masks = [
        mask(seed=seed, step=step, micro_batch=number, name=name)
        for seed, step, number, name in places
    ]
    for first, second in itertools.combinations(masks, 2):
        assert abs((first == second).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(1000)
    for rate in (0.01, 0.4, 0.99):
        dropped = (mask(rate, count=100_000) == 0).double().mean().item()
        assert abs(dropped - rate) < 5 * math.sqrt(rate * (1 - rate) / 100_000)


def test_dropout_strikes_single_activations_and_drop_path_whole_images():
    """In every dtype."""
    output = Dropout(0.4, "head", draws(), 1000)(ONES)
    assert torch.equal(output.flatten(), mask(0.4, count=ONES.numel()))
    x = torch.randn(64, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    kept = mask(0.4, "blocks.1.0", 64)
    assert 0 < (kept == 0).sum() < 64
    assert torch.equal(DropPath(0.4, "blocks.1.0", draws())(x), x * kept.view(64, 1, 1, 1))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert Dropout(0.2, "head", draws(), 5)(torch.ones(2, 5, dtype=dtype)).dtype == dtype
        assert DropPath(0.2, "head", draws())(torch.ones(2, 5, 1, 1, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_draws_the_bits_of_the_host(dtype, monkeypatch):
    """By the code for GPUs on a CPU: for micro batches in the order of a pipeline with
    recomputation, rows that are no multiple of anything, a rate that changes, and keys of 64
    bits."""
    shared = draws(seed=7)
    layers = [
        DropPath(0.2, "blocks.0.0", shared),
        Dropout(0.4, "head", shared, 11),
        DropPath(1 - 2**-32, "b", shared),
    ]
    like = torch.ones(1, dtype=dtype)
    for step, micro_batch, rows in [
        (0, 0, 5),
        (0, 1, 5),
        (0, 8, 5),
        (0, 1, 5),
        (3, 1, 5),
        (3, 1, 17),
        (3, 200, 17),
    ]:
        shared.step = step
        shared.micro_batch = micro_batch
        layers[0].rate = 0.3 if step else 0.2
        expected = [layer.draw(rows, like) for layer in layers]
        monkeypatch.setattr(stochastic, "_ON_DEVICE", ("cpu",))
        for layer, mask in zip(layers, expected):
            found = layer.draw(rows, like)
            assert found.dtype == dtype and torch.equal(found, mask), (
                layer.name,
                step,
                micro_batch,
            )
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("kind", "per_row", "shape"), [(Dropout, 12, (64, 12)), (DropPath, 1, (64, 3, 2, 2))]
)
def test_a_mask_that_is_drawn_ahead_is_the_one_that_the_pass_would_draw(kind, per_row, shape):
    """To the bit, and also where the numbers have moved on since.

    Evaluation and a rate of zero change nothing.
    """
    x = torch.randn(shape)
    assert kind(0.5, "head", draws(), per_row).eval()(x) is x
    assert kind(0.0, "head", draws(), per_row)(x) is x
    layer = kind(0.5, "head", draws(step=3), per_row)
    expected = layer(x)
    assert not torch.equal(expected, x)
    layer.mask = layer.draw(64, x)
    layer.draws.step = 4
    assert torch.equal(layer(x), expected)
    layer.mask = None
    assert not torch.equal(layer(x), expected)


def test_b4s_rates_rise_linearly_over_its_32_blocks():
    """Published: 0.2 x block / 32, and 0.4 before the classifier."""
    with torch.device("meta"):
        model = build(Model(name="efficientnet_b4"), seed=0)
    blocks = [name for name in model.names if name.startswith("blocks.")]
    for number, name in enumerate(blocks[1:], start=1):
        drop_path = model.block(name).drop_path
        assert drop_path.rate == pytest.approx(0.2 * number / 32, rel=1e-12)
        assert (type(drop_path), drop_path.name, drop_path.draws) == (DropPath, name, model.draws)
    assert isinstance(model.block(blocks[0]).drop_path, torch.nn.Identity)
    dropout = model.block("head").dropout
    assert (dropout.rate, dropout.draws) == (0.4, model.draws)


def test_no_layer_is_left_that_draws_from_torchs_generator():
    """Neither a timm or torch layer by type, nor by what a forward pass in training does to the
    generator.

    At a rate of almost 1 every residual branch goes, and a block with a shortcut passes its input
    on.
    """
    model = build(
        Model(
            name="efficientnet_b0", width=0.25, depth=0.6, classes=10, drop_path=0.5, dropout=0.5
        ),
        seed=0,
    )
    assert {
        type(module) for module in model.modules() if "drop" in type(module).__name__.lower()
    } == {
        Dropout,
        DropPath,
    }
    before = torch.random.get_rng_state()
    model(torch.zeros(4, 3, 32, 32, dtype=torch.uint8))
    assert torch.equal(torch.random.get_rng_state(), before)
    block = model.block("blocks.2.1")
    block.drop_path.rate = 1 - 2**-32
    x = torch.randn(4, block.conv_pw.in_channels, 8, 8)
    assert torch.equal(block(x), x)

"""Pixels to the network's input: exact arithmetic, and which dtype survives which move."""

import copy

import pytest
import torch

from models.preprocess import Preprocess
from recipe.config import Model

MEAN, STD = Model().mean, Model().std
ALL_VALUES = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
KINDS = [torch.float32, torch.float16, torch.bfloat16]


def exact(images):
    """(image / 255 - mean) / std in float64."""
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (MEAN, STD))
    return (images.double() / 255 - mean) / std


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_pixel_value_is_normalised_right(dtype):
    """In float32, of values to 4.5: the scaled pixel, its constant, the shift and the sum are rounded by half a
    unit of 4.5 each, 2**-22; together below 1e-6. Then one rounding to the dtype, by half its eps."""
    output = Preprocess(MEAN, STD).to(dtype)(ALL_VALUES)
    expected = exact(ALL_VALUES)
    assert output.dtype == dtype
    assert output.shape == ALL_VALUES.shape
    error = (output.double() - expected).abs()
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    assert (error <= 1e-6 + rounding * expected.abs()).all()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_mixed_images_come_as_float32(dtype):
    """Whole values are those of uint8 bit for bit; between them, as exact as there."""
    block = Preprocess(MEAN, STD).to(dtype)
    assert torch.equal(block(ALL_VALUES.float()), block(ALL_VALUES))
    mixed = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 255
    output, expected = block(mixed), exact(mixed)
    assert output.dtype == dtype
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    assert ((output.double() - expected).abs() <= 1e-6 + rounding * expected.abs()).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("wanted", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("given", [torch.contiguous_format, torch.channels_last])
def test_the_output_is_in_the_layout_asked_for_whatever_the_images_are_in(given, wanted, dtype):
    images = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    block = Preprocess(MEAN, STD).half()
    expected = block(images)
    assert expected.is_contiguous()
    block.memory_format = wanted
    output = block(images.to(dtype).contiguous(memory_format=given))
    assert output.is_contiguous(memory_format=wanted)
    assert torch.equal(output, expected)


def test_channels_are_red_green_blue():
    image = torch.zeros(1, 3, 1, 1, dtype=torch.uint8)
    expected = -torch.tensor(MEAN, dtype=torch.float64) / torch.tensor(STD, dtype=torch.float64)
    torch.testing.assert_close(Preprocess(MEAN, STD)(image).flatten().double(), expected, rtol=1e-6, atol=0)
    assert len(set(expected.tolist())) == 3


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(
    "move",
    [
        lambda block, dtype: block.to(dtype),
        lambda block, dtype: block.to("cpu", dtype),
        lambda block, dtype: block.to(dtype).to("cpu"),
        lambda block, dtype: block.to("cpu").to(dtype).to(torch.device("cpu"), non_blocking=True),
        lambda block, dtype: block.double().to(dtype).cpu(),
        lambda block, dtype: copy.deepcopy(block.to(dtype)).to("cpu"),
        lambda block, dtype: block.type(dtype).share_memory(),
        lambda block, dtype: {torch.float32: block.float, torch.float16: block.half, torch.bfloat16: block.bfloat16}[
            dtype
        ]().cpu(),
    ],
)
def test_the_dtype_is_the_last_one_asked_for_whatever_the_device(move, dtype):
    """A move to a device must not take the dtype back: half-precision convolutions would refuse the images.
    And the constants are the same float32 numbers after any number of moves."""
    block = move(Preprocess(MEAN, STD), dtype)
    assert block(ALL_VALUES).dtype == dtype
    fresh = Preprocess(MEAN, STD)
    for name in ("scale", "shift"):
        assert getattr(block, name).dtype == torch.float32
        assert torch.equal(getattr(block, name), getattr(fresh, name))


def test_it_moves_with_the_model_it_is_part_of():
    model = torch.nn.Sequential(Preprocess(MEAN, STD), torch.nn.Conv2d(3, 4, 1)).to(torch.bfloat16).to("cpu")
    assert model(ALL_VALUES).dtype == torch.bfloat16
    with torch.device("meta"):
        shapes = Preprocess(MEAN, STD)
    assert shapes.half()(ALL_VALUES.to("meta")).device.type == "meta"


def test_the_recipe_holds_the_constants_and_the_state_dict_does_not():
    assert Preprocess(MEAN, STD).state_dict() == {}
    assert Preprocess(MEAN, STD).half().state_dict() == {}
    assert list(Preprocess(MEAN, STD).parameters()) == []


def test_the_images_are_left_as_they_were():
    images = ALL_VALUES.clone()
    Preprocess(MEAN, STD)(images)
    assert torch.equal(images, ALL_VALUES)

"""Pixels to the network's input: exact arithmetic, and which dtype survives which move."""

import copy

import pytest
import torch

from models.preprocess import Preprocess
from recipe.config import Model

MEAN, STD = Model().mean, Model().std
ALL_VALUES = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
KINDS = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_pixels_are_normalised_right(dtype):
    """(image / 255 - mean) / std, every uint8 and, as mixed images are, float32. In float32, of values to 4.5: the
    scaled pixel, its constant, the shift and the sum are rounded by half a unit of 4.5 each, 2**-22; together below
    1e-6. Then one rounding to the dtype, by half its eps. The images are left as they were."""
    mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1) for values in (MEAN, STD))
    assert len({*MEAN}) == len({*STD}) == 3  # channels are told apart
    block = Preprocess(MEAN, STD).to(dtype)
    mixed = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 255
    for images in (ALL_VALUES, mixed):
        before, output = images.clone(), block(images)
        expected = (images.double() / 255 - mean) / std
        assert (output.dtype, output.shape) == (dtype, images.shape)
        rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
        assert ((output.double() - expected).abs() <= 1e-6 + rounding * expected.abs()).all()
        assert torch.equal(images, before)
    assert torch.equal(block(ALL_VALUES.float()), block(ALL_VALUES))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("wanted", LAYOUTS)
@pytest.mark.parametrize("given", LAYOUTS)
def test_the_output_is_in_the_layout_asked_for_whatever_the_images_are_in(given, wanted, dtype):
    images = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    block = Preprocess(MEAN, STD).half()
    expected = block(images)
    assert expected.is_contiguous()
    block.memory_format = wanted
    output = block(images.to(dtype).contiguous(memory_format=given))
    assert output.is_contiguous(memory_format=wanted)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(
    "move",
    [
        lambda block, dtype: block.to("cpu").to(dtype).to(torch.device("cpu"), non_blocking=True),
        lambda block, dtype: block.double().to(dtype).cpu(),
        lambda block, dtype: copy.deepcopy(block.half().type(dtype)).share_memory(),
        lambda block, dtype: torch.nn.Sequential(block, torch.nn.Conv2d(3, 4, 1)).to(dtype).to("cpu")[0],
    ],
)
def test_the_dtype_is_the_last_one_asked_for_whatever_the_device(move, dtype):
    """A move to a device must not take the dtype back: half-precision convolutions would refuse the images. And the
    constants are the same float32 numbers after any number of moves; they are no part of a state dict."""
    block, fresh = move(Preprocess(MEAN, STD), dtype), Preprocess(MEAN, STD)
    assert block(ALL_VALUES).dtype == dtype
    for name in ("scale", "shift"):
        assert getattr(block, name).dtype == torch.float32
        assert torch.equal(getattr(block, name), getattr(fresh, name))
    assert block.state_dict() == {} and list(block.parameters()) == []


def test_it_can_be_built_on_the_meta_device():
    with torch.device("meta"):
        block = Preprocess(MEAN, STD).half()
    assert block(ALL_VALUES.to("meta")).device.type == "meta"

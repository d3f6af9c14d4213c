"""Validation images as timm prepares them for its pretrained weights: against timm's own
transform."""

import io
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from data.base import Pixels
from data.encoded import EncodedImage
from data.transforms import Evaluation
from recipe import loading
from recipe.config import Data
from tests.conftest import QUICKSTART

skimage = pytest.importorskip("skimage", reason="its package has photographs")

# Photographs that come with scikit-image: faces, fur, a cup, a launch, an eye, galaxies; wide,
# square and large.
PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
    "retina.jpg",
    "hubble_deep_field.jpg",
)
# What differs: bicubic with a larger test size; a size that timm rounds down; bilinear; both sides
# alike.
WEIGHTS = (
    "resnet50.a1_in1k",
    "tf_efficientnet_b3.ns_jft_in1k",
    "resnet34.tv_in1k",
    "vit_base_patch16_siglip_224.webli",
)


def content(name):
    return (Path(skimage.__file__).parent / "data" / name).read_bytes()


def theirs(weights):
    """timm's size and transform for scores, up to the normalisation."""
    configuration = timm.get_pretrained_cfg(weights).to_dict()
    keys = resolve_data_config(pretrained_cfg=configuration, use_test_size=True)
    return keys["input_size"][-1], create_transform(**keys, is_training=False, normalize=False)


@pytest.mark.parametrize("photograph", PHOTOGRAPHS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_pixels_are_timms_within_a_level(weights, photograph):
    """Both resize in two passes to bytes; weights of 16 bits here and 22 there seldom round to
    another level."""
    recipe = loading.load(QUICKSTART, [f"model.init_from=timm:{weights}"])
    size, transform = theirs(weights)
    assert recipe.model.image_size == size
    image = Image.open(io.BytesIO(content(photograph))).convert("RGB")
    expected = transform(image)
    found = Evaluation(recipe.data)(
        EncodedImage(content(photograph), photograph), size, showing=0, index=0
    )
    assert expected.dtype == torch.uint8
    difference = (found.int() - expected.int()).abs()
    assert difference.max() <= 1
    assert difference.float().mean() < 0.02


def test_the_other_interpolation_would_not_pass():
    """So the limit of one level can fail."""
    weights = "resnet50.a1_in1k"
    recipe = loading.load(
        QUICKSTART, [f"model.init_from=timm:{weights}", "data.interpolation=bilinear"]
    )
    size, transform = theirs(weights)
    expected = transform(Image.open(io.BytesIO(content("coffee.png"))).convert("RGB"))
    image = EncodedImage(content("coffee.png"), "coffee.png")
    found = Evaluation(recipe.data)(image, size, showing=0, index=0)
    assert np.abs(found.numpy().astype(int) - expected.numpy()).max() > 10


@pytest.mark.parametrize(("height", "width"), [(5, 400), (400, 5)])
def test_squash_takes_all_of_a_long_image(height, width):
    """Only where the aspect stays would a line become gigabytes."""
    image = Pixels(torch.zeros(3, height, width, dtype=torch.uint8))
    frame = Evaluation(Data(crop_mode="squash")).frame(image, 32)
    assert frame.box == (0, 0, height, width)
    centre = Evaluation(Data(crop_mode="center")).frame(image, 32)
    assert max(centre.box[2:]) == 16 * 5

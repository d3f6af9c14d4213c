"""From a decoded image to the pixels that the model is shown: random crops, flips and operations, centre crops.

What is drawn (`augmentation`) is separate from what is done to pixels, so that a reader that crops by
itself can take the same draws. Everything stays uint8; mixing of images happens on the device.
"""

import functools
import math
from typing import Callable, NamedTuple, Tuple

import torch
import torchvision
from torch.nn.functional import interpolate

from recipe.config import Data
from recipe.randomness import Stream, key

_LONGEST_ASPECT = 16
_GREY = 128  # what operations that move pixels leave behind, as in the TensorFlow reference


class Augmentation(NamedTuple):
    """What is drawn for one image of one epoch: a box in its pixels, and whether to mirror it."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


def augmentation(seed: int, epoch: int, index: int, height: int, width: int, data: Data) -> Augmentation:
    """Draw the crop and flip of an image: a function of (seed, epoch, sample index) and the image's size."""
    stream = Stream(key("augment", seed, epoch, index))
    flip = stream.uniform() < data.flip
    return Augmentation(*crop_box(stream, height, width, data.crop_area, data.crop_aspect), flip=flip)


def crop_box(
    stream: Stream, height: int, width: int, area: Tuple[float, float], aspect: Tuple[float, float]
) -> Tuple[int, int, int, int]:
    """Draw a random box inside an image of height x width pixels.

    Args:
        stream: where the draws come from.
        area: low and high share of the image's area, uniform.
        aspect: low and high width over height, uniform in the logarithm.

    Returns:
        (top, left, height, width). If no box fits in ten tries, the largest central one whose aspect is in
        range.

    Source: Szegedy et al., 1409.4842, section 6; limits and fallback as in torchvision's RandomResizedCrop.
    """
    for _ in range(10):
        target_area = height * width * stream.uniform(*area)
        target_aspect = math.exp(stream.uniform(math.log(aspect[0]), math.log(aspect[1])))
        w = round(math.sqrt(target_area * target_aspect))
        h = round(math.sqrt(target_area / target_aspect))
        if 0 < w <= width and 0 < h <= height:
            return stream.integer(height - h + 1), stream.integer(width - w + 1), h, w
    h, w = height, width
    if width / height < aspect[0]:
        h = max(1, round(width / aspect[0]))
    elif width / height > aspect[1]:
        w = max(1, round(height * aspect[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def train_transform(
    image: torch.Tensor, image_size: int, data: Data, seed: int, epoch: int, index: int
) -> torch.Tensor:
    """Random crop, resized to a square, mirrored or not, then whatever data.augment says.

    Args:
        image: uint8 [3, height, width].
        image_size: pixels a side of the result.
        seed, epoch, index: name the draws; see `augmentation`.

    Returns:
        uint8 [3, image_size, image_size].
    """
    top, left, height, width, flip = augmentation(seed, epoch, index, image.shape[1], image.shape[2], data)
    image = _resized(image[:, top : top + height, left : left + width], image_size, image_size)
    return operated(image.flip(2) if flip else image, data, seed, epoch, index)


def operated(image: torch.Tensor, data: Data, seed: int, epoch: int, index: int) -> torch.Tensor:
    """RandAugment, AutoAugment (its policy for ImageNet) or TrivialAugment, by torchvision; or the image as it is.

    What is drawn is a function of (seed, epoch, sample index) and the installed torchvision, which draws in an
    order of its own. Not safe in two threads at once, of which a worker has one.

    Args:
        image: uint8 [3, height, width].
        seed, epoch, index: name the draws.

    Returns:
        uint8 [3, height, width].

    Sources: Cubuk et al., 1909.13719 and 1805.09501; Müller and Hutter, 2103.10158.
    """
    if data.augment == "none":
        return image
    operations = _operations(data.augment, data.randaugment_operations, data.randaugment_magnitude)
    # torchvision draws from the global generator. torch.manual_seed would seed those of devices, too.
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(key(data.augment, seed, epoch, index))
    try:
        return operations(image)
    finally:
        generator.set_state(state)


@functools.lru_cache(maxsize=None)
def _operations(augment: str, number: int, magnitude: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """torchvision's transform of that name, made once in each process."""
    # Up to torchvision 0.15 the import warns that v2 may change. In today's versions v1 takes a third longer.
    torchvision.disable_beta_transforms_warning()
    from torchvision.transforms import v2

    if augment == "randaugment":
        return v2.RandAugment(num_ops=number, magnitude=magnitude, fill=_GREY)
    if augment == "autoaugment":
        return v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET, fill=_GREY)
    return v2.TrivialAugmentWide(fill=_GREY)


def evaluation_transform(image: torch.Tensor, image_size: int, crop_fraction: float) -> torch.Tensor:
    """Resize the short side to round(image_size / crop_fraction), then cut the centre out.

    Sizes are rounded as torchvision's Resize and CenterCrop round them.

    Args:
        image: uint8 [3, height, width].
        image_size: pixels a side of the result.

    Returns:
        uint8 [3, image_size, image_size].
    """
    # The centre is all that is kept, and a line of 1 x 65535 pixels would be resized to gigabytes.
    limit = _LONGEST_ASPECT * min(image.shape[1:])
    image = _centre(image, min(image.shape[1], limit), min(image.shape[2], limit))
    height, width = image.shape[1:]
    short = round(image_size / crop_fraction)
    if height < width:
        height, width = short, short * width // height
    else:
        height, width = short * height // width, short
    return _centre(_resized(image, height, width), image_size, image_size)


def _centre(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    top = round((image.shape[1] - height) / 2)
    left = round((image.shape[2] - width) / 2)
    return image[:, top : top + height, left : left + width]


def _resized(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Bilinear with antialiasing: uint8 [3, any, any] to uint8 [3, height, width]."""
    if image.shape[1:] == (height, width):
        return image
    # torch 2.0 misreads strides other than those of a whole image, planar or interleaved.
    layout = torch.channels_last if image.stride(0) == 1 else torch.contiguous_format
    batch = image[None].contiguous(memory_format=layout)
    return interpolate(batch, (height, width), mode="bilinear", align_corners=False, antialias=True)[0]

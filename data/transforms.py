"""From an image to the pixels that the model gets: random crops, flips and operations, centre crops. All is uint8.

The plan (`Frame`) is separate from its execution, so that DALI, which decodes and crops by itself, follows the same.
"""

import abc
import functools
import math
import threading
from typing import Callable, NamedTuple, Tuple

import torch
import torchvision
from torch.nn.functional import interpolate

from data.base import Box, Image
from recipe.config import Data
from recipe.randomness import Stream, key

_LONGEST_ASPECT = 16
_generator_in_use = threading.Lock()
_GREY = 128  # what operations that move pixels leave behind, as in the TensorFlow reference


def crop_box(stream: Stream, height: int, width: int, area: Tuple[float, float], aspect: Tuple[float, float]) -> Box:
    """Draw a random box inside an image of height x width pixels; the largest central one if none fits in ten tries.

    Its share of the image's area is uniform in `area`, the logarithm of width over height in that of `aspect`.
    Source: Szegedy et al., 1409.4842, section 6; limits and fallback as in torchvision's RandomResizedCrop.
    """
    for _ in range(10):
        target_area = height * width * stream.uniform(*area)
        target_aspect = math.exp(stream.uniform(math.log(aspect[0]), math.log(aspect[1])))
        w = round(math.sqrt(target_area * target_aspect))
        h = round(math.sqrt(target_area / target_aspect))
        if 0 < w <= width and 0 < h <= height:
            return Box(stream.integer(height - h + 1), stream.integer(width - w + 1), h, w)
    h = height if width / height >= aspect[0] else max(1, round(width / aspect[0]))
    w = width if width / height <= aspect[1] else max(1, round(height * aspect[1]))
    return Box((height - h) // 2, (width - w) // 2, h, w)


class Frame(NamedTuple):
    """The part of an image that the model gets: the middle of a resized box, mirrored or not."""

    box: Box
    height: int  # of the resized box
    width: int
    size: int  # pixels a side of the square that is cut out of the middle of the resized box
    flip: bool  # left to right
    exact: bool  # whether the box must be decoded at its own size, however small it becomes

    @property
    def corner(self) -> Tuple[int, int]:
        """First row and column of the square in the resized box."""
        return round((self.height - self.size) / 2), round((self.width - self.size) / 2)


class Transform(abc.ABC):
    """The work on each image of a split: from image number `index` of the source to `size` pixels a side."""

    @abc.abstractmethod
    def frame(self, image: Image, size: int, epoch: int, index: int) -> Frame: ...

    def finish(self, pixels: torch.Tensor, epoch: int, index: int) -> torch.Tensor:
        """Augment the pixels of the frame, uint8 [3, size, size]."""
        return pixels

    def __call__(self, image: Image, size: int, epoch: int, index: int) -> torch.Tensor:
        """Return uint8 [3, size, size], mostly channels last in memory. Raises UnreadableImage."""
        frame = self.frame(image, size, epoch, index)
        top, left = frame.corner
        pixels = image.pixels(frame.box, None if frame.exact else size)
        pixels = _resized(pixels, frame.height, frame.width)[:, top : top + size, left : left + size]
        return self.finish(pixels.flip(2) if frame.flip else pixels, epoch, index)


class Training(Transform):
    """Random crop, resized to a square, mirrored or not, then data.augment by torchvision.

    Draws are a function of (seed, epoch, sample index), those of data.augment also of torchvision's order of draws.
    Sources: Cubuk et al., 1909.13719 and 1805.09501; Müller and Hutter, 2103.10158.
    """

    def __init__(self, data: Data, seed: int):
        self._data, self._seed = data, seed

    def frame(self, image: Image, size: int, epoch: int, index: int) -> Frame:
        stream = Stream(key("augment", self._seed, epoch, index))
        flip = stream.uniform() < self._data.flip
        box = crop_box(stream, image.height, image.width, self._data.crop_area, self._data.crop_aspect)
        return Frame(box, size, size, size, flip, exact=False)

    def finish(self, pixels: torch.Tensor, epoch: int, index: int) -> torch.Tensor:
        data = self._data
        if data.augment == "none":
            return pixels
        operations = _operations(data.augment, data.randaugment_operations, data.randaugment_magnitude)
        # torchvision draws from the global generator. torch.manual_seed would seed those of devices, too.
        with _generator_in_use, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key(data.augment, self._seed, epoch, index))
            return operations(pixels)


class Evaluation(Transform):
    """The short side resized to round(size / crop_fraction), then the centre; sizes are rounded as by torchvision."""

    def __init__(self, crop_fraction: float):
        self._crop_fraction = crop_fraction

    def frame(self, image: Image, size: int, epoch: int = 0, index: int = 0) -> Frame:
        # Only the centre is kept, and a line of 1 x 65535 pixels would be resized to gigabytes.
        limit = _LONGEST_ASPECT * min(image.height, image.width)
        height, width = min(image.height, limit), min(image.width, limit)
        box = Box(round((image.height - height) / 2), round((image.width - width) / 2), height, width)
        short, shorter = round(size / self._crop_fraction), min(height, width)
        return Frame(box, short * height // shorter, short * width // shorter, size, flip=False, exact=True)


@functools.lru_cache(maxsize=None)
def _operations(augment: str, number: int, magnitude: int) -> Callable[[torch.Tensor], torch.Tensor]:
    # Up to torchvision 0.15 the import warns that v2 may change. In today's versions v1 takes a third longer.
    torchvision.disable_beta_transforms_warning()
    from torchvision.transforms import v2

    if augment == "randaugment":
        return v2.RandAugment(num_ops=number, magnitude=magnitude, fill=_GREY)
    if augment == "autoaugment":
        return v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET, fill=_GREY)
    return v2.TrivialAugmentWide(fill=_GREY)


def _resized(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Bilinear with antialiasing: uint8 [3, any, any] to uint8 [3, height, width]."""
    if image.shape[1:] == (height, width):
        return image
    # With these strides of a batch of one torch takes the short path; torch 2.0 misreads those of a part of an image.
    if image.stride(0) == 1:
        batch = image.permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
    else:
        batch = image[None].contiguous()
    return interpolate(batch, (height, width), mode="bilinear", align_corners=False, antialias=True)[0]

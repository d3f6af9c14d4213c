"""From an image to the pixels that the model gets: crops, flips and augmentation of uint8 images.

The plan (`Frame`) is separate from its execution, so that DALI, which decodes and crops by itself,
follows the same plan.
"""

import abc
import functools
import math
import threading
from typing import Callable, NamedTuple, Tuple

import numpy as np
import torch
import torchvision
from PIL import Image as PillowImage
from torch.nn.functional import interpolate

from data import augmentation
from data.augmentation import IMAGENET, Colours
from data.base import Box, Image
from recipe.config import Data
from recipe.randomness import Stream, key

_CROP_TRIES = 10
_LONGEST_ASPECT = 16
_generator_in_use = threading.Lock()
_GREY = 128  # what operations that move pixels leave behind, as in the TensorFlow reference


def crop_box(
    stream: Stream,
    height: int,
    width: int,
    area: Tuple[float, float],
    aspect: Tuple[float, float],
) -> Box:
    """Draw a random box inside an image; the largest central one if none fits in ten tries.

    Source: Szegedy et al., 1409.4842, section 6; limits and fallback as in torchvision's
    RandomResizedCrop.

    Args:
        stream: from which the box is drawn.
        height: of the image in pixels.
        width: of the image in pixels.
        area: limits of the box's share of the image's area, which is uniform.
        aspect: limits of the box's width over height, of which the logarithm is uniform.
    """
    narrowest, widest = aspect
    for _ in range(_CROP_TRIES):
        target_area = height * width * stream.uniform(*area)
        target_aspect = math.exp(stream.uniform(math.log(narrowest), math.log(widest)))
        box_width = round(math.sqrt(target_area * target_aspect))
        box_height = round(math.sqrt(target_area / target_aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = stream.integer(height - box_height + 1)
            left = stream.integer(width - box_width + 1)
            return Box(top, left, box_height, box_width)
    # Only an image that is narrower or wider than `aspect` allows is cut.
    box_height = height
    box_width = width
    if width / height < narrowest:
        box_height = max(1, round(width / narrowest))
    if width / height > widest:
        box_width = max(1, round(height * widest))
    top = (height - box_height) // 2
    left = (width - box_width) // 2
    return Box(top, left, box_height, box_width)


class Frame(NamedTuple):
    """The part of an image that the model gets: the middle of a resized box, mirrored or not."""

    box: Box
    height: int  # of the resized box
    width: int
    size: int  # pixels a side of the square that is cut out of the middle of the resized box
    flip: bool  # left to right
    exact: bool  # whether the box must be decoded at its own size, however small it becomes
    interpolation: str  # data.interpolation

    @property
    def corner(self) -> Tuple[int, int]:
        """Return the first row and column of the square in the resized box."""
        row = round((self.height - self.size) / 2)
        column = round((self.width - self.size) / 2)
        return row, column


class Transform(abc.ABC):
    """The work on each image of a split, from the encoded image to the square of pixels."""

    @abc.abstractmethod
    def frame(self, image: Image, size: int, showing: int, index: int) -> Frame:
        """Return the plan for an image.

        Args:
            image: of which only height and width are read.
            size: pixels a side of the result.
            showing: number that names the draws, see data/epochs.Shown.
            index: number of the image in its source.
        """

    augments = False  # whether `finish` changes pixels
    interpolation = "bilinear"  # of all frames: data.interpolation

    def finish(self, pixels: torch.Tensor, showing: int, index: int) -> torch.Tensor:
        """Augment the pixels of a frame.

        Args:
            pixels: uint8 [3, size, size].
            showing: as in `frame`.
            index: number of the image in its source.

        Returns:
            uint8 [3, size, size].
        """
        return pixels

    def __call__(self, image: Image, size: int, showing: int, index: int) -> torch.Tensor:
        """Return the pixels for the model: uint8 [3, size, size], mostly channels last in memory.

        Raises:
            UnreadableImage: the image cannot be decoded.
        """
        # In training a decoder may give a smaller box where that is still large enough: fewer pixels
        # are decoded. Scores come from the box at its own size, as other programs compute them.
        frame = self.frame(image, size, showing, index)
        pixels = image.pixels(frame.box, None if frame.exact else size)
        pixels = _resize(pixels, frame.height, frame.width, frame.interpolation)
        top, left = frame.corner
        pixels = pixels[:, top : top + size, left : left + size]
        if frame.flip:
            pixels = pixels.flip(2)
        return self.finish(pixels, showing, index)


class Training(Transform):
    """Random crop, resized to a square, mirrored or not, then data.augment, jitter and erasing.

    Draws are a function of (seed, showing, sample index), those of data.augment also of
    torchvision's or timm's order of draws.

    Sources: Cubuk et al., 1909.13719 and 1805.09501; Müller and Hutter, 2103.10158; Hendrycks et
    al., 1912.02781; and those of data/augmentation.py.

    data: how images are cropped and augmented.
    """

    def __init__(self, data: Data, seed: int, colours: Colours = IMAGENET):
        """
        Args:
            data: how images are cropped and augmented.
            seed: of the run.
            colours: by which the model normalises images.
        """
        self.data = data
        self._seed = seed
        self._colours = colours
        self.interpolation = data.interpolation
        others = data.color_jitter > 0 or data.random_erasing > 0
        self.augments = others or data.augment != "none"

    def frame(self, image: Image, size: int, showing: int, index: int) -> Frame:
        """Draw the box and the flip of an image: see `Transform.frame`."""
        # The flip is drawn first, since a box takes a number of draws that varies.
        data = self.data
        stream = Stream(self.draw_key(showing, index))
        flip = stream.uniform() < data.flip
        box = crop_box(stream, image.height, image.width, data.crop_area, data.crop_aspect)
        return Frame(
            box=box,
            height=size,
            width=size,
            size=size,
            flip=flip,
            exact=False,
            interpolation=data.interpolation,
        )

    def draw_key(self, showing: int, index: int) -> int:
        """Return the 64-bit key of the box and the flip of an image: see `Transform.frame`."""
        return key("augment", self._seed, showing, index)

    def finish(self, pixels: torch.Tensor, showing: int, index: int) -> torch.Tensor:
        """Augment the `pixels` of a frame: see `Transform.finish`."""
        data = self.data
        names = (self._seed, showing, index)
        # Each has a key of its own, so that none changes what another draws.
        if data.augment != "none":
            pixels = self._by_policy(pixels, key(data.augment, *names))
        if data.color_jitter:
            stream = Stream(key("color_jitter", *names))
            pixels = augmentation.jitter(pixels, data.color_jitter, stream)
        erasing = data.random_erasing
        if erasing and Stream(key("random_erasing", *names)).uniform() < erasing:
            pixels = augmentation.erase(
                pixels,
                data.random_erasing_count,
                data.random_erasing_mode,
                colours=self._colours,
                draw=key("erased", *names),
            )
        return pixels

    def _by_policy(self, pixels: torch.Tensor, draw: int) -> torch.Tensor:
        """Do data.augment to pixels, uint8 [3, size, size], with a 64-bit key."""
        data = self.data
        if data.augment == "timm_randaugment":
            policy = data.timm_randaugment
            return augmentation.timm_randaugment(pixels, policy, self._colours, draw)
        if data.augment == "three_augment":
            return augmentation.three_augment(pixels, Stream(draw))
        operations = _operations(
            data.augment,
            data.randaugment_operations,
            data.randaugment_magnitude,
            severity=data.augmix_severity,
        )
        device = pixels.device
        # AugMix alone draws its weights by the generator of the pixels' device, which has no seed
        # of ours.
        if data.augment == "augmix":
            pixels = pixels.cpu()
        # torchvision draws from the global generator. torch.manual_seed would seed those of
        # devices, too.
        with _generator_in_use, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(draw)
            return operations(pixels).to(device)


class Evaluation(Transform):
    """The short side, or with data.crop_mode squash each side, resized to size / crop_fraction,
    then the centre.

    Sizes are rounded as by torchvision, with data.crop_rounding down as by timm.
    """

    def __init__(self, data: Data):
        """
        Args:
            data: with the keys of evaluation.
        """
        self._data = data
        self.interpolation = data.interpolation

    def frame(self, image: Image, size: int, showing: int = 0, index: int = 0) -> Frame:
        """Return the centre of an `image`, the same in every epoch: see `Transform.frame`."""
        # Where the aspect stays, only the centre is kept of a line of 1 x 65535 pixels, which would
        # be resized to gigabytes.
        squashes = self._data.crop_mode == "squash"
        longest = _LONGEST_ASPECT * min(image.height, image.width)
        if squashes:
            longest = max(image.height, image.width)
        height = min(image.height, longest)
        width = min(image.width, longest)
        top = round((image.height - height) / 2)
        left = round((image.width - width) / 2)
        # The short side becomes `short` pixels. The other one keeps the aspect, or is made as long.
        data = self._data
        rounded = math.floor if data.crop_rounding == "down" else round
        short = rounded(size / data.crop_fraction)
        shorter = min(height, width)
        return Frame(
            box=Box(top, left, height, width),
            height=short if squashes else short * height // shorter,
            width=short if squashes else short * width // shorter,
            size=size,
            flip=False,
            exact=True,
            interpolation=data.interpolation,
        )


@functools.lru_cache(maxsize=None)
def _operations(
    augment: str,
    count: int,
    magnitude: int,
    severity: int = 3,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return torchvision's operations for data.augment; count and magnitude are RandAugment's,
    severity is AugMix's.
    """
    # Up to torchvision 0.15 the import warns that v2 may change. In today's versions v1 takes a
    # third longer.
    torchvision.disable_beta_transforms_warning()
    from torchvision.transforms import v2

    if augment == "randaugment":
        return v2.RandAugment(num_ops=count, magnitude=magnitude, fill=_GREY)
    if augment == "autoaugment":
        return v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET, fill=_GREY)
    if augment == "augmix":
        return v2.AugMix(severity=severity, fill=_GREY)
    return v2.TrivialAugmentWide(fill=_GREY)


@functools.lru_cache(maxsize=None)
def bicubic_is_pillows() -> bool:
    """Return whether torch's bicubic filter is Pillow's; that of torch 2.0 (for IPUs) is another,
    by up to 40 levels.
    """
    # An edge, beside which filters overshoot.
    edge = torch.tensor([0, 0, 255, 255], dtype=torch.uint8).expand(3, 4, 4)
    by_torch = _interpolated(edge.contiguous()[None], 16, 16, "bicubic")[0]
    difference = by_torch.int() - _resize_by_pillow(edge, 16, 16).int()
    return int(difference.abs().max()) <= 1


def _resize_by_pillow(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize uint8 [3, any, any] to uint8 [3, height, width] by Pillow's bicubic filter."""
    pixels = PillowImage.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    resized = pixels.resize((width, height), PillowImage.Resampling.BICUBIC)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def _resize(
    image: torch.Tensor,
    height: int,
    width: int,
    interpolation: str,
) -> torch.Tensor:
    """Resize uint8 [3, any, any] to uint8 [3, height, width] with antialiasing.

    The filters are Pillow's: a triangle for `bilinear`, for `bicubic` the cubic of Keys (1981) with
    a = -0.5. Weights are rounded to 16 bits, Pillow's to 22.
    """
    if image.shape[1:] == (height, width):
        return image
    if interpolation == "bicubic" and not bicubic_is_pillows():
        return _resize_by_pillow(image, height, width)
    # With these strides of a batch of one torch takes the short path; torch 2.0 misreads those of a
    # part of an image.
    if image.stride(0) == 1:
        batch = image.permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
    else:
        batch = image[None].contiguous()
    return _interpolated(batch, height, width, interpolation)[0]


def _interpolated(
    batch: torch.Tensor,
    height: int,
    width: int,
    interpolation: str,
) -> torch.Tensor:
    """Resize uint8 [N, 3, any, any] to uint8 [N, 3, height, width] by torch."""
    return interpolate(
        batch,
        (height, width),
        mode=interpolation,
        align_corners=False,
        antialias=True,
    )

"""What is done to the pixels of a crop beyond torchvision's policies: uint8 in, uint8 out.

Every function draws from what it is given, so that pixels are a function of (seed, epoch, sample).
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import threading
from typing import Any, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import functional

from recipe.randomness import MASK32, Stream

_ERASED_AREA = (0.02, 1 / 3)  # share of the image
_ERASED_ASPECT = (0.3, 1 / 0.3)  # height over width
_ERASING_TRIES = 10
_SOLARIZE_FROM = 128
_BLUR_SIGMA = (0.1, 2.0)  # pixels
_BLUR_KERNEL = 13  # three standard deviations on each side
_TRANSLATION = 0.45  # of the size, at timm's magnitude 10
_generators_in_use = threading.Lock()


class Colours(NamedTuple):
    """Mean and standard deviation of RGB in [0, 1], by which the model normalises images."""

    mean: Tuple[float, float, float]
    std: Tuple[float, float, float]

    @property
    def grey(self) -> Tuple[int, int, int]:
        """The mean as bytes, which the model sees as 0."""
        red, green, blue = (min(255, round(255 * value)) for value in self.mean)
        return red, green, blue


IMAGENET = Colours(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def jitter(pixels: torch.Tensor, strength: float, stream: Stream) -> torch.Tensor:
    """Change brightness, contrast and saturation in a random order, each by a random factor.

    Source: torchvision's ColorJitter(strength, strength, strength), which timm and DeiT III use.

    Args:
        pixels: uint8 [3, height, width].
        strength: factors are uniform in [1 - strength, 1 + strength], and not below 0.
        stream: from which is drawn.

    Returns:
        uint8 [3, height, width].
    """
    adjustments = [
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
    ]
    while adjustments:
        adjust = adjustments.pop(stream.integer(len(adjustments)))
        pixels = adjust(pixels, stream.uniform(max(0.0, 1 - strength), 1 + strength))
    return pixels


def three_augment(pixels: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Make an image grey, solarise it, or blur it, each with the same probability.

    Source: Touvron, Cord and Jégou, 2204.07118 (DeiT III), section 3.2. Theirs blurs by Pillow's
    approximation of a Gaussian.

    Args:
        pixels: uint8 [3, height, width], at least 8 pixels a side.
        stream: from which is drawn.

    Returns:
        uint8 [3, height, width].
    """
    operation = stream.integer(3)
    if operation == 0:
        return functional.rgb_to_grayscale(pixels, num_output_channels=3)
    if operation == 1:
        return functional.solarize(pixels, _SOLARIZE_FROM)
    sigma = stream.uniform(*_BLUR_SIGMA)
    return functional.gaussian_blur(pixels, [_BLUR_KERNEL, _BLUR_KERNEL], [sigma, sigma])


def timm_randaugment(
    pixels: torch.Tensor,
    policy: str,
    colours: Colours,
    draw: int,
) -> torch.Tensor:
    """Apply timm's RandAugment.

    The operations, their magnitudes and the order of draws are timm's own.

    Args:
        pixels: uint8 [3, size, size].
        policy: timm's text, as `rand-m9-mstd0.5-inc1`.
        colours: of the model; the mean fills what operations leave behind.
        draw: 64-bit key.

    Returns:
        uint8 [3, size, size].
    """
    operations = _timm_operations(policy, pixels.shape[-1], colours.grey)
    image = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())
    with _seeded_generators(draw):
        image = operations(image)
    changed = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    return changed.to(pixels.device)


def erase(
    pixels: torch.Tensor,
    most: int,
    mode: str,
    colours: Colours,
    draw: int,
) -> torch.Tensor:
    """Replace random rectangles of an image by the mean colour or by noise.

    Sources: Zhong et al., 1708.04896; areas, aspects and noise as in timm's RandomErasing.

    Args:
        pixels: uint8 [3, height, width].
        most: rectangles; their number is uniform from 1 on, and they share the area.
        mode: `const` fills with the mean, `pixel` with normal noise that the model would see with
            mean 0 and deviation 1, but for what lies beyond black and white.
        colours: of the model.
        draw: 64-bit key.

    Returns:
        uint8 [3, height, width], a copy.
    """
    # A copy: images in memory, and views of them, are not to be changed.
    erased = pixels.clone()
    stream = Stream(draw)
    noise = np.random.Generator(np.random.Philox(key=draw))
    mean = torch.tensor(colours.mean).view(3, 1, 1)
    std = torch.tensor(colours.std).view(3, 1, 1)
    height, width = pixels.shape[1:]
    count = 1 + stream.integer(most)
    for _ in range(count):
        box = _erased_box(stream, height, width, count)
        if box is None:
            continue
        top, left, box_height, box_width = box
        values = mean
        if mode == "pixel":
            drawn = noise.standard_normal((3, box_height, box_width), dtype=np.float32)
            values = mean + std * torch.from_numpy(drawn)
        colour = (255 * values).round().clamp(0, 255).to(torch.uint8)
        inside = erased[:, top : top + box_height, left : left + box_width]
        inside.copy_(colour)
    return erased


def _erased_box(
    stream: Stream,
    height: int,
    width: int,
    count: int,
) -> Optional[Tuple[int, int, int, int]]:
    """Draw top, left, height and width of one of `count` rectangles; None if none fits in ten
    tries.
    """
    lowest, highest = _ERASED_ASPECT
    for _ in range(_ERASING_TRIES):
        area = stream.uniform(*_ERASED_AREA) * height * width / count
        aspect = math.exp(stream.uniform(math.log(lowest), math.log(highest)))
        box_height = round(math.sqrt(area * aspect))
        box_width = round(math.sqrt(area / aspect))
        if box_height < height and box_width < width:
            top = stream.integer(height - box_height + 1)
            left = stream.integer(width - box_width + 1)
            return top, left, box_height, box_width
    return None


@functools.lru_cache(maxsize=None)
def _timm_operations(policy: str, size: int, grey: Tuple[int, int, int]) -> Any:
    """Return timm's transform of a Pillow image of `size` pixels a side."""
    # Loaded by runs that ask for it.
    from timm.data.auto_augment import rand_augment_transform

    keys = {"translate_const": int(size * _TRANSLATION), "img_mean": grey}
    operations = rand_augment_transform(policy, keys)
    # timm asks for 0 bits where magnitudes are large, which newer versions of Pillow refuse.
    for operation in operations.ops:
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    return operations


def _posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """Keep the high `bits` of each byte, as Pillow 10 does for any number: none below 1, all from
    8 on.

    Args:
        image: RGB.
        bits: to keep.
        options: that timm gives to all operations, and this one does not need.
    """
    kept = 255 & ~(2 ** (8 - min(max(bits, 0), 8)) - 1)
    return image.point([value & kept for value in range(256)] * 3)


@contextlib.contextmanager
def _seeded_generators(draw: int) -> Iterator[None]:
    """Seed the global generators of Python and NumPy within, and leave them as they were.

    timm's operations draw from both, and take no other generator.
    """
    seeds: List[int] = [draw & MASK32, draw >> 32]
    with _generators_in_use:
        python_state = random.getstate()
        numpy_state = np.random.get_state()
        random.seed(draw)
        np.random.seed(seeds)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)

"""The handwritten digits that come with the repository."""

import os

import numpy as np
import torch

from data.base import SOURCES, MemorySource, Source
from recipe.images import Digits
from recipe.randomness import bits32, key

_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "digits.npz")
_BRIGHTEST = 16  # level in the file
_ONE_IN = 5  # images of a class validates


class DigitsSource(MemorySource):
    """The 1,797 handwritten digits of digits.npz, 8 x 8 grey.

    1,437 of them to train on and 360 to validate with.
    """

    def __init__(self, split: str):
        """
        Args:
            split: "train" or "validation".
        """
        with np.load(_FILE) as file:
            grey = file["images"]
            labels = file["labels"].astype(np.int64)
        self.place = "data.source=digits"
        self.classes = tuple(str(digit) for digit in range(10))
        # Every fifth of each class in a random order validates. The key is a constant: figures of
        # different runs compare only as long as the split never changes.
        shuffle = bits32(key("digits split"), np.arange(len(labels), dtype=np.int64))
        by_class = np.lexsort((shuffle, labels))
        validates = np.zeros(len(labels), dtype=bool)
        validates[by_class[::_ONE_IN]] = True
        belongs = validates if split == "validation" else ~validates
        self._numbers = np.flatnonzero(belongs)
        self.labels = labels[self._numbers]
        # Levels up to 16 become levels up to 255, rounded.
        levels = grey[self._numbers].astype(np.uint16) * 255
        pixels = ((levels + _BRIGHTEST // 2) // _BRIGHTEST).astype(np.uint8)
        one_channel = torch.from_numpy(pixels)[:, None]
        self.pixels = one_channel.repeat(1, 3, 1, 1)

    def name(self, index: int) -> str:
        """Return the number in the file of image `index`."""
        return f"digits/{self._numbers[index]}"


@SOURCES.implements(Digits)
def _open(data: Digits, classes: int, split: str) -> Source:
    """Open a split; `classes` is 10, which the recipe has been checked for."""
    return DigitsSource(split)

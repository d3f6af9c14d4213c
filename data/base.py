"""What a source of images promises."""

import abc
from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from recipe.errors import DataError
from recipe.randomness import bits32, key


class UnreadableImage(DataError):
    """An image that cannot be read or decoded; the message names the file and the reason."""


class Box(NamedTuple):
    """A rectangle of an image's pixels, the image upright."""

    top: int
    left: int
    height: int
    width: int


class Image(abc.ABC):
    """One image, of which as much is decoded as is asked for.

    Attributes:
        height, width: in pixels, the image upright.
    """

    height: int
    width: int

    @abc.abstractmethod
    def pixels(self, box: Optional[Box] = None, enough: Optional[int] = None) -> torch.Tensor:
        """The pixels of a box; all of them if None.

        Args:
            enough: pixels a side that will do: the box may come at a half, a quarter or an eighth of its size, as
                long as neither side has fewer. None: at its own size.

        Returns:
            uint8 [3, height, width], RGB, not necessarily contiguous.

        Raises:
            UnreadableImage.
        """


class Pixels(Image):
    """An image that has been decoded."""

    def __init__(self, pixels: torch.Tensor):
        """Args: pixels: uint8 [3, height, width]."""
        self._pixels = pixels
        self.height, self.width = pixels.shape[1:]

    def pixels(self, box: Optional[Box] = None, enough: Optional[int] = None) -> torch.Tensor:
        return self._pixels if box is None else cut(self._pixels, box)


def cut(pixels: torch.Tensor, box: Box) -> torch.Tensor:
    """A view of a box's pixels. Args: pixels: [3, height, width]."""
    return pixels[:, box.top : box.top + box.height, box.left : box.left + box.width]


class Source(abc.ABC):
    """Numbered images with labels. Safe to share with worker processes, which read from it at will.

    Attributes:
        classes: names of the classes, by label, as they are printed (recipe.errors.printable).
        labels: int64 [n], label of each image.
        digest: of names and labels, in their order, wherever they lie; empty where the recipe alone says what they are.
        notes: lines for the user on what was found beside the images, and left out.
    """

    classes: Tuple[str, ...]
    labels: np.ndarray
    digest: str = ""
    notes: Tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def read(self, index: int) -> torch.Tensor:
        """Pixels of an image: uint8 [3, height, width], RGB. Raises UnreadableImage."""

    @abc.abstractmethod
    def name(self, index: int) -> str:
        """What logs and errors call an image, such as its path, as it is printed."""

    def open(self, index: int) -> Image:
        """An image, its size known and its pixels to be asked for. Raises UnreadableImage."""
        return Pixels(self.read(index))

    def open_all(self, indices: Sequence[int]) -> List[Union[Image, UnreadableImage]]:
        """Several images, in the order asked for; in the place of one that cannot be opened, the reason."""
        return [self._opened(index) for index in indices]

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The order in which an epoch visits the images: int64 [n], a permutation; a function of (seed, epoch)."""
        return permutation(seed, epoch, len(self))

    def _opened(self, index: int) -> Union[Image, UnreadableImage]:
        try:
            return self.open(index)
        except UnreadableImage as error:
            return error


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """An epoch's random order of `size` images: int64 [size], a permutation of range(size).

    Images are sorted by 32 random bits each, of which no two are the same, because `bits32` of one draw maps
    numbers one to one. So no library's generator or sort, which may change between versions, has a say.
    """
    return np.argsort(bits32(key("order", seed, epoch), np.arange(size, dtype=np.int64)))

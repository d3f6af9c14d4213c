"""The interface of a source of images."""

import abc
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from recipe.config import Data
from recipe.errors import DataError
from recipe.kinds import Registry
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
    """One image, of which only the requested part is decoded."""

    height: int  # in pixels, the image upright
    width: int

    @abc.abstractmethod
    def pixels(self, box: Optional[Box] = None, enough: Optional[int] = None) -> torch.Tensor:
        """The pixels of a box, or of the whole image: uint8 [3, height, width], RGB. Raises UnreadableImage.

        Args:
            enough: pixels a side that will do: the box may come at a half, a quarter or an eighth of its size, as
                long as neither side has fewer. None: at its own size.
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
    """Numbered images with labels. Safe to share with worker processes."""

    place: str  # folder, URL or key of the recipe, as errors name it
    classes: Tuple[str, ...]  # names by label, as they are printed (recipe.errors.printable)
    labels: np.ndarray  # int64 [n], label of each image
    digest: str = ""  # of names and labels, in their order; empty where the recipe alone determines them
    notes: Tuple[str, ...] = ()  # lines for the user on files that lie beside the images and were left out

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def read(self, index: int) -> torch.Tensor:
        """Pixels of an image: uint8 [3, height, width], RGB. Raises UnreadableImage."""

    @abc.abstractmethod
    def name(self, index: int) -> str:
        """Path or number of an image, as logs and errors print it."""

    def open(self, index: int) -> Image:
        """An image with its size, not decoded where that can wait. Raises UnreadableImage."""
        return Pixels(self.read(index))

    def open_all(self, indices: Sequence[int]) -> List[Union[Image, UnreadableImage]]:
        """Several images, in the order of `indices`; in the place of one that cannot be opened, the error."""
        return [self._opened(index) for index in indices]

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The order in which an epoch visits the images: int64 [n], a permutation; a function of (seed, epoch)."""
        return permutation(seed, epoch, len(self))

    def _opened(self, index: int) -> Union[Image, UnreadableImage]:
        try:
            return self.open(index)
        except UnreadableImage as error:
            return error


class Names:
    """Names by number, held in one block of bytes.

    As strings, the 1.28 million paths of ImageNet would take twice as much, and each worker would come to own a copy,
    because to use a string is to write its reference count.
    """

    def __init__(self, blocks: Sequence[bytes], lengths: Sequence[np.ndarray]):
        """
        Args:
            blocks: names one after the other, without separators.
            lengths: integers [names], bytes of each name in a block.
        """
        self._block = b"".join(blocks)
        self._ends = np.cumsum(np.concatenate(lengths), dtype=np.uint64)

    def __getitem__(self, index: int) -> bytes:
        start = int(self._ends[index - 1]) if index else 0
        return self._block[start : int(self._ends[index])]


# By section class: opens the "train" or "validation" images of a recipe with so many classes. Raises DataError.
SOURCES: "Registry[Callable[[Data, int, str], Source]]" = Registry("a source of images")


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """An epoch's random order of `size` images: int64 [size], a permutation of range(size).

    Images are sorted by 32 random bits each, of which no two are the same, because `bits32` of one draw maps
    numbers one to one. So the order depends on no library's generator or sort, which may change between versions.
    """
    return np.argsort(bits32(key("order", seed, epoch), np.arange(size, dtype=np.int64)))

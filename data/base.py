"""Sources of images: their interface, and the registry of them."""

import abc
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from common.errors import DataError
from recipe.config import Data
from recipe.kinds import Registry
from recipe.randomness import bits32, key


class UnreadableImage(DataError):
    """An image that cannot be read or decoded; the message names the file and the reason."""


class Box(NamedTuple):
    """A rectangle of pixels of an upright image."""

    top: int
    left: int
    height: int
    width: int


class Image(abc.ABC):
    """One image, of which only the requested part is decoded. `height` and `width` are those of the upright image."""

    height: int
    width: int
    damage: str = ""  # names the file and its fault, once its pixels were read in spite of that

    @abc.abstractmethod
    def pixels(self, box: Optional[Box] = None, enough: Optional[int] = None) -> torch.Tensor:
        """Pixels of a box, or of the whole image: uint8 [3, height, width], RGB. Raises UnreadableImage.

        With `enough` the box may come at a half, a quarter or an eighth of its size, if no side gets fewer pixels.
        """


class Pixels(Image):
    """A decoded image, uint8 [3, height, width]."""

    def __init__(self, pixels: torch.Tensor):
        self._pixels = pixels
        self.height, self.width = pixels.shape[1:]

    def pixels(self, box: Optional[Box] = None, enough: Optional[int] = None) -> torch.Tensor:
        top, left, height, width = box or (0, 0, self.height, self.width)
        return self._pixels[:, top : top + height, left : left + width]


class Source(abc.ABC):
    """Numbered images with labels. Safe to share with worker processes."""

    place: str  # folder, URL or key of the recipe, as errors name it
    classes: Tuple[str, ...]  # printable names by label
    labels: np.ndarray  # int64 [n], label of each image
    digest: str = ""  # of names and labels, in their order; empty where the recipe alone determines them
    notes: Tuple[str, ...] = ()  # lines for the user on files that were left out

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
        """Several images, in the order of `indices`; the error in the place of one that cannot be opened."""
        return [self._opened(self.open, index) for index in indices]

    @staticmethod
    def _opened(open_one: Callable[..., Image], *arguments: object) -> Union[Image, UnreadableImage]:
        try:
            return open_one(*arguments)
        except UnreadableImage as error:
            return error

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Order in which an epoch visits the images: int64 [n], a permutation; a function of (seed, epoch)."""
        return permutation(seed, epoch, len(self))


class ClassNames(NamedTuple):
    """Names of the classes of a split, by label.

    place: of the split, as errors name it. sorted: whether the labels follow from the order of the names as bytes, as
    in class folders. If so, programs that sort otherwise number the same classes otherwise.
    """

    place: str
    names: Tuple[str, ...]
    sorted: bool


class Names:
    """Names by number in one block of bytes: strings take twice the memory, and workers would copy them page by page.

    blocks: names without separators. lengths: integers [names], bytes of each name in a block.
    """

    def __init__(self, blocks: Sequence[bytes], lengths: Sequence[np.ndarray]):
        self._block = b"".join(blocks)
        self._ends = np.cumsum(np.concatenate(lengths), dtype=np.uint64)

    def __getitem__(self, index: int) -> bytes:
        start = int(self._ends[index - 1]) if index else 0
        return self._block[start : int(self._ends[index])]


# By section class: opens the "train" or "validation" images of a recipe with so many classes. Raises DataError.
SOURCES: "Registry[Callable[[Data, int, str], Source]]" = Registry("a source of images")

# By section class: classes of the "train" or "validation" images without a look at the images, None where there are no
# such images. For sources of files, whose splits may have different classes. Raises DataError.
CLASS_NAMES: "Registry[Callable[[Data, str], Optional[ClassNames]]]" = Registry("names of the classes of images")


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """An epoch's random order of `size` images: int64 [size], a permutation of range(size).

    Images are sorted by 32 random bits each, which all differ (`bits32` of one draw is a bijection), so the order
    depends on no library's generator or sort.
    """
    return np.argsort(bits32(key("order", seed, epoch), np.arange(size, dtype=np.int64)))

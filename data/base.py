"""Sources of images: their interface, and the registry of them."""

import abc
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch

from common.errors import DataError
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
    """One image, of which only the requested part is decoded."""

    # Boxes are drawn by the size, before anything is decoded.
    height: int  # of the upright image
    width: int
    damage: str = ""  # names the file and its fault, once its pixels were read in spite of that

    @abc.abstractmethod
    def pixels(self, box: Optional[Box] = None, enough: Optional[int] = None) -> torch.Tensor:
        """Return the pixels of a box.

        Args:
            box: of the upright image; None for all of it.
            enough: pixels; the box may come at a half, a quarter or an eighth of its size, if no
                side gets fewer. None: at its own size.

        Returns:
            uint8 [3, height, width], RGB.

        Raises:
            UnreadableImage: the image cannot be decoded.
        """


class Pixels(Image):
    """A decoded image, uint8 [3, height, width]."""

    def __init__(self, pixels: torch.Tensor):
        self._pixels = pixels
        self.height, self.width = pixels.shape[1:]

    def pixels(self, box: Optional[Box] = None, enough: Optional[int] = None) -> torch.Tensor:
        """Return a view of a `box`, or of the whole image: see `Image.pixels`."""
        if box is None:
            return self._pixels
        top, left, height, width = box
        return self._pixels[:, top : top + height, left : left + width]


class Source(abc.ABC):
    """Numbered images with labels. Safe to share with worker processes."""

    place: str  # folder, URL or key of the recipe, as errors name it
    classes: Tuple[str, ...]  # printable names by label
    labels: np.ndarray  # int64 [n], label of each image
    # Of names and labels, in their order; empty where the recipe alone determines them.
    digest: str = ""
    notes: Tuple[str, ...] = ()  # lines for the user on files that were left out

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def read(self, index: int) -> torch.Tensor:
        """Return the pixels of image number `index`: uint8 [3, height, width], RGB.

        Raises:
            UnreadableImage: it cannot be read or decoded.
        """

    @abc.abstractmethod
    def name(self, index: int) -> str:
        """Return the path or number of image `index`, as logs and errors print it."""

    def open(self, index: int) -> Image:
        """Return image number `index` with its size, not decoded where that can wait.

        Raises:
            UnreadableImage: it cannot be read.
        """
        return Pixels(self.read(index))

    def open_all(self, indices: Sequence[int]) -> List[Union[Image, UnreadableImage]]:
        """Open several images.

        Args:
            indices: their numbers.

        Returns:
            The images, in the order of `indices`; in the place of one that cannot be opened, the
            error.
        """
        return [self._opened(self.open, index) for index in indices]

    @staticmethod
    def _opened(
        open_one: Callable[..., Image],
        *arguments: object,
    ) -> Union[Image, UnreadableImage]:
        """Return what `open_one` returns, or its error."""
        try:
            return open_one(*arguments)
        except UnreadableImage as error:
            return error

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the order in which an epoch visits the images, a function of the arguments.

        Args:
            seed: of the run.
            epoch: from 0.

        Returns:
            int64 [n], a permutation.
        """
        return permutation(seed, epoch, len(self))


class MemorySource(Source):
    """Images of one size, decoded and in memory.

    pixels: uint8 [n, 3, height, width], with any strides.
    """

    pixels: torch.Tensor

    def read(self, index: int) -> torch.Tensor:
        """Return image number `index`, a view: see `Source.read`."""
        return self.pixels[index]


class ClassNames(NamedTuple):
    """Names of the classes of a split, by label."""

    place: str  # of the split, as errors name it
    names: Tuple[str, ...]
    # Whether the labels follow from the order of the names as bytes, as in class folders. If so,
    # programs that sort otherwise number the same classes otherwise.
    sorted: bool


class Names:
    """Names by number in one block of bytes.

    Strings would take twice the memory, and workers would copy them page by page.
    """

    def __init__(self, blocks: Sequence[bytes], lengths: Sequence[np.ndarray]):
        """
        Args:
            blocks: names without separators.
            lengths: integers [names], bytes of each name in a block.
        """
        # Ends, not starts and lengths: one array is enough.
        self._block = b"".join(blocks)
        self._ends = np.cumsum(np.concatenate(lengths), dtype=np.uint64)

    def __getitem__(self, index: int) -> bytes:
        start = int(self._ends[index - 1]) if index else 0
        return self._block[start : int(self._ends[index])]


# By section class: opens the "train" or "validation" images of a recipe with so many classes.
# Raises DataError.
SOURCES: "Registry[Callable[[Any, int, str], Source]]" = Registry("a source of images")

# By section class: classes of the "train" or "validation" images without a look at the images, None
# where there are no such images. For sources of files, whose splits may have different classes.
# Raises DataError.
_ClassNamesOf = Callable[[Any, str], Optional[ClassNames]]
CLASS_NAMES: "Registry[_ClassNamesOf]" = Registry("names of the classes of images")


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return an epoch's random order of images.

    Images are sorted by 32 random bits each, which all differ (`bits32` of one draw is a
    bijection), so the order depends on no library's generator or sort.

    Args:
        seed: of the run.
        epoch: from 0.
        size: how many images there are.

    Returns:
        int64 [size], a permutation of range(size).
    """
    indices = np.arange(size, dtype=np.int64)
    return np.argsort(bits32(key("order", seed, epoch), indices))

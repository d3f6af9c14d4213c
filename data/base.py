"""What a source of images promises."""

import abc
from typing import Tuple

import numpy as np
import torch


class Source(abc.ABC):
    """Numbered images with labels. Safe to share with worker processes, which read from it at will.

    Attributes:
        classes: names of the classes, by label.
        labels: int64 [n], label of each image.
    """

    classes: Tuple[str, ...]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def read(self, index: int) -> torch.Tensor:
        """Pixels of an image: uint8 [3, height, width], RGB. Raises UnreadableImage."""

    @abc.abstractmethod
    def name(self, index: int) -> str:
        """What logs and errors call an image, such as its path."""

"""Requests to a reader, and the micro batches that an engine gets."""

from typing import List, NamedTuple, Optional, Tuple

import numpy as np
import torch


class Request(NamedTuple):
    """A micro batch to be read."""

    step: int
    epoch: int
    number: int  # within the step, counted over all replicas
    image_size: int  # pixels a side
    indices: List[int]  # of the images in their source
    showing_numbers: Optional[List[int]] = None  # see `showings`; None: once an epoch

    def showings(self) -> List[int]:
        """Return the number that names the draws of each image: see data/epochs.Shown."""
        if self.showing_numbers is None:
            return [self.epoch] * len(self.indices)
        return self.showing_numbers


class MicroBatch(NamedTuple):
    """Images of one forward pass. Rows from `valid` on are padding: black, label 0, index -1.

    `valid` can be 0: with data.bad_images=skip, when none of the images can be read.
    """

    images: torch.Tensor  # uint8 [micro, 3, size, size]; channels may be last in memory
    labels: torch.Tensor  # int64 [micro]
    indices: torch.Tensor  # int64 [micro], number of each image in its source
    valid: int
    number: int  # within the step, counted over all replicas
    step: int
    unreadable: Tuple[str, ...]  # why images were left out, one message each
    damaged: Tuple[str, ...] = ()  # about images that were read in spite of a fault, one each


class ReadBatch(NamedTuple):
    """A micro batch as a reader gives it: labels and indices are NumPy arrays.

    Every tensor that leaves a worker costs the training process 0.2 to 0.3 ms.
    """

    images: torch.Tensor
    labels: np.ndarray  # int64 [micro]
    indices: np.ndarray  # int64 [micro]
    valid: int
    number: int
    step: int
    unreadable: Tuple[str, ...]
    damaged: Tuple[str, ...] = ()

    def with_tensors(self) -> MicroBatch:
        """Return the micro batch for an engine, which shares the memory of this one."""
        return MicroBatch(
            images=self.images,
            labels=torch.from_numpy(self.labels),
            indices=torch.from_numpy(self.indices),
            valid=self.valid,
            number=self.number,
            step=self.step,
            unreadable=self.unreadable,
            damaged=self.damaged,
        )

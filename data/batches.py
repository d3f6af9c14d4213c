"""What is asked of a reader, what it answers, and what an engine is given."""

from typing import List, NamedTuple, Tuple

import torch


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


class Request(NamedTuple):
    """What a reader is asked for: one micro batch."""

    step: int
    epoch: int
    number: int
    image_size: int
    indices: List[int]


class Loaded(NamedTuple):
    """What a reader answers: a `MicroBatch` in the making.

    Each tensor that leaves a worker costs the training process 0.2 to 0.3 ms, lists of numbers next to
    nothing; so only the images are a tensor here.
    """

    images: torch.Tensor  # as in MicroBatch
    labels: List[int]  # [valid]
    indices: List[int]  # [valid]
    number: int
    step: int
    unreadable: Tuple[str, ...]

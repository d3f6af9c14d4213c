"""The order of a run: which image each row of a step shows, and which draws it gets."""

from typing import NamedTuple, Optional, Tuple

import numpy as np

from data import balance
from data.base import Source
from recipe.batch import steps_per_epoch
from recipe.config import Data


class Shown(NamedTuple):
    """Image of a row, and the number of its showing.

    image: its number in the source.
    showing: number of times that the image could have been shown before in the run, which names its
        draws: the epoch, or more where an epoch shows images several times.
    """

    image: int
    showing: int


class Epoch:
    """An epoch's images in their order, a function of the run's seed and of the source.

    number: of the epoch, from 0.
    """

    def __init__(self, source: Source, data: Data, seed: int, number: int, *, rows: int):
        """
        Args:
            source: of the images.
            data: whether classes are balanced, and how often images are repeated.
            seed: of the run.
            number: of the epoch, from 0.
            rows: of the steps of an epoch, repetitions included.
        """
        self.number = number
        self._repeats = data.repeats
        # int64 [n], numbers of images; and for each how often it came before in this order.
        self._images: np.ndarray
        self._visits: Optional[np.ndarray] = None
        self._most_visits = 1
        if data.balance == "sampling":
            # What is left over at the end of an order is in no step, and would be missing in a
            # class.
            sampled = balance.sampled(source.labels, places_of(rows, data.repeats), seed, number)
            self._images = sampled.images
            self._visits = sampled.visits
            self._most_visits = sampled.most_visits
        else:
            self._images = source.order(seed, number)

    def shown(self, first: int, size: int, row: int) -> Shown:
        """Return what a row of a step shows.

        Args:
            first: images of the epoch before this step.
            size: images of a step.
            row: within the step.
        """
        place, copy = repeated(first, size, self._repeats, row)
        visit = 0 if self._visits is None else int(self._visits[place])
        # The same image never gets the same number twice, so that each showing has its own draws.
        showing = (self.number * self._most_visits + visit) * self._repeats + copy
        return Shown(int(self._images[place]), showing)


class RunOrder:
    """The order of the images of a run: each row of each step shows one.

    Each step takes the next global batch of its epoch's order. Images left over at the end of an
    order are in no step of the epoch.

    source: of the images.
    data: section of the recipe, by which epochs are ordered.
    seed: of the run.
    global_batch: images per step.
    """

    def __init__(self, source: Source, data: Data, seed: int, global_batch: int):
        """
        Args:
            source: at least one global batch of training images.
            data: whether classes are balanced, and how often images are repeated.
            seed: of the run.
            global_batch: images per step.
        """
        # recipe/batch.py refuses fewer images for a recipe, with the remedy.
        assert len(source) >= global_batch, (len(source), global_batch)
        self.source = source
        self.data = data
        self.seed = seed
        self.global_batch = global_batch
        self._steps_per_epoch = steps_per_epoch(len(source), global_batch)
        self._newest: Optional[Epoch] = None

    def epoch(self, step: int) -> int:
        """Return the epoch of a `step`; both are counted from 0."""
        return step // self._steps_per_epoch

    def shown(self, step: int, row: int) -> Shown:
        """Return what a row of a step shows.

        Args:
            step: of the run, from 0.
            row: within the step.
        """
        number, within = divmod(step, self._steps_per_epoch)
        epoch = self._newest
        # An order costs a sort of all images, and neighbours are mostly of one epoch. Threads may
        # ask at the same time: each goes on with the epoch that it found or made.
        if epoch is None or epoch.number != number:
            rows = self._steps_per_epoch * self.global_batch
            epoch = Epoch(self.source, self.data, self.seed, number, rows=rows)
            self._newest = epoch
        return epoch.shown(within * self.global_batch, self.global_batch, row)


def places_of(rows: int, repeats: int) -> int:
    """Return how many images of its order an epoch shows.

    Args:
        rows: of its steps.
        repeats: times that each image is shown.
    """
    return -(-rows // repeats)


def repeated(first: int, size: int, repeats: int, row: int) -> Tuple[int, int]:
    """Return the image of a row where each image is shown several times in a row of steps.

    In the order of an epoch each image is repeated. A step takes the next `size` of these, and puts
    the first copies before the second ones and so on: copies of an image are as far apart as a step
    allows, in other micro batches and mostly in other replicas. Of n images an epoch shows the
    first n / repeats of its order, so it has as many steps as without repetitions.

    Source: Hoffer et al., 1901.09335 (batch augmentation), with the length of an epoch as in
    Touvron et al., 2012.12877 (DeiT).

    Args:
        first: repetitions in the epoch before this step.
        size: images of a step.
        repeats: copies of each image.
        row: within the step.

    Returns:
        The image's place in the order of the epoch, and the number of the copy, from 0.
    """
    for copy in range(repeats):
        # Repetition q is copy q % repeats of place q // repeats.
        start = -(-(first - copy) // repeats)
        stop = -(-(first + size - copy) // repeats)
        if row < stop - start:
            return start + row, copy
        row -= stop - start
    raise AssertionError(f"row {row} is beyond a step of {size}")

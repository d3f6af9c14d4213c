"""Classes with few images and classes with many: balanced by sampling, or by weights of the loss."""

from typing import NamedTuple

import numpy as np

from recipe.randomness import bits32, key


class Sampled(NamedTuple):
    """An epoch in which all classes come equally often.

    images: int64 [places], their numbers, in the order of the epoch.
    visits: int64 [places], how often the image came before in this order.
    most_visits: bound on how often an image comes, the same in every epoch.
    """

    images: np.ndarray
    visits: np.ndarray
    most_visits: int


def sampled(labels: np.ndarray, places: int, seed: int, epoch: int) -> Sampled:
    """Choose as many images as an epoch has places, equally many of each class, and shuffle them.

    A class with fewer images than its part shows all of them before it shows one again; of a class
    with more a random part is shown, another one in each epoch.

    Args:
        labels: int64 [n], of the images.
        places: that are shown; all of them, or the classes would not be equal.
        seed: of the run.
        epoch: from 0.

    Returns:
        The order, a function of the arguments alone.
    """
    counts = np.bincount(labels)
    parts = parts_of(counts, places)
    visits_of_class = -(-parts // np.maximum(counts, 1))

    # Each image as often as images of its class may come. Parts are full before another round, so
    # these are no more than the images and the places.
    numbers = np.arange(len(labels), dtype=np.int64)
    most = visits_of_class[labels]
    candidates = np.repeat(numbers, most)
    visits = _ranks(most)

    # By class, then by visit, then at random: the first of each class are its part.
    draws = bits32(key("balance", seed, epoch), np.arange(len(candidates), dtype=np.int64))
    by_class = np.lexsort((draws, visits, labels[candidates]))
    candidates_of_class = counts * visits_of_class
    is_chosen = _ranks(candidates_of_class) < np.repeat(parts, candidates_of_class)

    # Shuffled, as the chosen ones lie class by class.
    numbers_of_places = np.arange(places, dtype=np.int64)
    shuffled = np.argsort(bits32(key("balanced order", seed, epoch), numbers_of_places))
    chosen = by_class[is_chosen][shuffled]
    return Sampled(candidates[chosen], visits[chosen], int(visits_of_class.max()))


def _ranks(sizes: np.ndarray) -> np.ndarray:
    """Number the members of groups that lie one behind the other: 0 1 2, 0 1 for sizes 3 and 2."""
    starts = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(starts, sizes)


def parts_of(counts: np.ndarray, places: int) -> np.ndarray:
    """Divide the places of an epoch into equal parts of the classes.

    Args:
        counts: int64 [classes], images of each.
        places: to be divided.

    Returns:
        int64 [classes], 0 for classes without images; the others differ by one at most, and add up
        to `places`.
    """
    present = np.flatnonzero(counts)
    whole, rest = divmod(places, len(present))
    parts = np.zeros_like(counts)
    parts[present] = whole
    # What is left over goes to the classes that need fewest repetitions for it.
    most_images = present[np.argsort(-counts[present], kind="stable")]
    parts[most_images[:rest]] += 1
    return parts


def class_weights(counts: np.ndarray) -> np.ndarray:
    """Return the weights of classes in the loss by which all classes count equally.

    Source: King and Zeng (2001), "Logistic Regression in Rare Events Data", and `class_weight=
    "balanced"` of scikit-learn: all images / (classes x images of the class).

    Args:
        counts: int64 [classes], images of each.

    Returns:
        float64 [classes], 0 for classes without images. Their mean over the images is 1, so that
        learning rates keep their meaning.
    """
    present = counts > 0
    equal_part = counts.sum() / present.sum()
    return np.where(present, equal_part / np.maximum(counts, 1), 0.0)

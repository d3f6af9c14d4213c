"""The images of a run: opened where they enter, and compared between these ranks."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from common.errors import DataError
from data.balance import class_weights
from data.base import Source
from data.sources import open_source
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.config import Recipe

_SPLITS = ("train", "validation")


class _Facts(NamedTuple):
    """Facts about images on which all ranks where they enter must agree."""

    training_images: int
    validation_images: int
    classes: List[str]
    images_of_class: List[int]
    digest: str


class Images(NamedTuple):
    """Sources, None on ranks where no images enter, and what is in them.

    classes: their names.
    images_of_class: training images of each.
    digest: of both sources, joined by a hyphen.
    """

    train: Optional[Source]
    validation: Optional[Source]
    training_images: int
    validation_images: int
    classes: Sequence[str]
    images_of_class: Sequence[int]
    digest: str

    @property
    def class_weights(self) -> List[float]:
        """Weights of the classes in a loss to which all of them contribute equally."""
        weights: List[float] = class_weights(np.array(self.images_of_class)).tolist()
        return weights

    @property
    def notes(self) -> Tuple[str, ...]:
        """Lines for the user about the sources."""
        notes: List[str] = []
        for source in (self.train, self.validation):
            if source is not None:
                notes += source.notes
        # Once each: both may be of one folder, from which the same was left out.
        return tuple(dict.fromkeys(notes))


def open_sources(recipe: Recipe, topology: Topology) -> List[Source]:
    """Open training and validation images of a `recipe` where they enter, elsewhere none.

    Args:
        recipe: of the run.
        topology: of this process.

    Raises:
        UserError: images cannot be opened.
    """
    splits = _SPLITS if topology.is_first else ()
    return [open_source(recipe.data, recipe.model.classes, split) for split in splits]


def agreed(sources: Sequence[Source], processes: Processes) -> Images:
    """Check that ranks have the same images, and tell all of them what there is. All ranks call.

    Args:
        sources: training and validation images, where they enter; elsewhere none.
        processes: of the run.

    Raises:
        DataError: a rank has other images than the first; on all ranks, the main one says why.
    """
    # Ranks without images send nothing, and get the facts of the first, which always has images.
    facts = None
    train: Optional[Source] = None
    validation: Optional[Source] = None
    if sources:
        # Lengths and names say more to the user than a digest, which finds all differences.
        train, validation = sources
        digest = "-".join(source.digest for source in sources)
        images_of_class = np.bincount(train.labels, minlength=len(train.classes))
        facts = _Facts(
            training_images=len(train),
            validation_images=len(validation),
            classes=list(train.classes),
            images_of_class=images_of_class.tolist(),
            digest=digest,
        )
    by_rank = processes.gather(facts)
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        if other is not None and other != first:
            text = _difference(rank, other, first)
            raise DataError(text if processes.topology.is_main else "")
    return Images(
        train,
        validation,
        training_images=first.training_images,
        validation_images=first.validation_images,
        classes=first.classes,
        images_of_class=first.images_of_class,
        digest=first.digest,
    )


def _difference(rank: int, other: _Facts, first: _Facts) -> str:
    """Return in which facts a rank differs from the first."""
    return (
        f"rank {rank} finds {other.training_images} training and {other.validation_images} "
        f"validation images of {len(other.classes)} classes, rank 0 {first.training_images} and "
        f"{first.validation_images} of {len(first.classes)} (or others of the same number); give "
        "all hosts the same data.root"
    )

"""Which images of a folder or list validate, where no others do: a function of each image's name.

Imports no torch, so that plans count as runs read.
"""

from __future__ import annotations

import hashlib
from typing import List, Sequence

_RANGE = 2**64  # of the hash


def of_split(names: Sequence[bytes], share: float, split: str) -> List[bool]:
    """Return which images of a class belong to a split.

    An image validates if a hash of its name, read as a fraction, is below the share. So the choice
    depends on no other image, seed or machine, and a class of n images has about n * share of them.
    Only where all images of a class would validate, the one with the largest hash stays to train.

    Args:
        names: of all images of one class: paths relative to the folder or in the list, with `/`.
        share: of the images that validate, 0 <= share < 1; 0 chooses all of them for every split,
            which then has images of its own.
        split: "train" or "validation".

    Returns:
        One truth value for each name.
    """
    if not share or not names:
        return [True] * len(names)
    hashes = [_hash(name) for name in names]
    # As an integer: a float could not tell all hashes apart.
    bound = int(share * _RANGE)
    validates = [value < bound for value in hashes]
    if all(validates):
        largest = max(hashes)
        # A list may name an image twice, which must not be in both splits.
        validates = [value != largest for value in hashes]
    return validates if split == "validation" else [not value for value in validates]


def no_images(place: str, share: float) -> str:
    """Return the fault of a `place` none of whose images falls into the `share`, and the remedy."""
    fault = f"none of its images falls into the share {share:g} that validates"
    return f"{place}: {fault}; raise data.validation_share, or add images"


def _hash(name: bytes) -> int:
    """Return the first 64 bits of the SHA-256 of a name."""
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big")

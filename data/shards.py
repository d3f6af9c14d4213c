"""Images in tar shards, read by offset from this machine or over a network."""

import functools
import hashlib
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import List, Optional, Sequence, Union

import numpy as np

from common.text import printable
from data.base import (
    CLASS_NAMES,
    SOURCES,
    ClassNames,
    Image,
    Names,
    Source,
    UnreadableImage,
    permutation,
)
from data.decode import MAX_MEMORY
from data.encoded import EncodedImage, EncodedSource
from data.local import Folder, LocalFolder, MissingFile, Range
from data.shard_index import Index, Manifest, encode_manifest, read_index, read_manifest
from recipe.images import Shards, split_folder, split_place
from recipe.randomness import bits32, key


class ShardsSource(EncodedSource):
    """Tar shards in the WebDataset convention, with what `tools.shards` makes: indexes, manifest.

    Images are numbered in the order of the manifest, and in a shard as they lie in it. Their bytes
    are compared with the checksum of the index.
    """

    def __init__(self, place: str, window: int):
        """
        Args:
            place: a folder, or a URL that fsspec knows.
            window: images among which `order` shuffles beyond the order of shards; 1 leaves shards
                as they are.

        Raises:
            DataError: the manifest or an index is missing or damaged, or does not fit a shard.
        """
        self.place = place
        self._folder = open_folder(place)
        self._window = window
        manifest = read_manifest(self._folder)
        self.classes = manifest.classes
        # How the classes were numbered before is no part of the images.
        images = encode_manifest(manifest._replace(sorted=None))
        self.digest = hashlib.sha256(images).hexdigest()
        self._shards = tuple(shard.name for shard in manifest.shards)
        # All in memory: an image takes some tens of bytes, and is then read by a single request.
        indexes = _read_indexes(self._folder, manifest)
        counts = [len(index.labels) for index in indexes]
        self._starts = np.cumsum([0, *counts])  # number of each shard's first image, then all
        # One array over all shards: workers that are forked share it.
        labels = np.concatenate([index.labels for index in indexes])
        self.labels = labels.astype(np.int64)
        self._offsets = np.concatenate([index.offsets for index in indexes])
        self._lengths = np.concatenate([index.lengths for index in indexes])
        self._crc32 = np.concatenate([index.crc32 for index in indexes])
        self._names = Names(
            [index.names for index in indexes],
            [index.name_lengths for index in indexes],
        )

    def name(self, index: int) -> str:
        """Return the path of the shard of image `index`, and the image's name in it."""
        shard = self._folder.path(self._shard(index))
        return printable(f"{shard}/{os.fsdecode(self._names[index])}")

    def encoded(self, index: int) -> bytes:
        """Read the file of image number `index`: see `EncodedSource.encoded`."""
        (answer,) = self._answers([index])
        return self._checked(index, answer)

    def open_all(self, indices: Sequence[int]) -> List[Union[Image, UnreadableImage]]:
        """Open the images of `indices` by one request to the folder: see `Source.open_all`."""
        # In the order of their places, so that a disk reads on and neighbours are requested
        # together.
        wanted = sorted(set(indices))
        answers = self._answers(wanted)
        opened = {}
        for index, answer in zip(wanted, answers):
            opened[index] = self._opened(self._image, index, answer)
        return [opened[index] for index in indices]

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Put shards in random order, then shuffle images with those nearby.

        So a worker reads from few shards at a time. An image i places behind the first sorts at
        i + window x a random fraction; ties stay in their order.

        Args:
            seed: of the run.
            epoch: from 0.

        Returns:
            int64 [images], a permutation.
        """
        size = len(self)
        if self._window >= size:
            return permutation(seed, epoch, size)
        # Shards in random order, the images of each in theirs.
        counts = np.diff(self._starts)
        in_manifest = np.arange(len(counts), dtype=np.int64)
        shards = np.argsort(bits32(key("order of shards", seed, epoch), in_manifest))
        counts = counts[shards]
        # Where the first image of each shard comes in this order.
        first_places = np.cumsum(counts) - counts
        places = np.arange(size, dtype=np.int64)
        moves = self._starts[shards] - first_places
        images = places + np.repeat(moves, counts)
        # Places in units of 2**-32, so that a random fraction is an integer of 32 bits.
        fractions = bits32(key("order in window", seed, epoch), places)
        moved = (places << 32) + fractions * self._window
        return images[np.argsort(moved, kind="stable")]

    def _answers(self, indices: Sequence[int]) -> List[Union[bytes, str]]:
        """Read images by one request; in the place of one that cannot be read is the reason."""
        # What is too long for any image is not requested: memory for all of it would be taken.
        wanted = [index for index in indices if self._lengths[index] <= MAX_MEMORY]
        answers = self._folder.ranges([self._range(index) for index in wanted])
        read = dict(zip(wanted, answers))
        return [read.get(index, self._too_long(index)) for index in indices]

    def _too_long(self, index: int) -> str:
        """Return why an image that is longer than any may be is not read."""
        return f"{self._lengths[index]:,} bytes, above the limit of {MAX_MEMORY:,}"

    def _shard(self, index: int) -> str:
        """Return the name of the shard of an image."""
        # "right": an image that is the first of a shard belongs to it, not to the one before.
        behind = np.searchsorted(self._starts, index, side="right")
        return self._shards[int(behind) - 1]

    def _range(self, index: int) -> Range:
        """Return where the bytes of an image lie."""
        offset = int(self._offsets[index])
        length = int(self._lengths[index])
        return Range(self._shard(index), offset, length)

    def _image(self, index: int, answer: Union[bytes, str]) -> EncodedImage:
        """Return the image that a folder answered. Raises UnreadableImage."""
        return EncodedImage(self._checked(index, answer), self.name(index))

    def _checked(self, index: int, answer: Union[bytes, str]) -> bytes:
        """Return the bytes that a folder answered. Raises UnreadableImage."""
        if isinstance(answer, str):
            raise UnreadableImage(f"{self.name(index)}: {answer}")
        # In another shard of this name something else lies at the place, which may even decode.
        if zlib.crc32(answer) != self._crc32[index]:
            fault = "not the bytes that the index has the checksum of"
            raise UnreadableImage(f"{self.name(index)}: {fault}")
        return answer


def _read_indexes(folder: Folder, manifest: Manifest) -> List[Index]:
    """Read the indexes of all shards, several at a time from a server. Raises DataError."""
    read = functools.partial(read_index, folder, classes=len(manifest.classes))
    with ThreadPoolExecutor(folder.at_once) as threads:
        return list(threads.map(read, manifest.shards))


@SOURCES.implements(Shards)
def _open(data: Shards, classes: int, split: str) -> Source:
    """Open the shards of a split: manifest and indexes are read, images are not."""
    return ShardsSource(split_folder(data, split), data.shuffle_window)


@CLASS_NAMES.implements(Shards)
def _class_names(data: Shards, split: str) -> Optional[ClassNames]:
    """Return the classes that the manifest names; None where there is no manifest."""
    place = split_place(data, split)
    folder = open_folder(place)
    try:
        manifest = read_manifest(folder)
    except MissingFile:
        return None
    classes = manifest.classes
    are_sorted = manifest.sorted
    # Labels of tars that others wrote are numbers that they chose. An older `pack` did not store
    # whether its source numbered the classes by name.
    if are_sorted is None:
        index = read_index(folder, manifest.shards[0], len(classes))
        in_order = sorted(classes, key=os.fsencode)
        are_sorted = index.plan != "" and list(classes) == in_order
    return ClassNames(place, classes, sorted=are_sorted)


def open_folder(place: str) -> Folder:
    """Return the folder or URL of shards at `place`.

    Raises:
        DataError: a URL that cannot be used.
    """
    if "://" not in place:
        return LocalFolder(place)
    from data.remote import RemoteFolder

    return RemoteFolder(place)

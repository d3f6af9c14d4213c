"""Images in tar shards, read by offset from this machine or over a network."""

import functools
import hashlib
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import List, Optional, Sequence, Union

import numpy as np

from common.text import printable
from data.base import CLASS_NAMES, SOURCES, ClassNames, Image, Names, Source, UnreadableImage, permutation
from data.encoded import EncodedImage, EncodedSource
from data.local import Folder, LocalFolder, MissingFile, Range
from data.shard_index import encode_manifest, read_index, read_manifest
from recipe.images import Shards, split_folder, split_place
from recipe.randomness import bits32, key

_AT_ONCE = 32  # indexes that are requested from a server


class ShardsSource(EncodedSource):
    """Tar shards in the WebDataset convention, with the indexes and the manifest that `tools.shards` makes.

    Images are numbered in the order of the manifest, and in a shard as they lie in it. Their bytes are compared with
    the checksum of the index. `place` is a folder, or a URL that fsspec knows; `window`: images among which `order`
    shuffles beyond the order of shards; 1 leaves shards as they are.
    """

    def __init__(self, place: str, window: int):
        """Raises DataError: the manifest or an index is missing or damaged, or does not fit a shard."""
        self.place, self._folder, self._window = place, open_folder(place), window
        manifest = read_manifest(self._folder)
        self.classes = manifest.classes
        self.digest = hashlib.sha256(encode_manifest(manifest)).hexdigest()
        self._shards = tuple(shard.name for shard in manifest.shards)
        read = functools.partial(read_index, self._folder, classes=len(manifest.classes))
        with ThreadPoolExecutor(1 if isinstance(self._folder, LocalFolder) else _AT_ONCE) as threads:
            indexes = list(threads.map(read, manifest.shards))
        self._starts = np.cumsum([0, *(len(index.labels) for index in indexes)])
        self.labels = np.concatenate([index.labels for index in indexes]).astype(np.int64)
        self._offsets = np.concatenate([index.offsets for index in indexes])
        self._lengths = np.concatenate([index.lengths for index in indexes])
        self._crc32 = np.concatenate([index.crc32 for index in indexes])
        self._names = Names([index.names for index in indexes], [index.name_lengths for index in indexes])

    def name(self, index: int) -> str:
        return printable(f"{self._folder.path(self._shard(index))}/{os.fsdecode(self._names[index])}")

    def encoded(self, index: int) -> bytes:
        (answer,) = self._folder.ranges([self._range(index)])
        return self._checked(index, answer)

    def open_all(self, indices: Sequence[int]) -> List[Union[Image, UnreadableImage]]:
        # In the order of their places, so that a disk reads on and neighbours are requested together.
        wanted = sorted(set(indices))
        answers = self._folder.ranges([self._range(index) for index in wanted])
        opened = {index: self._opened(self._image, index, answer) for index, answer in zip(wanted, answers)}
        return [opened[index] for index in indices]

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Shards in random order, then images among those nearby, so that a worker reads from few shards at a time.

        An image i places behind the first sorts at i + window x a random fraction; ties stay in their order.
        """
        size = len(self)
        if self._window >= size:
            return permutation(seed, epoch, size)
        counts = np.diff(self._starts)
        shards = np.argsort(bits32(key("order of shards", seed, epoch), np.arange(len(counts), dtype=np.int64)))
        ends = np.cumsum(counts[shards])
        places = np.arange(size, dtype=np.int64)
        images = places + np.repeat(self._starts[shards] - (ends - counts[shards]), counts[shards])
        moved = (places << 32) + bits32(key("order in window", seed, epoch), places) * self._window
        return images[np.argsort(moved, kind="stable")]

    def _shard(self, index: int) -> str:
        return self._shards[int(np.searchsorted(self._starts, index, side="right")) - 1]

    def _range(self, index: int) -> Range:
        return Range(self._shard(index), int(self._offsets[index]), int(self._lengths[index]))

    def _image(self, index: int, answer: Union[bytes, str]) -> EncodedImage:
        return EncodedImage(self._checked(index, answer), self.name(index))

    def _checked(self, index: int, answer: Union[bytes, str]) -> bytes:
        """The bytes that a folder answered. Raises UnreadableImage."""
        if isinstance(answer, str):
            raise UnreadableImage(f"{self.name(index)}: {answer}")
        if zlib.crc32(answer) != self._crc32[index]:
            raise UnreadableImage(f"{self.name(index)}: not the bytes that the index has the checksum of")
        return answer


@SOURCES.implements(Shards)
def _open(data: Shards, classes: int, split: str) -> Source:
    return ShardsSource(split_folder(data, split), data.shuffle_window)


@CLASS_NAMES.implements(Shards)
def _class_names(data: Shards, split: str) -> Optional[ClassNames]:
    place = split_place(data, split)
    folder = open_folder(place)
    try:
        manifest = read_manifest(folder)
    except MissingFile:
        return None
    index = read_index(folder, manifest.shards[0], len(manifest.classes))
    # Labels of tars that others wrote are numbers that they chose; `pack` numbers class folders in their order.
    return ClassNames(place, manifest.classes, sorted=index.plan != "")


def open_folder(place: str) -> Folder:
    """The folder or URL of shards. Raises DataError."""
    if "://" not in place:
        return LocalFolder(place)
    from data.remote import RemoteFolder

    return RemoteFolder(place)

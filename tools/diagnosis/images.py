"""Images that one core reads and decodes in a second, the share of reading in that, and copies.

Copies are those of micro batches to the device.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set

import torch

from common.errors import DataError
from data.augmentation import Colours
from data.base import Source, UnreadableImage
from data.batches import Request
from data.encoded import EncodedSource
from data.loader import NotLeftOut
from data.reader import Reader
from data.transforms import Training
from engines.devices import synchronize
from recipe.config import Recipe
from recipe.settled import image_size
from tools.diagnosis.splitting import Spread, spread

_REPETITION = 0.1  # seconds of images in each
_FEWEST = 3  # repetitions of a measurement, beside the first
_MOST = 40
_TRIED = 10_000  # images whose files are to be dropped from the cache, at most
# Share of a file's pages in memory that is as good as none: of a shard some may be on their way.
_LEFT = 0.01


class Reading(NamedTuple):
    """Rates of one core that reads images.

    per_core: images a second by the torch reader in the process itself, from the page cache.
    tried: how many images were read.
    unreadable: those of them that training leaves out.
    bytes: of a file on average; None for images that are no files.
    cached_bytes_per_second: files read again, out of the page cache of local disks.
    disk_bytes_per_second: with the page cache empty; None where it cannot be emptied.
    """

    per_core: Spread
    tried: int
    unreadable: int
    bytes: Optional[float] = None
    cached_bytes_per_second: Optional[Spread] = None
    disk_bytes_per_second: Optional[Spread] = None

    @property
    def share_of_bytes(self) -> Optional[float]:
        """Return the share of an image's time in which its bytes are read; None without files.

        They are read from the disk where that was measured.
        """
        if self.bytes is None:
            return None
        read_again = self.cached_bytes_per_second
        # Both come from the same measurement of files.
        assert read_again is not None
        first_read = self.disk_bytes_per_second or read_again
        # The reader has read out of the cache, so that much of its time is not decoding.
        from_cache = self.bytes / read_again.median
        decoding = 1 / self.per_core.median - from_cache
        reading = self.bytes / first_read.median
        return reading / (decoding + reading)


class _FileReading(NamedTuple):
    """Reading files: bytes a second, and bytes of a file on average."""

    rate: Spread
    bytes: float


def read(
    recipe: Recipe,
    source: Source,
    replica: int,
    replicas: int,
    seconds: float,
) -> Reading:
    """Read, decode and augment images in the order of the run.

    Args:
        recipe: of the run.
        source: of its training images.
        replica: reads its own part of them.
        replicas: how many there are.
        seconds: for measuring.

    Raises:
        UnreadableImage: under data.bad_images=error.
        DataError: no image can be read.
    """
    order = source.order(recipe.run.seed, 0)[replica::replicas].tolist()
    # Rates are those of one core.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if not isinstance(source, EncodedSource):
            return _read_by_reader(recipe, source, order, seconds)
        # The disk comes first: what follows fills the page cache.
        third = seconds / 3
        disk = _read_files(source, _dropped(source, order), third)
        cached = _read_files(source, _cached(source, order), third)
        reading = _read_by_reader(recipe, source, order, third)
    finally:
        torch.set_num_threads(threads)
    if cached is None:
        # All images that were read are empty, which the reader may call readable.
        fault = f"{source.name(order[0])}: empty, as all images after it"
        raise DataError(f"{fault}; mend them, or correct data.root")
    return reading._replace(
        bytes=cached.bytes,
        cached_bytes_per_second=cached.rate,
        disk_bytes_per_second=None if disk is None else disk.rate,
    )


def to_device(micro: int, size: int, device: torch.device, seconds: float) -> Spread:
    """Measure the bytes a second of micro batches that are copied to the device.

    A GPU gets them from page-locked memory; on a CPU they are copied within memory.

    Args:
        micro: images of a micro batch.
        size: pixels a side.
        device: that gets them.
        seconds: for measuring.
    """
    images = torch.randint(0, 256, (micro, 3, size, size), dtype=torch.uint8)
    if device.type == "cuda":
        images = images.pin_memory()
    there = torch.empty_like(images, device=device)

    def copy(number: int) -> int:
        """Copy the micro batch, whatever its `number`; return its bytes."""
        there.copy_(images, non_blocking=True)
        synchronize(device)
        return images.numel()

    # The first copy allocates memory.
    copy(0)
    return spread(_rates(copy, itertools.repeat(0), seconds, _REPETITION / 10))


def _read_by_reader(
    recipe: Recipe,
    source: Source,
    order: Sequence[int],
    seconds: float,
) -> Reading:
    """Measure the images a second of the reader that trains. Raises UnreadableImage, DataError.

    Args:
        recipe: of the run.
        source: of its training images.
        order: numbers of the images, in which they are read again and again.
        seconds: for measuring.
    """
    size = image_size(recipe.model)
    colours = Colours(recipe.model.mean, recipe.model.std)
    reader = Reader(source, 1, Training(recipe.data, recipe.run.seed, colours))
    tried: Set[int] = set()
    unreadable: Dict[int, str] = {}  # the reason by index

    def load(index: int) -> int:
        """Load the image at `index`; return 1 if it can be read, else 0."""
        tried.add(index)
        request = Request(step=0, epoch=0, number=0, image_size=size, indices=[index])
        # One image at a time: the time of a micro batch in which some fail means nothing.
        reasons = reader[request].unreadable
        if not reasons:
            return 1
        if recipe.data.bad_images == "error":
            raise NotLeftOut(reasons[0])
        unreadable[index] = reasons[0]
        return 0

    rates = _rates(load, itertools.cycle(order), seconds, _REPETITION)
    if not rates:
        reason = next(iter(unreadable.values()))
        none = f"of {len(tried)} images that were tried none can be read"
        raise DataError(f"{reason}; {none}; mend them, or correct data.root")
    # The first repetition also loads decoders.
    steady = rates[1:] or rates
    return Reading(spread(steady), len(tried), len(unreadable))


def _read_files(
    source: EncodedSource,
    indices: Iterable[int],
    seconds: float,
) -> Optional[_FileReading]:
    """Measure the reading of files.

    Args:
        source: of the files.
        indices: of images whose files are read.
        seconds: for measuring.

    Returns:
        The rate; None if there are too few files that hold anything.
    """
    lengths = []

    def fetch(index: int) -> int:
        """Read the file at `index`; return its bytes."""
        length = _read_bytes(source, index)
        lengths.append(length)
        return length

    rates = _rates(fetch, indices, seconds, _REPETITION / 4)
    if not rates:
        return None
    # Files that are empty or cannot be read have no length.
    counted = [length for length in lengths if length]
    return _FileReading(spread(rates), sum(counted) / len(counted))


def _rates(
    work: Callable[[int], int],
    arguments: Iterable[int],
    seconds: float,
    repetition: float,
) -> List[float]:
    """Return the amounts a second of each repetition, or nothing of too few repetitions.

    Args:
        work: returns an amount; calls that return 0 do not count, nor does their time.
        arguments: of the calls, one after the other.
        seconds: for measuring.
        repetition: seconds of calls in each.
    """
    rates = []
    repetitions = 0
    amount = 0
    spent = 0.0  # seconds of the calls that count
    passed = 0.0  # seconds of all calls
    begin = time.perf_counter()
    for argument in arguments:
        start = time.perf_counter()
        done = work(argument)
        took = time.perf_counter() - start
        passed += took
        if done:
            amount += done
            spent += took
        # Clocks and caches blur what takes a few milliseconds.
        if passed < repetition:
            continue
        # A repetition of which no call counts ends without a rate.
        if amount:
            rates.append(amount / spent)
        amount = 0
        spent = 0.0
        passed = 0.0
        repetitions += 1
        is_late = time.perf_counter() - begin > seconds
        if repetitions > _MOST or (repetitions > _FEWEST and is_late):
            break
    return rates if repetitions > _FEWEST else []


def _dropped(source: EncodedSource, order: Sequence[int]) -> Iterable[int]:
    """Yield images whose files were just dropped from the page cache."""
    for index in itertools.islice(itertools.cycle(order), _TRIED):
        file = _file(source.name(index))
        if file is not None and _drop_from_cache(file):
            yield index


def _cached(source: EncodedSource, order: Sequence[int]) -> Iterable[int]:
    """Yield images whose files were just read, so that the page cache has them."""
    for index in itertools.cycle(order):
        _read_bytes(source, index)
        yield index


def _read_bytes(source: EncodedSource, index: int) -> int:
    """Read an image's bytes and count them; 0 if that fails, which the reader reports later."""
    try:
        return len(source.encoded(index))
    except UnreadableImage:
        return 0


def _file(name: str) -> Optional[str]:
    """Return the file that holds an image: itself, or the shard; None if it is elsewhere."""
    path = Path(name)
    for place in (path, *path.parents):
        if place.is_file():
            return str(place)
    return None


def _drop_from_cache(path: str) -> bool:
    """Ask the system to drop a file from the page cache, and return whether it has.

    Files of other users are left alone.
    """
    # macOS has no such call. Other users may be reading their files.
    if not hasattr(os, "posix_fadvise") or os.stat(path).st_uid != os.geteuid():
        return False
    file = os.open(path, os.O_RDONLY)
    try:
        # Only advice: pages that are dirty, or mapped by another process, stay.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return _share_in_memory(file) <= _LEFT
    except (OSError, ValueError):
        # It cannot be mapped, as one that is empty.
        return False
    finally:
        os.close(file)


def _share_in_memory(file: int) -> float:
    """Return the share of a file's pages that are in memory.

    Reading without waiting would show it, but begins to fetch.

    Args:
        file: its number.

    Raises:
        OSError, ValueError: it cannot be mapped.
    """
    # A copy on write, as ctypes takes the address of memory only that may be written.
    with mmap.mmap(file, 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        in_memory = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(first))
        length = ctypes.c_size_t(len(mapped))
        library = ctypes.CDLL(None, use_errno=True)
        failed = library.mincore(address, length, in_memory)
        del first  # or the file stays mapped
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    # The lowest bit of a page is set if it is in memory: mincore(2).
    return sum(page & 1 for page in in_memory) / pages

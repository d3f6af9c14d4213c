"""Images that one core reads and decodes in a second, the share of reading in that, and copies to the device."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import time
from typing import Callable, Iterator, NamedTuple, Optional

import torch

from data.base import Source, UnreadableImage
from data.batches import Request
from data.encoded import EncodedSource
from data.loader import NotLeftOut
from data.reader import Reader
from data.transforms import Training
from engines.devices import synchronize
from recipe.config import Recipe
from recipe.errors import DataError
from tools.diagnosis.splitting import Spread, spread

_REPETITION = 0.1  # seconds of images in each
_FEWEST, _MOST = 3, 40
_PATIENCE = 8  # images
_LEFT = 0.01  # share of a file's pages in memory that is as good as none: of a shard some may be on their way
_COPIES = 0.02  # seconds of copies in a repetition


class Reading(NamedTuple):
    """Rates of one core, by the torch reader in the process itself.

    rate: images a second, files being in the page cache. tried: images that were read for it; unreadable: those of
    them that could not be, and that training leaves out. Where images are files: image_bytes, of one on average;
    cached: bytes a second out of the page cache; disk: bytes a second with the page cache empty, None where it cannot
    be emptied; remote: whether they come over a network, so that there is no page cache and both are its rate.
    """

    rate: Spread
    tried: int
    unreadable: int
    image_bytes: Optional[float] = None
    cached: Optional[Spread] = None
    disk: Optional[Spread] = None
    remote: bool = False

    @property
    def share_of_bytes(self) -> Optional[float]:
        """Share of reading its bytes, from the disk where that is known, in the time that an image takes."""
        if self.image_bytes is None:
            return None
        out_of_cache = self.image_bytes / self.cached.median
        reading = self.image_bytes / (self.disk or self.cached).median
        return reading / (1 / self.rate.median - out_of_cache + reading)


def read(recipe: Recipe, source: Source, replica: int, replicas: int, seconds: float) -> Reading:
    """Reads, decodes and augments images in the order of the run, each replica its own part of it.

    Raises:
        UnreadableImage: under data.bad_images=error.
        DataError: no image can be read.
    """
    order = source.order(recipe.run.seed, 0)[replica::replicas].tolist()
    with _one_thread():
        reader = Reader(source, 1, Training(recipe.data, recipe.run.seed))
        if not isinstance(source, EncodedSource):
            return _through_reader(recipe, reader, itertools.cycle(order), seconds)
        remote = _file(source.name(order[0])) is None

        def forget(index: int) -> bool:
            return not remote and _forgotten(_file(source.name(index)))

        def fetch(index: int) -> bool:
            return remote or _length(source, index) >= 0

        disk = _bytes_a_second(source, itertools.cycle(order), seconds / 3, forget)
        # Those files again, which lie in the page cache now, and whatever the order brings after them.
        cached = _bytes_a_second(source, itertools.cycle(order), seconds / 3, fetch)
        found = _through_reader(recipe, reader, itertools.cycle(order), seconds / 3)
    if cached is None:  # all that were read are empty
        raise DataError(f"{source.name(order[0])}: empty, as all images after it; mend them, or correct data.root")
    return found._replace(image_bytes=cached.image_bytes, cached=cached.rate, disk=disk and disk.rate, remote=remote)


def to_device(recipe: Recipe, device: torch.device, seconds: float) -> Spread:
    """Bytes a second of micro batches that are copied to the device: from page-locked memory to a GPU, as training
    does. A CPU has no such way; there it is a copy in memory."""
    shape = (recipe.batch.micro, 3, recipe.model.image_size, recipe.model.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    if device.type == "cuda":
        images = images.pin_memory()
    there = torch.empty_like(images, device=device)

    def copy(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            there.copy_(images, non_blocking=True)
        synchronize(device)
        return time.perf_counter() - start

    copy(1)
    times = max(1, int(_COPIES / max(copy(1), 1e-7)))
    return spread([times * images.numel() / max(copy(times), 1e-9) for _ in _repetitions(seconds)])


def _through_reader(recipe: Recipe, reader: Reader, indices: Iterator[int], seconds: float) -> Reading:
    """Images a second through the whole reader; which cannot be read count neither as images nor by their time.

    Raises as `read` does.
    """
    size, rates, tried, unreadable = recipe.model.image_size, [], set(), {}
    for _ in _repetitions(seconds, more=1):
        count, spent, passed = 0, 0.0, 0.0
        while passed < _REPETITION:
            index = next(indices)
            start = time.perf_counter()
            loaded = reader[Request(0, 0, 0, size, [index])]
            seconds_of_one = time.perf_counter() - start
            passed += seconds_of_one
            tried.add(index)
            if not loaded.unreadable:
                count += 1
                spent += seconds_of_one
                continue
            if recipe.data.bad_images == "error":
                raise NotLeftOut(loaded.unreadable[0])
            unreadable[index] = loaded.unreadable[0]
        if count:
            rates.append(count / spent)
    if not rates:
        raise DataError(
            f"{next(iter(unreadable.values()))}; of {len(tried)} images that were tried none can be read; "
            "mend them, or correct data.root"
        )
    return Reading(spread(rates[1:] or rates), len(tried), len(unreadable))  # the first also loads decoders


class _Read(NamedTuple):
    """Bytes a second, and bytes of an image on average."""

    rate: Spread
    image_bytes: float


def _bytes_a_second(
    source: EncodedSource, indices: Iterator[int], seconds: float, prepare: Callable[[int], bool]
) -> Optional[_Read]:
    """Rate of reading files that `prepare` has prepared, empty ones aside; None where that fails for most of them."""
    rates, lengths, vain = [], [], 0
    for _ in _repetitions(seconds):
        length, spent, passed = 0, 0.0, 0.0
        while passed < _REPETITION / 4:
            index = next(indices)
            if not prepare(index):  # such as a part of a shard that the system is about to read ahead
                vain += 1
                if vain > _PATIENCE + len(lengths):
                    return None
                continue
            start = time.perf_counter()
            found = _length(source, index)
            seconds_of_one = time.perf_counter() - start
            passed += seconds_of_one
            if found:
                lengths.append(found)
                length += found
                spent += seconds_of_one
        if length:
            rates.append(length / spent)
    return _Read(spread(rates), sum(lengths) / len(lengths)) if rates else None


def _length(source: EncodedSource, index: int) -> int:
    """Bytes of an image, which are read; 0 if that fails, which the whole reader reports later."""
    try:
        return len(source.encoded(index))
    except UnreadableImage:
        return 0


def _file(name: str) -> Optional[str]:
    """The file that holds an image of that name: itself, or the shard; None where it is not on this machine."""
    while name and not os.path.isfile(name):
        shorter = os.path.dirname(name)
        if shorter == name:
            return None
        name = shorter
    return name or None


def _forgotten(path: Optional[str]) -> bool:
    """Asks the system to drop a file from the page cache, and whether it has. Only of files that the user owns."""
    if path is None or not hasattr(os, "posix_fadvise") or os.stat(path).st_uid != os.geteuid():
        return False
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return _resident(file) <= _LEFT
    except (OSError, ValueError):  # a file that cannot be mapped, such as an empty one
        return False
    finally:
        os.close(file)


def _resident(file: int) -> float:
    """Share of a file's pages that are in memory. Reading without waiting would show it, but begins to fetch."""
    with mmap.mmap(file, 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapped)
        place, length = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped))
        failed = ctypes.CDLL(None, use_errno=True).mincore(place, length, resident)
        del first  # or the file stays mapped
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in resident) / pages


def _repetitions(seconds: float, more: int = 0) -> Iterator[None]:
    start = time.perf_counter()
    for number in range(_MOST + more):
        if number >= _FEWEST + more and time.perf_counter() - start > seconds:
            return
        yield


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

"""Images that one core reads and decodes in a second, the share of reading in that, and copies to the device."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from pathlib import Path
from typing import Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import DataError
from data.base import Source, UnreadableImage
from data.batches import Request
from data.encoded import EncodedSource
from data.loader import NotLeftOut
from data.reader import Reader
from data.transforms import Training
from engines.devices import synchronize
from recipe.config import Recipe
from tools.diagnosis.splitting import Spread, spread

_REPETITION = 0.1  # seconds of images in each
_FEWEST, _MOST = 3, 40
_TRIED = 10_000  # images whose files are to be dropped from the cache, at most
_LEFT = 0.01  # share of a file's pages in memory that is as good as none: of a shard some may be on their way


class Reading(NamedTuple):
    """Rates of one core: images a second by the torch reader in the process itself, files being in the page cache.

    unreadable: images that training leaves out. Of files: bytes of one on average; bytes a second read again, out of
    the page cache of local disks; with the page cache empty, None where it cannot be emptied.
    """

    per_core: Spread
    tried: int
    unreadable: int
    bytes: Optional[float] = None
    cached_bytes_per_second: Optional[Spread] = None
    disk_bytes_per_second: Optional[Spread] = None

    @property
    def share_of_bytes(self) -> Optional[float]:
        """Share of an image's time in which its bytes are read, from the disk where that is known."""
        if self.bytes is None:
            return None
        cached = self.bytes / self.cached_bytes_per_second.median
        reading = self.bytes / (self.disk_bytes_per_second or self.cached_bytes_per_second).median
        return reading / (1 / self.per_core.median - cached + reading)


def read(recipe: Recipe, source: Source, replica: int, replicas: int, seconds: float) -> Reading:
    """Read, decode and augment images in the order of the run, each replica its own part of it.

    Raises UnreadableImage under data.bad_images=error, DataError if no image can be read.
    """
    order = source.order(recipe.run.seed, 0)[replica::replicas].tolist()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if not isinstance(source, EncodedSource):
            return _through_reader(recipe, source, order, seconds)
        some, again = itertools.islice(itertools.cycle(order), _TRIED), itertools.cycle(order)
        dropped = (index for index in some if _forgotten(_file(source.name(index))))
        disk = _bytes_a_second(source, dropped, seconds / 3)
        cached = _bytes_a_second(source, (i for i in again if _length(source, i) >= 0), seconds / 3)
        found = _through_reader(recipe, source, order, seconds / 3)
    finally:
        torch.set_num_threads(threads)
    if cached is None:  # all that were read are empty
        raise DataError(f"{source.name(order[0])}: empty, as all images after it; mend them, or correct data.root")
    rates = {"cached_bytes_per_second": cached[0], "disk_bytes_per_second": disk and disk[0]}
    return found._replace(bytes=cached[1], **rates)


def to_device(recipe: Recipe, device: torch.device, seconds: float) -> Spread:
    """Bytes a second of micro batches copied to the device: from page-locked memory to a GPU; on a CPU in memory."""
    shape = (recipe.batch.micro, 3, recipe.model.image_size, recipe.model.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8)
    if device.type == "cuda":
        images = images.pin_memory()
    there = torch.empty_like(images, device=device)

    def copy(_: int) -> int:
        there.copy_(images, non_blocking=True)
        synchronize(device)
        return images.numel()

    copy(0)
    return spread(_rates(copy, itertools.repeat(0), seconds, _REPETITION / 10))


def _through_reader(recipe: Recipe, source: Source, order: Sequence[int], seconds: float) -> Reading:
    reader, size = Reader(source, 1, Training(recipe.data, recipe.run.seed)), recipe.model.image_size
    tried, unreadable = set(), {}  # indices; the reason by index

    def load(index: int) -> int:
        tried.add(index)
        failed = reader[Request(0, 0, 0, size, [index])].unreadable
        if failed and recipe.data.bad_images == "error":
            raise NotLeftOut(failed[0])
        unreadable.update({index: failed[0]} if failed else {})
        return 0 if failed else 1

    rates = _rates(load, itertools.cycle(order), seconds, _REPETITION)
    if not rates:
        none = f"of {len(tried)} images that were tried none can be read; mend them, or correct data.root"
        raise DataError(f"{next(iter(unreadable.values()))}; {none}")
    return Reading(spread(rates[1:] or rates), len(tried), len(unreadable))  # the first also loads decoders


def _bytes_a_second(source: EncodedSource, indices: Iterable[int], seconds: float) -> Optional[Tuple[Spread, float]]:
    """Rate of reading files, and their mean length; None if there are too few."""
    lengths = []

    def fetch(index: int) -> int:
        lengths.append(_length(source, index))
        return lengths[-1]

    rates = _rates(fetch, indices, seconds, _REPETITION / 4)
    found = [length for length in lengths if length]
    return (spread(rates), sum(found) / len(found)) if rates else None


def _rates(work: Callable[[int], int], arguments: Iterable[int], seconds: float, repetition: float) -> List[float]:
    """What `work` yields a second, by repetition; nothing of few repetitions. Calls that return 0 do not count."""
    rates, done, spent, passed = [], 0, 0.0, 0.0
    begin, repetitions = time.perf_counter(), 0
    for argument in arguments:
        start = time.perf_counter()
        found = work(argument)
        took = time.perf_counter() - start
        passed, done, spent = passed + took, done + found, spent + (took if found else 0.0)
        if passed < repetition:
            continue
        rates += [done / spent] if done else []
        done, spent, passed, repetitions = 0, 0.0, 0.0, repetitions + 1
        if repetitions > _MOST or (repetitions > _FEWEST and time.perf_counter() - begin > seconds):
            break
    return rates if repetitions > _FEWEST else []


def _length(source: EncodedSource, index: int) -> int:
    """Read an image's bytes and count them; 0 if that fails, which the whole reader reports later."""
    try:
        return len(source.encoded(index))
    except UnreadableImage:
        return 0


def _file(name: str) -> Optional[str]:
    """The file that holds an image: itself, or the shard; None if it is not on this machine."""
    path = Path(name)
    return next((str(place) for place in (path, *path.parents) if place.is_file()), None)


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

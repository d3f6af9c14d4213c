"""batch.micro auto: the largest micro batch that fits into a GPU's memory, found by trying.

Tried is an update of two micro batches by an engine of one replica with the recipe's settings: all that persists is
there, as are the gradients of the first micro batch while the second is computed. A share of the free memory is kept in
reserve, as allocations leave gaps, and libraries and exchanges between ranks take memory of their own.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import re
from pathlib import Path
from typing import Callable, List, Optional, Sequence, Tuple

import torch

from common.errors import ConfigError
from common.json_io import read_json
from data import mixing
from data.batches import MicroBatch
from engines import cache, factory
from engines.base import one_step
from engines.devices import compute_dtype, device_of, memory_of, name_of, synchronize
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.batch import candidates, divide, settled, training_image_sizes
from recipe.config import Recipe
from recipe.division import Batch

RESERVE = 0.08  # of the memory that is free as a micro batch is tried
_WITH_TRIALS = ("cuda",)  # types of devices
# How libraries report that there is no memory, besides torch.OutOfMemoryError: cuBLAS, cuDNN, and cuDNN's search.
_NO_MEMORY = re.compile("out of memory|ALLOC_FAILED|unable to find an engine", re.IGNORECASE)


def resolve(recipe: Recipe, batch: Batch, processes: Processes, report: Callable[[str], None]) -> Recipe:
    """`recipe` with a number in the place of `batch.micro: auto`, the same on all processes, each of which must call
    this: what fits on every rank. Nothing is tried on CPUs and with run.deterministic, which take that of `batch`.

    Args: batch: of `recipe`; trials begin with its micro batch. Raises ConfigError: not even the smallest one fits.
    """
    if recipe.batch.micro is not None:
        return recipe
    device = device_of(recipe.run.device, processes.topology)
    if device.type not in _WITH_TRIALS or recipe.run.deterministic:
        why = "as run.deterministic asks, the" if recipe.run.deterministic else f"on a {device.type.upper()} the"
        report(f"batch.micro auto: {batch.micro}, {why} largest up to 32 that the batch allows")
        return settled(recipe, batch.micro)
    sizes = candidates(recipe, processes.topology.replicas)
    file = _file(recipe, sizes, device)
    by_rank, origin = processes.gather(_read(file, sizes)), f"tried before ({file})"
    trials: List[str] = []
    if None in by_rank:
        own, trials = _tried(recipe, sizes, batch.micro, device)
        by_rank, origin = processes.gather(own), "tried"
    taken = min(by_rank)
    pixels, dtype = (
        max(training_image_sizes(recipe)),
        str(compute_dtype(recipe.precision.compute, device)).split(".")[1],
    )
    place = f"images of {pixels} x {pixels} in {dtype} on {name_of(device)}"
    if not taken:
        fault = f"batch.micro auto: not even a micro batch of {sizes[0]} fits, of {place}"
        remedy = "use parallel.recompute=true, a smaller model.image_size or a GPU with more memory"
        raise ConfigError(f"{fault}; {remedy}" if processes.topology.is_main else "")
    if trials:
        cache.write(file, {"micro": taken})
    report(f"batch.micro auto: {place}, {origin}, {RESERVE:.0%} of the free memory in reserve")
    for line in trials:
        report(f"  {line}")
    others = f"; it is rank {by_rank.index(taken)} that has no room for more" if len(set(by_rank)) > 1 else ""
    report(f"  taken: {taken}, of {len(sizes)} sizes from {sizes[0]} to {sizes[-1]}{others}")
    return settled(recipe, taken)


def largest(sizes: Sequence[int], first: int, fits: Callable[[int], bool]) -> int:
    """The largest of ascending `sizes` that fits, or 0.

    From `first` on sizes are doubled until one does not fit, so that few are far too large; then halves are left out.
    Args: fits: true of every size below one that fits.
    """
    low, high, at = -1, len(sizes), sizes.index(first)
    while high - low > 1:
        if fits(sizes[at]):
            low = at
        else:
            high = at
        doubled = bisect.bisect_right(sizes, 2 * sizes[low]) - 1
        at = max(low + 1, doubled) if high == len(sizes) else (low + high) // 2
    return sizes[low] if low >= 0 else 0


def _tried(recipe: Recipe, sizes: Sequence[int], first: int, device: torch.device) -> Tuple[int, List[str]]:
    """The largest size that fits here, or 0, and a line for each trial."""
    lines = []

    def fits(micro: int) -> bool:
        fault = _fault(recipe, micro, device)
        gc.collect()  # the failed engine, of which the error had the frames
        torch.cuda.empty_cache()
        lines.append(f"{micro} {'does not fit' if fault else 'fits'}")
        return not fault

    return largest(sizes, first, fits), lines


def _fault(recipe: Recipe, micro: int, device: torch.device) -> str:
    """What a micro batch fails with for want of memory, or nothing. Raises what else goes wrong."""
    try:
        _train(recipe, micro, device)
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        return str(error) or "out of memory"
    return ""


def _train(recipe: Recipe, micro: int, device: torch.device) -> None:
    """Make an update of two micro batches of random pixels, of the largest size, and throw it away."""
    reserve = torch.empty(int(RESERVE * memory_of(device)), dtype=torch.uint8, device=device)
    plan = _alone(recipe, micro)
    engine = factory.create(plan, divide(plan, 1), Processes(Topology(), device), steps_per_epoch=1)
    try:
        shape, generator = (micro, 3, *[max(training_image_sizes(recipe))] * 2), torch.Generator(device).manual_seed(0)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        labels = torch.zeros(micro, dtype=torch.int64)
        batch = MicroBatch(images.contiguous(memory_format=torch.channels_last), labels, labels, micro, 0, 0, ())
        del images
        engine.train_step(itertools.repeat(batch), one_step(0), lr=0.0)
        synchronize(device)
    finally:
        engine.close()
    del reserve


def _alone(recipe: Recipe, micro: int) -> Recipe:
    """The recipe of one replica, whose update takes two micro batches."""
    batch = {"global_": 2 * micro, "micro": micro, "schedule": None, "largest": None}
    changes = {
        "batch": recipe.batch.model_copy(update=batch),
        "parallel": recipe.parallel.model_copy(update={"replicas": 1, "shares": "even", "elastic": False}),
    }
    return recipe.model_copy(update=changes)


def _file(recipe: Recipe, sizes: Sequence[int], device: torch.device) -> Path:
    """The cache's file: what takes memory, and how much of it there is, in sixteenths as others have some of it."""
    free, total = _memory(device)
    sections = (recipe.model, recipe.precision, recipe.optimizer, recipe.average, recipe.exchange, recipe.engine)
    return cache.place(
        "micro",
        *(section.model_dump(mode="json") for section in sections),
        *(sizes, sorted(training_image_sizes(recipe)), mixing.mixes(recipe.data), recipe.log.noise_scale),
        *(recipe.parallel.recompute, RESERVE, name_of(device), total, round(16 * free / total)),
        *cache.programs(),
    )


def _memory(device: torch.device) -> Tuple[int, int]:
    """Bytes of a GPU that are free, and all of them."""
    return torch.cuda.mem_get_info(device)


def _read(file: Path, sizes: Sequence[int]) -> Optional[int]:
    """The micro batch in this machine's file; None without a file, or with one of other content."""
    try:
        micro = read_json(file)["micro"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return micro if micro in sizes else None

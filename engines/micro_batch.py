"""batch.micro auto: the largest micro batch that fits into a GPU's memory, found by trying.

A trial is an update of two micro batches by an engine of one replica with the recipe's settings:
all that persists is there, as are the gradients of the first micro batch while the second is
computed. A share of the free memory is kept in reserve, as allocations leave gaps, and libraries
and exchanges between ranks take memory of their own.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import re
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import ConfigError
from common.json_io import read_json
from data.batches import MicroBatch
from engines import cache, factory
from engines.base import one_step
from engines.devices import (
    compute_dtype,
    device_of,
    dtype_name,
    memory_of,
    name_of,
    synchronize,
)
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.batch import candidates, divide, settled, training_image_sizes
from recipe.config import Recipe
from recipe.division import Batch

RESERVE = 0.08  # of the memory that is free as a micro batch is tried
_WITH_TRIALS = ("cuda",)  # types of devices
# How libraries report that there is no memory, besides torch.OutOfMemoryError: cuBLAS, cuDNN, and
# cuDNN's search.
_NO_MEMORY = re.compile(
    "out of memory|ALLOC_FAILED|unable to find an engine",
    re.IGNORECASE,
)


def settle(
    recipe: Recipe,
    batch: Batch,
    processes: Processes,
    report: Callable[[str], None],
) -> Recipe:
    """Replace `batch.micro: auto` by what fits on every rank, the same number on all processes.

    Nothing is tried on CPUs and with run.deterministic, which take the micro batch of `batch`.

    Args:
        recipe: of the run.
        batch: of a step; trials begin with its micro batch.
        processes: of the run; all of them call.
        report: takes lines for the user.

    Returns:
        The changed recipe.

    Raises:
        ConfigError: not even the smallest one fits.
    """
    if recipe.batch.micro is not None:
        return recipe
    device = device_of(recipe.run.device, processes.topology)
    if device.type not in _WITH_TRIALS or recipe.run.deterministic:
        reason = f"on a {device.type.upper()} the"
        if recipe.run.deterministic:
            reason = "as run.deterministic asks, the"
        report(f"batch.micro auto: {batch.micro}, {reason} largest up to 32 that the batch allows")
        return settled(recipe, batch.micro)

    sizes = candidates(recipe, processes.topology.replicas)
    results = _results(recipe, sizes, batch.micro, processes, device)
    # What fits on the fullest device.
    micro = min(results.by_rank)
    images = _described(recipe, device)
    if not micro:
        message = (
            f"batch.micro auto: not even a micro batch of {sizes[0]} fits, of {images}; "
            "use parallel.recompute=true, a smaller model.image_size or a GPU with more memory"
        )
        # One rank prints the reason, and all end.
        raise ConfigError(message if processes.topology.is_main else "")
    if results.trials:
        # This rank's own: another one may have a smaller or a fuller device.
        own = results.by_rank[processes.topology.rank]
        cache.write(results.file, {"micro": own})
    _report(results, sizes, images, report)
    return settled(recipe, micro)


class _Results(NamedTuple):
    """The largest size that fits on each rank, or 0.

    origin: of these numbers, for the user.
    trials: a line for each that this rank has made.
    file: for this machine's result.
    """

    by_rank: List[int]
    origin: str
    trials: List[str]
    file: Path


def _results(
    recipe: Recipe,
    sizes: Sequence[int],
    first: int,
    processes: Processes,
    device: torch.device,
) -> _Results:
    """Return results of earlier runs where all processes have one; else all try."""
    # Each machine has a cache: one without an entry makes all of them try.
    file = _file(recipe, sizes, device)
    by_rank = processes.gather(_read(file, sizes))
    if None not in by_rank:
        return _Results(by_rank, f"tried before ({file})", [], file)
    size, trials = _tried(recipe, sizes, first, device)
    return _Results(processes.gather(size), "tried", trials, file)


def _report(
    results: _Results,
    sizes: Sequence[int],
    images: str,
    report: Callable[[str], None],
) -> None:
    """Report which size is taken, and why no larger one."""
    reserve = f"{RESERVE:.0%} of the free memory in reserve"
    report(f"batch.micro auto: {images}, {results.origin}, {reserve}")
    for line in results.trials:
        report(f"  {line}")
    micro = min(results.by_rank)
    fullest = ""
    if len(set(results.by_rank)) > 1:
        fullest = f"; it is rank {results.by_rank.index(micro)} that has no room for more"
    report(f"  taken: {micro}, of {len(sizes)} sizes from {sizes[0]} to {sizes[-1]}{fullest}")


def _described(recipe: Recipe, device: torch.device) -> str:
    """Describe the largest images of a run."""
    size = max(training_image_sizes(recipe))
    dtype = dtype_name(compute_dtype(recipe.precision.compute, device))
    return f"images of {size} x {size} in {dtype} on {name_of(device)}"


def largest(sizes: Sequence[int], first: int, fits: Callable[[int], bool]) -> int:
    """Return the largest size that fits, or 0.

    From `first` on sizes are doubled until one does not fit, so that few are far too large; then
    halves are left out.

    Args:
        sizes: ascending.
        first: the one to begin with.
        fits: true of every size below one that fits.
    """
    low = -1  # index of the largest size that is known to fit
    high = len(sizes)  # of the smallest that is known not to
    index = sizes.index(first)
    while high - low > 1:
        if fits(sizes[index]):
            low = index
        else:
            high = index
        # Until one does not fit sizes are doubled, by the sizes that there are.
        if high == len(sizes):
            doubled = bisect.bisect_right(sizes, 2 * sizes[low]) - 1
            index = max(low + 1, doubled)
        else:
            index = (low + high) // 2
    return sizes[low] if low >= 0 else 0


def _tried(
    recipe: Recipe,
    sizes: Sequence[int],
    first: int,
    device: torch.device,
) -> Tuple[int, List[str]]:
    """Return the largest size that fits here, or 0, and a line for each trial."""
    lines = []

    def fits(micro: int) -> bool:
        """Try a `micro` batch."""
        fault = _fault(recipe, micro, device)
        # Memory that a trial leaves behind would be missing in the next one.
        gc.collect()  # the failed engine, of which the error had the frames
        torch.cuda.empty_cache()
        lines.append(f"{micro} {'does not fit' if fault else 'fits'}")
        return not fault

    return largest(sizes, first, fits), lines


def _fault(recipe: Recipe, micro: int, device: torch.device) -> str:
    """Return the error of a trial for which memory does not suffice, or "". Raises others."""
    try:
        _train(recipe, micro, device)
    # Libraries have no error of one class for it.
    except RuntimeError as error:
        message = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and not _NO_MEMORY.search(message):
            raise
        return message or "out of memory"
    return ""


def _train(recipe: Recipe, micro: int, device: torch.device) -> None:
    """Make an update of two micro batches, and throw it away."""
    # Stands for what gaps, libraries and exchanges take beside the engine.
    reserve = torch.empty(int(RESERVE * memory_of(device)), dtype=torch.uint8, device=device)
    plan = _single_replica(recipe, micro)
    processes = Processes(Topology(), device)
    # An engine that trains: what only training needs takes memory, too.
    engine = factory.create(plan, divide(plan, 1), processes, steps_per_epoch=1)
    try:
        # The largest images of the run: smaller ones fit where these do.
        batch = _random_batch(micro, max(training_image_sizes(recipe)), device)
        engine.train_step(itertools.repeat(batch), one_step(0), lr=0.0)
        synchronize(device)
    finally:
        engine.close()
    # It has to live until here.
    del reserve


def _random_batch(micro: int, size: int, device: torch.device) -> MicroBatch:
    """Return a micro batch of random pixels, in the loader's layout.

    Args:
        micro: images.
        size: pixels a side.
        device: of the images.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (micro, 3, size, size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    labels = torch.zeros(micro, dtype=torch.int64)
    return MicroBatch(
        images=images.contiguous(memory_format=torch.channels_last),
        labels=labels,
        indices=labels,
        valid=micro,
        number=0,
        step=0,
        unreadable=(),
    )


def _single_replica(recipe: Recipe, micro: int) -> Recipe:
    """Return the recipe of one replica, whose update takes two micro batches."""
    # Two, since the gradients of the first are there while the second is computed.
    batch = {"global_": 2 * micro, "micro": micro, "schedule": None, "largest": None}
    parallel = {"replicas": None, "shares": "even"}
    changes = {
        "batch": recipe.batch.model_copy(update=batch),
        "parallel": recipe.parallel.model_copy(update=parallel),
    }
    return recipe.model_copy(update=changes)


def _file(recipe: Recipe, sizes: Sequence[int], device: torch.device) -> Path:
    """Return the cache's file, named by what takes memory, and how much of it there is."""
    key: List[object] = []
    for name in ("model", "precision", "optimizer", "average", "exchange", "engine"):
        key.append(getattr(recipe, name).model_dump(mode="json"))
    free, total = _memory(device)
    key += [
        sizes,
        sorted(training_image_sizes(recipe)),
        recipe.data.mixes,
        recipe.log.noise_scale,
        recipe.parallel.recompute,
        RESERVE,
        name_of(device),
        total,
        round(16 * free / total),  # not to the byte: other programs have some of it
    ]
    return cache.place("micro", *key, *cache.programs())


def _memory(device: torch.device) -> Tuple[int, int]:
    """Return the bytes of a GPU that are free, and all of them."""
    return torch.cuda.mem_get_info(device)


def _read(file: Path, sizes: Sequence[int]) -> Optional[int]:
    """Return the micro batch in a file; None without a file, or with one of other content."""
    try:
        micro = read_json(file)["micro"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return micro if micro in sizes else None

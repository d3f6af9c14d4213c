"""Bytes of each device, of parameters and of micro batches in flight, and the widest model that fits."""

from __future__ import annotations

import functools
from typing import Container, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from models import shapes
from models.shapes import BlockShape
from recipe import ipu
from recipe.batch import training_image_sizes
from recipe.config import Model, Recipe
from recipe.division import Batch
from tools.planning import workload
from tools.planning.machine import Machine

_TILES = 1472  # of an IPU, Mk2 and Bow alike
_GRID = 0.05  # width multipliers that are tried
_WIDEST = 64.0


class StageBytes(NamedTuple):
    """Bytes of one device. state: parameters and all that belongs to them. activations: of micro batches in flight."""

    state: int
    activations: int


class Widest(NamedTuple):
    """The largest width multiplier that fits on `stages` devices; None: not even the narrowest model does."""

    stages: int
    width: Optional[float]
    parameters: int
    bytes: int


def available(recipe: Recipe, machine: Machine, batch: Batch) -> float:
    """Bytes of a device, without those of an IPU's tiles that only move data."""
    moving = machine.device == "ipu" and recipe.run.device == "ipu" and ipu.overlaps(recipe, batch)
    return machine.memory.value * (1 - recipe.ipu.io_tiles / _TILES * moving)


def by_stage(
    recipe: Recipe, device: str, batch: Batch, work: workload.Workload, again: Optional[FrozenSet[str]] = None
) -> List[StageBytes]:
    """Bytes of each device of a replica. Args: device: its kind. again: blocks recomputed, if not the recipe's."""
    again = work.recomputed if again is None else again
    each, state = workload.compute_bytes(recipe, device) * batch.micro, workload.state_bytes(recipe, device)
    found = []
    for stage, count in zip(work.stages, in_flight(recipe, device, batch, len(work.stages))):
        *_, (parameters, kept, once) = elements(stage.names, work.shapes, again, device)
        found.append(StageBytes(state * parameters, each * (count * kept + once)))
    return found


def in_flight(recipe: Recipe, device: str, batch: Batch, stages: int) -> List[int]:
    """Micro batches of which each stage keeps activations at once.

    An IPU's pipeline has a forward and a backward pass of each stage in turn, so stage s of K keeps 2 (K - 1 - s) + 1.
    Elsewhere a device that has several parts is taken to keep as many of all as of its first.
    """
    parallel = recipe.parallel
    if stages == 1 or parallel.schedule == "sharded":
        return [1] * stages
    if device == "ipu":
        return [2 * (stages - 1 - stage) + 1 for stage in range(stages)]
    return parallel.model_copy(update={"stages": stages}).in_flight(batch.accumulation)[:stages]


def widest(recipe: Recipe, machine: Machine, batch: Batch, stages: int) -> Widest:
    """The widest model whose stages fit, cut where memory is most even: GPipe, 1811.06965, table 1."""
    limit, found = available(recipe, machine, batch), Widest(stages, None, 0, 0)
    low, high = 0, round(_WIDEST / _GRID) + 1
    while high - low > 1:
        middle = (low + high) // 2
        model = recipe.model.model_copy(update={"width": middle * _GRID})
        size, parameters = _smallest(recipe, machine.device, batch, model, stages)
        if size <= limit:
            low, found = middle, Widest(stages, middle * _GRID, parameters, size)
        else:
            high = middle
    return found


def _smallest(recipe: Recipe, device: str, batch: Batch, model: Model, stages: int) -> Tuple[int, int]:
    """Bytes of the fullest device under the best cut for memory, and the model's parameters."""
    found = shapes.blocks(model, max(training_image_sizes(recipe)))
    names = list(found)
    again = workload.recomputed(recipe, names)
    held = in_flight(recipe, device, batch, stages)
    each, state = workload.compute_bytes(recipe, device) * batch.micro, workload.state_bytes(recipe, device)
    parts = [list(elements(names[start:], found, again, device)) for start in range(len(names))]

    @functools.lru_cache(maxsize=None)
    def fullest(stage: int, start: int) -> int:
        """The least possible bytes of the fullest of the stages from `stage` on, whose first block is `start`."""
        later = stages - stage - 1
        sizes = [state * parameters + each * (held[stage] * kept + once) for parameters, kept, once in parts[start]]
        if later == 0:
            return sizes[-1]
        ends = range(start + 1, len(names) - later + 1)
        return min(max(size, fullest(stage + 1, end)) for size, end in zip(sizes, ends))

    return fullest(0, 0), parts[0][-1][0]


def elements(
    names: Sequence[str], found: Dict[str, BlockShape], again: Container[str], device: str
) -> Iterator[Tuple[int, int, int]]:
    """After each of consecutive blocks: parameters, and elements an image kept of each micro batch in flight and once.

    Of recomputed blocks only inputs are kept in flight. IPUs recompute a stage as a whole, others a block at a time.
    """
    inputs = dict(zip(found, [0, *(shape.output for shape in found.values())]))
    whole, recomputes = device == "ipu", False
    parameters = kept = once = 0
    for name in names:
        shape = found[name]
        parameters += shape.parameters
        if name not in again:
            kept += shape.saved
        else:
            kept += 0 if whole and recomputes else inputs[name]
            once = once + shape.saved if whole else max(once, shape.saved)
            recomputes = True
        yield parameters, kept, once

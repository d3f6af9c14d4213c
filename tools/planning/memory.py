"""Bytes of each device, of parameters and of micro batches in flight, and the widest model that fits."""

from __future__ import annotations

from typing import Dict, FrozenSet, List, NamedTuple, Optional

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

    @property
    def total(self) -> int:
        return self.state + self.activations


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
    """Bytes of each device of a replica. Program code and what libraries need for themselves are not in it.

    Args:
        device: kind of the devices: cpu, cuda or ipu.
        again: the blocks that are recomputed, if not the recipe's.
    """
    again = work.recomputed if again is None else again
    entering = _inputs(work.shapes)
    held = in_flight(recipe, device, batch, len(work.stages))
    each = workload.compute_bytes(recipe, device) * batch.micro
    per_parameter = workload.state_bytes(recipe, device)
    found = []
    for stage, count in zip(work.stages, held):
        part = _Part(work.shapes, entering, again, device)
        for name in stage.names:
            part.add(name)
        found.append(StageBytes(per_parameter * stage.parameters, each * part.activations(count)))
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
    """The largest model by width whose stages fit, each cut where the fullest device has least; depth stays.

    The question of GPipe's table 1 (Huang et al., 1811.06965). Widths are tried in steps of 0.05.
    """
    limit = available(recipe, machine, batch)

    def need(step: int) -> tuple:
        model = recipe.model.model_copy(update={"width": step * _GRID})
        return _smallest(recipe, machine.device, batch, model, stages)

    low, high = 0, round(_WIDEST / _GRID) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle)[0] <= limit else (low, middle)
    if low == 0:
        return Widest(stages, None, 0, 0)
    size, parameters = need(low)
    return Widest(stages, low * _GRID, parameters, size)


def _smallest(recipe: Recipe, device: str, batch: Batch, model: Model, stages: int) -> tuple:
    """Bytes of the fullest device under the best cut for memory, and the model's parameters."""
    found = shapes.blocks(model, max(training_image_sizes(recipe)))
    names = list(found)
    again, entering = workload.recomputed(recipe, names), _inputs(found)
    held = in_flight(recipe, device, batch, stages)
    each = workload.compute_bytes(recipe, device) * batch.micro
    per_parameter = workload.state_bytes(recipe, device)
    # Dynamic programming over the blocks: the least possible maximum of the first stages up to each block.
    best = {0: 0}
    for stage in range(stages):
        reached: Dict[int, int] = {}
        last = len(names) - (stages - stage - 1)
        for start, before in best.items():
            part = _Part(found, entering, again, device)
            for end in range(start + 1, last + 1):
                part.add(names[end - 1])
                if stage < stages - 1 or end == len(names):
                    size = per_parameter * part.parameters + each * part.activations(held[stage])
                    reached[end] = min(max(before, size), reached.get(end, max(before, size)))
        best = reached
    return best[len(names)], sum(shape.parameters for shape in found.values())


class _Part:
    """Consecutive blocks on one device, and the elements that it keeps for each image of a micro batch.

    Of recomputed blocks only inputs are kept in flight: on IPUs that of the stage, which is computed again as a
    whole; elsewhere that of each block, one of which is computed again at a time.
    """

    def __init__(self, found: Dict[str, BlockShape], entering: Dict[str, int], again: FrozenSet[str], device: str):
        self._found, self._entering, self._again, self._whole = found, entering, again, device == "ipu"
        self.parameters = self._kept = self._transient = 0
        self._recomputes = False

    def add(self, name: str) -> None:
        """One more block behind the others."""
        shape = self._found[name]
        self.parameters += shape.parameters
        if name not in self._again:
            self._kept += shape.saved
            return
        if not (self._whole and self._recomputes):
            self._kept += self._entering[name]
        self._transient = self._transient + shape.saved if self._whole else max(self._transient, shape.saved)
        self._recomputes = True

    def activations(self, held: int) -> int:
        """Elements, of `held` micro batches in flight."""
        return held * self._kept + self._transient


def _inputs(found: Dict[str, BlockShape]) -> Dict[str, int]:
    """Block's name -> elements of its input; the first one's, images, do not count."""
    return dict(zip(found, [0, *(shape.output for shape in found.values())]))
